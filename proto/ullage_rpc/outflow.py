"""What one call of a stream sends: never further ahead than its window, and tokens in company.

Each message costs the reader more than the tokens in it. A first token leaves at once; those that
come within the pause after it, up to as many as the reader wants together, leave as one delta.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ullage.inference.v1 import inference_pb2 as pb


@dataclass(slots=True)
class _Held:
    """Tokens of one sample that wait for others."""

    responses: list[pb.GenerateResponse] = field(default_factory=list)
    tokens: int = 0
    due: float = 0.0
    """When they may leave, on the event loop's clock."""
    timer: asyncio.TimerHandle | None = None

    def take(self) -> list[pb.GenerateResponse]:
        taken, self.responses, self.tokens = self.responses, [], 0
        if self.timer:
            self.timer.cancel()
            self.timer = None
        return taken


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
        self._samples: dict[int, _Held] = {}
        self.is_finished = False
        """The last response was Finished."""

    async def write(self, response: pb.GenerateResponse) -> None:
        """Sends a response or keeps it for others; waits for a reader that is too far behind."""
        if response.HasField("delta"):
            await self._write_delta(response)
            return
        for held in self._samples.values():
            await self._release(held)
        await self._send(response)

    def grant(self, responses: int) -> None:
        """The reader takes so many more."""
        self._window += responses
        if self._room and not self._room.done():
            self._room.set_result(None)
            return
        for held in self._samples.values():
            if held.responses and held.timer is None and self._window > 0:
                self._send_now(joined(held.take()))

    def end(self) -> None:
        """Sends what is held: nothing more comes."""
        for held in self._samples.values():
            if held.responses:
                self._send_now(joined(held.take()))

    def drop(self) -> None:
        """Forgets what is held: nobody reads it."""
        for held in self._samples.values():
            held.take()

    async def _write_delta(self, response: pb.GenerateResponse) -> None:
        delta = response.delta
        held = self._samples.setdefault(delta.sample, _Held())
        if held.tokens + delta.num_tokens > self._most:
            await self._release(held)
        if not held.responses and self._loop.time() >= held.due:
            await self._send(response)
            return
        held.responses.append(response)
        held.tokens += delta.num_tokens
        if held.tokens >= self._most:
            await self._release(held)
        elif held.timer is None:
            held.timer = self._loop.call_at(held.due, self._is_due, held)

    def _is_due(self, held: _Held) -> None:
        held.timer = None
        if held.responses and self._window > 0:  # else they leave when the reader takes more
            self._send_now(joined(held.take()))

    async def _release(self, held: _Held) -> None:
        if held.responses:
            await self._send(joined(held.take()))

    async def _send(self, response: pb.GenerateResponse) -> None:
        while self._window <= 0:
            self._room = self._loop.create_future()
            await self._room
        self._send_now(response)

    def _send_now(self, response: pb.GenerateResponse) -> None:
        self._window -= 1
        self.is_finished = response.HasField("finished")
        if response.HasField("delta"):
            held = self._samples.setdefault(response.delta.sample, _Held())
            held.due = self._loop.time() + self._pause_s
        self._put(response)


def joined(responses: Sequence[pb.GenerateResponse]) -> pb.GenerateResponse:
    """One delta of all, which are of one sample, in their order; they stay as they are."""
    if len(responses) == 1:
        return responses[0]
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
