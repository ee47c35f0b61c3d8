"""Scenario 1: prompts of 12k tokens, four at a time, on a KV pool that holds one of them.

Every answer must be a success or 429. The device must stay within its threshold, and the memory
ledger must equal the driver's count.
"""

import asyncio

import aiohttp

from benchmarks.gpu.checkpoint import words
from benchmarks.gpu.device_memory import MOST_SHARE, Sampler, settled
from benchmarks.gpu.figures import Fact, Figure, Job, Report, at_most, count, none_of
from benchmarks.gpu.service import (
    ASK_S,
    MIB,
    Reply,
    Router,
    complete,
    engine_up,
    judge_log,
    kv_bytes,
    metrics,
    prompt_of,
    router_up,
)
from benchmarks.support.one_engine import Engine

CONCURRENT = 4
WAVES = 2
"""Number of waves. Before the first wave, the router has no estimate of how long answers take."""
POOL_SHARE = 1.5
"""Size of the KV pool as a multiple of a complete request's KV."""
MOST_LEDGER_ERROR = 0.02
MOST_LEDGER_ERROR_ON_CPU = 0.1
"""Maximum relative error of the ledger on a CPU, where library pages come and go."""


def run(job: Job, report: Report) -> None:
    asyncio.run(_run(job, report))


async def _run(job: Job, report: Report) -> None:
    prompt_tokens, output_tokens = (12_000, 1_000) if not job.tiny else (1_200, 40)
    max_kv = int(POOL_SHARE * kv_bytes(job, prompt_tokens + output_tokens))
    report(Fact("KV pool", f"{max_kv // MIB} MiB"))
    sections = {"memory": {"max_kv": max_kv}}

    before = settled(job)
    async with engine_up(job, "overload", sections) as engine:
        ready = settled(job)
        headroom = (await engine.state()).headroom_bytes
        figures = await asyncio.to_thread(metrics, engine)
        own = int(figures["ullage_worker_resident_bytes"])
        report(Figure("the worker's own bytes, as it says", own / MIB, "MiB"))
        await ledger(job, engine, ready - before if job.on_gpu else own, report)
        async with router_up(job, {"single": [engine]}) as router:
            with Sampler(job, "overload") as sampler:
                replies = [
                    reply
                    for wave in range(WAVES)
                    for reply in await load(job, router, wave, prompt_tokens, output_tokens)
                ]
            refusals(replies, output_tokens, report)
        report(at_most("most used of the device", sampler.share(), "of it", MOST_SHARE))
        figures = await asyncio.to_thread(metrics, engine)
        report(none_of("workers that were replaced", figures["ullage_worker_restarts_total"]))
        report(none_of("steps that ran out of memory", figures["ullage_oom_events_total"]))
        missing = await missing_headroom(engine, headroom)
        report(none_of("bytes of headroom that did not come back", missing))
    judge_log(job, "overload", report)


async def ledger(job: Job, engine: Engine, taken: int, report: Report) -> None:
    """Compare the memory ledger's total with the bytes that the engine has allocated."""
    state = await engine.state()
    allocated = sum(line.allocated_bytes for line in state.ledger if not _on_host(line.name))
    report(Figure("ledger's sum", allocated / MIB, "MiB"))
    report(Figure("the device has lost", taken / MIB, "MiB"))
    error = abs(allocated - taken) / taken
    limit = MOST_LEDGER_ERROR if job.on_gpu else MOST_LEDGER_ERROR_ON_CPU
    report(at_most("ledger against the device", error, "off", limit))


def _on_host(name: str) -> bool:
    return name in ("pinned_host_kv", "kv_host_tier")


async def load(
    job: Job, router: Router, wave: int, prompt_tokens: int, output_tokens: int
) -> list[Reply]:
    """Send the requests of a wave at once, and read all answers."""
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        numbers = range(wave * CONCURRENT, (wave + 1) * CONCURRENT)
        prompts = [words(prompt_of(job, number, prompt_tokens)) for number in numbers]
        asked = (complete(client, router, prompt, output_tokens) for prompt in prompts)
        return list(await asyncio.gather(*asked))


def refusals(replies: list[Reply], output_tokens: int, report: Report) -> None:
    """Judge the statuses, the refusals and the lengths of the answers."""
    statuses = [reply.status for reply in replies]
    report(Fact("statuses", " ".join(map(str, statuses))))
    for status, error in sorted({(reply.status, reply.error) for reply in replies if reply.error}):
        report(Fact(f"status {status}", error))

    report(none_of("answers but 200 and 429", sum(each not in (200, 429) for each in statuses)))
    report(count("served", statuses.count(200), WAVES))

    silent = [
        reply for reply in replies if reply.status == 429 and "retry-after" not in reply.headers
    ]
    report(none_of("refusals without Retry-After", len(silent)))

    short = [
        reply
        for reply in replies
        if reply.status == 200
        and reply.tokens != output_tokens
        and not reply.headers.get("x-ullage-degraded")
    ]
    report(none_of("answers cut short without a word", len(short)))

    report(Figure("longest answer", max(reply.seconds for reply in replies), "s"))


async def missing_headroom(engine: Engine, wanted: int, seconds: float = 10.0) -> int:
    """Wait up to `seconds` for the headroom to return, and return the bytes still missing."""
    for _ in range(int(seconds / 0.2)):
        state = await engine.state()
        if state.headroom_bytes >= wanted and not state.requests_running:
            return 0
        await asyncio.sleep(0.2)
    return int(wanted - state.headroom_bytes)
