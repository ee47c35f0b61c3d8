"""One worker process seen from the server: its environment, its link and its health.

The link is a Unix stream of msgpack messages (`protocol/frames.py`). glibc and OpenMP read the
environment before any Python runs.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from ullage_common.config.engine import EngineConfig
from ullage_common.process.cores import is_pinned, usable_cores
from ullage_common.process.memory import OomKills
from ullage_engine.protocol.frames import READ_BYTES, SEND_BUFFER_BYTES, Frames, framed
from ullage_engine.protocol.messages import (
    Loading,
    Ready,
    StateReport,
    StepDone,
    ToServer,
    ToWorker,
)
from ullage_engine.server.health import HangDetector, RestartPolicy, read_proc_stats


class ChildProcess:
    """A started process; its standard streams are the parent's.

    Start it on the main thread: the kernel kills a worker that asked for it when the *thread* that
    started it ends. subprocess.Popen and not asyncio's: it uses vfork, so gRPC's fork handlers,
    which cannot cope with running threads, are never called.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: int | None = None,
    ) -> None:
        """`stdin`: file descriptor of its standard input; None: the parent's."""
        own = {**os.environ, **environment}
        self._process = subprocess.Popen(command, stdin=stdin, env=own)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for the exit status; minus the signal's number when a signal killed the process."""
        return await asyncio.to_thread(self._process.wait)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


class StandbyWorker:
    """A worker that imports its libraries and waits to take over.

    Its standard input is a socket: it writes a byte when it has imported them, and goes on when it
    reads a line.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], import_s: float
    ) -> None:
        """`import_s`: seconds that imports may take."""
        self._import_s = import_s
        self._started_at = time.monotonic()
        self._has_imported = False
        self._socket, its_end = socket.socketpair()
        self._socket.setblocking(False)
        try:
            self._process = ChildProcess([*command, "--standby"], environment, its_end.fileno())
        except OSError:
            self._socket.close()
            raise
        finally:
            its_end.close()

    def failure(self) -> str:
        """Return why it cannot take over; empty: it can, or is going to. Call it regularly."""
        status = self._process.poll()
        if status is not None:
            return f"ended with status {status}"
        with contextlib.suppress(OSError):
            self._has_imported = bool(self._socket.recv(1)) or self._has_imported
        if not self._has_imported and time.monotonic() - self._started_at > self._import_s:
            return f"no end of its imports after {self._import_s:g} s"
        return ""

    def begin(self) -> ChildProcess:
        """Let it go on as the worker."""
        with self._socket, contextlib.suppress(BrokenPipeError):
            self._socket.send(b"\n")
        return self._process

    async def close(self) -> None:
        """Kill it, and return when it is gone: the kernel may take a while to free its memory."""
        self._socket.close()
        self._process.kill()
        await self._process.wait()


# Longest path of a Unix socket, less the terminating zero.
MAX_PATH_BYTES = 107
_PREFIX = "worker-"


class EndpointError(Exception):
    """The worker's socket cannot be created; the message is one line naming server.run_dir."""


def endpoint(run_dir: Path, number: int) -> str:
    """Return the path of the socket for the worker with this number; sockets of its ranks have
    longer names."""
    return f"{run_dir}/{_PREFIX}{number}.ipc"


def clear_endpoints(run_dir: Path) -> None:
    """Remove sockets that killed workers left behind. Call it while there is no worker."""
    for path in run_dir.glob(f"{_PREFIX}*"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


class ServerLink:
    """One worker's connection; a new worker gets a new link, so nothing of an old one arrives.

    Messages to the worker are queued without limit and never block: there are at most a few for
    each open request.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._listener = _listener(path)
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        """The connection, once the worker has made it."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
        self._unsent = bytearray()
        self._frames = Frames()
        self._messages: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.failure: asyncio.Future[None] = self._loop.create_future()
        """Has an exception once no message reaches the worker any more, though it lives."""
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def post(self, message: ToWorker) -> None:
        """Send a message, or queues it; it is lost if the worker dies before taking it."""
        try:
            data = framed(self._encoder.encode(message))
        except Exception as error:
            self._fail(error)
            return
        is_waiting = bool(self._unsent)
        self._unsent += data
        if self._socket is not None and not is_waiting:
            self._write(self._socket)

    async def receive(self) -> ToServer:
        """Wait for the next message.

        Raises:
            msgspec.MsgspecError: the worker sent something that is not a message.
        """
        while not self._messages:
            self._reader = self._loop.create_future()
            await self._reader
        return self._decoder.decode(self._messages.popleft())

    def close(self) -> None:
        if self.failure.done():
            self.failure.exception()  # whoever waited for it may have gone
        self._stop_listening()
        self._path.unlink(missing_ok=True)
        if self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        self._stop_listening()
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = connected
        self._loop.add_reader(connected.fileno(), self._read, connected)
        if self._unsent:
            self._write(connected)

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _read(self, connected: socket.socket) -> None:
        try:
            data = connected.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the worker has gone, which its process says
            self._loop.remove_reader(connected.fileno())
            return
        self._messages.extend(self._frames.feed(data))
        if self._messages and self._reader is not None:
            reader = self._reader
            self._reader = None
            if not reader.done():
                reader.set_result(None)

    def _write(self, connected: socket.socket) -> None:
        """Send as much as the worker's buffer takes, and the rest when it takes more."""
        try:
            del self._unsent[: connected.send(self._unsent)]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):  # the worker has gone
            self._unsent.clear()
        except OSError as error:
            self._fail(error)
        if self._unsent and not self.failure.done():
            self._loop.add_writer(connected.fileno(), self._write, connected)
        else:
            self._loop.remove_writer(connected.fileno())

    def _fail(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)


