"""Bounds of connections and of the memory for bodies."""

from dataclasses import dataclass, field

from ullage_router.http.long_bodies import (
    MAX_HANDLED_BYTES,
    MAX_LONG_BYTES,
    LongBodies,
)


@dataclass(frozen=True, slots=True)
class HTTPLimits:
    """Limits of a connection and of all connections of a server; bytes and seconds."""

    max_head_bytes: int = 64 << 10
    """Request line and headers."""
    max_headers: int = 100
    max_body_bytes: int = 8 << 20
    max_held_bytes: int = 256 << 20
    """Bytes of bodies that arrive or wait to become prompts, on all connections together."""
    max_long_bytes: int = MAX_LONG_BYTES
    max_handled_bytes: int = MAX_HANDLED_BYTES
    max_connections: int = 20_000
    max_age_s: float = 600.0
    """Age at which a connection ends with its reply, so that the client comes to another process.
    """
    head_timeout_s: float = 10.0
    """Seconds from a request's first byte to the end of its headers."""
    body_timeout_s: float = 30.0
    """Seconds from the end of the headers to the end of the body."""
    idle_timeout_s: float = 75.0
    """Seconds between two requests."""
    stall_timeout_s: float = 60.0
    """Seconds for which a client may take nothing of what it is sent."""
    linger_s: float = 2.0
    """A connection closed on a client that still sends may lose the reply on its way; so what
    follows a refused request is read and thrown away for so long."""


@dataclass(slots=True)
class BodyRoom:
    """Memory for bodies that arrive and have not become prompts, on all connections of a server.

    limit: bytes for all; one tenant gets at most half of them.
    """

    limit: int
    taken: int = 0
    long_bodies: LongBodies = field(default_factory=LongBodies)
    """Turns of those that arrive."""
    handled: LongBodies = field(
        default_factory=lambda: LongBodies(MAX_HANDLED_BYTES, MAX_HANDLED_BYTES)
    )
    """Turns of those that become prompts."""
    _of_tenants: dict[str, int] = field(default_factory=dict)

    def take(self, size: int, tenant: str) -> bool:
        """False, and nothing is taken, where that much is not free."""
        of_tenant = self._of_tenants.get(tenant, 0) + size
        if self.taken + size > self.limit or (tenant and of_tenant > self.limit // 2):
            return False
        self.taken += size
        if tenant:
            self._of_tenants[tenant] = of_tenant
        return True

    def give_back(self, size: int, tenant: str) -> None:
        self.taken -= size
        if tenant and size:
            self._of_tenants[tenant] -= size
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]
