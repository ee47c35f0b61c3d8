"""What a router tells the operator of its pools, on `/measures`: one definition for both ends."""

import msgspec


class PoolReport(msgspec.Struct, frozen=True, kw_only=True):
    """One pool as one process of a router sees it."""

    ready: int
    """Engines that take requests; told by engines."""
    capacity_bytes: int
    """KV memory of these; told by engines."""
    headroom_bytes: int
    """Of it, what they report as available; told by engines."""
    engine_requests: int
    """Requests running or waiting on them; told by engines."""
    credit_bytes: int
    """Of the headroom, what this router has promised since."""
    queued: int
    queue_bytes: int
    queue_s: float
    """Requests that wait for memory here, their bytes, and the longest wait so far."""
    answered: int
    late: int
    """First tokens in the last minute, and those of them later than the objective."""
    held: int
    """Requests held until the pool wakes."""
    wanted: int
    """Requests that want the pool awake, held or not."""
    idle_s: float
    """Since a request was last seen."""
