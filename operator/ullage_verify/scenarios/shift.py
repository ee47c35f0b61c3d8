"""Shifts the load from short prompts to long ones and back, and checks that the speed recovers.

No response may have a status of 5xx, and no sequence may be preempted for memory, unless its KV was
kept in host memory.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ullage_verify.client import ChatAnswer, OpenAIClient
from ullage_verify.criteria import Checks
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import Target, metric

NUM_CLIENTS = 4
SHORT_TOKENS = 100
LONG_TOKENS = 8_000
ANSWER_TOKENS = 32
PHASE_SHARE = 1 / 3
"""Duration of each phase, as a fraction of `ScenarioSettings.minutes`."""
MIN_SPEED_SHARE = 0.9
"""Minimum speed with short prompts after the long ones, as a fraction of that before them.

Two equal phases of a minute's run have a few dozen answers each, so their speeds differ by some
percent by chance. `python -m benchmarks settings` repeats runs, and requires 95 % of the best
goodput.
"""
PREEMPTION_METRICS = (
    "ullage_preemptions_total",  # an engine of Ullage
    "vllm:num_preemptions_total",
)
SWAP_METRICS = ("ullage_swaps_total",)
"""Counters of the preemptions that kept the sequence's KV in host memory."""
ROUTER_METRIC = "ullage_router_preemptions_total"
"""Counter of all preemptions. A router has no counter of swaps."""


class Preempted(NamedTuple):
    """How many preemptions a server has counted so far."""

    total: float
    has_swaps: bool
    """Whether the total includes preemptions that lost no work."""


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Send short, then long, then short prompts, and compare the speed of the short phases.

    Preemptions are counted over all phases.
    """
    long_tokens = min(LONG_TOKENS, target.usable - ANSWER_TOKENS)
    seconds = 60 * settings.minutes * PHASE_SHARE
    numbers = itertools.count(20_000)
    answers: list[ChatAnswer] = []
    speeds: list[float] = []
    num_served: list[int] = []
    preempted = await _num_preempted(target)
    for tokens in (SHORT_TOKENS, long_tokens, SHORT_TOKENS):
        settings.progress(f"prompts of {tokens} tokens for {seconds:.0f} s")
        began = time.monotonic()
        phase = await _phase(target, numbers, tokens, began + seconds)
        served = sum(answer.is_whole for answer in phase)
        speeds.append(served / (time.monotonic() - began))
        num_served.append(served)
        answers += phase

    prompts = f"prompts of {SHORT_TOKENS}, {long_tokens} and {SHORT_TOKENS} tokens"
    failed = [each for each in answers if not each.is_whole and each.status in (0, 200)]
    checks.holds(
        f"{prompts}: no failure",
        not failed,
        "answered or refused",
        f"{len(failed)} of {len(answers)}" + (f" ({failed[0].error[:60]})" if failed else ""),
    )
    _check_statuses(f"{prompts}: no status but 200 and 429", answers, checks)
    _check_preemptions(preempted, await _num_preempted(target), checks)
    checks.at_least(f"answers to prompts of {long_tokens} tokens", num_served[1], 1)
    if not speeds[0]:
        checks.holds("short prompts are served", False, "some", "none")
        return
    share = speeds[-1] / speeds[0]
    checks.at_least("speed with short prompts afterwards", share, MIN_SPEED_SHARE, "of before")
    checks.figures["requests_per_s"] = [round(speed, 3) for speed in speeds]


def _check_statuses(name: str, answers: Sequence[ChatAnswer], checks: Checks) -> None:
    """Check that each response with a status is an answer or a refusal that is not an error."""
    others = Counter(each.status for each in answers if each.status not in (0, 200, 429))
    seen = f"{others.total()} of {len(answers)}"
    if others:
        seen += f" ({', '.join(f'{count} x {status}' for status, count in others.items())})"
    checks.holds(name, not others, "0 others", seen)


async def _num_preempted(target: Target) -> Preempted | None:
    """Return how many preemptions there were so far, or None if the server counts none.

    Preemptions by swapping keep the sequence's KV. Engines count them apart, so they are left out.
    A router's counter is read only if no engine's can be.
    """
    counts = [await _num_lost(engine) for engine in target.engines or (target.pages,)]
    reported = [count for count in counts if count is not None]
    if len(reported) == len(counts):
        return Preempted(sum(reported), has_swaps=False)
    count = await target.metric(ROUTER_METRIC)
    return None if count is None else Preempted(count, has_swaps=True)


async def _num_lost(engine: OpenAIClient) -> float | None:
    """Return how many preemptions of an engine have lost work, or None if it counts none."""
    preempted = await metric(engine, *PREEMPTION_METRICS)
    return None if preempted is None else preempted - (await metric(engine, *SWAP_METRICS) or 0.0)


def _check_preemptions(before: Preempted | None, after: Preempted | None, checks: Checks) -> None:
    name = "preemptions that lose work"
    if before is None or after is None:
        checks.skip(name, "the server shows no counter of preemptions (/metrics)")
        return
    lost = after.total - before.total
    if before.has_swaps != after.has_swaps:
        checks.skip(name, "an engine's counter of preemptions came or went (/metrics)")
    elif lost < 0:
        checks.skip(name, "the counter of preemptions fell, as after a restart (/metrics)")
    elif lost and after.has_swaps:
        checks.skip(
            name,
            f"the router counted {lost:.0f} preemptions, and it counts swaps, which lose no work, "
            "too; read the engine's metrics with --monitoring",
        )
    else:
        checks.holds(name, not lost, "0", f"{lost:.0f}")


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
