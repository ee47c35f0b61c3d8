"""Limits on connections, and on the memory for request bodies."""

from dataclasses import dataclass, field

from ullage_router.http.long_bodies import (
    MAX_HANDLED_BYTES,
    MAX_LONG_BYTES,
    LongBodies,
)


@dataclass(frozen=True, slots=True)
class HTTPLimits:
    """Limits on each connection and on all connections of a server, in bytes and seconds."""

    max_head_bytes: int = 64 << 10
    """Maximum size of the request line and the headers together, in bytes."""
    max_headers: int = 100
    max_body_bytes: int = 8 << 20
    max_held_bytes: int = 256 << 20
    """Maximum total size in bytes of bodies that are being received or await conversion to prompts.

    The limit covers all connections.
    """
    max_long_bytes: int = MAX_LONG_BYTES
    """Maximum total bytes of long bodies that are being received or are held in memory."""
    max_handled_bytes: int = MAX_HANDLED_BYTES
    """Maximum total bytes of long bodies that are being converted to prompts."""
    max_kept_bytes: int = 256 << 20
    """Maximum total memory of the large parts of replies that are kept until they are sent.

    The limit covers all connections.
    """
    max_connections: int = 20_000
    max_age_s: float = 600.0
    """Age in seconds after which a connection closes, so that clients rebalance across routers.

    The connection closes after its next reply.
    """
    head_timeout_s: float = 10.0
    """Maximum seconds from the first byte of a request to the end of its headers."""
    body_timeout_s: float = 30.0
    """Maximum seconds from the end of the headers to the end of the body."""
    min_upload_bytes_per_s: int = 16 << 10
    """Minimum rate of an uploaded file, after the first `body_timeout_s`."""
    idle_timeout_s: float = 75.0
    """Maximum idle time between two requests, in seconds."""
    stall_timeout_s: float = 60.0
    """Maximum seconds for which a client may leave a reply unread."""
    websocket_idle_timeout_s: float = 600.0
    """Maximum seconds between two messages of a client on a WebSocket, while none is answered."""
    websocket_max_age_s: float = 3600.0
    """Age in seconds after which a WebSocket closes, once its current message is answered."""
    linger_s: float = 2.0
    """Seconds for which further bytes are read and discarded after a request is refused.

    If the connection were closed immediately, a client that is still sending could miss the reply.
    """


@dataclass(slots=True)
class BodyRoom:
    """Memory budget for request bodies, shared by all connections of a server.

    A body counts against the budget until it has been converted to a prompt. Vectors and large
    replies have budgets of their own.
    """

    limit: int
    """Maximum total size of all bodies, in bytes. One tenant gets at most half of this."""
    taken: int = 0
    """Number of bytes that are currently reserved."""
    long_bodies: LongBodies = field(default_factory=LongBodies)
    """Limits how many long bodies are received at a time."""
    handled: LongBodies = field(
        default_factory=lambda: LongBodies(MAX_HANDLED_BYTES, MAX_HANDLED_BYTES)
    )
    """Limits how many long bodies are converted to prompts at a time."""
    _of_tenants: dict[str, int] = field(default_factory=dict)
    """Number of bytes that are currently reserved for each tenant's bodies."""

    def take(self, size: int, tenant: str) -> bool:
        """Reserve `size` bytes if they fit in the budget and in the tenant's limit.

        Return whether the bytes were reserved.
        """
        of_tenant = self._of_tenants.get(tenant, 0) + size
        if self.taken + size > self.limit or (tenant and of_tenant > self.limit // 2):
            return False
        self.taken += size
        if tenant:
            self._of_tenants[tenant] = of_tenant
        return True

    def give_back(self, size: int, tenant: str) -> None:
        """Free bytes that were reserved with `take`."""
        self.taken -= size
        if tenant and size:
            self._of_tenants[tenant] -= size
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]
