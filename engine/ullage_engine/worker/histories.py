"""Transfers token histories to the rank that samples, sending each token only once.

Penalties need a request's whole history in every step, and histories only grow. Rank 0 therefore
only sends new tokens, and the rank that samples keeps the earlier ones. Both ranks keep histories
for the same requests: the most recently sampled ones, up to a fixed number. They drop the history
of a request that has not been in any of the last `KEPT_PLANS` plans, because it has ended or is
waiting. If the request runs again later, rank 0 resends its whole history.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

from msgspec.structs import replace

from ullage_engine.protocol.step_plan import Chunk

T = TypeVar("T")

KEPT_PLANS = 64
"""Number of consecutive plans without a request after which its history is dropped.

A running request is in every plan, or in one of N consecutive plans if N plans are in flight.
"""


class _Recent(Generic[T]):
    """Values of recently planned requests, by id. Both ranks evict the same requests."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_plans = 0
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        """Value and last plan number of each request, most recently used last."""

    def begin_plan(self) -> None:
        """Count a new plan, and drop requests that were not used in the last `KEPT_PLANS` plans."""
        self._num_plans += 1
        while self._kept and next(iter(self._kept.values()))[1] <= self._num_plans - KEPT_PLANS:
            self._kept.popitem(last=False)

    def pop(self, request_id: str, default: T) -> T:
        """Remove and return the value of a request, or return `default`."""
        return self._kept.pop(request_id, (default, 0))[0]

    def keep(self, request_id: str, value: T) -> None:
        """Store a value as the most recently used, evicting the least recently used one if full."""
        self._kept[request_id] = (value, self._num_plans)
        if len(self._kept) > self._max_requests:
            self._kept.popitem(last=False)


class SentHistories:
    """Tracks which history tokens rank 0 has already sent."""

    def __init__(self, max_requests: int) -> None:
        self._recent: _Recent[tuple[list[int], int]] = _Recent(max_requests)
        """The history of each request, and how many of its tokens have been sent."""

    def begin_plan(self) -> None:
        """Drop requests that are out of date. Call this once per plan, before its first chunk."""
        self._recent.begin_plan()

    def shorten(self, chunk: Chunk) -> Chunk:
        """Return a copy of a chunk whose history only contains tokens that were not sent yet.

        If the history is not the same list object as in the request's last chunk, it is sent
        completely.
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
        """Drop the same requests as the sender. Call this once per plan, before its first chunk."""
        self._recent.begin_plan()

    def complete(self, chunk: Chunk) -> Chunk:
        """Return a copy of a chunk with its whole history, which is the same list in every step.

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
