"""A worker process, spoken to as the server does."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from ullage_engine.protocol.frames import BlockingLink
from ullage_engine.protocol.messages import (
    Loading,
    ProfileDone,
    Ready,
    Rejected,
    RequestFailed,
    Shutdown,
    StartFailed,
    StateReport,
    StepDone,
    Submit,
    ToServer,
    ToWorker,
)
from ullage_engine.protocol.requests import EngineRequest, TokenLogprobs
from ullage_engine.protocol.worker_state import WorkerState

DEADLINE_S = 240.0
"""For a sign of life: vLLM imports a family for the first time in a process of its own."""
WORK_S = 900.0
"""For work that is done step by step: hundreds of requests take minutes on a slow processor."""


@dataclass
class Answer:
    """Everything the worker said about one request."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    vector: bytes = b""
    rejected: Rejected | None = None
    failed: str = ""
    failed_field: str = ""

    @property
    def is_over(self) -> bool:
        return bool(self.finish or self.rejected or self.failed)


class WorkerProcess:
    """A worker and the server's end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], listener: socket.socket) -> None:
        self.process = process
        self.answers: dict[str, Answer] = {}
        self.state: WorkerState | None = None
        self.loading: list[Loading] = []
        self.profile: ProfileDone | None = None
        """The latest answer to a `StartProfile`."""
        self.order: list[str] = []
        """The request of each output, in their order."""
        self._listener = listener
        self._link: BlockingLink | None = None
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)

    def send(self, message: ToWorker) -> None:
        self._connected().send(msgspec.msgpack.encode(message))

    def receive(self) -> ToServer:
        message = self.receive_within(DEADLINE_S)
        assert message is not None, "the worker says nothing"
        return message

    def receive_within(self, timeout_s: float) -> ToServer | None:
        """Return the next message, or None if none arrived in time."""
        try:
            received = self._connected().receive(timeout_s)
        except OSError as error:
            raise AssertionError("the worker is gone") from error
        if received is None:
            return None
        message = self._decoder.decode(received)
        self._note(message)
        return message

    def _connected(self) -> BlockingLink:
        deadline = time.monotonic() + DEADLINE_S
        while self._link is None:
            assert time.monotonic() < deadline, "the worker says nothing"
            assert self.process.poll() is None, "the worker is gone"
            with contextlib.suppress(TimeoutError):
                self._link = BlockingLink(self._listener.accept()[0], DEADLINE_S)
        return self._link

    def wait_ready(self) -> Ready:
        """Waits until it serves."""
        message = self.receive()
        while not isinstance(message, Ready | StartFailed):
            message = self.receive()
        assert isinstance(message, Ready), message
        self.state = message.state
        return message

    def wait_failed(self) -> StartFailed:
        """Waits until it says that it cannot start."""
        message = self.receive()
        while not isinstance(message, Ready | StartFailed):
            message = self.receive()
        assert isinstance(message, StartFailed), message
        return message

    def submit(self, request: EngineRequest, *, resumed: bool = False) -> Answer:
        return self.submit_group([request], resumed=resumed)[0]

    def submit_group(self, requests: list[EngineRequest], *, resumed: bool = False) -> list[Answer]:
        self.send(Submit(requests=requests, resumed=resumed))
        answers = [Answer() for _ in requests]
        self.answers |= {each.request_id: a for each, a in zip(requests, answers, strict=True)}
        return answers

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WORK_S
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.receive()

    def wait_profile(self) -> ProfileDone:
        """Waits for the answer to a `StartProfile`."""
        self.profile = None
        self.wait_for(lambda: self.profile is not None)
        assert self.profile is not None
        return self.profile

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

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def stop(self) -> int:
        self.send(Shutdown())
        return self.process.wait(30)

    def _note(self, message: ToServer) -> None:
        match message:
            case Loading():
                self.loading.append(message)
            case StateReport(state=state):
                self.state = state
            case ProfileDone():
                self.profile = message
            case Rejected(request_id=request_id):
                self.answers[request_id].rejected = message
            case RequestFailed(request_id=request_id, message=text, field=field_name):
                self.answers[request_id].failed = text
                self.answers[request_id].failed_field = field_name
            case StepDone(outputs=outputs, embeddings=embeddings):
                for each in embeddings:
                    self.answers[each.request_id].vector = each.vector
                    self.answers[each.request_id].finish = "embedded"
                for output in outputs:
                    answer = self.answers[output.request_id]
                    answer.token_ids += output.token_ids
                    answer.finish = output.finish
                    answer.num_preemptions = output.num_preemptions
                    answer.num_cached_tokens = output.num_cached_tokens
                    answer.logprobs += output.logprobs or []
                    self.order.append(output.request_id)


Launch = Callable[[Sequence[str], Path, Mapping[str, str]], WorkerProcess]


@contextmanager
def launcher() -> Iterator[Launch]:
    """Launches workers by a command, the folder with their engine.yaml, and what to add to their
    environment. Ends them with itself."""
    with ExitStack() as stack:

        def launch(
            command: Sequence[str], folder: Path, environment: Mapping[str, str]
        ) -> WorkerProcess:
            path = folder / "w.ipc"
            path.unlink(missing_ok=True)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.settimeout(0.1)
            listener.bind(str(path))
            listener.listen(1)
            arguments = ["--config", str(folder / "engine.yaml"), "--endpoint", str(path)]
            process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                env={**os.environ, **environment},
            )
            stack.callback(end, process)
            worker = WorkerProcess(process, listener)
            stack.callback(worker.close)
            return worker

        yield launch


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate(timeout=60)
