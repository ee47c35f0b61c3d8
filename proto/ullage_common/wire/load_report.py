"""Reports of pools, as routers serve them on `/measures` and the operator reads them."""

import msgspec


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one pool, as one router sees it."""

    ready: int
    """Engines that take requests, as they report it."""
    capacity_bytes: int
    """KV memory of the ready engines in bytes, as they report it."""
    headroom_bytes: int
    """KV memory that the engines report as available, in bytes."""
    engine_requests: int
    """Requests running or waiting on the engines, as they report it."""
    credit_bytes: int
    """Bytes of the headroom that this router has reserved since."""
    queued: int
    """Requests that wait for memory in the router."""
    queue_bytes: int
    """Predicted bytes of the waiting requests."""
    queue_s: float
    """Longest wait so far, in seconds."""
    answered: int
    """First tokens in the last minute."""
    late: int
    """First tokens in the last minute that came later than the objective."""
    held: int
    """Requests held until the pool wakes."""
    wanted: int
    """Requests that want the pool awake, held or not."""
    idle_s: float
    """Seconds since the newest request."""
