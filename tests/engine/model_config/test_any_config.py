"""Whatever a config.json says, logits are those of transformers or the model is refused by name.

Configurations are drawn from all keys of transformers' class of each family, from keys of older and
foreign files, and from the ways in which a checkpoint's tensors differ from its configuration. Each
becomes a small random checkpoint, from which transformers and the engine compute by themselves.
"""

import dataclasses
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.registry import FAMILIES, read_model_config
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

Load = Callable[..., LoadedModel]
NewRunner = Callable[..., ModelRunner]
Values = dict[str, Any]

TOLERANCE = 2e-3
"""Difference of log-probabilities between two ways of summing float32 numbers."""

ALTERNATIVES = 20
"""Tokens whose log-probabilities are compared."""

LONGEST = 80
"""Tokens of the longest sequence."""

BLOCK = 16

TRIES_A_FAMILY = 8
"""Configurations of each of five families in the gate."""

SIZES: Values = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 96,
}
EXPERTS: Values = {"num_experts_per_tok": 2, "num_hidden_layers": 3}
BASE: dict[str, Values] = {
    "llama": SIZES,
    "qwen3": SIZES | {"head_dim": 8},
    "lfm2": SIZES | {"num_hidden_layers": 3, "block_multiple_of": 16},
    "lfm2_moe": SIZES
    | EXPERTS
    | {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
    "gpt_oss": SIZES | EXPERTS | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
}

booleans = st.booleans()
thetas = st.sampled_from([100.0, 10_000, 10_000.0, 5e5, None])
eps = st.sampled_from([1e-6, 1e-5, 1e-2, 0.3])
token_ids = st.sampled_from([None, 0, 3, 60, 61])
originals = st.sampled_from([16, 32, 48, 96])
numbers = st.floats(0.25, 8)


@st.composite
def ropes(draw: st.DrawFn) -> Values | None:
    """A section of positions, of any type that transformers knows and of one that nobody does."""
    kind = draw(
        st.sampled_from(
            [
                *("default", "linear", "dynamic", "yarn", "yarn", "llama3", "longrope"),
                *("proportional", "axial", "mrope", None, "nested"),
            ]
        )
    )
    if kind is None:
        return draw(st.sampled_from([None, {}]))
    if kind == "nested":
        one = {"rope_type": "default", "rope_theta": 1e4}
        return {"full_attention": one, "sliding_attention": one | {"rope_theta": 1e6}}
    parts: Values = {draw(st.sampled_from(["rope_type", "rope_type", "type"])): kind}
    if kind != "default" or draw(st.integers(0, 9)) == 0:
        parts["factor"] = draw(st.sampled_from([1.0, 2, 4.0, 8.0]))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "rope_theta": thetas,
        "partial_rotary_factor": st.sampled_from([1.0, 0.5]),
    }
    if kind in ("yarn", "llama3", "longrope"):
        optional["original_max_position_embeddings"] = originals
    if kind in ("yarn", "longrope"):
        optional["attention_factor"] = st.sampled_from([None, 0.5, 1.0, 1.3])
        optional["factor"] = st.sampled_from([None, 2.0, 3.5])
    if kind == "yarn":
        optional |= {
            "mscale": st.sampled_from([None, 0.7, 1.0]),
            "mscale_all_dim": st.sampled_from([None, 0.5, 1.0]),
            "beta_fast": st.sampled_from([None, 0, 4, 32.0]),
            "beta_slow": st.sampled_from([None, 0, 1, 2.0]),
            "truncate": st.sampled_from([None, True, False]),
            "finetuned": booleans,
        }
    if kind == "llama3":
        parts |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.sampled_from([1.0, 4.0]))}
        parts["rope_theta"] = draw(st.sampled_from([1e4, 5e5]))
        parts["original_max_position_embeddings"] = draw(originals)
    if kind == "longrope":
        parts["short_factor"] = [draw(numbers) for _ in range(4)]
        is_same = draw(booleans)
        parts["long_factor"] = parts["short_factor"] if is_same else [2.0, 2.0, 3.0, 4.0]
    chosen = draw(st.sets(st.sampled_from(sorted(optional)), max_size=3))
    return parts | {key: draw(optional[key]) for key in sorted(chosen)}


def kinds(*names: str) -> st.SearchStrategy[list[str] | None]:
    """Kinds of two or three layers, as many as there are or not."""
    return st.none() | st.lists(st.sampled_from(names), min_size=2, max_size=3)


windows = st.sampled_from([None, 1, 5, 17, 4096])

