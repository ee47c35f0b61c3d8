"""Adapters that take turns in fewer slots than there are compute what they would all at once, and
their slots take what the ledger says."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from ullage_testing.small_models import continue_greedily, write_adapter
from ullage_testing.worker_link import launcher

from ullage_engine.protocol.messages import AdapterAdded, AddAdapter, RequestFailed
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.server.worker_env import vllm_env
from ullage_engine.vllm_worker.adapters import slot_bytes

from .conftest import vllm_config

OUTPUT = 16
RANKS = {"first": 8, "second": 4, "third": 8}
MODEL = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.1,
    tie_word_embeddings=True,
)
ONE_SLOT = {"adapter_percent": 0.01, "max_loras": 8, "max_lora_rank": 8}  # YAML reads no 1e-4


@pytest.fixture
def models(write_checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Writes a model and three adapters; returns its folder, and the models that they make of it,
    by name."""
    folder = write_checkpoint(MODEL, seed=6)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = {"": base}
    for seed, (name, rank) in enumerate(RANKS.items()):
        made[name] = write_adapter(tmp_path / name, base, rank, seed)
    return folder, made


def add_all(started: Any, folder: Path) -> None:
    """Adds the adapters as a server does, one after the other."""
    for name in RANKS:
        assert started.engine.adapters.add(name, str(folder / name), is_checked=False) == ""


def request_of(name: str, prompt: list[int], adapter: str) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_tokens=OUTPUT,
        sampling=SamplingParams(temperature=0.0),
        adapter=adapter,
    )


def run(started: Any, requests: list[EngineRequest]) -> tuple[list[list[int]], list[RequestFailed]]:
    """Returns the texts of requests that come at once, and those that failed."""
    texts: dict[str, list[int]] = {each.request_id: [] for each in requests}
    for each in requests:
        assert started.engine.submit_group([each]) == []
    while started.engine.has_work:
        for output in started.engine.step():
            texts[output.request_id] += output.token_ids
    return list(texts.values()), started.engine.take_failed()


def slots_of(started: Any) -> int:
    """Returns the bytes of all tensors that vLLM keeps adapters in."""
    executor = started.core._engine.engine_core.engine_core.model_executor
    model = executor.driver_worker.worker.model_runner.get_model()
    tensors = {}
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(module, name, ())
            for each in [stacked] if isinstance(stacked, torch.Tensor) else stacked:
                tensors[each.data_ptr()] = each.nbytes
    return sum(tensors.values())


def ledger_of(started: Any) -> dict[str, int]:
    return {each.name: each.allocated_bytes for each in started.ledger.states()}


def test_three_adapters_take_turns_in_one_slot(
    start_here: Any, models: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, merged = models
    prompt = list(range(300, 360))
    expected = {name: continue_greedily(each, prompt, OUTPUT) for name, each in merged.items()}
    assert len({tuple(each) for each in expected.values()}) == 4

    started = start_here(folder, memory=ONE_SLOT)
    add_all(started, tmp_path)
    config = started.core._config.lora_config
    assert (config.max_loras, config.max_cpu_loras) == (2, 2)  # one of them stays empty
    # The first one took the slot when it came; each is asked for twice now.
    names = ["", *RANKS, "", *RANKS]
    requests = [request_of(str(i), prompt, name) for i, name in enumerate(names)]
    first = run(started, requests[:4])
    second = run(started, requests[4:])
    assert first == second == ([expected[name] for name in names[:4]], [])
    stats = started.engine.stats()
    assert stats.num_adapter_loads - stats.num_adapter_unloads == 1 < stats.num_adapter_unloads

    allocated = ledger_of(started)["adapters"]
    assert allocated == slots_of(started) == 2 * slot_bytes(folder, 8, 4)

    (tmp_path / "second/adapter_model.safetensors").unlink()
    texts, [failed] = run(started, requests[:4])
    assert failed.field == "model"
    assert "adapter second cannot be loaded" in failed.message
    assert texts == [[] if name == "second" else expected[name] for name in names[:4]]
    texts, _ = run(started, requests[:2])
    assert texts == [expected[""], expected["first"]]


def test_two_ranks_that_cannot_read_an_adapter_go_on(
    models: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set by an engine in this process, for one rank.
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    folder, merged = models
    prompt = list(range(300, 360))
    config = vllm_config(
        f"file://{folder}",
        gpus=2,
        parallelism={"tensor": 2},
        memory=ONE_SLOT,
        server={"weights_dir": str(tmp_path)},
    )
    (tmp_path / "engine.yaml").write_text(json.dumps(config))
    with launcher() as launch:
        command = [sys.executable, "-m", "ullage_engine.vllm_worker"]
        worker = launch(command, tmp_path, vllm_env(1, 2))
        worker.wait_ready()
        for name in RANKS:
            worker.send(AddAdapter(name=name, folder=str(tmp_path / name)))
        worker.send(AddAdapter(name="gone", folder=str(tmp_path / "gone")))
        added: dict[str, str] = {}
        while len(added) < len(RANKS) + 1:
            if isinstance(message := worker.receive(), AdapterAdded):
                added[message.name] = message.error
        assert added.pop("gone")
        assert not any(added.values())
        (tmp_path / "second/adapter_model.safetensors").unlink()
        answers = [worker.submit(request_of(str(i), prompt, name)) for i, name in enumerate(merged)]
        worker.finish_all()
        assert worker.stop() == 0
    for name, answer in zip(merged, answers, strict=True):
        if name == "second":
            assert answer.failed.startswith("adapter second cannot be loaded; ")
        else:
            assert answer.token_ids == continue_greedily(merged[name], prompt, OUTPUT)


def test_adapters_come_and_go_and_broken_ones_cost_nothing(
    start_here: Any, models: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, merged = models
    prompt = list(range(300, 360))
    expected = {name: continue_greedily(each, prompt, OUTPUT) for name, each in merged.items()}
    started = start_here(folder, memory={"max_loras": 1, "max_lora_rank": 8})
    adapters = started.engine.adapters
    before = ledger_of(started)

    # What slots have no room for, with a slot free and with none.
    write_adapter(tmp_path / "wide", merged[""], 16, seed=7)
    assert "rank" in adapters.add("wide@1", str(tmp_path / "wide"), is_checked=False)
    assert adapters.add("second@1", str(tmp_path / "second"), is_checked=False) == ""
    assert "rank" in adapters.add("wide@1", str(tmp_path / "wide"), is_checked=False)
    (tmp_path / "third/adapter_model.safetensors").unlink()
    assert adapters.add("third@1", str(tmp_path / "third"), is_checked=False)

    asked = [request_of("a", prompt, "second@1"), request_of("b", prompt, "")]
    assert run(started, asked) == ([expected["second"], expected[""]], [])
    adapters.remove("second@1")

    # Another content under the name and the folder of the one before: no KV of it may be found.
    other = write_adapter(tmp_path / "second", merged[""], 4, seed=9)
    assert adapters.add("second@2", str(tmp_path / "second"), is_checked=False) == ""
    [text], _ = run(started, [request_of("c", prompt, "second@2")])
    assert text == continue_greedily(other, prompt, OUTPUT) != expected["second"]
    assert ledger_of(started) == before
    _, [failed] = run(started, [request_of("d", prompt, "second@1")])
    assert failed.field == "model"
    assert run(started, [request_of("e", prompt, "")]) == ([expected[""]], [])
