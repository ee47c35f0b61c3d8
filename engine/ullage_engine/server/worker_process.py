"""Worker processes: their startup, health checks and exit, and the standby worker."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ullage_common.process.memory import OomKills
from ullage_engine.protocol.messages import Loading, Ready, StateReport, StepDone, ToServer
from ullage_engine.server.hang_detector import HangDetector, read_proc_stats
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.server_link import ServerLink

log = logging.getLogger("ullage.engine.supervisor")

CLOSE_S = 5.0
"""Maximum time to wait for a killed standby worker to exit, in seconds."""
_PROGRESS_S = 1.0
"""Minimum interval between log lines of the same loading stage, in seconds."""


class WorkerProcess(Protocol):
    """A worker's process, executed or forked."""

    @property
    def pid(self) -> int:
        """The process id. It changes if another process loads libraries on the worker's behalf."""

    async def wait(self) -> int:
        """Wait for the process to exit. Return its exit status, negative if a signal killed it."""

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has exited."""

    def kill(self) -> None:
        """Send SIGKILL, unless the process has exited."""


class ChildProcess:
    """A child process that inherits the standard streams of its parent.

    Start the process from the main thread. A worker asks the kernel to kill it when its parent
    exits, and the kernel regards the *thread* that started the worker as the parent.
    subprocess.Popen is used because it calls vfork. asyncio may fork, and gRPC's fork handlers
    cannot deal with running threads.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: int | None = None,
    ) -> None:
        """Start the process.

        Args:
            command: the command line.
            environment: environment variables in addition to those of the parent.
            stdin: file descriptor to use as standard input, or None to inherit the parent's.
        """
        own = {**os.environ, **environment}
        self._process = subprocess.Popen(command, stdin=stdin, env=own)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the process is running."""
        return self._process.poll()

    async def wait(self) -> int:
        """Wait for the process to exit. Return its exit status, negative if a signal killed it."""
        return await asyncio.to_thread(self._process.wait)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has exited."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


class StandbyWorker:
    """A spare worker that imports its libraries in advance and waits to take over.

    The worker's standard input is a socket. After importing its libraries, the worker writes a byte
    to the socket, and it continues when it reads a line.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], import_s: float
    ) -> None:
        """Start the process.

        Args:
            command: command line of the worker.
            environment: environment variables in addition to those of the parent.
            import_s: time limit for the imports, in seconds.
        """
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
        """Return why the worker cannot take over, or "" if it can.

        Poll this method, because it also reads the message with which the worker reports that its
        imports are done.
        """
        status = self._process.poll()
        if status is not None:
            return f"ended with status {status}"
        with contextlib.suppress(OSError):
            self._has_imported = bool(self._socket.recv(1)) or self._has_imported
        if not self._has_imported and time.monotonic() - self._started_at > self._import_s:
            return f"its imports took more than {self._import_s:g} s"
        return ""

    def begin(self) -> ChildProcess:
        """Let the standby process take over as the worker, and return the process."""
        with self._socket, contextlib.suppress(BrokenPipeError):
            self._socket.send(b"\n")
        return self._process

    async def close(self) -> None:
        """Kill the process, and wait up to `CLOSE_S` for it to exit and free its memory.

        A process in a driver that hangs never exits. The serving worker is watched meanwhile.
        """
        self._socket.close()
        self._process.kill()
        exited = asyncio.create_task(self._process.wait())
        if not (await asyncio.wait({exited}, timeout=CLOSE_S))[0]:
            log.error("a killed standby worker does not end", extra={"pid": self._process.pid})


