"""Token histories on their way to the rank that samples: each token is sent once.

Penalties read the whole history of a request in each of its steps, and a history only grows. So
rank 0 sends what is new of it, and the rank that samples keeps the rest. Both keep the histories of
the requests that were sampled last, and of as many: what one has forgotten, the other has, too.
"""

from collections import OrderedDict
from dataclasses import replace

from ullage_engine.protocol.step_plan import Chunk


class SentHistories:
    """What rank 0 has sent of the histories."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._sent: OrderedDict[str, tuple[list[int], int]] = OrderedDict()
        """History of each request, and the number of its tokens that were sent."""

    def shorten(self, chunk: Chunk) -> Chunk:
        """Returns a chunk with what is new of its history: all of it where it is another list than
        in the request's last chunk."""
        history, start = self._sent.pop(chunk.request_id, ([], 0))
        if history is not chunk.history:
            start = 0
        self._sent[chunk.request_id] = (chunk.history, len(chunk.history))
        if len(self._sent) > self._max_requests:
            self._sent.popitem(last=False)
        return replace(chunk, history=chunk.history[start:], history_start=start)


class ReceivedHistories:
    """The histories that the rank which samples has received."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._received: OrderedDict[str, list[int]] = OrderedDict()

    def complete(self, chunk: Chunk) -> Chunk:
        """Returns a chunk with its whole history, the same list in each of a request's steps."""
        history = self._received.pop(chunk.request_id, [])
        if chunk.history_start == 0:
            history = []
        if len(history) != chunk.history_start:
            raise RuntimeError(
                f"{chunk.request_id}: {len(history)} tokens of its history are here, "
                f"not {chunk.history_start}"
            )
        history += chunk.history
        self._received[chunk.request_id] = history
        if len(self._received) > self._max_requests:
            self._received.popitem(last=False)
        return replace(chunk, history=history, history_start=0)
