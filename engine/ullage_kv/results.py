"""The outcome of a call for each of its blocks. A miss is a result, not an exception."""

import enum
from dataclasses import dataclass

HOST = "host"
"""Name of the tier in host memory."""


class Status(enum.StrEnum):
    """The outcome for one block."""

    STORED = "stored"
    EXISTS = "exists"
    """The block was already stored. Nothing was written."""
    HIT = "hit"
    MISS = "miss"
    """None of the queried tiers has the block."""
    FULL = "full"
    """No slot is free, because no block can be evicted at present."""
    BUSY = "busy"
    """Another writer has the block, or the tier's queue is full. Nothing was done."""
    CORRUPT = "corrupt"
    """The checksum of the bytes read is wrong. The block was dropped."""
    STALE = "stale"
    """The reservation or pin has already ended."""
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """The tier failed too often, and its circuit breaker is open."""
    ERROR = "error"


_USABLE = {Status.STORED, Status.EXISTS, Status.HIT}
_REFUSALS = {Status.FULL, Status.BUSY, Status.TIMEOUT, Status.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome for one block, with the tier that it refers to."""

    status: Status
    tier: str = ""
    """Name of the tier that has or had the block, or "" for no tier."""
    num_bytes: int = 0
    """Number of bytes that were copied."""
    error: str = ""
    """Human-readable line about the failure, or "" if there was none."""

    @property
    def is_usable(self) -> bool:
        """Whether the block is now available where the caller requested it."""
        return self.status in _USABLE

    @property
    def is_refusal(self) -> bool:
        """Whether the tier accepts nothing at present and would refuse other blocks, too."""
        return self.status in _REFUSALS


MISS = Result(Status.MISS)
