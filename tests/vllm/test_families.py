"""Every family that vLLM serves here computes what transformers computes, through the worker's
process and its socket."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from ullage_testing.small_models import continue_greedily, write_adapter
from ullage_testing.worker_link import Answer, WorkerProcess, launcher

from ullage_engine.protocol.messages import AddAdapter, Ready
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.server.worker_env import vllm_env
from ullage_engine.vllm_worker.adapters import slot_bytes

from .conftest import vllm_config

WINDOW = 64
OUTPUT = 24
PROMPT_LENGTHS = (1, 97, 300)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
SLIDING = "sliding_attention"
FULL = "full_attention"
WIDE = SIZES | {"hidden_size": 128}
HEADS = {"head_dim": 32}
"""The smallest that vLLM's attention on CPUs takes; `WIDE` comes to it by itself."""
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[Any, list[int]]] = {
    # With the window of each cache group, 0 for layers that see everything.
    "llama": (LlamaConfig(**SIZES, **HEADS), [0]),
    "qwen2": (Qwen2Config(**WIDE | {"initializer_range": 0.3}), [0]),
    "qwen3": (Qwen3Config(**SIZES, **HEADS), [0]),
    "qwen3_moe": (
        Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, num_experts=8, moe_intermediate_size=32),
        [0],
    ),
    "mistral": (MistralConfig(**SIZES, **HEADS, sliding_window=WINDOW), [WINDOW]),
    "gemma3_text": (
        Gemma3TextConfig(
            **SIZES,
            **HEADS,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
            tie_word_embeddings=False,
            layer_types=[SLIDING, SLIDING, SLIDING, FULL],
        ),
        [WINDOW, WINDOW, WINDOW, 0],
    ),
    "gpt_oss": (
        GptOssConfig(
            **SIZES,
            **HEADS,
            **EXPERTS,
            sliding_window=WINDOW,
            num_local_experts=4,
            layer_types=[SLIDING, FULL] * 2,
        ),
        [WINDOW, 0],
    ),
}


Launched = tuple[WorkerProcess, Ready]
StartWorker = Callable[..., Launched]


@pytest.fixture
def start_worker(tmp_path: Path, vllm_cache: Path) -> Iterator[StartWorker]:
    """Starts a worker that serves a folder's checkpoint; returns it and what it said when it was
    ready."""
    with launcher() as launch:

        def start(folder: Path, **sections: Any) -> Launched:
            config = vllm_config(f"file://{folder}", server={"weights_dir": str(tmp_path)})
            config["model"]["max_model_len"] = 512
            (tmp_path / "engine.yaml").write_text(json.dumps(config | sections))  # a subset of YAML
            command = [sys.executable, "-m", "ullage_engine.vllm_worker"]
            worker = launch(command, tmp_path, vllm_env(2))
            return worker, worker.wait_ready()

        yield start


def answer(worker: WorkerProcess, *requests: EngineRequest, resumed: bool = False) -> list[Answer]:
    """Submits requests at once and returns their answers when all have ended."""
    answers = [worker.submit(request, resumed=resumed) for request in requests]
    worker.wait_for(lambda: all(each.is_over for each in answers))
    for each in answers:
        assert each.finish, each
    return answers


def request_of(name: str, token_ids: list[int], **fields: Any) -> EngineRequest:
    defaults: dict[str, Any] = {
        "num_prompt_tokens": len(token_ids),
        "max_tokens": OUTPUT,
        "sampling": SamplingParams(temperature=0.0),
    }
    return EngineRequest(request_id=name, token_ids=token_ids, **defaults | fields)


def prompts_of(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(100, 40_000, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(
    family: str, write_checkpoint: Callable[..., Path], start_worker: StartWorker
) -> None:
    config, windows = FAMILIES[family]
    folder = write_checkpoint(config, seed=5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = prompts_of(seed=1)
    expected = [continue_greedily(model, prompt, OUTPUT) for prompt in prompts]
    assert all(len(set(tokens)) > 4 for tokens in expected), "this model repeats itself"

    worker, ready = start_worker(folder)
    profile = ready.profile
    assert sorted(group.window_tokens for group in profile.groups) == sorted(windows)
    assert profile.kv_pool_bytes <= 64 << 20
    together = answer(worker, *(request_of(str(i), each) for i, each in enumerate(prompts)))
    assert [each.token_ids for each in together] == expected
    assert {each.finish for each in together} == {"length"}

    prompt = prompts[-1]
    tokens = expected[-1]
    rest = request_of("rest", prompt + tokens[:9], num_prompt_tokens=len(prompt))
    assert answer(worker, rest, resumed=True)[0].token_ids == tokens[9:]

    state = worker.fresh_state()
    assert state.kv_committed_bytes == 0
    assert profile.kv_pool_bytes * 0.9 < state.kv_free_bytes <= profile.kv_pool_bytes
    assert worker.stop() == 0


def test_requests_for_the_base_and_for_adapters_share_a_batch(
    write_checkpoint: Callable[..., Path], start_worker: StartWorker, tmp_path: Path
) -> None:
    folder = write_checkpoint(FAMILIES["llama"][0], seed=6)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = prompts_of(seed=2)[1]
    models = {"": base}
    for seed, (name, rank) in enumerate({"first": 8, "second": 4}.items()):
        models[name] = write_adapter(tmp_path / name, base, rank, seed)
    expected = {name: continue_greedily(each, prompt, OUTPUT) for name, each in models.items()}
    assert len({tuple(each) for each in expected.values()}) == 3

    worker, ready = start_worker(folder, memory={"max_loras": 2, "max_lora_rank": 8})
    for name in ("first", "second"):
        worker.send(AddAdapter(name=name, folder=str(tmp_path / name)))
    names = ["", "first", "second", ""]
    requests = [request_of(str(i), prompt, adapter=name) for i, name in enumerate(names)]
    answers = answer(worker, *requests)
    assert [each.token_ids for each in answers] == [expected[name] for name in names]
    [slots] = [each for each in ready.state.ledger if each.name == "adapters"]
    # On CPUs there is one slot more.
    assert slots.allocated_bytes == 3 * slot_bytes(folder, 8, 4)
    assert worker.stop() == 0


def test_embeddings_of_an_encoder_are_those_of_transformers(
    write_checkpoint: Callable[..., Path], start_worker: StartWorker
) -> None:
    folder = write_checkpoint(BertConfig(**WIDE), seed=7, encoder=True)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = prompts_of(seed=3)
    with torch.inference_mode():
        states = [model(torch.tensor([each])).last_hidden_state[0, 0] for each in prompts]
    expected = [torch.nn.functional.normalize(each, dim=0).numpy() for each in states]

    worker, ready = start_worker(folder, batching={"max_sequences": 8}, vllm={"args": {}})
    assert ready.task == "embed"
    answers = answer(
        worker,
        *(request_of(str(i), each, max_tokens=0, embed=True) for i, each in enumerate(prompts)),
    )
    for each, vector in zip(answers, expected, strict=True):
        np.testing.assert_allclose(np.frombuffer(each.vector, "<f4"), vector, atol=1e-5)
    assert worker.stop() == 0
