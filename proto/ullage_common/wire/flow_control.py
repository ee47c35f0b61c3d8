"""The sending side of flow control: keeps each call within its window, and batches its tokens.

For the reader, a message has more overhead than the tokens in it, so tokens are sent in batches.
The first token is sent immediately. Later tokens are held until the first tick after the previous
send, or until there are enough for the reader's preferred batch size, and are then sent as one
delta. Ticks occur at fixed intervals, at the same times for all calls, so that the tokens of many
calls can share a message.

`SendWindow` enforces this rule, because it alone knows the time of the last send. A producer of
deltas can follow the same `SendPace`, so that it does not produce deltas that would only be merged.
The deltas of such a producer are sent immediately.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ullage.inference.v1 import inference_pb2 as pb


@dataclass(slots=True)
class _Pending:
    """Deltas of one sample that are held back, to be merged with later deltas and sent as one."""

    responses: list[pb.GenerateResponse] = field(default_factory=list)
    num_tokens: int = 0
    due: float = 0.0
    """Time on the event loop's clock at which the tokens may be sent."""
    timer: asyncio.TimerHandle | None = None

    def take(self) -> list[pb.GenerateResponse]:
        """Remove and return the waiting deltas, and stop the timer."""
        responses = self.responses
        self.responses = []
        self.num_tokens = 0
        if self.timer:
            self.timer.cancel()
            self.timer = None
        return responses


@dataclass(frozen=True, slots=True)
class SendPace:
    """The pace at which the tokens of one sample are sent."""

    pause_s: float = 0.0
    """Seconds between two ticks (0 to send each token immediately)."""
    max_tokens: int = 1
    """Number of pending tokens that triggers a send before the next tick."""

    def next_tick(self, now: float) -> float:
        """Return the earliest time at which to send again, if tokens are sent at `now`.

        Both times are on the same clock.
        """
        return next_tick(now, self.pause_s)


AT_ONCE = SendPace()
"""The pace that sends each token immediately."""


class SendWindow:
    """Sends one call's responses, but never more than the reader has granted.

    Args:
        call: the call, which specifies its window, the pause between ticks, and the tokens per
            batch.
        send: sends a response without waiting.
    """

    def __init__(self, call: pb.MultiplexCall, send: Callable[[pb.GenerateResponse], None]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._window = max(1, call.window)
        self._opened: asyncio.Future[None] | None = None
        self.pace = SendPace(call.coalesce_ms / 1000, max(1, call.coalesce_tokens))
        self._samples: dict[int, _Pending] = {}
        self.is_finished = False
        """Whether the most recently sent response is Finished."""

    async def write(self, response: pb.GenerateResponse) -> None:
        """Send a response, or hold a delta to merge it later. Wait while the window is closed."""
        if response.HasField("delta"):
            await self._write_delta(response)
            return
        for pending in self._samples.values():
            await self._flush(pending)
        await self._send_when_open(response)

    def grant(self, responses: int) -> None:
        """Widen the window by a number of responses, and send deltas that were waiting for it."""
        self._window += responses
        if self._opened and not self._opened.done():
            self._opened.set_result(None)
            return
        for pending in self._samples.values():
            if pending.responses and pending.timer is None and self._window > 0:
                self._send_now(merge_deltas(pending.take()))

    def end(self) -> None:
        """Send all pending deltas, at the end of the call."""
        for pending in self._samples.values():
            if pending.responses:
                self._send_now(merge_deltas(pending.take()))

    def drop(self) -> None:
        """Drop all pending deltas, because the reader has disconnected."""
        for pending in self._samples.values():
            pending.take()

    async def _write_delta(self, response: pb.GenerateResponse) -> None:
        delta = response.delta
        pending = self._samples.setdefault(delta.sample, _Pending())
        if pending.num_tokens + delta.num_tokens > self.pace.max_tokens:
            await self._flush(pending)
        if delta.HasField("prompt_logprobs"):
            await self._flush(pending)  # a delta of its own, which is never merged
            await self._send_when_open(response)
            return
        if not pending.responses and self._loop.time() >= pending.due:
            await self._send_when_open(response)
            return
        pending.responses.append(response)
        pending.num_tokens += delta.num_tokens
        if pending.num_tokens >= self.pace.max_tokens:
            await self._flush(pending)
        elif pending.timer is None:
            pending.timer = self._loop.call_at(pending.due, self._on_due, pending)

    def _on_due(self, pending: _Pending) -> None:
        pending.timer = None
        if pending.responses and self._window > 0:  # otherwise `grant` sends them
            self._send_now(merge_deltas(pending.take()))

    async def _flush(self, pending: _Pending) -> None:
        if pending.responses:
            await self._send_when_open(merge_deltas(pending.take()))

    async def _send_when_open(self, response: pb.GenerateResponse) -> None:
        while self._window <= 0:
            self._opened = self._loop.create_future()
            await self._opened
        self._send_now(response)

    def _send_now(self, response: pb.GenerateResponse) -> None:
        self._window -= 1
        self.is_finished = response.HasField("finished")
        if response.HasField("delta"):
            pending = self._samples.setdefault(response.delta.sample, _Pending())
            pending.due = self.pace.next_tick(self._loop.time())
        self._send(response)


def next_tick(now: float, pause_s: float) -> float:
    """Return the time of the next tick: the first multiple of `pause_s` after `now`.

    Both times are on the same clock.
    """
    if not pause_s:
        return now
    tick = (now // pause_s + 1) * pause_s
    return tick if tick > now else tick + pause_s  # rounding: 1000.0 // 0.01 is 99999.0


def merge_deltas(responses: Sequence[pb.GenerateResponse]) -> pb.GenerateResponse:
    """Merge deltas into one delta with all their text, tokens and log probabilities in order.

    Args:
        responses: deltas of one sample, which are not changed. Only the first delta may have
            reasoning or tool calls, and none may have log-probabilities of the prompt.
    """
    if len(responses) == 1:
        return responses[0]
    deltas = [response.delta for response in responses]
    whole = pb.GenerateResponse()
    merged = whole.delta
    merged.CopyFrom(deltas[0])
    merged.text = "".join([delta.text for delta in deltas])
    merged.num_tokens = sum([delta.num_tokens for delta in deltas])
    for delta in deltas[1:]:
        if delta.token_ids:
            merged.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            merged.logprobs.extend(delta.logprobs)
    return whole
