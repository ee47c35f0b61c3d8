"""The limits by which the supervisor restarts workers, retries requests and recognises hangs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Limits of the supervisor. All times are in seconds."""

    first_backoff_s: float = 0.5
    """Seconds before the second restart in a row; the first is immediate, the later ones double
    it."""
    max_backoff_s: float = 10.0
    max_failures: int = 8
    """Workers in a row that may die without having served before the engine gives up."""
    stable_after_s: float = 30.0
    """Age in seconds at which an idle worker counts as having served."""
    max_unproven: int = 3
    """Starts in a row that fail their proof after which the engine stays out."""
    max_deaths: int = 3
    """Workers that may have died of a request since its last decode before it is given up. In all
    but one of these deaths nothing else can have been the cause."""
    trial_s: float = 5.0
    """Seconds from a worker's start for which requests that the last one may have died of are tried
    alone, one after the other. A request that two may have died of is tried as long as it takes."""
    step_deadline_s: float = 30.0
    """Seconds after which a worker that has work and finishes no step hangs, whatever it does."""
    load_silence_s: float = 600.0
    """Seconds after which a worker that is loading and reports no progress hangs."""
    standby_import_s: float = 120.0
    """Seconds in which a worker that stands by has to import its libraries."""
    slow_steps: float = 20.0
    """Multiple of its slowest step after which a worker that uses no processor time hangs."""
    min_suspect_s: float = 2.0
    """Least seconds without processor time after which a worker hangs, however short its steps."""
    long_steps: float = 3.0
    """Multiple of its longest step after which a worker hangs, by the processor time that its
    busiest thread has had: neighbours on the same cores do not count."""
    min_busy_s: float = 8.0
    """Least seconds of that processor time, however short its steps."""
    slow_start_steps: int = 16
    """Steps after which a worker is as fast as it gets; before, it has twice the time."""
    stopped_after_s: float = 1.0
    """Seconds after which a worker that a signal has stopped hangs, working or not."""
    stop_grace_s: float = 3.0
    """Seconds between asking a worker to stop and killing it."""

    def backoff(self, num_failures: int) -> float | None:
        """Return the seconds before the next start after so many failures in a row (at least 1).

        None: the budget is spent.
        """
        if num_failures > self.max_failures:
            return None
        if num_failures == 1:
            return 0.0
        return min(self.max_backoff_s, self.first_backoff_s * 2.0 ** (num_failures - 2))

    def runs_alone(self, deaths: int, serving_s: float) -> bool:
        """Return whether a request runs alone until a worker has survived a decode of it.

        Args:
            deaths: workers that may have died of it since its last decode.
            serving_s: seconds for which the present worker has been ready.
        """
        return deaths > 1 or (deaths == 1 and serving_s < self.trial_s)

    def is_given_up(self, deaths: int, lone_deaths: int, *, is_short: bool = False) -> bool:
        """Return whether a request ends.

        Args:
            deaths: workers that may have died of it since its last decode.
            lone_deaths: those of them that nothing else can have died of.
            is_short: whether the last one died since others had taken its memory; the request is
                not to blame then, and may be sent again.
        """
        return deaths >= self.max_deaths and (is_short or lone_deaths >= self.max_deaths - 1)

    def is_last_chance(self, num_failures: int) -> bool:
        """Whether one more failure in a row ends the engine: a new pod is likelier to help."""
        return num_failures >= self.max_failures

    def busy_after_s(self, longest_step_s: float, num_steps: int) -> float:
        """Return the seconds of computing without an end of its step after which a worker hangs.

        Args:
            longest_step_s: its longest step; 0: unknown, so that only the deadline holds.
            num_steps: steps that it has done.
        """
        if longest_step_s <= 0.0:
            return self.step_deadline_s

        threshold_s = max(self.min_busy_s, self.long_steps * longest_step_s)
        return min(threshold_s * self._slow_start(num_steps), self.step_deadline_s)

    def suspect_after_s(
        self, slowest_step_s: float | None, longest_step_s: float, num_steps: int
    ) -> float:
        """Return the seconds without processor time after which a worker with work hangs.

        clamp(slow_steps * slowest recent step, min_suspect_s, busy_after_s); with no step known
        yet the latter.
        """
        busy_after_s = self.busy_after_s(longest_step_s, num_steps)
        if slowest_step_s is None:
            return busy_after_s
        threshold_s = max(self.min_suspect_s, self.slow_steps * slowest_step_s)
        return min(threshold_s * self._slow_start(num_steps), busy_after_s)

    def _slow_start(self, num_steps: int) -> float:
        return 2.0 if num_steps < self.slow_start_steps else 1.0
