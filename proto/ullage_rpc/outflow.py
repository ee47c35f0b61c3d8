"""What one call of a stream sends: never further ahead than its window, and tokens in company.

Each message costs the reader more than the tokens in it. A first token leaves at once; those that
come within the pause after it, up to as many as the reader wants together, leave as one delta.
"""

import asyncio
from collections.abc import Callable, Sequence

from ullage.inference.v1 import inference_pb2 as pb


class Outflow:
    """The responses of one call.

    Args:
        call: its window, its pause and how many tokens may leave together.
        put: sends a response.
    """

    def __init__(self, call: pb.MultiplexCall, put: Callable[[pb.GenerateResponse], None]) -> None:
        self._put = put
        self._loop = asyncio.get_running_loop()
        self._window = max(1, call.window)
        self._room: asyncio.Future[None] | None = None
        self._pause_s = call.coalesce_ms / 1000
        self._most = max(1, call.coalesce_tokens)
        self._held: list[pb.GenerateResponse] = []
        """Deltas of one sample that wait for others."""
        self._held_tokens = 0
        self._due = 0.0
        """When tokens may leave, on the event loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self.is_finished = False
        """The last response was Finished."""

    async def write(self, response: pb.GenerateResponse) -> None:
        """Sends a response or keeps it for others; waits for a reader that is too far behind."""
        if response.HasField("delta"):
            await self._write_delta(response)
        else:
            await self._release()
            await self._send(response)

    def grant(self, responses: int) -> None:
        """The reader takes so many more."""
        self._window += responses
        if self._room and not self._room.done():
            self._room.set_result(None)
        elif self._held and self._timer is None and self._window > 0:
            self._send_now(self._taken())

    def end(self) -> None:
        """Sends what is held: nothing more comes."""
        if self._held:
            self._send_now(self._taken())

    def drop(self) -> None:
        """Forgets what is held: nobody reads it."""
        self._held.clear()
        self._stop_timer()

    async def _write_delta(self, response: pb.GenerateResponse) -> None:
        if self._held and not self._fits(response.delta):
            await self._release()
        if not self._held and self._loop.time() >= self._due:
            await self._send(response)
            return
        self._hold(response)
        if self._held_tokens >= self._most:
            await self._release()

    def _fits(self, delta: pb.Delta) -> bool:
        tokens = self._held_tokens + delta.num_tokens
        return tokens <= self._most and delta.sample == self._held[0].delta.sample

    def _hold(self, response: pb.GenerateResponse) -> None:
        self._held.append(response)
        self._held_tokens += response.delta.num_tokens
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._is_due)

    def _is_due(self) -> None:
        self._timer = None
        if self._window > 0:  # else they leave when the reader takes more
            self._send_now(self._taken())

    async def _release(self) -> None:
        if self._held:
            await self._send(self._taken())

    def _taken(self) -> pb.GenerateResponse:
        held, self._held, self._held_tokens = self._held, [], 0
        self._stop_timer()
        return held[0] if len(held) == 1 else joined(held)

    async def _send(self, response: pb.GenerateResponse) -> None:
        while self._window <= 0:
            self._room = self._loop.create_future()
            await self._room
        self._send_now(response)

    def _send_now(self, response: pb.GenerateResponse) -> None:
        self._window -= 1
        self.is_finished = response.HasField("finished")
        if response.HasField("delta"):
            self._due = self._loop.time() + self._pause_s
        self._put(response)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


def joined(responses: Sequence[pb.GenerateResponse]) -> pb.GenerateResponse:
    """One delta of several of one sample, in their order; they stay as they are."""
    deltas = [response.delta for response in responses]
    whole = pb.GenerateResponse()
    made = whole.delta
    made.text = "".join([delta.text for delta in deltas])
    made.num_tokens = sum([delta.num_tokens for delta in deltas])
    made.sample = deltas[0].sample
    for delta in deltas:
        if delta.token_ids:
            made.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            made.logprobs.extend(delta.logprobs)
    return whole
