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
    """Restarts a request may live through without a single new token; it is the likely cause.

    In the last two of them it runs alone, so that others are not blamed for its faults."""
    step_deadline_s: float = 30.0
    """A worker that has work and finishes no step for this long hangs, whatever it does."""
    load_silence_s: float = 600.0
    """The same for a worker that is loading."""
    slow_steps: float = 20.0
    """A worker that uses no processor time hangs when that took this many of its slowest steps."""
    least_suspect_s: float = 2.0
    """The same in seconds, when steps are short."""
    stopped_after_s: float = 1.0
    """A worker that a signal has stopped hangs after this long, working or not."""
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

    def is_suspect(self, stalled_resumes: int) -> bool:
        """Whether a request may be why workers die, after so many deaths since its last token."""
        return stalled_resumes >= max(1, self.max_stalled_resumes - 1)

    def is_last_chance(self, num_failures: int) -> bool:
        """Whether one more failure in a row ends the engine: a new pod is likelier to help."""
        return num_failures >= self.max_failures

    def suspect_after_s(self, slowest_step_s: float | None) -> float:
        """Seconds without processor time after which a worker with work hangs.

        clamp(slow_steps * slowest recent step, least_suspect_s, step_deadline_s); with no step
        known yet the deadline.
        """
        if slowest_step_s is None:
            return self.step_deadline_s
        wanted = max(self.least_suspect_s, self.slow_steps * slowest_step_s)
        return min(wanted, self.step_deadline_s)


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
