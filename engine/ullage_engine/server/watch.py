"""Whether a worker hangs: pure, so that every case can be tested without waiting for it."""

from collections import deque

from ullage_engine.server.policy import RestartPolicy
from ullage_engine.server.vitals import Vitals

# Steps are alike for a while: the slowest of so many bounds the next one's order of magnitude.
_RECENT_STEPS = 128
# Time between two looks counts no longer than this. When the watcher itself could not run - it was
# stopped, its container was frozen, its core was taken - the worker's words are still unread.
LONGEST_LOOK_S = 0.5


class Watch:
    """How long a worker has been silent, still and without progress, as far as it was looked at."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._silent_s = 0.0
        self._still_s = 0.0
        self._stopped_s = 0.0
        self._waiting_s = 0.0
        self._cpu_ticks: int | None = None

    @property
    def is_suspect(self) -> bool:
        """Silent for longer than a worker ever is, so that its vitals are worth reading."""
        return self._silent_s > LONGEST_LOOK_S

    def heard(self) -> None:
        """It sent a message."""
        self._silent_s = self._still_s = self._stopped_s = 0.0
        self._cpu_ticks = None

    def progressed(self) -> None:
        """It finished a step, or a piece of its loading. A heartbeat alone is no progress."""
        self._waiting_s = 0.0

    def stepped(self, seconds: float) -> None:
        """It finished a step that took so long."""
        self._steps.append(seconds)
        self.progressed()

    def look(self, elapsed_s: float, *, is_loading: bool, has_work: bool) -> None:
        """So much time has passed since the last look."""
        elapsed_s = min(elapsed_s, LONGEST_LOOK_S)
        self._silent_s += elapsed_s
        # Without work a worker owes nothing: the time it takes counts from when it gets some.
        self._waiting_s = self._waiting_s + elapsed_s if is_loading or has_work else 0.0

    def examine(self, vitals: Vitals, elapsed_s: float) -> None:
        """What the kernel says of it at this look."""
        elapsed_s = min(elapsed_s, LONGEST_LOOK_S)
        is_still = vitals.is_waiting and vitals.cpu_ticks == self._cpu_ticks
        self._cpu_ticks = vitals.cpu_ticks
        self._still_s = self._still_s + elapsed_s if is_still else 0.0
        self._stopped_s = self._stopped_s + elapsed_s if vitals.is_stopped else 0.0

    def verdict(self, *, is_loading: bool) -> str:
        """Why the worker is to be killed; empty while it is not."""
        policy = self._policy
        if self._stopped_s > policy.stopped_after_s:
            return "stopped by a signal"
        if is_loading:
            return "silent while loading" if self._waiting_s > policy.load_silence_s else ""
        if self._waiting_s > policy.step_deadline_s:
            return "no step within the deadline"
        suspect_s = policy.suspect_after_s(max(self._steps, default=None))
        if min(self._waiting_s, self._still_s) > suspect_s:
            return "asleep in a step"
        return ""
