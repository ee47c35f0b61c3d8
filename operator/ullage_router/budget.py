"""How many retries the router may cause: a token bucket, so that failures cannot multiply load.

Every request puts in `share` of a token and every second `per_second` tokens, up to `burst`; a
retry takes one out. When engines fail faster than that, errors are told at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    share: float
    """Of requests."""
    per_second: float
    """Retries a second that are always allowed."""
    burst: int
    """Most retries that can be saved up."""


class RetryBudget:
    """The bucket. Times are of any steady clock."""

    def __init__(self, policy: BudgetPolicy, now: float) -> None:
        self._policy = policy
        self._tokens = float(policy.burst)
        self._filled_at = now
        self.spent = 0
        """Retries made."""
        self.refused = 0
        """Retries not made because the bucket was empty."""

    @property
    def tokens(self) -> float:
        """Retries that were left when it was last used."""
        return self._tokens

    def requested(self) -> None:
        """A request arrived."""
        self._tokens = min(self._policy.burst, self._tokens + self._policy.share)

    def take(self, now: float) -> bool:
        """Whether one more retry may be made; it is then taken out."""
        self._fill(now)
        if self._tokens < 1.0:
            self.refused += 1
            return False
        self._tokens -= 1.0
        self.spent += 1
        return True

    def _fill(self, now: float) -> None:
        elapsed_s = max(0.0, now - self._filled_at)
        gained = elapsed_s * self._policy.per_second
        self._tokens = min(self._policy.burst, self._tokens + gained)
        self._filled_at = max(now, self._filled_at)
