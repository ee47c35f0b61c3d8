"""Keeps one pod's process running: restarts it after a crash, and captures its output."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from ullage_cli.local.pods import Pod
from ullage_cli.processes.pod_log import PodLog
from ullage_cli.processes.readiness import wait_ready
from ullage_operator.api.errors import LocalFailure

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
STEADY_S = 60.0
"""Seconds of readiness after which a process's restart backoff is reset."""
MAX_FAILED_STARTS = 5
"""Number of consecutive exits before readiness after which the pod fails for good.

A pod that becomes ready is restarted however often it crashes, as in Kubernetes: its service
answers in between, and other pods may be well.
"""

READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 20
"""Maximum length of an output line in bytes. A longer line is logged as several lines."""

MISUSE = 2
"""Exit status of a process whose configuration can never work. It is not restarted."""
PR_SET_PDEATHSIG = 1
"""prctl option for the signal that a process gets when its parent exits (linux/prctl.h)."""


class PodFailed(LocalFailure):
    """Raised if a pod's process failed permanently, so that it is not restarted again.

    The message is the pod's last error.
    """


class PodProcess:
    """Runs one pod's process and writes its log file.

    Args:
        pod: the pod to run.
        log_path: file to which the output of every run is appended.
        on_progress: called with a short description whenever the pod's progress changes.
    """

    def __init__(self, pod: Pod, log_path: Path, on_progress: Callable[[str], None]) -> None:
        self.pod = pod
        self.restarts = 0
        self.ready_since: float | None = None
        """Monotonic time at which the current process first became ready (None before that)."""
        self._on_progress = on_progress
        self._log = PodLog(log_path, on_progress)
        self._process: asyncio.subprocess.Process | None = None
        self._has_been_ready = False
        """Whether any process of the pod has passed its probe. Pods without ports have none."""
        self._last_error = ""
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the current process (0 before the first start)."""
        return self._process.pid if self._process else 0

    async def run(self) -> None:
        """Run the process and restart it whenever it exits, until `stop` is called.

        Raises:
            PodFailed: the process exited too many times in a row without becoming ready, or with a
                status that a restart cannot fix.
        """
        try:
            await self._keep_running()
        finally:
            self._log.close()

    async def _keep_running(self) -> None:
        failed_starts = 0
        pause = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            status = await self._run_once()
            if self._stopping.is_set():
                return
            if status == MISUSE:
                raise PodFailed(self._last_error or f"exit status 2\n{self._log.tail}")

            failed_starts = 0 if self._has_been_ready else failed_starts + 1
            if failed_starts == MAX_FAILED_STARTS:
                raise PodFailed(self._explanation(status))

            if self._was_steady():
                pause = FIRST_BACKOFF_S
            reason = f" ({self._last_error})" if self._last_error else ""
            ended = "could not be started" if status is None else f"exited with status {status}"
            self._on_progress(f"{ended}{reason}; restarting in {pause:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return

            pause = min(2 * pause, MAX_BACKOFF_S)
            self.restarts += 1

    def _explanation(self, status: int | None) -> str:
        """Return why the pod is given up, after MAX_FAILED_STARTS runs without readiness.

        Args:
            status: the last exit status, or None if the process could not be started.
        """
        if status is None:
            return (
                f"its process could not be started: {self._last_error}; check the limits of "
                "memory, processes and open files (ulimit -a)"
            )
        count = f"exited {MAX_FAILED_STARTS} times in a row, last with status {status}"
        words = f": {self._last_error}" if self._last_error else f"\n{self._log.tail}"
        return count + words

    async def stop(self) -> None:
        """Send SIGTERM to the process, and SIGKILL to its group after the pod's grace period."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return

        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.pod.grace_s)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the process and its children, and do not restart it."""
        self._stopping.set()
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> int | None:
        """Run the process until it exits, and return its exit status.

        The result is None if the process could not be started.
        """
        self._last_error = ""
        self.ready_since = None
        try:
            self._process = process = await self._start()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            # The machine may lack memory, processes, threads or open files for a while.
            self._last_error = str(error)
            return None
        if self._stopping.is_set():
            process.terminate()  # `stop` ran during the start, before there was a process

        assert process.stdout is not None
        probing = asyncio.create_task(self._probe())
        try:
            await self._follow(process.stdout)
            return await process.wait()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.pod.command,
            env={**os.environ, **self.pod.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C in a terminal goes to the whole foreground group, but pods must stop in order.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    async def _probe(self) -> None:
        await wait_ready(self.pod)
        self.ready_since = time.monotonic()
        self._has_been_ready = bool(self.pod.ports)

    def _was_steady(self) -> bool:
        """Return whether the exited process had been ready for at least STEADY_S.

        Startup time does not count, because a long startup says nothing about whether the next one
        will succeed.
        """
        ready_since = self.ready_since
        return ready_since is not None and time.monotonic() - ready_since > STEADY_S

    async def _follow(self, output: asyncio.StreamReader) -> None:
        """Append the process's output to the log, and track its last error and its progress."""
        async for line in lines_of(output):
            self._log.write(line)
            if "error: " in line and not line.startswith("{"):
                self._last_error = line.partition("error: ")[2]
            elif progress := progress_of(line):
                self._on_progress(progress)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent exits for any reason.

    This function runs in the child process before exec. The signal is SIGKILL, because a process
    that ignored SIGTERM would have no parent left to kill it. Engine workers do the same.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def lines_of(output: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield output lines as they arrive, and split lines that exceed LONGEST_LINE.

    At most one line is buffered in memory.
    """
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


class LogLine(msgspec.Struct):
    """The progress fields of a pod's JSON log line. All other fields are ignored."""

    stage: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


def progress_of(line: str) -> str:
    """Return the stage and percentage from a JSON log line (empty if it reports no progress)."""
    if not line.startswith("{"):
        return ""
    with contextlib.suppress(msgspec.MsgspecError):
        log = msgspec.json.decode(line, type=LogLine)
        percent = f" {log.done_bytes / log.total_bytes:.0%}" if log.total_bytes > 0 else ""
        return f"{log.stage}{percent}" if log.stage else ""
    return ""
