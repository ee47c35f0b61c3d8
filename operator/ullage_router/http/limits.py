"""Limits of connections and of the memory for bodies."""

from dataclasses import dataclass, field

from ullage_router.http.long_bodies import (
    MAX_HANDLED_BYTES,
    MAX_LONG_BYTES,
    LongBodies,
)


@dataclass(frozen=True, slots=True)
class HTTPLimits:
    """Limits of each connection and of all connections of a server, in bytes and seconds."""

    max_head_bytes: int = 64 << 10
    """Bytes of the request line and the headers."""
    max_headers: int = 100
    max_body_bytes: int = 8 << 20
    max_held_bytes: int = 256 << 20
    """Bytes of bodies that are arriving or waiting to become prompts, over all connections."""
    max_long_bytes: int = MAX_LONG_BYTES
    """Bytes of long bodies that arrive or are held at a time."""
    max_handled_bytes: int = MAX_HANDLED_BYTES
    """Bytes of long bodies that become prompts at a time."""
    max_connections: int = 20_000
    max_age_s: float = 600.0
    """Age at which a connection ends with its reply, so that clients spread over routers."""
    head_timeout_s: float = 10.0
    """Seconds from a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """Seconds from the end of the headers to the end of the body."""
    idle_timeout_s: float = 75.0
    """Seconds between two requests."""
    stall_timeout_s: float = 60.0
    """Seconds for which a client may leave a reply unread."""
    linger_s: float = 2.0
    """Seconds for which the bytes after a refused request are read and discarded. If the connection
    were closed at once, a client that is still sending could lose the reply."""


@dataclass(slots=True)
class BodyRoom:
    """Memory for bodies that have not become prompts, on all connections of a server."""

    limit: int
    """Bytes for all bodies. One tenant gets at most half of them."""
    taken: int = 0
    """Bytes in use."""
    long_bodies: LongBodies = field(default_factory=LongBodies)
    """Turns of long bodies that arrive."""
    handled: LongBodies = field(
        default_factory=lambda: LongBodies(MAX_HANDLED_BYTES, MAX_HANDLED_BYTES)
    )
    """Turns of long bodies that become prompts."""
    _of_tenants: dict[str, int] = field(default_factory=dict)
    """Bytes in use by tenant."""

    def take(self, size: int, tenant: str) -> bool:
        """Take `size` bytes. If they are not free, take nothing and return False."""
        of_tenant = self._of_tenants.get(tenant, 0) + size
        if self.taken + size > self.limit or (tenant and of_tenant > self.limit // 2):
            return False
        self.taken += size
        if tenant:
            self._of_tenants[tenant] = of_tenant
        return True

    def give_back(self, size: int, tenant: str) -> None:
        """Give back bytes that were taken."""
        self.taken -= size
        if tenant and size:
            self._of_tenants[tenant] -= size
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]
