"""Checks that streams are complete, match non-streamed responses, and do not slow other clients."""

import asyncio
import time

from ullage_verify.client import ChatAnswer
from ullage_verify.criteria import Checks
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import Target

NUM_STREAMS = 24
TOKENS = 48
SLOW_TOKENS = 600
SLOW_PIECES = 30
"""Number of initial events with text. The slow client pauses after each of them."""
SLOW_READ_S = 0.1
SLOW_BUFFER_BYTES = 4096
NUM_LEAVING = 12
LEAVING_PROMPT_TOKENS = 60
LEAVING_S = 30.0
"""Seconds that the responses to vanishing clients would take if nobody cancelled them."""
RUNNING_METRICS = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
)
WAITING_METRICS = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
)
FREE_WITHIN_S = 5.0
"""Seconds within which the requests of vanished clients must have ended."""
MAX_SLOWDOWN = 3.0
"""Maximum factor by which a slow client may lengthen another client's response time."""
ALLOWANCE_S = 0.5


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Check many streams at once, a non-streamed response, a slow client and vanishing clients."""
    settings.progress(f"{NUM_STREAMS} streams at once")
    await _many(target, checks)
    settings.progress("a stream beside a plain answer")
    await _equals_plain(target, checks)
    settings.progress("a slow client")
    alone = await target.client.chat(target.model, target.prompt(10, 40), TOKENS, ignore_eos=True)
    await _slow_client(target, checks, alone)
    settings.progress(f"{NUM_LEAVING} clients that vanish")
    await _vanishing_clients(target, checks, alone)


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
    # A server that does not know `ignore_eos` may stop earlier, and says so.
    exact = sum(each.output_tokens == TOKENS or each.finish_reason == "stop" for each in whole)
    checks.holds(
        "every stream's usage has its tokens",
        exact == len(whole),
        f"{len(whole)} x {TOKENS}",
        f"{exact}",
    )
    checks.figures["longest_gap_s"] = max((a.longest_gap_s for a in whole), default=0.0)


async def _equals_plain(target: Target, checks: Checks) -> None:
    name = "a stream has the text of the plain answer"
    prompt = target.prompt(9, 40)
    streamed = [await target.client.chat(target.model, prompt, TOKENS) for _ in range(2)]
    body = {"model": target.model, "messages": prompt, "max_tokens": TOKENS, "temperature": 0}
    plain = await target.client.post("chat/completions", body)

    first, second = (answer.text for answer in streamed)
    if all(answer.is_whole for answer in streamed) and first != second:
        checks.skip(name, "the server's greedy answers differ from run to run")
        return
    is_whole = plain.is_whole and streamed[1].is_whole
    checks.holds(
        name,
        is_whole and second == plain.text != "",
        "equal",
        "equal" if second == plain.text else f"{second[:30]!r}, {plain.text[:30]!r}",
    )


async def _slow_client(target: Target, checks: Checks, alone: ChatAnswer) -> None:
    """Read one response so slowly that the server must wait, while another request runs."""
    tokens = min(SLOW_TOKENS, target.usable // 2)

    async def dawdle(answer: ChatAnswer) -> None:
        if answer.num_pieces <= SLOW_PIECES:
            await asyncio.sleep(SLOW_READ_S)

    async with target.client.with_buffers(SLOW_BUFFER_BYTES) as client:
        slow = asyncio.create_task(
            client.chat(target.model, target.prompt(11, 40), tokens, dawdle, ignore_eos=True)
        )
        beside = await target.client.chat(
            target.model, target.prompt(14, 40), TOKENS, ignore_eos=True
        )
        slow_answer = await slow

    is_complete = slow_answer.output_tokens == tokens or slow_answer.finish_reason == "stop"
    checks.holds(
        "a slow client gets its whole answer",
        slow_answer.is_whole and is_complete,
        f"{tokens} tokens",
        f"{slow_answer.output_tokens} tokens, {slow_answer.outcome}",
    )
    limit = MAX_SLOWDOWN * alone.seconds + ALLOWANCE_S
    checks.at_most("an answer beside a slow client", beside.seconds, limit)


async def _vanishing_clients(target: Target, checks: Checks, alone: ChatAnswer) -> None:
    """Disconnect many clients mid-stream, and check that the server ends their requests."""
    name = "requests of vanished clients end"
    speed = TOKENS / max(alone.seconds, 0.001)
    # A request that nobody cancels must run for much longer than it may.
    tokens = min(int(LEAVING_S * speed), target.usable - LEAVING_PROMPT_TOKENS)
    begun: set[int] = set()

    def vanish(number: int) -> asyncio.Task[ChatAnswer]:
        def note(_: ChatAnswer) -> None:
            begun.add(number)

        prompt = target.prompt(5_000 + number, LEAVING_PROMPT_TOKENS)
        return asyncio.create_task(
            target.client.chat(target.model, prompt, tokens, note, ignore_eos=True)
        )

    tasks = [vanish(number) for number in range(NUM_LEAVING)]
    while len(begun) < NUM_LEAVING // 2 and not all(task.done() for task in tasks):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    num_cut = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    began = time.monotonic()
    running = await _running(target)
    while running and time.monotonic() - began < 2 * FREE_WITHIN_S:
        await asyncio.sleep(0.1)
        running = await _running(target)
    if running is None:
        checks.skip(name, target.unreported("its running requests (/metrics)"))
    elif not num_cut or tokens / speed < 2 * FREE_WITHIN_S:
        checks.skip(name, f"answers of {tokens} tokens end too soon to tell")
    else:
        checks.at_most(name, time.monotonic() - began, FREE_WITHIN_S)

    after = await target.client.chat(target.model, target.prompt(12, 40), 4)
    checks.holds("a new client afterwards", after.is_whole, "200", after.outcome)


async def _running(target: Target) -> float | None:
    """Return the number of running and waiting requests, or None if it is not reported."""
    engines = (await target.stats()).get("engines")
    if engines is not None:
        names = ("requests_running", "requests_waiting")
        return float(sum(engine.get(name) or 0 for engine in engines for name in names))
    running = await target.metric(*RUNNING_METRICS)
    return None if running is None else running + (await target.metric(*WAITING_METRICS) or 0.0)
