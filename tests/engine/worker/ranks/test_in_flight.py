"""Two stages compute two batches of decodes at the same time, and say what one process says."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import distributed
from ullage_testing.child_process import start_child

from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import read_file
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.protocol.step_plan import SampledToken, StepPlan
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.worker.engine import EngineCore
from ullage_engine.worker.forks import ForkedProcess
from ullage_engine.worker.startup import start

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "tie_word_embeddings": False}
# A real rank of the second stage. While there is a file `hold` it keeps each plan, before it
# samples, until the first stage has begun one of other sequences.
SECOND_STAGE = """
import sys, time
from pathlib import Path
from ullage_engine.runner import model_runner
from ullage_engine.worker.rank_process import main
folder = Path({folder!r})
sample = model_runner.sample
def hold(logits, chunks, *rest, **named):
    own, deadline = {{chunk.request_id for chunk in chunks}}, time.monotonic() + 60
    while (folder / "hold").exists() and own & set((folder / "begun").read_text().split()):
        time.sleep(0.001)
        if time.monotonic() > deadline:
            (folder / "hold").unlink()
            (folder / "late").touch()
    return sample(logits, chunks, *rest, **named)
model_runner.sample = hold
sys.exit(main())
"""


@pytest.fixture
def write_config(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[int], Path]:
    checkpoint = make_checkpoint(7, **LLAMA)

    def write(stages: int) -> Path:
        values: dict[str, Any] = {
            "model": {"source": f"file://{checkpoint}", "name": "tiny", "max_model_len": 128},
            "device": "cpu",
            "gpus": stages,
            "parallelism": {"pipeline": stages, "decode_batches": stages},
            "memory": {"threshold_percent": 100, "safety_reserve": 0, "device_bytes": 2 << 30},
            "batching": {"max_sequences": 8, "prefill_chunk_tokens": 32},
            "server": {"weights_dir": str(tmp_path / "weights"), "threads": 1},
        }
        values["memory"]["max_kv"] = 64 << 20
        # What a sequence says then depends on nothing else in its batch.
        values["model"] |= {"dtype": "float32", "deterministic": True}
        path = tmp_path / f"engine-{stages}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture
def start_engine(
    write_config: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], EngineCore]]:
    """Starts an engine of so many stages, of which this process is the first."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    stops = []

    def start_stages(stages: int) -> EngineCore:
        path = write_config(stages)
        script = SECOND_STAGE.format(folder=str(tmp_path))
        base = [sys.executable, "-c", script, "--config", str(path)]

        def start_rank(rank: int, endpoint: str, device_bytes: int | None) -> ForkedProcess:
            own = ["--rank", str(rank), "--endpoint", endpoint]
            return start_child([*base, *own, "--device-bytes", str(device_bytes)])

        started = start(read_file(path, EngineConfig), lambda _: None, tmp_path / "g", start_rank)
        stops.append(started.stop)
        return started.engine

    yield start_stages
    for stop in stops:
        stop()
    if distributed.is_initialized():
        distributed.destroy_process_group()


def submit(engine: EngineCore) -> dict[str, list[int]]:
    """Submits five prompts; returns where their tokens are collected."""
    for number in range(5):
        request = EngineRequest(
            request_id=f"r{number}",
            token_ids=[number + 3, 50, 7 * number + 1],
            num_prompt_tokens=3,
            max_tokens=24,
            sampling=SamplingParams(temperature=0.8, seed=number),
        )
        assert engine.submit(request) is None
    return {f"r{number}": [] for number in range(5)}


def step(engine: EngineCore, tokens: dict[str, list[int]]) -> None:
    for output in engine.step():
        tokens[output.request_id] += output.token_ids


def test_the_first_stage_begins_a_batch_while_the_second_has_the_one_before(
    start_engine: Callable[[int], EngineCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = start_engine(1)
    expected = submit(alone)
    while alone.has_work:
        step(alone, expected)
    engine = start_engine(2)
    execute = ModelRunner.execute
    begun = tmp_path / "begun"

    def note(runner: ModelRunner, plan: StepPlan) -> list[SampledToken]:
        new = begun.with_suffix(".new")
        new.write_text(" ".join(chunk.request_id for chunk in plan.chunks))
        new.rename(begun)
        return execute(runner, plan)

    monkeypatch.setattr(ModelRunner, "execute", note)
    tokens = submit(engine)
    while not all(tokens.values()):
        step(engine, tokens)
    (tmp_path / "hold").touch()
    for _ in range(8):
        step(engine, tokens)
    assert not (tmp_path / "late").exists(), "the second stage had its batch alone"
    (tmp_path / "hold").unlink()
    while engine.has_work:
        step(engine, tokens)
    assert tokens == expected
    assert engine.num_overlapped_steps > 8
    assert alone.num_overlapped_steps == 0
