"""What the supervisor knows of one worker."""

import asyncio
import logging
import time

from ullage_engine.messages import Loading
from ullage_engine.server.child import ChildProcess
from ullage_engine.server.ipc import ServerLink
from ullage_engine.server.policy import RestartPolicy

log = logging.getLogger("ullage.engine.supervisor")

# Least time between two progress lines of one stage.
_PROGRESS_S = 1.0


class WorkerLife:
    """One worker process and its link, from start to end."""

    def __init__(self, process: ChildProcess, link: ServerLink) -> None:
        self.process = process
        self.link = link
        self.exited = asyncio.create_task(process.wait())
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.heard_at = self.started_at
        """Last message, or when it got work after having none."""
        self.served = False
        """It has done a step."""
        self.start_error = ""
        self._logged = ("", 0.0)

    def heard(self) -> None:
        self.heard_at = time.monotonic()

    def has_work_from_now(self, is_first: bool) -> None:
        """A worker may be silent while it has nothing to do; that time does not count."""
        if is_first:
            self.heard()

    def is_wedged(self, policy: RestartPolicy, has_work: bool) -> bool:
        """Silent for longer than any step or any stage of loading takes."""
        silence = time.monotonic() - self.heard_at
        if self.ready_at is None:
            return silence > policy.load_silence_s
        return has_work and silence > policy.wedged_after_s

    def has_served(self, policy: RestartPolicy) -> bool:
        """The worker was of use, so its end is the first failure of a row."""
        if self.ready_at is None:
            return False
        return self.served or time.monotonic() - self.ready_at > policy.stable_after_s

    def progress(self, loading: Loading) -> None:
        """Logs how far the start is: each stage's beginning and end, and once a second."""
        stage, logged_at = self._logged
        now = time.monotonic()
        is_done = loading.done_bytes >= loading.total_bytes
        if loading.stage == stage and now - logged_at < _PROGRESS_S and not is_done:
            return
        self._logged = (loading.stage, now)
        log.info(
            "loading",
            extra={
                "stage": loading.stage,
                "done_bytes": loading.done_bytes,
                "total_bytes": loading.total_bytes,
            },
        )
