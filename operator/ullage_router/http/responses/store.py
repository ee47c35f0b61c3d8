"""Keeps responses for a time, so that later requests can continue or read them.

The responses are in the memory of this router. Another replica does not know them.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from ullage_common.config.router import ResponsesSection

_Name = tuple[str, str]
"""A response's key: (tenant, response id)."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, with the conversation that a later request continues."""

    body: bytes
    """The response's JSON."""
    conversation: bytes
    """Serialized `Messages` without the instructions. The answer is the last turn."""
    input_items: bytes
    """JSON list of the items that the response answers, as clients read them, the oldest first."""
    root: str
    """Id of the first response of the conversation."""
    expires: float = 0.0
    """Time at which the response expires, in seconds of the store's clock. The store sets it."""

    @property
    def num_bytes(self) -> int:
        """Size of the response in memory, in bytes."""
        return self.continued_bytes + OVERHEAD_BYTES

    @property
    def continued_bytes(self) -> int:
        """Size in bytes of all that a request reads to continue the response."""
        return len(self.body) + len(self.conversation) + len(self.input_items)


OVERHEAD_BYTES = 1024
"""Estimate of a stored response's memory in addition to its JSON, conversation and items."""


class ResponseStore:
    """Stores responses by tenant and id until they expire or the store is full.

    A full store drops its oldest responses. One tenant's responses take at most half of it.

    Args:
        section: Limits on the lifetime and the total size of the responses.
        clock: Returns monotonic time in seconds.

    Attributes:
        is_enabled: Whether responses are stored.
        num_bytes: Total size of the stored responses in bytes.
    """

    def __init__(
        self, section: ResponsesSection, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_enabled = section.enabled
        self.num_bytes = 0
        self._section = section
        self._clock = clock
        self._stored: OrderedDict[_Name, StoredResponse] = OrderedDict()
        """Responses in the order in which they will expire."""
        self._names: dict[str, OrderedDict[str, None]] = {}
        """Ids of each tenant's responses, in the same order."""
        self._of_tenants = Counter[str]()
        """Number of bytes stored for each tenant."""

    def find(self, tenant: str, name: str) -> StoredResponse | None:
        """Return a tenant's response, or None if it is not stored. Any thread may call this."""
        stored = self._stored.get((tenant, name))
        return stored if stored and stored.expires > self._clock() else None

    def add(self, tenant: str, name: str, response: StoredResponse) -> None:
        """Store a response, and drop expired responses and those for which there is no room."""
        self.remove(tenant, name)
        stored = replace(response, expires=self._clock() + self._section.ttl)
        self._stored[tenant, name] = stored
        self._names.setdefault(tenant, OrderedDict())[name] = None
        self.num_bytes += stored.num_bytes
        self._of_tenants[tenant] += stored.num_bytes

        now = self._clock()
        while self._stored and next(iter(self._stored.values())).expires <= now:
            self.remove(*next(iter(self._stored)))
        if tenant:
            most = self._section.max_bytes // 2
            self._make_room(tenant, most)
        while self.num_bytes > self._section.max_bytes:
            self.remove(*next(iter(self._stored)))

    def remove(self, tenant: str, name: str) -> bool:
        """Remove a tenant's response, and return whether it was stored."""
        removed = self._stored.pop((tenant, name), None)
        if removed is None:
            return False
        del self._names[tenant][name]
        self.num_bytes -= removed.num_bytes
        self._of_tenants[tenant] -= removed.num_bytes
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]
            del self._names[tenant]
        return removed.expires > self._clock()

    def _make_room(self, tenant: str, most: int) -> None:
        """Remove a tenant's oldest responses until the others have at most `most` bytes."""
        while self._of_tenants[tenant] > most:
            self.remove(tenant, next(iter(self._names[tenant])))


class ConnectionResponses:
    """The responses that requests on one WebSocket may continue: stored ones, and the latest one.

    The latest response can be continued on its connection even if it is not stored. As the API
    demands, the response is dropped if a request that continues it fails.

    Args:
        stored: The service's stored responses.
        latest: The latest responses of all connections, if they are not stored.
    """

    def __init__(self, stored: ResponseStore, latest: ResponseStore) -> None:
        self.stored = stored
        self._latest = latest
        self._name: _Name | None = None
        """The key of this connection's latest response, or None."""
        self._is_continued = False
        """Whether the current request continues the latest response."""

    @property
    def is_enabled(self) -> bool:
        """Whether the service stores responses."""
        return self.stored.is_enabled

    def find(self, tenant: str, name: str) -> StoredResponse | None:
        """Return a tenant's response, or None if it is not here. Any thread may call this."""
        if (tenant, name) != self._name:
            return self.stored.find(tenant, name)
        self._is_continued = True
        return self._latest.find(tenant, name)

    def add(self, tenant: str, name: str, response: StoredResponse) -> None:
        """Keep a response that is not stored, in place of the latest one."""
        self.drop()
        self._name = (tenant, name)
        self._latest.add(tenant, name, response)

    def end_request(self) -> None:
        """Drop the latest response if the request that continued it gave no newer one."""
        if self._is_continued:
            self.drop()

    def drop(self) -> None:
        """Drop the latest response."""
        if self._name:
            self._latest.remove(*self._name)
        self._name = None
        self._is_continued = False
