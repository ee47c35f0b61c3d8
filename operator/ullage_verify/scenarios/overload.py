"""Overloads a server, and checks that refused requests succeed after their Retry-After."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from ullage_verify.client import MAX_RETRY_AFTER_S, ChatAnswer
from ullage_verify.criteria import Checks
from ullage_verify.quantiles import quantile
from ullage_verify.scenarios.settings import DEFAULT_TTFT_S, ScenarioSettings
from ullage_verify.target import Target

NUM_REQUESTS = 60
PROMPT_TOKENS = 400
ANSWER_TOKENS = 48
SECOND_TRY_SHARE = 0.5
"""Minimum fraction of refused requests that must succeed when retried after Retry-After.

With a constant Retry-After, all clients return at once, and nearly all are refused again.
"""
BACK_WITHIN_S = 30.0


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Send sixty large requests at once, and retry refused ones after their Retry-After."""
    objective = await target.objective(settings.ttft_s, "ttft_p95_s", DEFAULT_TTFT_S)
    settings.progress(f"{NUM_REQUESTS} requests at once")
    tries = await asyncio.gather(*(_obey(target, number) for number in range(NUM_REQUESTS)))
    answers = [answer for each in tries for answer in each]

    statuses = Counter(answer.outcome for answer in answers)
    seen = ", ".join(f"{count} x {outcome}" for outcome, count in sorted(statuses.items()))
    checks.holds(
        "nothing but answers and refusals",
        all(answer.is_whole or answer.is_refused for answer in answers),
        "200, 429 or 503",
        seen,
    )

    refused = [answer for answer in answers if answer.is_refused]
    timed = [a for a in refused if a.retry_after_s and a.retry_after_s <= MAX_RETRY_AFTER_S]
    checks.holds(
        "every refusal says when to return",
        len(timed) == len(refused),
        f"{len(refused)}",
        f"{len(timed)}",
    )
    _check_second_tries(checks, tries)

    whole = [answer for answer in answers if answer.is_whole]
    served = sum(each[-1].is_whole for each in tries)
    checks.holds(
        "every client is served in the end", served == NUM_REQUESTS, f"{NUM_REQUESTS}", f"{served}"
    )
    ttft = quantile([answer.ttft_s for answer in whole], 0.95)
    name = f"p95 of the first token of accepted requests ({objective})"
    checks.at_most(name, ttft, objective.seconds)

    began = time.monotonic()
    hello = await target.client.chat(target.model, target.prompt(13, 16), 4)
    checks.holds("a new client afterwards", hello.is_whole, "200", hello.outcome)
    checks.at_most("time of its answer", time.monotonic() - began, BACK_WITHIN_S)


async def _obey(target: Target, number: int) -> Sequence[ChatAnswer]:
    tokens = min(PROMPT_TOKENS, target.usable // 3)
    prompt = target.prompt(6_000 + number, tokens)
    return await target.client.obey(target.model, prompt, ANSWER_TOKENS, ignore_eos=True)


def _check_second_tries(checks: Checks, tries: Sequence[Sequence[ChatAnswer]]) -> None:
    name = "most refused clients are accepted when they return"
    returned = [each for each in tries if len(each) > 1]
    if not returned:
        checks.skip(name, "nobody was refused")
        return
    share = sum(each[1].is_whole for each in returned) / len(returned)
    checks.at_least(name, share, SECOND_TRY_SHARE)
    checks.figures["tries"] = Counter(len(each) for each in tries)