def _listener(path: str) -> socket.socket:
    """Return a socket that one worker may connect to.

    Raises:
        EndpointError: it cannot be made.
    """
    if len(path.encode()) > MAX_PATH_BYTES:
        raise EndpointError(f"server.run_dir: {path} is longer than a socket's path may be")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    try:
        listener.bind(path)
        listener.listen(1)
    except OSError as error:
        listener.close()
        raise EndpointError(f"server.run_dir: cannot make {path}: {error}") from error
    return listener


log = logging.getLogger("ullage.engine.supervisor")

# Least time between two progress lines of one stage.
_PROGRESS_S = 1.0


class WorkerHandle:
    """One worker process and its link, from start to end."""

    def __init__(self, process: ChildProcess, link: ServerLink, detector: HangDetector) -> None:
        self.process = process
        self.link = link
        self.exited = asyncio.create_task(process.wait())
        self.oom_kills = OomKills(process.pid)
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.last_message_at = self.started_at
        """Time of the last message."""
        self.served = False
        """Whether the worker has done a step."""
        self.start_error = ""
        self.may_retry = True
        """Whether another start may do better."""
        self.is_blameless = False
        """Whether the server ends it for an error of its own, of which no request is the cause."""
        self.is_unproven = False
        """Whether the start ended because it computed otherwise than a verified one."""
        self._logged = (("", 0), 0.0)
        self._detector = detector
        self._checked_at = self.started_at
        self._has_work = False
        """Whether it had any when it was last looked at, or was sent some since."""
        self._submitted_at = self.started_at
        """When it last got work after it had none."""
        self._step_at = self.started_at
        """When the server last heard of a step."""
        self._is_step_known = False
        """Whether the steps of the next report are in it already by a message of their own."""
        self._num_steps = 0

    def on_message(self, message: ToServer) -> None:
        """Records that the worker is alive and, by some messages, that it makes progress."""
        now = time.monotonic()
        match message:
            case StepDone():
                self.served = True
                self._is_step_known = True
                self._on_step(now)
            case StateReport(state=state) if state.num_steps != self._num_steps:
                self._num_steps = state.num_steps
                # Steps that compute a part of a prompt have no message of their own.
                if self._is_step_known:
                    self._detector.on_progress()
                else:
                    self._on_step(now)
                self._is_step_known = False
            case Loading():
                self._detector.on_progress()
            case Ready():
                self._step_at = now
                self._detector.on_ready(message.longest_step_s)
        self.last_message_at = now
        self._detector.on_message()

    def _on_step(self, now: float) -> None:
        self._detector.on_step(now - max(self._step_at, self._submitted_at))
        self._step_at = now

    def on_submit(self) -> None:
        """Record that it was sent a request: idle time before it is not part of the next step."""
        if not self._has_work:
            self._has_work = True
            self._submitted_at = time.monotonic()

    def check_health(self, has_work: bool) -> str:
        """Return why the worker counts as hung; empty while it does not. Call it regularly."""
        now = time.monotonic()
        elapsed = now - self._checked_at
        self._checked_at = now
        self._has_work = has_work
        self.oom_kills.look()
        is_loading = self.ready_at is None
        self._detector.tick(elapsed, is_loading=is_loading, has_work=has_work)
        stats = read_proc_stats(self.process.pid) if self._detector.is_suspect else None
        if stats is not None:
            self._detector.observe(stats, elapsed)
        return self._detector.reason(is_loading=is_loading)

    def has_served(self, policy: RestartPolicy) -> bool:
        """Whether the worker was of use, so that its end is the first failure in a row."""
        if self.ready_at is None:
            return False
        return self.served or time.monotonic() - self.ready_at > policy.stable_after_s

    def on_progress(self, loading: Loading) -> None:
        """Log how far the start is: a rank's stages, their ends, and once a second."""
        stage, logged_at = self._logged
        loading_stage = loading.stage, loading.rank
        now = time.monotonic()
        is_done = loading.done_bytes >= loading.total_bytes
        if loading_stage == stage and now - logged_at < _PROGRESS_S and not is_done:
            return
        self._logged = (loading_stage, now)
        log.info(
            "loading",
            extra={
                "rank": loading.rank,
                "stage": loading.stage,
                "done_bytes": loading.done_bytes,
                "total_bytes": loading.total_bytes,
            },
        )


