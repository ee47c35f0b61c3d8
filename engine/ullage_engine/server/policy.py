"""When a dead worker is started again, when one counts as stuck, and how healthy an engine is."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Limits of the supervisor; all times are seconds."""

    first_backoff_s: float = 0.5
    """Before the second restart in a row; the first is immediate, the later ones double it."""
    max_backoff_s: float = 10.0
    max_failures: int = 8
    """Workers that may die in a row without having served; then the engine gives up."""
    stable_after_s: float = 30.0
    """An idle worker that lived this long has served."""
    max_stalled_resumes: int = 3
    """Restarts a request may live through without a single new token; it is the likely cause."""
    wedged_after_s: float = 60.0
    """A serving worker with work to do is killed after this long without a message."""
    load_silence_s: float = 600.0
    """The same for a worker that is loading."""
    stop_grace_s: float = 3.0
    """Between asking a worker to stop and killing it."""

    def backoff(self, num_failures: int) -> float | None:
        """Seconds to wait before the next start after this many failures in a row (at least 1).

        None: the budget is spent.
        """
        if num_failures > self.max_failures:
            return None
        if num_failures == 1:
            return 0.0
        return min(self.max_backoff_s, self.first_backoff_s * 2.0 ** (num_failures - 2))


class HealthScore:
    """1 is healthy; each fault multiplies it, and the loss decays with a time constant."""

    def __init__(self, recovery_s: float = 60.0) -> None:
        self._recovery_s = recovery_s
        self._loss = 0.0
        self._since = 0.0

    def value(self, now: float) -> float:
        """1 - loss * e^(-t / recovery), t seconds after the last fault."""
        return 1.0 - self._loss * math.exp(-(now - self._since) / self._recovery_s)

    def fault(self, now: float, factor: float = 0.5) -> None:
        self._loss = 1.0 - self.value(now) * factor
        self._since = now
