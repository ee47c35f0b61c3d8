"""The server's side of the fork server, from which native workers are forked.

See `ullage_engine.worker.fork_server` for the process itself.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence

import msgspec

from ullage_engine.protocol.forks import (
    MAX_PACKET_BYTES,
    ForkWorker,
    FromForkServer,
    LoadVocabulary,
    ToForkServer,
    WorkerExited,
    WorkerForked,
)
from ullage_engine.server.hang_detector import read_proc_stats
from ullage_engine.server.worker_process import ChildProcess

log = logging.getLogger("ullage.engine.supervisor")

_CHECK_S = 1.0
"""Seconds between checks of a fork server that owes an exit status."""
_MAX_CHECKS = 10
"""Number of checks after which a fork server counts as lost. It may be swapped out, and slow."""


class ForkedWorker:
    """A worker that the fork server forks from itself.

    While the fork server is still importing the libraries, it represents the worker: `pid` is its
    process id, and signals go to it.
    """

    def __init__(self, fork_server: ChildProcess) -> None:
        self._fork_server = fork_server
        self._pid = fork_server.pid
        self._descriptor: int | None = None
        """The worker's pidfd, or None before the worker has been forked."""
        self._loop = asyncio.get_running_loop()
        self._is_dead = asyncio.Event()
        """Set when a forked worker has exited, even if its exit status is not yet known."""
        self._status: asyncio.Future[int] = self._loop.create_future()

    @property
    def pid(self) -> int:
        return self._pid

    async def wait(self) -> int:
        """Wait for the process to exit. Return its exit status, negative if a signal killed it."""
        return await asyncio.shield(self._status)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def on_forked(self, pid: int, descriptor: int) -> None:
        """Record that the worker has been forked."""
        self._pid = pid
        self._descriptor = descriptor
        self._loop.add_reader(descriptor, self._on_dead)
        log.info("worker forked", extra={"pid": pid})

    def on_exited(self, status: int) -> None:
        """Record the exit status, which is known once the process has exited."""
        if not self._status.done():
            self._status.set_result(status)
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    async def on_fork_server_lost(self) -> None:
        """Wait until the kernel has killed the worker too. Its exit status is then unknown."""
        status = await self._fork_server.wait()
        if self._descriptor is not None:
            await self._is_dead.wait()
            status = -signal.SIGKILL
        self.on_exited(status)

    def _on_dead(self) -> None:
        assert self._descriptor is not None, "only a forked worker is watched"
        self._loop.remove_reader(self._descriptor)
        self._is_dead.set()
        self._loop.call_later(_CHECK_S, self._check_fork_server, _MAX_CHECKS)

    def _check_fork_server(self, num_checks: int) -> None:
        """Kill the fork server if it cannot report the worker's exit status."""
        if self._status.done():
            return
        stats = read_proc_stats(self._fork_server.pid)
        if num_checks == 0 or (stats is not None and stats.is_stopped):
            log.error("the fork server is silent, so it is replaced")
            self._fork_server.kill()
            return
        self._loop.call_later(_CHECK_S, self._check_fork_server, num_checks - 1)

    def _signal(self, number: signal.Signals) -> None:
        if self._status.done():
            return
        if self._descriptor is None:
            self._fork_server.send_signal(number)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


class ForkServerProcess:
    """Forks the workers of one engine, one after another.

    The process is started for the first worker, and started again if it was lost.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Create a fork server without starting its process.

        Args:
            command: command line of the fork server.
            environment: environment variables of all workers in addition to those of this process.
        """
        self._command = command
        self._environment = environment
        self._process: ChildProcess | None = None
        self._channel: socket.socket | None = None
        self._worker: ForkedWorker | None = None
        """The latest worker."""
        self._losing: asyncio.Task[None] | None = None
        self._vocabulary: LoadVocabulary | None = None
        """Command with the vocabulary that the process has built or is building."""

    def start_worker(self, program: Sequence[str], options: list[str]) -> ForkedWorker:
        """Begin to start a worker. The worker before it must have exited.

        Call this from the main thread. See `ChildProcess`.

        Args:
            program: beginning of the command line that would execute the worker.
            options: the rest of the command line.

        Raises:
            OSError: the fork server cannot be started.
        """
        is_new = self._process is None or self._channel is None
        if self._process is None or self._channel is None:
            self._process, self._channel = self._start()
        self._worker = ForkedWorker(self._process)
        self._send(ForkWorker(program=list(program), options=options))
        if is_new and self._vocabulary is not None:
            self._send(self._vocabulary)
        return self._worker

    def load_vocabulary(self, source: str, vocab_size: int) -> None:
        """Let later workers inherit the vocabulary for grammars. Repeated calls have no effect.

        Until it is built, which takes about a second, no worker can be forked.

        Args:
            source: the model's source, as configured.
            vocab_size: number of tokens for which the model computes logits.
        """
        message = LoadVocabulary(source=source, vocab_size=vocab_size)
        if message != self._vocabulary:
            self._vocabulary = message
            self._send(message)

    async def close(self) -> None:
        """Kill the fork server and its worker, and wait for them to exit."""
        process = self._process
        if process is not None:
            process.kill()
            await process.wait()
            self._on_lost()
        if self._losing is not None:
            await self._losing

    def _send(self, message: ToForkServer) -> None:
        if self._channel is None:
            return
        # If the fork server has just exited, the end of the socket is read next.
        with contextlib.suppress(ConnectionError):
            self._channel.send(msgspec.msgpack.encode(message))

    def _start(self) -> tuple[ChildProcess, socket.socket]:
        channel, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        try:
            process = ChildProcess(self._command, self._environment, its_end.fileno())
        except OSError:
            channel.close()
            raise
        finally:
            its_end.close()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._read)
        return process, channel

    def _read(self) -> None:
        channel = self._channel
        if channel is None:
            return
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                channel, MAX_PACKET_BYTES, maxfds=1, flags=socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionError:
            packet = b""
        if not packet:
            self._on_lost()
            return

        worker = self._worker
        match msgspec.msgpack.decode(packet, type=FromForkServer):
            case WorkerForked(pid=pid) if worker is not None and descriptors:
                worker.on_forked(pid, descriptors[0])
            case WorkerForked():
                log.error("this process has too many open files to watch a worker")
                if self._process is not None:
                    self._process.kill()
            case WorkerExited(pid=pid, status=status) if worker is not None and worker.pid == pid:
                worker.on_exited(status)

    def _on_lost(self) -> None:
        """Record that the fork server has exited. The next worker needs a new one."""
        channel = self._channel
        if channel is None:
            return
        asyncio.get_running_loop().remove_reader(channel.fileno())
        channel.close()
        self._channel = None
        self._process = None
        if self._worker is not None:
            self._losing = asyncio.create_task(self._worker.on_fork_server_lost())
