"""Load reports of pools, which routers serve on `/measures` and the operator reads."""

import msgspec


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one pool, as one router sees it."""

    ready: int
    """Number of engines that report that they are ready."""
    capacity_bytes: int
    """KV memory that the ready engines report, in bytes."""
    headroom_bytes: int
    """KV memory that the engines report as available, in bytes."""
    engine_requests: int
    """Number of requests that engines report as running or waiting."""
    credit_bytes: int
    """Bytes of headroom that this router has reserved since the engines' last reports."""
    queued: int
    """Number of requests that wait for memory in the router."""
    queue_bytes: int
    """Predicted bytes of the waiting requests."""
    queue_s: float
    """Longest wait so far, in seconds."""
    answered: int
    """Number of first tokens in the last minute."""
    late: int
    """Number of first tokens in the last minute that missed the objective."""
    held: int
    """Number of requests held until the pool wakes."""
    wanted: int
    """Number of requests that need the pool, whether held or not."""
    idle_s: float
    """Seconds since the newest request."""
