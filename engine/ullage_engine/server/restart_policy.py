"""The limits by which the supervisor restarts workers, retries requests and recognises hangs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Limits of the supervisor. All times are in seconds."""

    first_backoff_s: float = 0.5
    """Seconds before the second restart in a row. The first restart is immediate, and each later
    one doubles the pause."""
    max_backoff_s: float = 10.0
    max_failures: int = 8
    """Workers in a row that may die without having served before the engine gives up."""
    stable_after_s: float = 30.0
    """Age in seconds at which an idle worker counts as having served."""
    max_unproven: int = 3
    """Starts in a row that fail their proof after which the engine stays out."""
    max_deaths: int = 3
    """Deaths of workers since a request's last decode after which the request is given up. In all
    but one of them no other request can have been the cause."""
    trial_s: float = 5.0
    """Seconds from a worker's start in which suspects, of which the last worker may have died, are
    tried alone. A suspect of two deaths is tried alone as long as it takes."""
    step_deadline_s: float = 30.0
    """Seconds without a finished step after which a worker with work hangs in any case."""
    load_silence_s: float = 600.0
    """Seconds without progress after which a worker that is loading hangs."""
    standby_import_s: float = 120.0
    """Seconds in which a standby worker must have imported its libraries."""
    slow_steps: float = 20.0
    """Multiple of its slowest step after which a worker that uses no processor time hangs."""
    min_suspect_s: float = 2.0
    """Least seconds without processor time after which a worker hangs, however short its steps."""
    long_steps: float = 3.0
    """Multiple of its longest step after which a worker hangs, in processor time of its busiest
    thread, so that neighbours on the same cores do not count."""
    min_busy_s: float = 8.0
    """Least seconds of that processor time, however short its steps."""
    slow_start_steps: int = 16
    """Steps after which a worker has its full speed. Before, it has twice the time."""
    stopped_after_s: float = 1.0
    """Seconds after which a worker that a signal has stopped hangs, with or without work."""
    stop_grace_s: float = 3.0
    """Seconds between asking a worker to stop and killing it."""

    def backoff(self, num_failures: int) -> float | None:
        """Return the seconds before the next start after so many failures in a row (at least 1).

        None: the engine gives up.
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
        """Return whether the engine gives a request up instead of running it again.

        Args:
            deaths: number of workers that the request may have killed since its last decode.
            lone_deaths: number of those workers that ran no other request.
            is_short: whether the last worker died because other processes had taken its memory. The
                client may then send the request again.
        """
        return deaths >= self.max_deaths and (is_short or lone_deaths >= self.max_deaths - 1)

    def is_last_chance(self, num_failures: int) -> bool:
        """Return whether one more failure in a row ends the engine: a new pod may help more."""
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
