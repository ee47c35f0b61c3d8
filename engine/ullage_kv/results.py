"""What became of each block of a call: a value for every key, never an exception for a miss."""

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """The outcome for one block."""

    STORED = "stored"
    EXISTS = "exists"
    """It was stored before; nothing was written."""
    HIT = "hit"
    MISS = "miss"
    """It is stored nowhere that was asked."""
    FULL = "full"
    """Everything that could make room is in use."""
    BUSY = "busy"
    """Somebody else is writing it, or the tier's queue is full: nothing was done."""
    CORRUPT = "corrupt"
    """What was read is not what was written; it is dropped."""
    STALE = "stale"
    """The reservation or pin has ended before."""
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """The tier failed too often and is left alone for a while."""
    ERROR = "error"


_USABLE = {Status.STORED, Status.EXISTS, Status.HIT}


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome for one block, and which tier it is about."""

    status: Status
    tier: str = ""
    """Tier that has or had the block; empty: none."""
    num_bytes: int = 0
    """Bytes that were copied."""
    error: str = ""
    """One line for people, of an error."""

    @property
    def is_usable(self) -> bool:
        """Whether the block is where the caller wanted it."""
        return self.status in _USABLE


MISS = Result(Status.MISS)
