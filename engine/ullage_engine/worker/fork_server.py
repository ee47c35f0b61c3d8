"""A process that imports the native worker's libraries once, and forks every worker from itself.

The engine's server starts it with a socket as standard input, and `protocol.forks` has the
messages on this socket. A worker's imports take two to ten seconds of CPU time, most of its
startup. A forked worker starts without them, and shares the libraries' memory with this process.

The kernel kills the workers when this process exits, and this process when the server exits.

exit status: 0 after the server has closed the socket, 1 unexpected error
"""

import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import msgspec
import setproctitle

from ullage_common.process.stacks import dump_on_signal
from ullage_engine.protocol.forks import (
    MAX_PACKET_BYTES,
    ForkWorker,
    FromForkServer,
    LoadVocabulary,
    ToForkServer,
    WorkerExited,
    WorkerForked,
)
from ullage_engine.worker.forks import die_with_parent, fork

log = logging.getLogger("ullage.engine.worker")


class ForkServer:
    """Forks workers on command, and reports how they exit."""

    def __init__(
        self,
        channel: socket.socket,
        run_worker: Callable[[list[str]], int],
        keep_vocabulary: Callable[[str, int], None],
    ) -> None:
        """Create a fork server.

        Args:
            channel: socket to the engine's server.
            run_worker: runs a worker with the given options, and returns its exit status.
            keep_vocabulary: builds the vocabulary of a model, by its source and size, for all
                workers that are forked afterwards.
        """
        self._channel = channel
        self._run_worker = run_worker
        self._keep_vocabulary = keep_vocabulary
        # Python writes a byte to this pipe for every signal, which wakes the `select` below.
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> None:
        """Serve until the socket is closed."""
        channel = self._channel.fileno()
        while True:
            ready, _, _ = select.select([channel, self._woken], [], [])

            if self._woken in ready:
                os.read(self._woken, 4096)
                for pid, status in _exited_children():
                    self._send(WorkerExited(pid=pid, status=status))

            if channel in ready:
                packet = self._channel.recv(MAX_PACKET_BYTES)
                if not packet:
                    return
                match msgspec.msgpack.decode(packet, type=ToForkServer):
                    case ForkWorker() as message:
                        self._fork(message)
                    case LoadVocabulary(source=source, vocab_size=vocab_size):
                        self._load_vocabulary(source, vocab_size)

    def _fork(self, message: ForkWorker) -> None:
        pid = fork(lambda: self._run(message))
        descriptor = os.pidfd_open(pid)
        try:
            self._send(WorkerForked(pid=pid), descriptor)
        finally:
            os.close(descriptor)

    def _load_vocabulary(self, source: str, vocab_size: int) -> None:
        """Build a vocabulary. If that fails, each worker tries it again, and reports the error."""
        try:
            self._keep_vocabulary(source, vocab_size)
        except Exception as error:
            log.warning("workers build the vocabulary for grammars themselves: %s", error)
        freeze_objects()

    def _run(self, message: ForkWorker) -> int:
        """Run a worker in the forked process, and return its exit status."""
        self._channel.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._woken)
        os.close(self._wake)

        setproctitle.setproctitle(" ".join([*message.program, *message.options]))
        return self._run_worker(message.options)

    def _send(self, message: FromForkServer, *descriptors: int) -> None:
        socket.send_fds(self._channel, [msgspec.msgpack.encode(message)], descriptors)


def main() -> int:
    """Serve until the socket is closed, and return the exit status."""
    die_with_parent(os.getppid())
    dump_on_signal()
    # Ctrl-C reaches the whole group, but the server decides when this process exits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    with take_standard_input() as channel:
        # Takes seconds, during which the lines above already hold.
        from ullage_engine.worker import main as worker
        from ullage_engine.worker.vocabulary import keep_vocabulary

        freeze_objects()

        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads > 1:
            log.warning(
                "a library has started %d threads, which a fork lacks: workers may hang while they "
                "start; remove what is loaded into all programs, such as LD_PRELOAD",
                num_threads - 1,
            )
        ForkServer(channel, worker.main, keep_vocabulary).serve()
    return 0


def freeze_objects() -> None:
    """Exclude all objects from garbage collection, because none becomes garbage any more.

    A collection in a worker would write to every object, and the kernel would copy every page.
    """
    gc.collect()
    gc.freeze()


def take_standard_input() -> socket.socket:
    """Return the socket that is standard input, and make the null device standard input."""
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), sys.stdin.fileno())
    return channel


def _exited_children() -> Iterator[tuple[int, int]]:
    """Yield the process id and exit status of each child that has exited since the last call."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
