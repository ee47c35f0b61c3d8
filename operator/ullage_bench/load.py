"""Generates load on a server: a closed loop, an open loop, or multi-turn conversations."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass

from ullage_bench.levels import Level, measure
from ullage_verify.client import ChatAnswer
from ullage_verify.target import Target

TURNS = 4
"""Number of turns in a conversation."""
Numbers = Iterator[int]
"""Prompt numbers. Each number is used for only one request."""


@dataclass(frozen=True)
class Shape:
    """Prompt and response sizes of a load test's requests, in tokens."""

    input_tokens: int = 180
    output_tokens: int = 64
    prefix_tokens: int = 0
    """Number of tokens at the start of each prompt that are the same in all requests."""

    @property
    def request_tokens(self) -> int:
        """Return the tokens of a single request, with its prefix and its response."""
        return self.prefix_tokens + self.turn_tokens

    @property
    def conversation_tokens(self) -> int:
        """Return the tokens of a conversation's last request, which has all turns before it."""
        return self.prefix_tokens + TURNS * self.turn_tokens

    @property
    def turn_tokens(self) -> int:
        """Return the tokens by which a turn lengthens its conversation."""
        return self.input_tokens + self.output_tokens


class Sender:
    """Sends requests of one shape.

    Apart from the shared prefix, every prompt is unique, so that it is never served from a cache.

    Args:
        target: the server.
        shape: the sizes of the requests.
        seed: seed of the prompts. Runs with different seeds send different prompts.
    """

    def __init__(self, target: Target, shape: Shape, seed: int = 0) -> None:
        self._target = target
        self._shape = shape
        self._numbers = itertools.count(1_000_000 * (seed + 1))
        self._prefix = ""
        if shape.prefix_tokens:
            self._prefix = str(target.prompt(999, shape.prefix_tokens)[0]["content"])

    async def request(self) -> ChatAnswer:
        """Send one request, and return its response."""
        return await self._chat([self._turn()])

    async def conversation(self) -> Sequence[ChatAnswer]:
        """Send the turns of a conversation, each with its history, and return the responses.

        The conversation ends early if a response is incomplete, or if the next turn might not fit
        in the context.
        """
        answers: list[ChatAnswer] = []
        messages: list[dict[str, str]] = []
        for _ in range(TURNS):
            messages.append(self._turn())
            answers.append(await self._chat(messages))
            if not answers[-1].is_whole or self._next_turn_ends_at(answers) > self._target.usable:
                break
            messages.append({"role": "assistant", "content": answers[-1].text or "-"})
        return answers

    async def _chat(self, messages: Sequence[dict[str, str]]) -> ChatAnswer:
        if self._prefix:
            messages = [{"role": "system", "content": self._prefix}, *messages]
        return await self._target.client.chat(
            self._target.model, messages, self._shape.output_tokens, ignore_eos=True
        )

    def _next_turn_ends_at(self, answers: Sequence[ChatAnswer]) -> int:
        """Return the context that a conversation's next turn needs, in tokens.

        The server counts the tokens of the turns so far. A response may have more tokens as part of
        a prompt than it had when it was generated.
        """
        last = answers[-1].prompt_tokens
        growth = last - answers[-2].prompt_tokens if len(answers) > 1 else 0
        return last + max(growth, self._shape.turn_tokens) + self._shape.output_tokens

    def _turn(self) -> dict[str, str]:
        prompt = self._target.prompt(next(self._numbers), self._shape.input_tokens)
        return {"role": "user", "content": str(prompt[0]["content"])}


async def closed_loop(sender: Sender, clients: float, seconds: float) -> Level:
    """Let each client send one request after another for `seconds`, and measure the level.

    Args:
        sender: sends the requests.
        clients: number of concurrent clients.
        seconds: time after which no client sends another request.
    """

    async def request() -> Sequence[ChatAnswer]:
        return [await sender.request()]

    return await _busy_clients(request, clients, seconds)


async def open_loop(sender: Sender, rate: float, seconds: float) -> Level:
    """Send requests at random times for `seconds`, whether or not earlier ones have ended.

    Args:
        sender: sends the requests.
        rate: mean number of requests per second, with exponential gaps (a Poisson process).
        seconds: time after which no more requests are sent.
    """
    chooser = random.Random(rate)
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sender.request())]
        due = chooser.expovariate(rate)
        while due < seconds:
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
            tasks.append(group.create_task(sender.request()))
            due += chooser.expovariate(rate)
    return measure(rate, [task.result() for task in tasks], began + seconds)


async def conversations(sender: Sender, clients: float, seconds: float) -> Level:
    """Let each client hold one conversation after another for `seconds`, and measure the level.

    Args:
        sender: sends the requests.
        clients: number of concurrent clients.
        seconds: time after which no client starts another conversation.
    """
    return await _busy_clients(sender.conversation, clients, seconds)


async def _busy_clients(
    act: Callable[[], Awaitable[Sequence[ChatAnswer]]], clients: float, seconds: float
) -> Level:
    """Run clients that repeat `act` for `seconds`, and measure the resulting load level.

    After an incomplete response, a client pauses before it continues, but not beyond `seconds`.
    """

    async def client() -> None:
        while time.monotonic() < ends_at:
            answers.extend(await act())
            if not answers[-1].is_whole:
                left_s = max(0.0, ends_at - time.monotonic())
                await asyncio.sleep(min(answers[-1].pause_s, left_s))

    answers: list[ChatAnswer] = []
    ends_at = time.monotonic() + seconds
    await asyncio.gather(*(client() for _ in range(int(clients))))
    return measure(clients, answers, ends_at)


Loop = Callable[[Sender, float, float], Coroutine[None, None, Level]]
LOOPS: dict[str, Loop] = {
    "closed": closed_loop,
    "open": open_loop,
    "conversations": conversations,
}


async def sweep(
    loop: Loop,
    sender: Sender,
    loads: Sequence[float],
    seconds: float,
    show: Callable[[Level], None],
) -> Sequence[Level]:
    """Measure increasing loads until a higher load no longer increases throughput.

    Args:
        loop: one of LOOPS.
        sender: sends the requests.
        loads: increasing loads.
        seconds: duration of each load.
        show: called with each level as soon as it is measured.
    """
    levels: list[Level] = []
    for load in loads:
        level = await loop(sender, load, seconds)
        show(level)
        levels.append(level)
        if _is_past_the_knee(levels):
            break
    return levels


def _is_past_the_knee(levels: Sequence[Level]) -> bool:
    """Return whether throughput is falling, so that no higher load has to be measured.

    This is so if the last two levels both have fewer requests per second than the best one.
    """
    best = max(level.requests_per_s for level in levels)
    return len(levels) > 2 and all(level.requests_per_s < best for level in levels[-2:])
