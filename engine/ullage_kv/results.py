"""The outcome of a call for each of its blocks. A miss is a value and never an exception."""

import enum
from dataclasses import dataclass

HOST = "host"
"""Name of the tier in host memory."""


class Status(enum.StrEnum):
    """The outcome for one block."""

    STORED = "stored"
    EXISTS = "exists"
    """The block was stored before. Nothing was written."""
    HIT = "hit"
    MISS = "miss"
    """No tier that was asked has the block."""
    FULL = "full"
    """Every block that could be evicted is in use."""
    BUSY = "busy"
    """Another writer has the block, or the tier's queue is full. Nothing was done."""
    CORRUPT = "corrupt"
    """The checksum of the bytes read is wrong. The block is dropped."""
    STALE = "stale"
    """The reservation or pin has ended before."""
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """The tier failed too often, and its circuit breaker is open."""
    ERROR = "error"


_USABLE = {Status.STORED, Status.EXISTS, Status.HIT}
_REFUSALS = {Status.FULL, Status.BUSY, Status.TIMEOUT, Status.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome for one block, and which tier it is about."""

    status: Status
    tier: str = ""
    """Name of the tier that has or had the block, empty for no tier."""
    num_bytes: int = 0
    """Bytes that were copied."""
    error: str = ""
    """One line for people about the failure, empty if there was none."""

    @property
    def is_usable(self) -> bool:
        """Whether the block is where the caller wanted it."""
        return self.status in _USABLE

    @property
    def is_refusal(self) -> bool:
        """Whether the tier takes nothing now, so that it would refuse other blocks, too."""
        return self.status in _REFUSALS


MISS = Result(Status.MISS)
