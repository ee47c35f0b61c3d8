"""Generates only one answer for a tenant's requests with the same `Idempotency-Key`.

A repeated request joins the running generation, or gets the finished answer while it is cached.
Reusing a key for a different request is an error. A request is forgotten if it fails, or if all
clients leave before it has finished. The next request with the same key then runs normally.

Answers are kept in this router's memory. If a request with the same key reaches another router
replica, that replica generates the answer again.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from ullage_common.config.router import IdempotencySection
from ullage_common.wire.errors import ServiceError
from ullage_router.call import Call, Handler, ResponseStream
from ullage_router.errors import KEY_REUSED
from ullage_router.pipeline.coalesce import SharedGeneration, key_of
from ullage_router.pipeline.replace import checked_key

HEADER = "idempotency-key"

_Name = tuple[str, str]
"""An answer's key: (tenant, idempotency key)."""


@dataclass(slots=True, eq=False)
class _Entry:
    """The first request with an idempotency key, and its answer."""

    digest: bytes
    """Digest of the request, used to detect a different request with the same key."""
    generation: SharedGeneration
    size: int = 0
    """Size of the finished answer in bytes."""
    expires: float = 0.0
    """Time at which the finished answer expires."""


class IdempotencyKeys:
    """Keeps answers by idempotency key while they are running, and afterwards until they expire.

    Args:
        section: limits on the lifetime and the total size of finished answers.
        clock: returns monotonic time in seconds.

    repeated
        number of requests that got an earlier request's answer
    """

    def __init__(
        self,
        section: IdempotencySection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._section = section
        self._clock = clock
        self._running: dict[_Name, _Entry] = {}
        self._finished: OrderedDict[_Name, _Entry] = OrderedDict()
        """Finished answers, in the order in which they will expire."""
        self._size = 0
        self.repeated = 0

    @property
    def size(self) -> int:
        """Return the total size of the cached answers in bytes."""
        return self._size

    async def repeat(self, call: Call, proceed: Handler) -> ResponseStream:
        """Return the answer to the first request with the call's key, which may be this call.

        `proceed` runs the call if it has no key, or if no earlier answer with its key is available.

        Raises:
            ServiceError: the key is too long, was used with a different request, or `proceed`
                failed.
        """
        if not call.idempotency_key:
            return await proceed(call)
        name = (call.tenant.name, checked_key(HEADER, call.idempotency_key))
        generation = self._find(name, call, proceed)
        if generation.leader is not call:
            call.end_turn()
        reader = generation.join(call)
        try:
            await reader.begin()
        except BaseException:
            reader.close()
            raise
        return reader

    def _find(self, name: _Name, call: Call, proceed: Handler) -> SharedGeneration:
        self._expire()
        digest = key_of(call.request, str(call.is_streamed))
        entry = self._running.get(name) or self._finished.get(name)
        if entry and entry.generation.is_joinable:
            if entry.digest != digest:
                raise _reused(call.idempotency_key)
            self.repeated += 1
            return entry.generation

        own = _Entry(digest, SharedGeneration(call, 0.0, keeps_all=True))
        self._running[name] = own
        own.generation.run(proceed, lambda: self._on_end(name, own))
        return own.generation

    def _on_end(self, name: _Name, entry: _Entry) -> None:
        if self._running.get(name) is not entry:
            return
        del self._running[name]

        generation = entry.generation
        if not (generation.is_finished and generation.is_joinable):
            return

        entry.size = generation.size
        entry.expires = self._clock() + self._section.ttl
        self._finished[name] = entry
        self._size += entry.size
        while self._size > self._section.max_bytes:
            self._drop_oldest()

    def _expire(self) -> None:
        now = self._clock()
        while self._finished and next(iter(self._finished.values())).expires <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._finished.popitem(last=False)
        self._size -= entry.size


def _reused(key: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        KEY_REUSED,
        f"the {HEADER} {key!r} was sent with another request; send each request a key of its own",
    )
