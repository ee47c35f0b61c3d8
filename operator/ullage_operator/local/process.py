"""One pod as a process: started, followed, restarted when it crashes, stopped."""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TextIO

import msgspec

from ullage_operator.local.pods import Pod

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
STEADY_S = 60.0
"""A process that lived this long starts over with the first backoff."""
MAX_FAILURES = 5
"""Exits in a row, none after a steady run, until it is taken for hopeless."""
TAIL_LINES = 5
READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 20
"""Bytes of a line of output; a longer one is logged as several."""
MISUSE = 2
"""Exit status of a process whose configuration can never work."""
PR_SET_PDEATHSIG = 1


class PodFailed(Exception):
    """A pod that can never work; the message is its own last words."""


def die_with_parent() -> None:
    """Runs in the child: the kernel kills it when the parent is gone, however that went.

    SIGKILL, because then nobody is left to insist. An engine's worker asks for the same.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class PodProcess:
    """Owner of one pod's process and log file."""

    def __init__(self, pod: Pod, log_path: Path, on_progress: Callable[[str], None]) -> None:
        self.pod = pod
        self.log_path = log_path
        self.restarts = 0
        self._on_progress = on_progress
        self._process: asyncio.subprocess.Process | None = None
        self._last_error = ""
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def run(self) -> None:
        """Keeps the process running until `stop`.

        Raises:
            PodFailed: it exited with the status that says a restart cannot help, or too often.
        """
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._run_once()
            if self._stopping.is_set():
                return
            if status == MISUSE:
                raise PodFailed(self._last_error or f"exit status 2\n{tail(self.log_path)}")
            failures = 1 if time.monotonic() - started > STEADY_S else failures + 1
            if failures == MAX_FAILURES:
                count = f"exited {failures} times in a row, last with status {status}"
                raise PodFailed(f"{count}\n{tail(self.log_path)}")
            pause = min(FIRST_BACKOFF_S * 2 ** (failures - 1), MAX_BACKOFF_S)
            self._on_progress(f"exited with status {status}; restarting in {pause:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return
            self.restarts += 1

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to whatever is left after the grace."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            # The pod is a session of its own, so this reaches its children too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _run_once(self) -> int:
        self._process = await asyncio.create_subprocess_exec(
            *self.pod.command,
            env={**os.environ, **self.pod.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C in a terminal goes to the whole foreground group; pods are stopped in order.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        if self._stopping.is_set():
            self._process.terminate()  # told to stop while it was being started
        assert self._process.stdout is not None
        with self.log_path.open("a", encoding="utf-8") as log:
            await self._follow(self._process.stdout, log)
        return await self._process.wait()

    async def _follow(self, output: asyncio.StreamReader, log: TextIO) -> None:
        async for line in lines_of(output):
            print(line, file=log, flush=True)
            if "error: " in line and not line.startswith("{"):
                self._last_error = line.partition("error: ")[2]
            elif progress := progress_of(line):
                self._on_progress(progress)


async def lines_of(output: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines as they are written; of an overlong one, pieces, so that none has to be held whole."""
    pending = b""
    while chunk := await output.read(READ_BYTES):
        *whole, pending = (pending + chunk).split(b"\n")
        for raw in whole:
            yield raw.decode(errors="replace").rstrip()
        if len(pending) > LONGEST_LINE:
            yield pending.decode(errors="replace")
            pending = b""
    if pending:
        yield pending.decode(errors="replace").rstrip()


def tail(path: Path) -> str:
    """The last lines of a log."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


class LogLine(msgspec.Struct):
    """The fields of a JSON log line that tell progress."""

    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


def progress_of(line: str) -> str:
    """What to show of a log line: its stage and percentage, or nothing."""
    if not line.startswith("{"):
        return ""
    with contextlib.suppress(msgspec.MsgspecError):
        log = msgspec.json.decode(line, type=LogLine)
        percent = f" {log.done_bytes / log.total_bytes:.0%}" if log.total_bytes > 0 else ""
        return f"{log.stage}{percent}" if log.stage else ""
    return ""
