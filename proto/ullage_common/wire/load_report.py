"""Per-pool load reports, which routers serve on `/measures` for the operator to read."""

import msgspec


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one pool as seen by one router."""

    ready: int
    """Number of engines that report being ready."""
    capacity_bytes: int
    """KV memory that the ready engines report, in bytes."""
    headroom_bytes: int
    """KV memory that the engines report as available, in bytes."""
    engine_requests: int
    """Number of requests that engines report as running or waiting."""
    credit_bytes: int
    """Bytes of headroom that this router has reserved since the engines' latest reports."""
    queued: int
    """Number of requests that are waiting for memory in the router."""
    queue_bytes: int
    """Predicted KV bytes of the requests that are waiting for memory in the router."""
    queue_s: float
    """How long the oldest request in the queue has waited so far, in seconds."""
    answered: int
    """Number of requests that got their first token in the last minute."""
    late: int
    """Number of first tokens in the last minute that missed the latency objective."""
    held: int
    """Number of requests that the router is holding until the pool has scaled up from zero."""
    wanted: int
    """Number of requests that need the pool, whether they are held or not."""
    idle_s: float
    """Seconds since the pool's latest request."""
