"""Transfers token histories to the rank that samples, sending each token only once.

Penalties need a request's whole token history in every step, but histories only grow. Rank 0
therefore sends only new tokens, and the rank that samples keeps the earlier ones. Both ranks keep
histories for the same requests: a fixed number of the most recently sampled requests. They drop the
history of a request that was in none of the last `KEPT_PLANS` plans, because it has finished or is
waiting. If the request runs again later, rank 0 resends its whole history.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

from msgspec.structs import replace

from ullage_engine.protocol.step_plan import Chunk

T = TypeVar("T")

KEPT_PLANS = 64
"""If a request is in none of this many consecutive plans, its history is dropped.

A running request is in every plan, or in one out of N consecutive plans if N plans are in flight.
"""


class _Recent(Generic[T]):
    """Stores a value for each request that was part of a recent step plan.

    Rank 0 and the rank that samples each have an instance. Both drop the same requests.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_plans = 0
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        """Each request's value and the number of its last plan, least recently used first."""

    def begin_plan(self) -> None:
        """Count a new plan, and drop requests that were in none of the last `KEPT_PLANS` plans."""
        self._num_plans += 1
        while self._kept and next(iter(self._kept.values()))[1] <= self._num_plans - KEPT_PLANS:
            self._kept.popitem(last=False)

    def pop(self, request_id: str, default: T) -> T:
        """Remove and return the value of a request, or return `default` if there is none."""
        return self._kept.pop(request_id, (default, 0))[0]

    def keep(self, request_id: str, value: T) -> None:
        """Store a request's value as the most recent, and evict the least recently used if full."""
        self._kept[request_id] = (value, self._num_plans)
        if len(self._kept) > self._max_requests:
            self._kept.popitem(last=False)


class SentHistories:
    """Rank 0's record of which tokens of each history it has already sent."""

    def __init__(self, max_requests: int) -> None:
        self._recent: _Recent[tuple[list[int], int]] = _Recent(max_requests)
        """The history of each request, and how many of its tokens have been sent."""

    def begin_plan(self) -> None:
        """Drop histories no longer in use. Call this once per plan, before its first chunk."""
        self._recent.begin_plan()

    def shorten(self, chunk: Chunk) -> Chunk:
        """Return a copy of a chunk with only those history tokens that have not been sent yet.

        If the history is a different list object than in the request's last chunk, the whole
        history is sent.
        """
        history, start = self._recent.pop(chunk.request_id, ([], 0))
        if history is not chunk.history:
            start = 0
        self._recent.keep(chunk.request_id, (chunk.history, len(chunk.history)))
        return replace(chunk, history=chunk.history[start:], history_start=start)


class ReceivedHistories:
    """The histories received by the rank that samples."""

    def __init__(self, max_requests: int) -> None:
        self._recent: _Recent[list[int]] = _Recent(max_requests)

    def begin_plan(self) -> None:
        """Drop what the sender drops. Call this once per plan, before its first chunk."""
        self._recent.begin_plan()

    def complete(self, chunk: Chunk) -> Chunk:
        """Return a copy of a chunk with its whole history.

        The history is the same list object in every step.

        Raises:
            RuntimeError: earlier tokens of the history have not been received.
        """
        history = self._recent.pop(chunk.request_id, [])
        if chunk.history_start == 0:
            history = []
        if len(history) != chunk.history_start:
            raise RuntimeError(
                f"{chunk.request_id}: {len(history)} tokens of its history are here, "
                f"not {chunk.history_start}"
            )
        history += chunk.history
        self._recent.keep(chunk.request_id, history)
        return replace(chunk, history=history, history_start=0)
