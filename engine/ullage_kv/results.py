"""Per-block results of store and tier calls. A miss is a result rather than an exception."""

import enum
from dataclasses import dataclass

HOST = "host"
"""Name of the tier in host memory."""


class Status(enum.StrEnum):
    """The outcome of a call for one block."""

    STORED = "stored"
    EXISTS = "exists"
    """The block was already stored. Nothing was written."""
    HIT = "hit"
    MISS = "miss"
    """None of the queried tiers has the block."""
    FULL = "full"
    """No slot is free, and no block can currently be evicted."""
    BUSY = "busy"
    """Nothing was done, because another client is writing the block or the tier's queue is full."""
    CORRUPT = "corrupt"
    """The block's data does not match its checksum. The block was dropped."""
    STALE = "stale"
    """The reservation or pin has already been released."""
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """The tier is closed or unreachable, or failed so often that its circuit breaker is open."""
    ERROR = "error"


_USABLE = {Status.STORED, Status.EXISTS, Status.HIT}
FAILURES = tuple(status for status in Status if status not in {*_USABLE, Status.MISS})
"""The statuses that tiers count as failures."""
_REFUSALS = {Status.FULL, Status.BUSY, Status.TIMEOUT, Status.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class Result:
    """The status of one block after a call, and the tier that the status refers to."""

    status: Status
    tier: str = ""
    """Name of the tier that stores or stored the block, or "" if there is none."""
    num_bytes: int = 0
    """Number of bytes copied."""
    error: str = ""
    """One-line description of the failure, or "" if there was none."""

    @property
    def is_usable(self) -> bool:
        """Whether the block is now available where the caller requested it."""
        return self.status in _USABLE

    @property
    def is_refusal(self) -> bool:
        """Whether the tier currently refuses requests, so that other blocks would fail as well."""
        return self.status in _REFUSALS


MISS = Result(Status.MISS)
