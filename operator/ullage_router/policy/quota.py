"""What a tenant may use, as a pure state machine: every step returns the next state.

A limit of N a minute is a token bucket (https://en.wikipedia.org/wiki/Token_bucket) that holds N
and refills at N / 60 a second: in any t seconds at most N * (1 + t / 60) are let through. Tokens
are charged before they are known, so their bucket may owe: what was used beyond the charge is taken
off at the end, and nothing is let in until the debt is refilled.
"""

import math
from typing import Literal

import msgspec
from msgspec.structs import replace

MINUTE_S = 60.0
# Refilling adds rounding errors of this order; a bucket short by no more is full enough.
ROUNDING = 1e-6

Limit = Literal["requests_per_minute", "tokens_per_minute", "concurrency"]


class Bucket(msgspec.Struct, frozen=True):
    """A refilling allowance.

    capacity  amount a minute, and the most that is saved up
    level     what is left at time `at`; below 0: owed
    at        seconds on the monotonic clock
    """

    capacity: float
    level: float
    at: float

    @staticmethod
    def full(capacity: float, now: float) -> "Bucket":
        return Bucket(capacity, capacity, now)

    def refilled(self, now: float) -> "Bucket":
        gained = max(0.0, now - self.at) * self.capacity / MINUTE_S
        return replace(self, level=min(self.capacity, self.level + gained), at=max(now, self.at))

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount`, or all that the bucket can hold, is there; 0: now."""
        missing = min(amount, self.capacity) - self.refilled(now).level
        return missing / self.capacity * MINUTE_S if missing > ROUNDING else 0.0

    def holds(self, amount: float, now: float) -> int:
        """Return how many such amounts may be taken at once, as if one after another."""
        whole = math.floor((self.refilled(now).level + ROUNDING) / amount)
        return max(whole, 0 if self.wait_s(amount, now) else 1)

    def take(self, amount: float, now: float) -> "Bucket":
        """Less of it, whether it is there or not; a negative amount gives back."""
        refilled = self.refilled(now)
        return replace(refilled, level=min(self.capacity, refilled.level - amount))


class Shortage(msgspec.Struct, frozen=True):
    """The limit that keeps a request out."""

    limit: Limit
    allowed: float
    wait_s: float | None
    """Seconds until the bucket has enough; None where only the end of another request can tell."""


class Quota(msgspec.Struct, frozen=True):
    """A tenant's allowances and what is left of them; None: unlimited."""

    requests: Bucket | None = None
    tokens: Bucket | None = None
    concurrency: int | None = None
    active: int = 0

    def room(self, count: int, tokens: float, now: float) -> int:
        """Return how many of that many equal requests, of that many tokens each, could enter and
        be charged."""
        if self.concurrency is not None:
            count = min(count, self.concurrency - self.active)
        for bucket, amount in ((self.requests, 1.0), (self.tokens, tokens)):
            if bucket is not None:
                count = min(count, bucket.holds(amount, now))
        return max(0, count)

    def enter(self, now: float, count: int = 1) -> "Quota | Shortage":
        """Enters one more request, or as many as there is `room` for; each must `leave`."""
        entered = self.enter_paid(count)
        if self.requests is None or isinstance(entered, Shortage):
            return entered
        if wait_s := self.requests.wait_s(count, now):
            return Shortage("requests_per_minute", self.requests.capacity, wait_s)
        return replace(entered, requests=self.requests.take(count, now))

    def enter_paid(self, count: int = 1) -> "Quota | Shortage":
        """Enters requests that are not counted against their rate; each must `leave`."""
        if self.concurrency is not None and self.active + count > self.concurrency:
            return Shortage("concurrency", self.concurrency, None)
        return replace(self, active=self.active + count)

    def charge(self, tokens: float, now: float) -> "Quota | Shortage":
        """Tokens in advance; more than a bucket holds need a full one and leave it owing."""
        if self.tokens is None:
            return self
        if wait_s := self.tokens.wait_s(tokens, now):
            return Shortage("tokens_per_minute", self.tokens.capacity, wait_s)
        return replace(self, tokens=self.tokens.take(tokens, now))

    def give_back(self, count: int, now: float) -> "Quota":
        """Requests that entered are refused, and are not counted against their rate."""
        return self.count(-count, now)

    def count(self, count: int, now: float) -> "Quota":
        """Count requests against their rate, whether that suffices or not."""
        return replace(self, requests=self.requests and self.requests.take(count, now))

    def leave(self, charged: float, used: float, now: float, count: int = 1) -> "Quota":
        """Requests have ended: what they used takes the place of what was charged."""
        tokens = self.tokens and self.tokens.take(used - charged, now)
        return Quota(self.requests, tokens, self.concurrency, self.active - count)
