"""Sends requests of given sizes in a closed loop, and measures their times."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.overload.rounds import Measured, measured
from ullage_verify.client import ChatAnswer
from ullage_verify.target import Target

SEED_STEP = 10_000
"""Distance of the prompt numbers of two loops, so that no two share a prompt."""


class Ask(NamedTuple):
    """The size of one request, in tokens."""

    prompt: int
    output: int


async def closed_loop(
    target: Target,
    asks: Sequence[Ask],
    clients: int,
    seed: int,
    counts: Callable[[Ask], bool] = lambda ask: True,
) -> Measured:
    """Send all requests, by `clients` that each send the next one when the last has ended.

    Args:
        target: the service.
        asks: sizes of the requests, in order.
        clients: number of requests in flight.
        seed: number of the loop. Loops with different numbers have different prompts.
        counts: whether to measure a request of this size. All are sent.
    """
    numbers = itertools.count(SEED_STEP * (seed + 1))
    waiting = iter(asks)
    answers: list[ChatAnswer] = []

    async def go_on() -> None:
        for ask in waiting:
            prompt = target.prompt(next(numbers), ask.prompt)
            answer = await target.client.chat(target.model, prompt, ask.output, ignore_eos=True)
            if counts(ask):
                answers.append(answer)
            if answer.is_refused:
                await asyncio.sleep(answer.pause_s)

    await asyncio.gather(*(go_on() for _ in range(clients)))
    return measured(answers)
