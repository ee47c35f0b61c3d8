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
from ullage_router.pipeline.coalesce import FinishedAnswer, SharedGeneration, key_of
from ullage_router.pipeline.replace import checked_key

HEADER = "idempotency-key"

_Name = tuple[str, str]
"""An answer's key: (tenant, idempotency key)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """The first request with an idempotency key, while its answer is generated."""

    digest: bytes
    """Digest of the request, used to detect a different request with the same key."""
    generation: SharedGeneration


@dataclass(frozen=True, slots=True, eq=False)
class _Finished:
    """The answer to the first request with an idempotency key."""

    digest: bytes
    """Digest of the request, used to detect a different request with the same key."""
    answer: FinishedAnswer
    expires: float
    """Time at which the answer expires."""


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
        self._running: dict[_Name, _Running] = {}
        self._finished: OrderedDict[_Name, _Finished] = OrderedDict()
        """Finished answers, in the order in which they will expire."""
        self._size = 0
        self.repeated = 0

    @property
    def size(self) -> int:
        """Return the total size of the cached answers in memory, in bytes."""
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
        digest = key_of(call.request, str(call.is_streamed))
        self._expire()
        if finished := self._finished.get(name):
            self._join(finished, digest, call)
            return finished.answer.read(call)

        running = self._running.get(name)
        if running and running.generation.is_joinable:
            self._join(running, digest, call)
        else:
            running = self._begin(name, digest, call, proceed)
        reader = running.generation.join(call)
        try:
            await reader.begin()
        except BaseException:
            reader.close()
            raise
        return reader

    def _join(self, entry: _Running | _Finished, digest: bytes, call: Call) -> None:
        """Count one more call that shares an answer.

        Raises:
            ServiceError: the key was used with a different request.
        """
        if entry.digest != digest:
            raise _reused(call.idempotency_key)
        self.repeated += 1
        call.end_turn()
        call.release_body()  # its prompt is not rendered

    def _begin(self, name: _Name, digest: bytes, call: Call, proceed: Handler) -> _Running:
        """Start to generate the answer to the first call with a key."""
        own = _Running(digest, SharedGeneration(call, 0.0, keeps_all=True))
        self._running[name] = own
        own.generation.run(proceed, lambda: self._on_end(name, own))
        return own

    def _on_end(self, name: _Name, ended: _Running) -> None:
        if self._running.get(name) is not ended:
            return
        del self._running[name]

        answer = ended.generation.finished_answer()
        if answer is None:
            return

        expires = self._clock() + self._section.ttl
        self._finished[name] = _Finished(ended.digest, answer, expires)
        self._size += answer.num_bytes
        while self._size > self._section.max_bytes:
            self._drop_oldest()

    def _expire(self) -> None:
        now = self._clock()
        while self._finished and next(iter(self._finished.values())).expires <= now:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._finished.popitem(last=False)
        self._size -= entry.answer.num_bytes


def _reused(key: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        KEY_REUSED,
        f"the {HEADER} {key!r} was sent with another request; send each request a key of its own",
    )
