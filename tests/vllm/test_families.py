"""Every family that vLLM serves here computes what transformers computes, through the worker's
process and its socket."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
import zmq
from safetensors.torch import save_file
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
from ullage_testing.small_models import continue_greedily

from ullage_engine.protocol.messages import (
    EngineRequest,
    Ready,
    Rejected,
    RequestFailed,
    SamplingParams,
    Shutdown,
    StartFailed,
    StateReport,
    StepDone,
    Submit,
    ToServer,
    ToWorker,
    WorkerState,
)
from ullage_engine.server.worker_process import vllm_env

DEADLINE_S = 240.0
"""For a sign of life: the first start of a family imports it in a process of its own."""
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
SLIDING, FULL = "sliding_attention", "full_attention"
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


@dataclass
class Answer:
    """What the worker said about one request."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    vector: bytes = b""


class Worker:
    """A worker's process and the server's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], socket: zmq.Socket[bytes]) -> None:
        self._process = process
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._answers: dict[str, Answer] = {}
        self._state: WorkerState | None = None
        message = self._receive()
        while not isinstance(message, Ready | StartFailed):
            message = self._receive()
        assert isinstance(message, Ready), message
        self.ready = message

    def answer(self, *requests: EngineRequest, resumed: bool = False) -> list[Answer]:
        """Submits requests at once and returns their answers when all have ended."""
        answers = [Answer() for _ in requests]
        self._answers = {each.request_id: one for each, one in zip(requests, answers, strict=True)}
        for request in requests:
            self._send(Submit(requests=[request], resumed=resumed))
        while not all(each.finish for each in answers):
            self._receive()
        return answers

    def idle_state(self) -> WorkerState:
        """Returns a state that was measured after everything that was asked."""
        self._state = None
        while self._state is None or self._state.num_running:
            self._receive()
        return self._state

    def stop(self) -> None:
        self._send(Shutdown())
        assert self._process.wait(60) == 0

    def _send(self, message: ToWorker) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def _receive(self) -> ToServer:
        deadline = time.monotonic() + DEADLINE_S
        while not self._socket.poll(100):
            assert time.monotonic() < deadline, "the worker says nothing"
            assert self._process.poll() is None or self._socket.poll(100), "the worker is gone"
        message = self._decoder.decode(self._socket.recv())
        match message:
            case Rejected() | RequestFailed():
                pytest.fail(repr(message))
            case StateReport(state=state):
                self._state = state
            case StepDone(outputs=outputs, embeddings=embeddings):
                for output in outputs:
                    self._answers[output.request_id].token_ids += output.token_ids
                    self._answers[output.request_id].finish = output.finish
                for each in embeddings:
                    answer = self._answers[each.request_id]
                    answer.vector, answer.finish = each.vector, "embedded"
        return message


StartWorker = Callable[..., Worker]


@pytest.fixture
def start_worker(tmp_path: Path, vllm_cache: Path) -> Iterator[StartWorker]:
    """Starts a worker that serves a folder's checkpoint, and waits until it does."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def start(folder: Path, **sections: Any) -> Worker:
            config = {
                "engine": "vllm",
                "model": {
                    "source": f"file://{folder}",
                    "name": "served",
                    "dtype": "float32",
                    "max_model_len": 512,
                },
                "device": "cpu",
                "memory": {
                    "threshold": 1.0,
                    "safety_reserve": 0,
                    "device_bytes": 4 << 30,
                    "max_kv": 64 << 20,
                },
                "batching": {"max_sequences": 8, "prefill_chunk_tokens": 256},
                "server": {"weights_dir": str(tmp_path), "threads": 2},
                # The smallest block that vLLM's attention on CPUs takes.
                "vllm": {"args": {"block_size": 32}},
                **sections,
            }
            path, endpoint = tmp_path / "engine.yaml", f"ipc://{tmp_path}/w.ipc"
            path.write_text(yaml.safe_dump(config))
            socket: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.PAIR))
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)
            command = [sys.executable, "-m", "ullage_engine.vllm_worker"]
            process = subprocess.Popen(
                [*command, "--config", str(path), "--endpoint", endpoint],
                stdin=subprocess.PIPE,
                env={**os.environ, **vllm_env(2)},
            )
            stack.callback(end, process)
            return Worker(process, socket)

        yield start


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=60)


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

    worker = start_worker(folder)
    profile = worker.ready.profile
    assert sorted(group.window_tokens for group in profile.groups) == sorted(windows)
    assert profile.kv_pool_bytes <= 64 << 20
    together = worker.answer(*(request_of(str(i), each) for i, each in enumerate(prompts)))
    assert [answer.token_ids for answer in together] == expected
    assert {answer.finish for answer in together} == {"length"}

    prompt, tokens = prompts[-1], expected[-1]
    rest = request_of("rest", prompt + tokens[:9], num_prompt_tokens=len(prompt))
    assert worker.answer(rest, resumed=True)[0].token_ids == tokens[9:]

    state = worker.idle_state()
    assert state.kv_committed_bytes == 0
    assert profile.kv_pool_bytes * 0.9 < state.kv_free_bytes <= profile.kv_pool_bytes
    worker.stop()


def write_adapter(folder: Path, model: Any, rank: int, seed: int) -> Any:
    """Writes a LoRA adapter of a Llama as PEFT does; returns a model with it merged."""
    generator = torch.Generator().manual_seed(seed)
    merged = type(model)(model.config).eval()
    merged.load_state_dict(model.state_dict())
    tensors, targets = {}, ("q_proj", "v_proj", "down_proj")
    for name, weight in merged.named_parameters():
        if name.endswith(tuple(f"{target}.weight" for target in targets)):
            outputs, inputs = weight.shape
            a = torch.randn(rank, inputs, generator=generator) / 8
            b = torch.randn(outputs, rank, generator=generator) / 8
            weight.data += 2 * b @ a
            layer = name.removesuffix(".weight")
            tensors[f"base_model.model.{layer}.lora_A.weight"] = a
            tensors[f"base_model.model.{layer}.lora_B.weight"] = b
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config |= {"target_modules": list(targets), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


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

    adapters = [
        {"name": name, "source": f"file://{tmp_path / name}", "rank": rank}
        for name, rank in (("first", 8), ("second", 4))
    ]
    worker = start_worker(folder, adapters=adapters)
    names = ["", "first", "second", ""]
    requests = [request_of(str(i), prompt, adapter=name) for i, name in enumerate(names)]
    answers = worker.answer(*requests)
    assert [each.token_ids for each in answers] == [expected[name] for name in names]
    worker.stop()


def test_embeddings_of_an_encoder_are_those_of_transformers(
    write_checkpoint: Callable[..., Path], start_worker: StartWorker
) -> None:
    folder = write_checkpoint(BertConfig(**WIDE), seed=7, encoder=True)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = prompts_of(seed=3)
    with torch.inference_mode():
        states = [model(torch.tensor([each])).last_hidden_state[0, 0] for each in prompts]
    expected = [torch.nn.functional.normalize(each, dim=0).numpy() for each in states]

    worker = start_worker(folder, batching={"max_sequences": 8}, vllm={"args": {}})
    assert worker.ready.task == "embed"
    answers = worker.answer(
        *(request_of(str(i), each, max_tokens=0, embed=True) for i, each in enumerate(prompts))
    )
    for answer, vector in zip(answers, expected, strict=True):
        np.testing.assert_allclose(np.frombuffer(answer.vector, "<f4"), vector, atol=1e-5)
    worker.stop()
