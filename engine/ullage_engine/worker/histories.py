"""Token histories on their way to the rank that samples: each token is sent once.

Penalties read the whole history of a request in each of its steps, and a history only grows. So
rank 0 sends what is new of it, and the rank that samples keeps the rest. Both keep the histories of
the requests that were sampled last, and of as many: what one has forgotten, the other has, too.
Requests that ended are forgotten some plans later, as are those that wait, which are sent again.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

from msgspec.structs import replace

from ullage_engine.protocol.step_plan import Chunk

T = TypeVar("T")

KEPT_PLANS = 64
"""Plans without a request after which its history is forgotten; running ones are in every plan, or
in every one of so many as there are in flight."""


class _Recent(Generic[T]):
    """What is kept of the requests of the latest plans, by id; the same on both ranks."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_plans = 0
        self._kept: OrderedDict[str, tuple[T, int]] = OrderedDict()
        """With the number of the plan; the one used last is last."""

    def begin_plan(self) -> None:
        """Count a plan, and forget what none of the latest has used."""
        self._num_plans += 1
        while self._kept and next(iter(self._kept.values()))[1] <= self._num_plans - KEPT_PLANS:
            self._kept.popitem(last=False)

    def pop(self, request_id: str, default: T) -> T:
        return self._kept.pop(request_id, (default, 0))[0]

    def keep(self, request_id: str, value: T) -> None:
        self._kept[request_id] = (value, self._num_plans)
        if len(self._kept) > self._max_requests:
            self._kept.popitem(last=False)


class SentHistories:
    """What rank 0 has sent of the histories."""

    def __init__(self, max_requests: int) -> None:
        self._recent: _Recent[tuple[list[int], int]] = _Recent(max_requests)
        """History of each request, and the number of its tokens that were sent."""

    def begin_plan(self) -> None:
        """Forget requests of old plans; called once before the chunks of each plan."""
        self._recent.begin_plan()

    def shorten(self, chunk: Chunk) -> Chunk:
        """Return a chunk with what is new of its history: all of it where it is another list than
        in the request's last chunk."""
        history, start = self._recent.pop(chunk.request_id, ([], 0))
        if history is not chunk.history:
            start = 0
        self._recent.keep(chunk.request_id, (chunk.history, len(chunk.history)))
        return replace(chunk, history=chunk.history[start:], history_start=start)


class ReceivedHistories:
    """The histories that the rank which samples has received."""

    def __init__(self, max_requests: int) -> None:
        self._recent: _Recent[list[int]] = _Recent(max_requests)

    def begin_plan(self) -> None:
        """Forget what the sender does; called once before the chunks of each plan."""
        self._recent.begin_plan()

    def complete(self, chunk: Chunk) -> Chunk:
        """Return a chunk with its whole history, the same list in each of a request's steps."""
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
