"""Lowers the memory limits of the worker that starts after an out-of-memory error.

vLLM cannot continue after a step that ran out of memory, so its worker exits. A new worker that
took the same amount of memory would fail in the same way. Workers therefore record, in a file in
the engine's run_dir, how much memory they took and which out-of-memory errors occurred. All workers
of one server share this file. A new server ignores the old server's file.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from ullage_common.process.memory import OomKills
from ullage_engine.memory.out_of_memory import is_out_of_memory

log = logging.getLogger("ullage.engine.vllm")

FILE = "vllm-memory.json"

_POOL_SHARE = 7 / 8
"""Size of the next worker's KV pool, as a fraction of the failed worker's pool."""
_LEAST_CHUNK_TOKENS = 64
_FORGIVEN_S = 3600.0
"""Seconds after the last out-of-memory error until a new worker may use all memory again."""


class Taken(msgspec.Struct, frozen=True):
    """The KV pool size and prompt chunk size of one worker, with their lower bounds."""

    kv_bytes: int
    least_kv_bytes: int
    """KV bytes that one sequence of maximum length needs, but at most `kv_bytes`."""
    chunk_tokens: int = 0
    """Maximum prompt tokens per step, or 0 if prompts are not chunked."""
    least_chunk_tokens: int = 0
    """Lower bound on `chunk_tokens`: the number of tokens in the largest KV block of any kind.

    Models with recurrent states compute prompts in whole blocks.
    """


class BackoffLimits(msgspec.Struct, frozen=True):
    """Upper limits on the memory that the next worker takes."""

    kv_bytes: int | None = None
    reserve_bytes: int = 0
    """Bytes to keep free in addition to `memory.safety_reserve`."""
    chunk_tokens: int | None = None


def lowered(limits: BackoffLimits, taken: Taken) -> BackoffLimits:
    """Return lower limits for the next worker, after one that took `taken` ran out of memory.

    The KV pool shrinks by an eighth and the prompt tokens per step by half, but neither falls below
    its minimum. The memory that the KV pool gives up is kept free.
    """
    kv_bytes = max(int(taken.kv_bytes * _POOL_SHARE), min(taken.least_kv_bytes, taken.kv_bytes))
    chunk_tokens = limits.chunk_tokens
    if taken.chunk_tokens:
        least = max(_LEAST_CHUNK_TOKENS, taken.least_chunk_tokens)
        chunk_tokens = max(taken.chunk_tokens // 2, min(least, taken.chunk_tokens))
    return BackoffLimits(
        kv_bytes=kv_bytes,
        reserve_bytes=limits.reserve_bytes + taken.kv_bytes - kv_bytes,
        chunk_tokens=chunk_tokens,
    )


class _History(msgspec.Struct):
    """Contents of the file that one server's workers share."""

    server: str = ""
    limits: BackoffLimits = BackoffLimits()
    taken: Taken | None = None
    """Memory that the latest worker took, or None if it exited before that was known."""
    ran_out_at: float = 0.0
    """Time of the latest out-of-memory error, in seconds since the epoch."""
    num_unreported: int = 0
    """Number of out-of-memory errors that no worker has reported in its state yet."""
    is_running: bool = False
    """Whether the latest worker has started and has not recorded why it exited."""
    num_kills: int = 0
    """Number of processes that the OOM killer had killed when the latest worker started."""


class OomBackoff:
    """History of out-of-memory errors in one server's workers."""

    def __init__(
        self,
        run_dir: Path,
        server: str = "",
        kills: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the history of earlier workers, and record that this one has started.

        Args:
            run_dir: folder of the file.
            server: name of the server, unique among the servers that use the folder. If empty, the
                parent process identifies the server.
            kills: returns how many processes the kernel's OOM killer has killed. None to read the
                number from the kernel.
            clock: returns the time in seconds since the epoch.
        """
        self._path = run_dir / FILE
        self._clock = clock
        server = server or _parent()
        self._history = self._read(server)

        num_kills = (kills or OomKills(os.getpid()).count)()
        if self._history.is_running and num_kills > self._history.num_kills:
            # The server counts this error.
            self._ran_out("the kernel killed a worker")
        if clock() - self._history.ran_out_at > _FORGIVEN_S:
            self._history.limits = BackoffLimits()
        self._history.taken = None
        self._history.is_running = True
        self._history.num_kills = num_kills
        self._write()

    @property
    def limits(self) -> BackoffLimits:
        """Upper limits on the memory that this worker may take."""
        return self._history.limits

    def took(self, taken: Taken) -> None:
        """Record how much memory this worker took."""
        self._history.taken = taken
        self._write()

    def on_failed_step(self, error: Exception) -> None:
        """Record a failed step, which makes this worker exit.

        The server detects out-of-memory errors from the worker's exit status and counts them.
        """
        self._on_error(error)
        self._write()

    def on_failed_start(self, error: Exception) -> None:
        """Record an error during startup.

        If this is an out-of-memory error, the next worker reports it to the server.
        """
        self._history.num_unreported += self._on_error(error)
        self._write()

    def take_unreported(self) -> int:
        """Return how many out-of-memory errors no worker has reported to the server yet.

        The count is reset to 0.
        """
        num_events = self._history.num_unreported
        self._history.num_unreported = 0
        if num_events:
            self._write()
        return num_events

    def _on_error(self, error: Exception) -> bool:
        self._history.is_running = False
        cause = error.__cause__
        is_of_rank = isinstance(cause, Exception) and is_out_of_memory(cause)
        if not is_of_rank and not is_out_of_memory(error):
            return False
        self._ran_out("memory ran out")
        return True

    def _ran_out(self, reason: str) -> None:
        history = self._history
        history.ran_out_at = self._clock()
        if history.taken is None:
            log.warning("%s in a start, before its pool was known", reason)
            return
        history.limits = lowered(history.limits, history.taken)
        limits = msgspec.to_builtins(history.limits)
        log.warning("%s, so the next worker takes less", reason, extra=limits)

    def _read(self, server: str) -> _History:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            history = msgspec.json.decode(self._path.read_bytes(), type=_History)
            if history.server == server:
                return history
        return _History(server=server)

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        try:
            part.write_bytes(msgspec.json.encode(self._history))
            part.replace(self._path)
        except OSError as error:
            log.warning("the next worker will not know what this one took: %s", error)


def _parent() -> str:
    """Return an id of the parent process that, unlike its process id, is never reused."""
    parent = psutil.Process(os.getppid())
    return f"{parent.pid} {parent.create_time()}"
