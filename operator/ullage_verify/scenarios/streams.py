"""Streams as clients know them: complete, equal to plain answers, and apart from one another."""

import asyncio
import time

from ullage_verify.client import Answer
from ullage_verify.criteria import Checks
from ullage_verify.scenarios.settings import Settings
from ullage_verify.target import Target

NUM_STREAMS = 24
TOKENS = 48
SLOW_READ_S = 0.1
"""Pause of a slow client after each piece."""
NUM_LEAVING = 12
LEAVING_TOKENS = 400
FREE_WITHIN_S = 5.0
"""Time in which the memory of vanished clients must be free."""
MAX_SLOWDOWN = 3.0
"""Most by which a slow client may slow another one."""
ALLOWANCE_S = 0.5


async def run(target: Target, settings: Settings, checks: Checks) -> None:
    """Check many streams at once, a slow client, and clients that vanish."""
    settings.progress(f"{NUM_STREAMS} streams at once")
    await _many(target, checks)
    settings.progress("a stream beside a plain answer")
    await _equals_plain(target, checks)
    settings.progress("a slow client")
    await _slow_client(target, checks)
    settings.progress(f"{NUM_LEAVING} clients that vanish")
    await _vanishing_clients(target, checks)


async def _many(target: Target, checks: Checks) -> None:
    requests = (
        target.client.chat(target.model, target.prompt(4_000 + number, 60), TOKENS, ignore_eos=True)
        for number in range(NUM_STREAMS)
    )
    answers = [answer for answer in await asyncio.gather(*requests) if not answer.is_refused]
    whole = [answer for answer in answers if answer.is_whole]
    checks.holds(
        "every stream ends with a finish reason",
        len(whole) == len(answers) > 0,
        f"{len(answers)}",
        f"{len(whole)}",
    )
    exact = sum(answer.output_tokens == TOKENS for answer in whole)
    checks.holds(
        "every stream's usage has its tokens",
        exact == len(whole),
        f"{len(whole)} x {TOKENS}",
        f"{exact}",
    )
    checks.figures["longest_gap_s"] = max((a.longest_gap_s for a in whole), default=0.0)


async def _equals_plain(target: Target, checks: Checks) -> None:
    prompt = target.prompt(9, 40)
    streamed = await target.client.chat(target.model, prompt, TOKENS)
    body = {"model": target.model, "messages": prompt, "max_tokens": TOKENS, "temperature": 0}
    plain = await target.client.post("chat/completions", body)
    checks.holds(
        "a stream has the text of the plain answer",
        plain.is_whole and streamed.text == plain.text,
        "equal",
        "equal" if streamed.text == plain.text else f"{streamed.text[:30]!r}, {plain.text[:30]!r}",
    )


async def _slow_client(target: Target, checks: Checks) -> None:
    async def dawdle(_: Answer) -> None:
        await asyncio.sleep(SLOW_READ_S)

    prompt = target.prompt(10, 40)
    alone = await target.client.chat(target.model, prompt, TOKENS)
    slow = asyncio.create_task(
        target.client.chat(target.model, target.prompt(11, 40), TOKENS, dawdle, ignore_eos=True)
    )
    beside = await target.client.chat(target.model, prompt, TOKENS)
    slow_answer = await slow

    checks.holds(
        "a slow client gets its whole answer",
        slow_answer.is_whole and slow_answer.output_tokens == TOKENS,
        f"{TOKENS} tokens",
        f"{slow_answer.output_tokens} tokens, {slow_answer.outcome}",
    )
    limit = MAX_SLOWDOWN * alone.seconds + ALLOWANCE_S
    checks.at_most("an answer beside a slow client", beside.seconds, limit)


async def _vanishing_clients(target: Target, checks: Checks) -> None:
    """Cut many streams after their first text, and wait until the server has noticed."""
    begun: set[int] = set()

    def vanish(number: int) -> asyncio.Task[Answer]:
        def note(_: Answer) -> None:
            begun.add(number)

        prompt = target.prompt(5_000 + number, 60)
        return asyncio.create_task(
            target.client.chat(target.model, prompt, LEAVING_TOKENS, note, ignore_eos=True)
        )

    tasks = [vanish(number) for number in range(NUM_LEAVING)]
    while len(begun) < NUM_LEAVING // 2 and not all(task.done() for task in tasks):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    name = "requests of vanished clients end"
    began = time.monotonic()
    running = await _running(target)
    while running and time.monotonic() - began < 2 * FREE_WITHIN_S:
        await asyncio.sleep(0.1)
        running = await _running(target)
    if running is None:
        checks.skip(name, "the server does not report its running requests (/metrics)")
    else:
        checks.at_most(name, time.monotonic() - began, FREE_WITHIN_S)

    after = await target.client.chat(target.model, target.prompt(12, 40), 4)
    checks.holds("a new client afterwards", after.is_whole, "200", after.outcome)


async def _running(target: Target) -> float | None:
    """Return how many requests run in the server, or None if it does not report them."""
    engines = (await target.stats()).get("engines")
    if engines is not None:
        return float(sum(engine.get("requests_running", 0) for engine in engines))
    return await target.metric(
        "vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"
    )
