"""What the supervisor knows of one worker."""

import asyncio
import logging
import time

from ullage_engine.messages import Loading, Ready, State, StepDone, ToServer
from ullage_engine.server.child import ChildProcess
from ullage_engine.server.ipc import ServerLink
from ullage_engine.server.policy import RestartPolicy
from ullage_engine.server.vitals import read_vitals
from ullage_engine.server.watch import Watch

log = logging.getLogger("ullage.engine.supervisor")

# Least time between two progress lines of one stage.
_PROGRESS_S = 1.0


class WorkerLife:
    """One worker process and its link, from start to end."""

    def __init__(self, process: ChildProcess, link: ServerLink, watch: Watch) -> None:
        self.process = process
        self.link = link
        self.exited = asyncio.create_task(process.wait())
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        self.heard_at = self.started_at
        """Last message."""
        self.served = False
        """It has done a step."""
        self.start_error = ""
        self.may_retry = True
        """Another start may do better."""
        self._logged = (("", 0), 0.0)
        self._watch = watch
        self._looked_at = self.started_at
        self._asked_at = self.started_at
        self._num_steps = 0

    def heard(self, message: ToServer) -> None:
        """Notes that it lives and, of some messages, that it gets on."""
        now = time.monotonic()
        match message:
            case StepDone():
                self.served = True
                self._watch.stepped(now - max(self.heard_at, self._asked_at))
            case State(state=state) if state.num_steps != self._num_steps:
                self._num_steps = state.num_steps
                self._watch.progressed()
            case Loading() | Ready():
                self._watch.progressed()
        self.heard_at = now
        self._watch.heard()

    def asked(self) -> None:
        """It was sent a request; what it did before took none of the next step's time."""
        self._asked_at = time.monotonic()

    def look(self, has_work: bool) -> str:
        """Why the worker is to be killed as hung; empty while it is not. Call it regularly."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        is_loading = self.ready_at is None
        self._watch.look(elapsed, is_loading=is_loading, has_work=has_work)
        vitals = read_vitals(self.process.pid) if self._watch.is_suspect else None
        if vitals is not None:
            self._watch.examine(vitals, elapsed)
        return self._watch.verdict(is_loading=is_loading)

    def has_served(self, policy: RestartPolicy) -> bool:
        """The worker was of use, so its end is the first failure of a row."""
        if self.ready_at is None:
            return False
        return self.served or time.monotonic() - self.ready_at > policy.stable_after_s

    def progress(self, loading: Loading) -> None:
        """Logs how far the start is: a rank's stages, their ends, and once a second."""
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
