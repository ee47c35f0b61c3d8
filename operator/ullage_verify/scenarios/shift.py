"""Shifts the load from short prompts to long ones and back, and checks that the speed recovers."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence

from ullage_verify.client import ChatAnswer
from ullage_verify.criteria import Checks
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import Target

NUM_CLIENTS = 4
SHORT_TOKENS = 100
LONG_TOKENS = 8_000
ANSWER_TOKENS = 32
PHASE_SHARE = 1 / 3
"""Duration of each phase, as a fraction of `ScenarioSettings.minutes`."""
MIN_SPEED_SHARE = 0.9
"""Minimum speed with short prompts after the long ones, as a fraction of that before them."""


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Send short, then long, then short prompts, and compare the speed of the short phases."""
    long_tokens = min(LONG_TOKENS, target.usable - ANSWER_TOKENS)
    seconds = 60 * settings.minutes * PHASE_SHARE
    numbers = itertools.count(20_000)
    answers: list[ChatAnswer] = []
    speeds: list[float] = []
    num_served: list[int] = []
    for tokens in (SHORT_TOKENS, long_tokens, SHORT_TOKENS):
        settings.progress(f"prompts of {tokens} tokens for {seconds:.0f} s")
        began = time.monotonic()
        phase = await _phase(target, numbers, tokens, began + seconds)
        served = sum(answer.is_whole for answer in phase)
        speeds.append(served / (time.monotonic() - began))
        num_served.append(served)
        answers += phase

    failed = [each for each in answers if not each.is_whole and not each.is_refused]
    checks.holds(
        f"prompts of {SHORT_TOKENS}, {long_tokens} and {SHORT_TOKENS} tokens: no failure",
        not failed,
        "200, 429 or 503",
        f"{len(failed)} of {len(answers)}" + (f" ({failed[0].error[:60]})" if failed else ""),
    )
    checks.at_least(f"answers to prompts of {long_tokens} tokens", num_served[1], 1)
    if not speeds[0]:
        checks.holds("short prompts are served", False, "some", "none")
        return
    share = speeds[-1] / speeds[0]
    checks.at_least("speed with short prompts afterwards", share, MIN_SPEED_SHARE, "of before")
    checks.figures["requests_per_s"] = [round(speed, 3) for speed in speeds]


async def _phase(
    target: Target, numbers: Iterator[int], tokens: int, ends_at: float
) -> Sequence[ChatAnswer]:
    """Let clients send prompts one after another until `ends_at`. Return all responses.

    A refused client sends another prompt when it may return, but not after the phase.
    """
    answers: list[ChatAnswer] = []

    async def client() -> None:
        while time.monotonic() < ends_at:
            prompt = target.prompt(next(numbers), tokens)
            answer = await target.client.chat(target.model, prompt, ANSWER_TOKENS, ignore_eos=True)
            answers.append(answer)
            if not answer.is_whole:
                await asyncio.sleep(min(answer.pause_s, max(0.0, ends_at - time.monotonic())))

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return answers