EVERY: dict[str, st.SearchStrategy[Any]] = {
    "transformers_version": st.just("4.40.0"),
    "architectures": st.none(),
    "output_hidden_states": booleans,
    "return_dict": booleans,
    "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
    "chunk_size_feed_forward": st.sampled_from([0, 4]),
    "is_encoder_decoder": booleans,
    "id2label": st.just({"0": "A"}),
    "label2id": st.just({"A": 0}),
    "problem_type": st.just("regression"),
    "vocab_size": st.sampled_from([61, 64]),
    "hidden_size": st.sampled_from([32, 48]),
    "intermediate_size": st.sampled_from([32, 80]),
    "num_hidden_layers": st.sampled_from([1, 2, 3]),
    "num_attention_heads": st.sampled_from([2, 4, 8]),
    "num_key_value_heads": st.sampled_from([None, 1, 2, 4, 3]),
    "max_position_embeddings": st.sampled_from([48, 96, 4096]),
    "initializer_range": st.just(0.1),
    "use_cache": booleans,
    "pad_token_id": token_ids,
    "bos_token_id": token_ids,
    "eos_token_id": token_ids | st.just([2, 3]),
    "tie_word_embeddings": booleans,
    "rope_parameters": ropes(),
    "hidden_act": st.sampled_from(["silu", "swish", "gelu", "relu"]),
    "rms_norm_eps": eps,
    "norm_eps": eps,
    "attention_bias": booleans,
    "attention_dropout": st.sampled_from([0, 0.5]),
    "mlp_bias": booleans,
    "head_dim": st.sampled_from([None, 8, 16, 6]),
    "pretraining_tp": st.sampled_from([1, 2, None]),
    "sliding_window": windows,
    "use_sliding_window": booleans,
    "max_window_layers": st.sampled_from([0, 1, 28]),
    "layer_types": kinds("full_attention", "sliding_attention"),
    "conv_bias": booleans,
    "conv_L_cache": st.sampled_from([1, 2, 3, 4]),
    "block_multiple_of": st.sampled_from([8, 16, 256]),
    "block_ffn_dim_multiplier": st.sampled_from([1.0, 0.5, 2, 1.3]),
    "block_auto_adjust_ff_dim": booleans,
    "full_attn_idxs": st.sampled_from([None, [0], [1], [0, 2], []]),
    "num_dense_layers": st.sampled_from([0, 1, 2, 5]),
    "num_experts_per_tok": st.sampled_from([1, 2, 3]),
    "num_experts": st.sampled_from([3, 4]),
    "num_local_experts": st.sampled_from([3, 4]),
    "use_expert_bias": booleans,
    "routed_scaling_factor": st.sampled_from([1.0, 0.5, 2.5]),
    "norm_topk_prob": booleans,
    "output_router_logits": st.just(False),
    "moe_intermediate_size": st.sampled_from([16, 24]),
    "swiglu_alpha": st.sampled_from([1.702, 1.0]),
    "swiglu_limit": st.sampled_from([7.0, 1.0]),
    "router_aux_loss_coef": st.just(0.9),
}
"""Values of every key of every class."""

FOREIGN: dict[str, st.SearchStrategy[Any]] = {
    "rope_theta": thetas,
    "rope_scaling": ropes(),
    "partial_rotary_factor": st.sampled_from([1.0, 0.5]),
    "original_max_position_embeddings": originals,
    "torch_dtype": st.just("bfloat16"),
    "rope_interleaved": booleans,
    "logit_scale": st.sampled_from([1.0, 0.25]),
    "final_logit_softcapping": st.sampled_from([None, 30.0]),
    "embedding_multiplier": st.sampled_from([1, 12.0]),
    "residual_multiplier": st.sampled_from([1.0, 0.22]),
    "auto_map": st.just({"AutoConfig": "a.B"}),
    "per_layer_config": st.sampled_from([{}, {"0": {"intermediate_size": 40}}]),
    "temperature": st.just(0.6),
    "surprise": st.sampled_from([None, 1, "x"]),
    "text_config": st.just({"hidden_size": 8}),
    "tie_embedding": booleans,
    "block_ff_dim": st.sampled_from([32, 64]),
    "theta": st.sampled_from([1e6, 1e4]),
    "block_dim": st.sampled_from([32, 40]),
    "use_pos_enc": booleans,
    "experts_per_token": st.sampled_from([2, 3]),
    "initial_context_length": st.just(4096),
}
"""Values of keys that files have and the classes have not."""

OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "lfm2": {"layer_types": kinds("full_attention", "conv", "attention")},
    "lfm2_moe": {
        "layer_types": st.lists(st.sampled_from(["full_attention", "conv"]), min_size=3, max_size=3)
    },
}
"""Values of keys that mean something else in a family."""

