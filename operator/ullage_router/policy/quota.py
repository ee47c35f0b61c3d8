"""The quota of a tenant as a pure state machine: every step returns the next state.

A limit of N a minute is a token bucket (https://en.wikipedia.org/wiki/Token_bucket) that holds N
and refills at N / 60 a second. So at most N * (1 + t / 60) pass in any t seconds.

Tokens are charged before they are known, so their bucket may go into debt: tokens used beyond the
charge are taken at the end of a request, and no request enters until the debt is refilled.
"""

import math
from typing import Literal

import msgspec
from msgspec.structs import replace

MINUTE_S = 60.0
ROUNDING = 1e-6
"""Shortage that is ignored, because refilling adds rounding errors of this order."""

Limit = Literal["requests_per_minute", "tokens_per_minute", "concurrency"]


class TokenBucket(msgspec.Struct, frozen=True):
    """A token bucket at one moment."""

    capacity: float
    """Amount that the bucket gains in a minute, and its maximum."""
    level: float
    """Amount left at the time `at` (negative while in debt)."""
    at: float
    """Time on the monotonic clock, seconds."""

    @staticmethod
    def full(capacity: float, now: float) -> "TokenBucket":
        """Return a bucket that holds its capacity."""
        return TokenBucket(capacity, capacity, now)

    def refilled(self, now: float) -> "TokenBucket":
        """Return the bucket at a later time."""
        gained = max(0.0, now - self.at) * self.capacity / MINUTE_S
        return replace(self, level=min(self.capacity, self.level + gained), at=max(now, self.at))

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket has `amount`, or its capacity if that is less."""
        missing = min(amount, self.capacity) - self.refilled(now).level
        return missing / self.capacity * MINUTE_S if missing > ROUNDING else 0.0

    def holds(self, amount: float, now: float) -> int:
        """Return how many times `amount` may be taken now, as if one after another."""
        whole = math.floor((self.refilled(now).level + ROUNDING) / amount)
        return max(whole, 0 if self.wait_s(amount, now) else 1)

    def take(self, amount: float, now: float) -> "TokenBucket":
        """Return the bucket without `amount`, possibly in debt. A negative amount is refunded."""
        refilled = self.refilled(now)
        return replace(refilled, level=min(self.capacity, refilled.level - amount))


class Shortage(msgspec.Struct, frozen=True):
    """The limit that keeps a request out."""

    limit: Limit
    allowed: float
    wait_s: float | None
    """Seconds until the bucket has enough, or None if another request must end first."""


class Quota(msgspec.Struct, frozen=True):
    """A tenant's limits and the amounts left of them. None means no limit."""

    requests: TokenBucket | None = None
    """Requests a minute."""
    tokens: TokenBucket | None = None
    """Tokens a minute."""
    concurrency: int | None = None
    """Maximum number of concurrent requests."""
    active: int = 0
    """Number of requests that have entered and not left yet."""

    def room(self, count: int, tokens: float, now: float) -> int:
        """Return how many of `count` requests, each of `tokens` tokens, could enter and pay."""
        if self.concurrency is not None:
            count = min(count, self.concurrency - self.active)
        for bucket, amount in ((self.requests, 1.0), (self.tokens, tokens)):
            if bucket is not None:
                count = min(count, bucket.holds(amount, now))
        return max(0, count)

    def enter(self, now: float, count: int = 1) -> "Quota | Shortage":
        """Admit `count` requests, or return the limit that forbids it. Each request must `leave`.

        Args:
            count: at most as many requests as there is `room` for.
        """
        entered = self.enter_paid(count)
        if self.requests is None or isinstance(entered, Shortage):
            return entered
        if wait_s := self.requests.wait_s(count, now):
            return Shortage("requests_per_minute", self.requests.capacity, wait_s)
        return replace(entered, requests=self.requests.take(count, now))

    def enter_paid(self, count: int = 1) -> "Quota | Shortage":
        """Admit requests without counting them against the rate. Each request must `leave`."""
        if self.concurrency is not None and self.active + count > self.concurrency:
            return Shortage("concurrency", self.concurrency, None)
        return replace(self, active=self.active + count)

    def charge(self, tokens: float, now: float) -> "Quota | Shortage":
        """Charge tokens in advance, or return the shortage.

        More tokens than the bucket can hold need a full bucket and leave it in debt.
        """
        if self.tokens is None:
            return self
        if wait_s := self.tokens.wait_s(tokens, now):
            return Shortage("tokens_per_minute", self.tokens.capacity, wait_s)
        return replace(self, tokens=self.tokens.take(tokens, now))

    def give_back(self, count: int, now: float) -> "Quota":
        """Refund requests that entered and were refused, so that they do not count."""
        return self.count(-count, now)

    def count(self, count: int, now: float) -> "Quota":
        """Count requests against the rate, even beyond the limit."""
        return replace(self, requests=self.requests and self.requests.take(count, now))

    def leave(self, charged: float, used: float, now: float, count: int = 1) -> "Quota":
        """Release requests that ended, and replace the charged tokens by the tokens they used."""
        tokens = self.tokens and self.tokens.take(used - charged, now)
        return Quota(self.requests, tokens, self.concurrency, self.active - count)
