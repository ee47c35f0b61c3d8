"""Transfers token histories to the rank that samples, and sends each token only once.

Penalties read the whole history of a request in each of its steps, and a history only grows. Rank 0
therefore sends only new tokens, and the rank that samples keeps the earlier tokens. Both ranks keep
the histories of the same requests: the most recently sampled ones, up to a fixed number. A few
plans after a request has ended or has begun to wait, both ranks drop its history. When a waiting
request runs again, rank 0 sends its whole history again.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

from msgspec.structs import replace

from ullage_engine.protocol.step_plan import Chunk

T = TypeVar("T")

KEPT_PLANS = 64
"""Number of successive plans without a request, after which the request's history is dropped.

A running request is in every plan, or in one of N successive plans if N plans are in flight.
"""


class _Recent(Generic[T]):
    """Values of the requests in the latest plans, by id. Both ranks keep the same requests."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_plans = 0
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        """Value and last plan number of each request, with the most recently used request last."""

    def begin_plan(self) -> None:
        """Count a new plan, and drop the requests that have not been used in the latest plans."""
        self._num_plans += 1
        while self._kept and next(iter(self._kept.values()))[1] <= self._num_plans - KEPT_PLANS:
            self._kept.popitem(last=False)

    def pop(self, request_id: str, default: T) -> T:
        """Remove and return the value of a request, or return `default`."""
        return self._kept.pop(request_id, (default, 0))[0]

    def keep(self, request_id: str, value: T) -> None:
        """Store a value as the most recently used. If full, drop the least recently used value."""
        self._kept[request_id] = (value, self._num_plans)
        if len(self._kept) > self._max_requests:
            self._kept.popitem(last=False)


class SentHistories:
    """The record of which history tokens rank 0 has sent."""

    def __init__(self, max_requests: int) -> None:
        self._recent: _Recent[tuple[list[int], int]] = _Recent(max_requests)
        """The history of each request, and how many of its tokens have been sent."""

    def begin_plan(self) -> None:
        """Drop requests of old plans. Call this once per plan, before its first chunk."""
        self._recent.begin_plan()

    def shorten(self, chunk: Chunk) -> Chunk:
        """Return a chunk with only the new tokens of its history.

        If the history is not the same list as in the request's last chunk, the whole history is
        new.
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
        """Return a chunk with its whole history, in the same list for all steps of a request.

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