TENSORS = (
    *(["as saved"] * 6),
    *("another head", "no head", "an equal head", "no embedding"),
    *("more rows", "fewer rows", "inverse frequencies", "a zero bias", "a bias", "a layer more"),
)
"""Ways in which the tensors are changed."""


def config_class(family: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[family]


TOPICS: dict[str, set[str]] = {
    "heads": {
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size"),
        *("attention_bias", "tie_word_embeddings", "tie_embedding"),
    },
    "windows": {
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        *("full_attn_idxs", "num_hidden_layers"),
    },
    "widths": {
        *("intermediate_size", "moe_intermediate_size", "block_multiple_of", "block_ff_dim"),
        *("block_ffn_dim_multiplier", "block_auto_adjust_ff_dim", "mlp_bias", "hidden_act"),
        *("num_experts_per_tok", "num_experts", "num_local_experts", "num_dense_layers"),
        *("routed_scaling_factor", "norm_topk_prob", "use_expert_bias"),
    },
    "norms": {"rms_norm_eps", "norm_eps", "conv_L_cache", "conv_bias", "swiglu_limit"},
}
"""Keys that bear upon one another."""


@st.composite
def positions(draw: st.DrawFn) -> Values:
    """All that a file says of positions, in one spelling or two."""
    one = {"rope_type": "default", "rope_theta": draw(st.sampled_from([100.0, 10_000.0, 5e5]))}
    sections = draw(
        st.sampled_from(
            [
                *(["rope_parameters"], ["rope_scaling"], ["rope_scaling"]),
                *(["rope_parameters", "rope_scaling"], ["old beside new"], []),
            ]
        )
    )
    values = {key: draw(ropes()) for key in sections if key != "old beside new"}
    if sections == ["old beside new"]:
        values = {"rope_parameters": one, "rope_scaling": draw(ropes())}
        values |= draw(st.sampled_from([{}, {"rope_theta": one["rope_theta"]}]))
    others = ("rope_theta", "original_max_position_embeddings", "max_position_embeddings")
    for key in draw(st.sets(st.sampled_from(others), max_size=2)):
        values.setdefault(key, draw((EVERY | FOREIGN)[key]))
    return values


@st.composite
def configurations(draw: st.DrawFn, family: str) -> Values:
    """A config.json of a family: its usual values, with some keys changed or left out."""
    strategies = {
        field.name: EVERY[field.name] for field in dataclasses.fields(config_class(family))
    }
    strategies |= FOREIGN | OWN.get(family, {})
    topic = draw(st.sampled_from(["any", "positions", "positions", *TOPICS]))
    names = sorted(strategies.keys() & TOPICS.get(topic, strategies.keys()))
    chosen = draw(st.sets(st.sampled_from(names), max_size=1 if topic == "positions" else 4))
    drawn = {key: draw(strategies[key]) for key in sorted(chosen)}
    if topic == "positions":
        drawn |= draw(positions())
    values = {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
        **BASE[family],
        **drawn,
    }
    optional = {"num_key_value_heads", "head_dim", "block_multiple_of", "sliding_window"}
    absent = draw(st.sets(st.sampled_from(sorted(optional)), max_size=1))
    return {key: value for key, value in values.items() if key not in absent - set(drawn)}


def make_checkpoint(folder: Path, values: Values, how: str, seed: int) -> None:
    """Write config.json and random weights, changed in a way of `TENSORS`.

    Raises what transformers raises where it has no such model.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_config(folder, values)
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_floating_point() and "inv_freq" not in name:
                value.normal_(float("norm" in name), 0.25)
    model.save_pretrained(folder)
    write_config(folder, values)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change_tensors(tensors, how)
    save_file(tensors, path, metadata={"format": "pt"})


def write_config(folder: Path, values: Values) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def change_tensors(tensors: dict[str, torch.Tensor], how: str) -> None:
    embedding = "model.embed_tokens.weight"
    head = "lm_head.weight"
    first = tensors[embedding]
    if how == "another head":
        tensors[head] = torch.randn_like(first)
    if how == "an equal head":
        tensors[head] = first.clone()
    if how == "no head":
        tensors.pop(head, None)
    if how == "no embedding":
        tensors[head] = tensors.pop(embedding)
    if how == "more rows":
        tensors[embedding] = torch.cat([first, first[:3]])
    if how == "fewer rows":
        tensors[embedding] = first[:-3].clone()
    if how == "inverse frequencies":
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    if how == "a zero bias":
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(first.shape[1])
    if how == "a bias":
        tensors["model.layers.0.self_attn.k_proj.other.bias"] = torch.ones(16)
    if how == "a layer more":
        tensors["model.layers.99.input_layernorm.weight"] = torch.ones(first.shape[1])


def expected(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities behind these tokens by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(torch.tensor([tokens])).logits[0, -1]
    return logits.log_softmax(-1)


def computed(runner: ModelRunner, tokens: list[int], first: int) -> dict[int, float]:
    """Log-probabilities behind these tokens by the engine, of which `first` come in a step of their
    own."""
    params = SamplingParams(temperature=0.0, top_logprobs=ALTERNATIVES)
    sampled: list[Any] = []
    for start, end in ((0, first), (first, len(tokens))):
        if end == start:
            continue
        chunk = Chunk(
            request_id="a",
            token_ids=tokens[start:end],
            start=start,
            block_ids=list(range(-(-end // BLOCK))),
            sampling=params if end == len(tokens) else None,
            history=tokens,
            num_prompt_tokens=len(tokens),
            **state(start, first < len(tokens) and start == 0),
        )
        sampled = runner.execute(StepPlan([chunk]))
    [token] = sampled
    return dict(zip(token.top_ids, token.top_logprobs, strict=True))


def state(start: int, is_first: bool) -> Values:
    """Slots of the convolutions' state before and after a chunk."""
    return {"state_slot": None if start == 0 else 0, "next_state_slot": 0 if is_first else 1}


def check(family: str, data: st.DataObject, folder: Path, load: Load, new_runner: NewRunner) -> str:
    """Draw a configuration and compare; returns what became of it."""
    values = data.draw(configurations(family), label="config.json")
    how = data.draw(st.sampled_from(TENSORS), label="tensors")
    seed = data.draw(st.integers(0, 1000), label="seed")
    length = data.draw(st.integers(1, LONGEST), label="length")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make_checkpoint(folder, values, how, seed)
        except Exception as error:  # transformers has no such model
            return f"no model: {type(error).__name__}"
        try:
            loaded = load(f"file://{folder}")
        except WeightsError as error:
            assert str(folder) in str(error)
            assert "\n" not in str(error)
            return "refused"
        longest = min(loaded.model_config.max_position, LONGEST + 1)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 61, (min(length, longest - 1),), generator=generator).tolist()
        try:
            reference = expected(folder, tokens)
        except (
            Exception
        ) as error:  # transformers cannot load or run it, so nothing says what is right
            return f"no answer: {type(error).__name__}"
    runner = new_runner(
        loaded, max_step_tokens=128, max_sequences=2, max_model_len=longest, num_blocks=8
    )
    ours = computed(runner, tokens, len(tokens) // 2)
    theirs = {token: float(reference[token]) for token in ours}
    assert ours == pytest.approx(theirs, abs=TOLERANCE), (family, values, how)
    return "equal"


def draw_many(
    count: int, family: str, folder: Path, load: Load, new_runner: NewRunner
) -> Counter[str]:
    seen: Counter[str] = Counter()

    @settings(max_examples=count, suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        verdict = check(family, data, folder, load, new_runner)
        seen[verdict.partition(":")[0]] += 1
        seen[verdict] += ":" in verdict
        assume(verdict in ("equal", "refused"))

    run()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal_or_the_model_is_refused(
    family: str, tmp_path: Path, load: Load, new_runner: NewRunner
) -> None:
    seen = draw_many(TRIES_A_FAMILY, family, tmp_path / "model", load, new_runner)
    assert seen["equal"] >= TRIES_A_FAMILY // 4, seen


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_are_equal_or_refused(
    family: str, tmp_path: Path, load: Load, new_runner: NewRunner
) -> None:
    seen = draw_many(60, family, tmp_path / "model", load, new_runner)
    print(family, dict(seen))
    assert seen["equal"] >= 15, seen
    assert seen["refused"] >= 5, seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_the_class_is_drawn(family: str) -> None:
    names = {field.name for field in dataclasses.fields(config_class(family))}
    assert names <= EVERY.keys(), names - EVERY.keys()


@settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
@given(positions())
def test_positions_are_transformers_or_refused(drawn: Values) -> None:
    """Of many more configurations than there could be checkpoints."""
    values = {"model_type": "llama", **SIZES, **drawn}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = config_class("llama")(**json.loads(json.dumps(values)))
            theirs = rotary_embedding(config)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            assume(False)
    try:
        ours = read_model_config(HFConfig(Path("config.json"), values))
    except WeightsError:
        return
    exponents = torch.arange(0, ours.head_dim, 2, dtype=torch.float64) / ours.head_dim
    frequencies = ours.rope_theta**-exponents / torch.tensor(ours.rope_factors or [1.0])
    assert frequencies.tolist() == pytest.approx(theirs.inv_freq.tolist(), rel=1e-5)
    assert ours.rope_scale == pytest.approx(theirs.attention_scaling)


def rotary_embedding(config: Any) -> Any:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config)
