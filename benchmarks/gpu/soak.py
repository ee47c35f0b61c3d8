"""Scenario 3, short: four sessions of mixed lengths in constant memory, despite a killed worker."""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.checkpoint import service_shape
from benchmarks.gpu.device_memory import Sampler
from benchmarks.gpu.faults import POLL_S, WAIT_S, until
from benchmarks.gpu.figures import Fact, Figure, Job, Report, at_most, count, none_of
from benchmarks.gpu.service import (
    MIB,
    PATIENT,
    ask,
    engine_up,
    kv_bytes,
    metrics,
    router_up,
)
from benchmarks.support.one_engine import Engine
from ullage_common.wire.channels import open_channel

SESSIONS = 4
LEAST_SAMPLES = 20
MOST_SPREAD_MIB = 32.0
MOST_P95_S = 20.0
KILLED_AT = 0.3
"""Share of the total time after which the worker is killed."""
REFUSED = "RESOURCE_EXHAUSTED"
NOT_READY = "UNAVAILABLE"
REFUSED_PAUSE_S = 0.5
SETTLE_S = 2.0
"""Seconds after a worker's start before its memory is judged."""
JUDGED_S = 3.0
"""Minimum number of seconds for which memory is then judged."""


@dataclass
class Soak:
    """The requests of a run, and their durations."""

    job: Job
    until: float
    longest: int
    """Number of tokens after which a session starts a new conversation."""
    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    cached: int = 0
    errors: list[str] = field(default_factory=list)
    killed: float = 0.0
    back: float = 0.0
    is_judged: bool = False
    """Whether the worker was killed and its successor has served for long enough."""

    @property
    def is_over(self) -> bool:
        return self.is_judged and time.monotonic() >= self.until

    def is_refusal(self, error: str) -> bool:
        """Return whether a request may be refused temporarily for this reason.

        Either memory is short for a moment, or the only engine is between two workers. The router
        may notice a missing worker a moment later.
        """
        if error.startswith(REFUSED):
            return True
        is_between = self.killed > 0.0 and not (0.0 < self.back < time.monotonic() - SETTLE_S)
        return error.startswith(NOT_READY) and is_between


def run(job: Job, report: Report) -> None:
    asyncio.run(_run(job, report))


async def _run(job: Job, report: Report) -> None:
    seconds, longest = (36.0, 6_000) if not job.tiny else (15.0, 600)
    sections = {"memory": {"max_kv": kv_bytes(job, 3 * longest)}}
    async with (
        engine_up(job, "soak", sections) as engine,
        router_up(job, {"single": [engine]}, PATIENT) as router,
        open_channel(router.target) as channel,
    ):
        with Sampler(job, "soak") as sampler:
            began = time.monotonic()
            soak = Soak(job, began + seconds, longest)
            killing = asyncio.create_task(kill(soak, engine, KILLED_AT * seconds))
            await asyncio.gather(*(session(soak, channel, n) for n in range(SESSIONS)))
            await killing
            ended = time.monotonic()

        lives = ((began + SETTLE_S, soak.killed), (soak.back + SETTLE_S, ended))
        samples = min(len(sampler.between(*life)) for life in lives)
        report(count("samples of each worker's life", samples, LEAST_SAMPLES))
        spread = max(sampler.spread(*life) for life in lives) / MIB
        judge(soak, spread, report)
        figures = await asyncio.to_thread(metrics, engine)
        report(Figure("workers replaced", figures["ullage_worker_restarts_total"], "", 1))
        report(none_of("steps that ran out of memory", figures["ullage_oom_events_total"]))


def judge(soak: Soak, spread_mib: float, report: Report) -> None:
    ordered = sorted(soak.seconds)
    p95 = ordered[int(0.95 * (len(ordered) - 1))] if ordered else 0.0
    report(count("answers", len(ordered), SESSIONS))
    report(Figure("refused", soak.refused, ""))
    for error in sorted(set(soak.errors)):
        report(Fact("error", error))
    report(none_of("failed answers", len(soak.errors)))
    # A CPU's heap varies by more. Only a GPU's memory is constant to the allocation.
    limit = MOST_SPREAD_MIB if soak.job.on_gpu else None
    report(at_most("device memory, most less least", spread_mib, "MiB", limit))
    report(at_most("whole answers, p95", p95, "s", MOST_P95_S))
    report(count("prompt tokens that were cached", soak.cached, 1))


async def session(soak: Soak, channel: Any, number: int) -> None:
    """Continue one conversation after another until the time is over."""
    chooser = random.Random(number)
    vocab = service_shape(soak.job).vocab
    tokens: list[int] = []
    conversation = 0

    while not soak.is_over:
        if len(tokens) > soak.longest:
            tokens = []
            conversation += 1
        new = soak.longest // chooser.choice([4, 12, 40])
        tokens += [chooser.randrange(vocab) for _ in range(new)]
        output = soak.longest // chooser.choice([30, 60, 120])
        answer = await ask(channel, tokens, output, session=f"{number}-{conversation}")
        if soak.is_refusal(answer.error):
            soak.refused += 1
            del tokens[-new:]
            await asyncio.sleep(REFUSED_PAUSE_S)
            continue
        if answer.error:
            soak.errors.append(answer.error)
            return
        tokens += answer.token_ids
        soak.seconds.append(answer.times[-1] - answer.times[0])
        soak.cached += answer.cached_tokens


async def kill(soak: Soak, engine: Engine, after_s: float) -> None:
    """Kill the worker, record when its successor serves, and wait until memory is measured."""
    try:
        await asyncio.sleep(after_s)
        pid = engine.worker_pid()
        soak.killed = time.monotonic()
        if pid is None:
            soak.errors.append("there was no worker to kill")
            return
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.worker_pid() not in (pid, None), "another worker")
        await serves_again(engine)
        soak.back = time.monotonic()
        await asyncio.sleep(SETTLE_S + JUDGED_S)
    finally:
        soak.is_judged = True


async def serves_again(engine: Engine) -> None:
    """Wait until the engine reports that its worker runs steps."""
    for _ in range(round(WAIT_S / POLL_S)):
        if (await engine.state()).ready:
            return
        await asyncio.sleep(POLL_S)
    raise RuntimeError(f"no worker was ready within {WAIT_S:g} s")
