"""Limits for worker restarts, request retries and hang detection."""

from dataclasses import dataclass

from ullage_common.config.engine import Device

_CPU_MIN_BUSY_S = 2.0
"""`min_busy_s` for engines on a CPU, where no kernel is compiled during a step."""


@dataclass(frozen=True)
class RestartPolicy:
    """Limits that the supervisor applies. All times are in seconds."""

    first_backoff_s: float = 0.5
    """Delay before the second consecutive restart, in seconds.

    The first restart is immediate, and each later restart doubles the delay.
    """
    max_backoff_s: float = 10.0
    max_failures: int = 8
    """Number of consecutive workers that may die without serving before the engine gives up."""
    stable_after_s: float = 30.0
    """Uptime in seconds after which an idle worker counts as having served."""
    max_unproven: int = 3
    """Number of consecutive unverified startups after which the engine stops serving requests.

    A startup is unverified if its results differ from those of a verified startup.
    """
    max_deaths: int = 3
    """Number of worker deaths since a request's last decode after which the request may fail.

    It then fails if it was the sole suspect in at least `max_deaths` - 1 of these deaths, or if the
    last worker died because other processes had taken its memory.
    """
    trial_s: float = 5.0
    """Seconds after a worker becomes ready during which suspects are retried alone.

    A suspect is a request that may have killed the previous worker. A request suspected of two
    deaths is always retried alone.
    """
    step_deadline_s: float = 30.0
    """Seconds without a finished step after which a worker that has work always counts as hung."""
    load_silence_s: float = 600.0
    """Seconds without progress after which a worker that is still loading counts as hung."""
    standby_import_s: float = 120.0
    """Time limit in seconds for a standby worker to import its libraries."""
    slow_steps: float = 20.0
    """A worker counts as hung if it is idle for this multiple of its slowest recent step."""
    min_suspect_s: float = 2.0
    """Minimum time without CPU use, in seconds, before a worker counts as hung."""
    long_steps: float = 3.0
    """A worker counts as hung if a step's CPU time exceeds this multiple of the longest known step.

    Only the CPU time of the worker's busiest thread counts, so that other processes on the same
    cores have no effect.
    """
    min_busy_s: float = 8.0
    """Minimum CPU time in one step, in seconds, before a worker counts as hung.

    On a GPU, a step with a new shape may first compile its kernels on the CPU.
    """
    slow_start_steps: int = 16
    """Number of steps until a worker runs at full speed. Earlier steps may take twice as long."""
    stopped_after_s: float = 0.6
    """Seconds after which a worker stopped by a signal counts as hung, even if it has no work."""
    stop_grace_s: float = 3.0
    """Seconds between asking a worker to exit and killing it."""
    kill_grace_s: float = 30.0
    """Seconds that the process of a killed worker may take to end.

    The kernel needs time to free a large host tier. A process in a driver that hangs never ends.
    """

    @classmethod
    def for_engine(cls, device: Device, step_deadline_s: float) -> "RestartPolicy":
        """Return the limits for an engine on the given device.

        Args:
            device: the configured device. With "auto", it may be a GPU.
            step_deadline_s: see the field of this name.
        """
        if device == "cpu":
            return cls(step_deadline_s=step_deadline_s, min_busy_s=_CPU_MIN_BUSY_S)
        return cls(step_deadline_s=step_deadline_s)

    def backoff(self, num_failures: int) -> float | None:
        """Return the delay in seconds before the next restart, or None if the engine gives up.

        Args:
            num_failures: number of consecutive failures, at least 1.
        """
        if num_failures > self.max_failures:
            return None
        if num_failures == 1:
            return 0.0
        return min(self.max_backoff_s, self.first_backoff_s * 2.0 ** (num_failures - 2))

    def runs_alone(self, deaths: int, serving_s: float) -> bool:
        """Return whether to retry a request without any others, because it may have killed workers.

        It then runs alone until a worker survives one of its decode steps.

        Args:
            deaths: number of workers that the request may have killed since its last decode.
            serving_s: seconds for which the current worker has been ready.
        """
        return deaths > 1 or (deaths == 1 and serving_s < self.trial_s)

    def is_given_up(self, deaths: int, lone_deaths: int, *, is_short: bool = False) -> bool:
        """Return whether to fail a request instead of retrying it.

        Args:
            deaths: number of workers that the request may have killed since its last decode.
            lone_deaths: number of those deaths for which no other request was suspected.
            is_short: whether the last worker died because other processes had taken its memory. The
                client may then retry the request.
        """
        return deaths >= self.max_deaths and (is_short or lone_deaths >= self.max_deaths - 1)

    def is_last_chance(self, num_failures: int) -> bool:
        """Return whether one more consecutive failure makes the engine give up.

        The engine then reports that it is not live, because a new pod may fix the problem.
        """
        return num_failures >= self.max_failures

    def busy_after_s(self, longest_step_s: float, num_steps: int) -> float:
        """Return how much CPU time a step may use, in seconds, before its worker counts as hung.

        Args:
            longest_step_s: the worker's longest step, or 0 if unknown, in which case only the
                deadline applies.
            num_steps: number of steps that the worker has completed.
        """
        if longest_step_s <= 0.0:
            return self.step_deadline_s

        threshold_s = max(self.min_busy_s, self.long_steps * longest_step_s)
        return min(threshold_s * self._slow_start(num_steps), self.step_deadline_s)

    def suspect_after_s(
        self, slowest_step_s: float | None, longest_step_s: float, num_steps: int
    ) -> float:
        """Return how long a worker that has work may use no CPU before it counts as hung.

        The value, in seconds, is clamp(slow_steps * slowest recent step, min_suspect_s,
        busy_after_s), or busy_after_s before the first step.
        """
        busy_after_s = self.busy_after_s(longest_step_s, num_steps)
        if slowest_step_s is None:
            return busy_after_s
        threshold_s = max(self.min_suspect_s, self.slow_steps * slowest_step_s)
        return min(threshold_s * self._slow_start(num_steps), busy_after_s)

    def _slow_start(self, num_steps: int) -> float:
        return 2.0 if num_steps < self.slow_start_steps else 1.0