WORKER_ENV: Mapping[str, str] = MappingProxyType(
    {
        # One arena: freed temporaries of any thread are reused by all, so the heap has one
        # high-water mark, reached in warm-up, and not one a thread.
        "MALLOC_ARENA_MAX": "1",
        # Large temporaries come from the heap and go back to it. With mmap each would fault its
        # pages in anew, and glibc would move its threshold while serving: resident memory jumps.
        "MALLOC_MMAP_MAX_": "0",
        # Never give the heap's top back to the kernel: what warm-up took is in the ledger already.
        "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
        # Descriptors and code of one shape of matrix product take about 0.6 MB, and are kept in two
        # caches of 1,024: oneDNN's and torch's own above it. One is enough, and not that large:
        # shapes that fell out cost about a millisecond when they come again.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "96",
        "LRU_CACHE_CAPACITY": "1",
        # Huge pages for torch's large allocations, where the system grants them: KV is read in
        # blocks of a page or less from all over the pool. Steps on CPUs took 8 to 15 % less.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
)
"""Environment of every worker, on top of the parent's."""


SLEEPING_ENV: Mapping[str, str] = MappingProxyType(
    {
        # Threads spin this often for one another, then sleep. The default is 300,000: when another
        # engine computes on their cores they burn whole time slices waiting for a thread that is
        # not running. 120 small products with two threads on two cores took 26 ms against 80 ms
        # with two busy neighbours, at worst 32 ms against 2 s. On cores of its own an engine's
        # steps are 1.3 to 1.7 times slower for it.
        "GOMP_SPINCOUNT": "1000",
    }
)
"""Environment of workers that share their cores with other engines' or ranks'."""

TRANSFER_ENV: Mapping[str, str] = MappingProxyType(
    {
        # A failed transfer ends its process, and so the group, rather than waiting for ever.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # For GPUs that speak over PCIe: more channels and larger pieces.
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_BUFFSIZE": "8388608",
        # All ranks of an engine are on one host, and nobody else may speak to them.
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
)
"""Environment of transfers between ranks; `parallelism.nccl` may say otherwise."""
_INTERFACES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}


def worker_env(
    threads: int,
    num_ranks: int = 1,
    nccl: Mapping[str, str] = MappingProxyType({}),
    *,
    owns_cores: bool = False,
) -> dict[str, str]:
    """Return `WORKER_ENV` for `threads` compute threads; ranks inherit it from rank 0.

    `owns_cores`: no other engine computes on the cores that this one may use. Several ranks share
    them with one another.
    """
    own = {**WORKER_ENV, "OMP_NUM_THREADS": str(threads)}
    if num_ranks > 1:
        return {**own, **SLEEPING_ENV, **TRANSFER_ENV, **nccl}
    return own if owns_cores else {**own, **SLEEPING_ENV}


def vllm_env(
    threads: int,
    num_ranks: int = 1,
    nccl: Mapping[str, str] = MappingProxyType({}),
    *,
    owns_cores: bool = False,
) -> dict[str, str]:
    """Return the environment of a worker with vLLM, which sets its allocator itself."""
    own = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The log has a line for each thing that happened, and no bars.
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if num_ranks > 1:
        own |= {**TRANSFER_ENV, **nccl}
    return own if owns_cores else {**own, **SLEEPING_ENV}


def launch_env(config: EngineConfig, environment: Callable[..., dict[str, str]]) -> dict[str, str]:
    """Return what `worker_env` or `vllm_env` is for a configuration, on this node."""
    threads = config.server.threads or max(1, usable_cores() // config.num_local_ranks)
    owns_cores = config.server.owns_cores
    nccl = config.parallelism.nccl
    own = environment(
        threads,
        config.gpus,
        nccl,
        owns_cores=is_pinned() if owns_cores is None else owns_cores,
    )
    if config.group.nodes > 1:  # which do not talk on the loopback interface
        for name in _INTERFACES - nccl.keys():
            own.pop(name, None)
    return own
