"""A tenant's quota as a pure state machine, whose methods return the next state.

A limit of N per minute is a token bucket (https://en.wikipedia.org/wiki/Token_bucket) that holds N
and refills at N / 60 per second. So at most N * (1 + t / 60) requests or tokens pass in any t
seconds.

Tokens are charged before their number is known, so the token bucket may go into debt. Tokens used
beyond the charge are deducted when the request ends, and no request is admitted until the debt is
paid off.
"""

import math
from typing import Literal

import msgspec
from msgspec.structs import replace

MINUTE_S = 60.0
ROUNDING = 1e-6
"""Largest shortfall of a bucket that is ignored, since rounding while refilling can cause it."""

Limit = Literal["requests_per_minute", "tokens_per_minute", "concurrency"]


class TokenBucket(msgspec.Struct, frozen=True):
    """The state of a token bucket at one moment."""

    capacity: float
    """Capacity of the bucket, which is also the amount that it gains per minute."""
    level: float
    """Amount left at the time `at` (negative if the bucket is in debt)."""
    at: float
    """Time on the monotonic clock, in seconds."""

    @staticmethod
    def full(capacity: float, now: float) -> "TokenBucket":
        """Return a full bucket."""
        return TokenBucket(capacity, capacity, now)

    def refilled(self, now: float) -> "TokenBucket":
        """Return the bucket after refilling it up to time `now`."""
        gained = max(0.0, now - self.at) * self.capacity / MINUTE_S
        return replace(self, level=min(self.capacity, self.level + gained), at=max(now, self.at))

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket has `amount`.

        If the bucket cannot hold that much, return the seconds until it is full.
        """
        missing = min(amount, self.capacity) - self.refilled(now).level
        return missing / self.capacity * MINUTE_S if missing > ROUNDING else 0.0

    def holds(self, amount: float, now: float) -> int:
        """Return how many withdrawals of `amount` the bucket allows now."""
        whole = math.floor((self.refilled(now).level + ROUNDING) / amount)
        return max(whole, 0 if self.wait_s(amount, now) else 1)

    def take(self, amount: float, now: float) -> "TokenBucket":
        """Return the bucket after taking `amount`, possibly in debt.

        A negative amount is a refund.
        """
        refilled = self.refilled(now)
        return replace(refilled, level=min(self.capacity, refilled.level - amount))


class Shortage(msgspec.Struct, frozen=True):
    """The limit that a request would exceed if it were admitted."""

    limit: Limit
    allowed: float
    wait_s: float | None
    """Seconds until the bucket has enough, or None if another request must end first."""


class Quota(msgspec.Struct, frozen=True):
    """A tenant's limits, and what is left of each. None means that there is no limit."""

    requests: TokenBucket | None = None
    """Bucket that limits the requests per minute."""
    tokens: TokenBucket | None = None
    """Bucket that limits the tokens per minute."""
    concurrency: int | None = None
    """Maximum number of concurrent requests."""
    active: int = 0
    """Number of requests that were admitted and have not ended yet."""

    def room(self, count: int, tokens: float, now: float) -> int:
        """Return how many of `count` requests could be admitted if each is charged `tokens`."""
        if self.concurrency is not None:
            count = min(count, self.concurrency - self.active)
        for bucket, amount in ((self.requests, 1.0), (self.tokens, tokens)):
            if bucket is not None:
                count = min(count, bucket.holds(amount, now))
        return max(0, count)

    def enter(self, now: float, count: int = 1) -> "Quota | Shortage":
        """Return the quota after admitting `count` requests, or the limit that prevents this.

        Call `leave` for each admitted request.

        Args:
            count: number of requests, at most as many as there is `room` for.
        """
        entered = self.enter_paid(count)
        if self.requests is None or isinstance(entered, Shortage):
            return entered
        if wait_s := self.requests.wait_s(count, now):
            return Shortage("requests_per_minute", self.requests.capacity, wait_s)
        return replace(entered, requests=self.requests.take(count, now))

    def enter_paid(self, count: int = 1) -> "Quota | Shortage":
        """Admit requests like `enter`, but without counting them against the rate limit.

        This is for requests that continue an interrupted answer, for which a ticket from `Pick` may
        already have paid.
        """
        if self.concurrency is not None and self.active + count > self.concurrency:
            return Shortage("concurrency", self.concurrency, None)
        return replace(self, active=self.active + count)

    def charge(self, tokens: float, now: float) -> "Quota | Shortage":
        """Return the quota after charging tokens in advance, or the shortage if too few are left.

        A charge that exceeds the bucket's capacity needs a full bucket and leaves it in debt.
        """
        if self.tokens is None:
            return self
        if wait_s := self.tokens.wait_s(tokens, now):
            return Shortage("tokens_per_minute", self.tokens.capacity, wait_s)
        return replace(self, tokens=self.tokens.take(tokens, now))

    def give_back(self, count: int, now: float) -> "Quota":
        """Return the quota after crediting requests back to the rate limit.

        This is for requests that were admitted but then refused.
        """
        return self.count(-count, now)

    def count(self, count: int, now: float) -> "Quota":
        """Return the quota after charging requests to the rate limit, even if they exceed it."""
        return replace(self, requests=self.requests and self.requests.take(count, now))

    def leave(self, charged: float, used: float, now: float, count: int = 1) -> "Quota":
        """Return the quota after requests end, with their charge adjusted to the tokens used."""
        tokens = self.tokens and self.tokens.take(used - charged, now)
        return Quota(self.requests, tokens, self.concurrency, self.active - count)