class Standby:
    """Keeps a standby worker ready to take over, and restarts it if it is lost."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._worker: StandbyWorker | None = None
        self._start_at = 0.0
        """Earliest monotonic time at which the next standby worker may be started."""

    async def keep(self, command: Callable[[], Sequence[str]], env: Mapping[str, str]) -> None:
        """Start a standby worker if there is none, and kill one that can no longer take over.

        Call this regularly.

        Args:
            command: returns the command line of the next worker.
            env: environment variables in addition to those of this process.
        """
        now = time.monotonic()
        if self._worker is None and now >= self._start_at:
            self._start_at = now + self._policy.max_backoff_s
            try:
                self._worker = StandbyWorker(command(), env, self._policy.standby_import_s)
            except OSError as error:
                log.warning("the standby worker cannot be started: %s", error)
        elif self._worker is not None and (reason := self._worker.failure()):
            log.warning("the standby worker is lost", extra={"reason": reason})
            await self.close()

    async def take(self) -> ChildProcess | None:
        """Let the standby worker take over, and return its process. Return None if it cannot."""
        worker = self._worker
        if worker is None:
            return None
        if worker.failure():
            await self.close()
            return None
        self._worker = None
        return worker.begin()

    async def close(self) -> None:
        """Kill the standby worker, if there is one."""
        worker = self._worker
        self._worker = None
        if worker is not None:
            await worker.close()


class WorkerHandle:
    """One worker process and its connection, from startup to exit."""

    def __init__(self, process: WorkerProcess, link: ServerLink, detector: HangDetector) -> None:
        self.process = process
        self.link = link
        self.exited = asyncio.create_task(process.wait())
        self.oom_kills = OomKills(process.pid)
        self._watched_pid = process.pid
        """The process that `oom_kills` watches."""
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.last_message_at = self.started_at
        """Monotonic time of the worker's latest message."""
        self.served = False
        """Whether the worker has completed a step."""
        self.start_error = ""
        self.may_retry = True
        """Whether starting another worker may help if this one fails."""
        self.is_blameless = False
        """Whether no request can have caused the worker's exit."""
        self.is_killed = False
        """Whether the server has sent SIGKILL to the worker. The process may not have ended yet."""
        self.is_broken = False
        """Whether the server killed the worker because it hung or sent an invalid message."""
        self.is_unproven = False
        """Whether startup failed because its results differ from a verified startup's results."""
        self._logged = (("", 0), 0.0)
        self._detector = detector
        self._checked_at = self.started_at
        self._has_work = False
        """Whether the worker had work at the last check, or has received a request since then."""
        self._submitted_at = self.started_at
        """Monotonic time at which the worker last received work after being idle."""
        self._step_at = self.started_at
        """Monotonic time of the latest message about a step."""
        self._is_step_known = False
        """Whether a `StepDone` announced the step that the next `StateReport` will count."""
        self._num_steps = 0

    def on_message(self, message: ToServer) -> None:
        """Record that the worker is alive and, for some messages, that it is making progress."""
        now = time.monotonic()
        match message:
            case StepDone():
                self.served = True
                self._is_step_known = True
                self._on_step(now)
            case StateReport(state=state) if state.num_steps != self._num_steps:
                self._num_steps = state.num_steps
                # A step that computes only a part of a prompt has no message of its own.
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
        """Record that the worker received a request.

        If the worker was idle, the duration of its next step is measured from this moment.
        """
        if not self._has_work:
            self._has_work = True
            self._submitted_at = time.monotonic()

    def check_health(self, has_work: bool) -> str:
        """Return why the worker counts as hung, or "" if it does not. Call this regularly."""
        now = time.monotonic()
        elapsed = now - self._checked_at
        self._checked_at = now
        self._has_work = has_work
        self._watch_oom_kills()
        is_loading = self.ready_at is None
        self._detector.tick(elapsed, is_loading=is_loading, has_work=has_work)
        stats = read_proc_stats(self.process.pid) if self._detector.is_suspect else None
        if stats is not None:
            self._detector.observe(stats, elapsed)
        return self._detector.reason(is_loading=is_loading)

    def _watch_oom_kills(self) -> None:
        if self.process.pid != self._watched_pid:
            self._watched_pid = self.process.pid
            self.oom_kills = OomKills(self._watched_pid)
        self.oom_kills.look()

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended, or has been killed and must end soon."""
        return self.is_killed or self.exited.done()

    @property
    def is_stopped(self) -> bool:
        """Return whether the worker counts as hung because a signal has stopped it."""
        return self._detector.is_stopped

    def is_killed_by_others(self, status: int) -> bool:
        """Return whether neither this server nor the kernel's OOM killer sent the SIGKILL.

        If the kernel's kills cannot be counted, the answer is False.
        """
        is_counted = self.oom_kills.is_counted and self.oom_kills.recent() == 0
        return status == -signal.SIGKILL and not self.is_broken and is_counted

    def has_served(self, policy: RestartPolicy) -> bool:
        """Return whether the worker has completed a step, or has been ready for long enough.

        When such a worker exits, the count of consecutive failures restarts.
        """
        if self.ready_at is None:
            return False
        return self.served or time.monotonic() - self.ready_at > policy.stable_after_s

    def on_progress(self, loading: Loading) -> None:
        """Log a rank's startup progress: each stage's start and end, and every second between."""
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
