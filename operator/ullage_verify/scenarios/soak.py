"""Runs conversations for a long time, and checks for failures, slowness and memory growth."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ullage_verify.client import ChatAnswer, Document
from ullage_verify.criteria import Checks
from ullage_verify.quantiles import quantile
from ullage_verify.scenarios.settings import DEFAULT_E2E_S, ScenarioSettings
from ullage_verify.target import Objective, Target, metric

NUM_SESSIONS = 4
TURN_TOKENS = (30, 100, 400, 1_000)
ANSWER_TOKENS = (16, 64, 128)
FULL_SHARE = 0.6
"""Fraction of the model's context that a conversation fills before a new one begins."""
MAX_MEMORY_SHARE = 0.85
MAX_GROWTH_SHARE = 0.05
SAMPLE_S = 2.0
WARM_UP_SHARE = 0.25
"""Initial fraction of the memory samples that is ignored, because caches are still filling."""
MIN_SAMPLES = 12
RESIDENT_METRIC = "process_resident_memory_bytes"
ENGINE_METRICS = ("ullage_server_resident_bytes", "ullage_worker_resident_bytes")
"""Metrics of an engine of Ullage: the resident memory of its server and of its worker."""
PROCESSES = "all its processes, --pid"
PAGES_PROCESS = "the process behind /metrics"
ENGINES = "engines with their workers, {} x /metrics"
LEDGER = "memory that the engines allocate, /stats"
GROWTH = "growth of the server's memory"
MIB = 1 << 20


@dataclass
class SoakProgress:
    """The state of a soak run: its end time, and the responses and memory samples so far."""

    ends_at: float
    answers: list[ChatAnswer] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(10_000))
    """Numbers of prompts that no turn has used."""
    memory: dict[str, list[float]] = field(default_factory=dict)
    """Samples of memory in bytes, by the name of those whose memory it is."""
    used_share: list[float] = field(default_factory=list)
    """Samples of the allocated fraction of device memory, of the engine with the highest one."""

    def add_memory(self, whose: str, num_bytes: float | None) -> None:
        """Add a sample of memory. None is no sample."""
        if num_bytes is not None:
            self.memory.setdefault(whose, []).append(num_bytes)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_at


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Keep four conversations running, and check the responses and the server's memory.

    If the call is cancelled, the responses that have ended by then are checked.
    """
    objective = await target.objective(settings.e2e_s, "e2e_p95_s", DEFAULT_E2E_S)
    began = time.monotonic()
    progress = SoakProgress(began + 60 * settings.minutes)
    try:
        async with asyncio.TaskGroup() as group:
            sampler = group.create_task(_sample(target, settings, progress))
            sessions = [
                group.create_task(_converse(target, progress, number))
                for number in range(NUM_SESSIONS)
            ]
            await asyncio.wait(sessions)
            sampler.cancel()
    except asyncio.CancelledError:
        if progress.answers:
            minutes = round((time.monotonic() - began) / 60, 1)
            _check(target, checks, progress, objective, minutes)
        raise

    _check(target, checks, progress, objective, settings.minutes)


def _check(
    target: Target, checks: Checks, progress: SoakProgress, objective: Objective, minutes: float
) -> None:
    answers = [answer for answer in progress.answers if not answer.is_refused]
    failed = [answer for answer in answers if not answer.is_whole]
    checks.holds(
        f"every answer of {minutes:g} minutes ends well",
        bool(answers) and not failed,
        "all",
        f"{len(answers) - len(failed)} of {len(answers)}"
        + (f" ({failed[0].error[:80]})" if failed else ""),
    )
    times = [answer.seconds for answer in answers]
    p95 = quantile(times, 0.95)
    checks.at_most(f"p95 of all answers ({objective})", p95, objective.seconds)
    _check_growth(target, checks, progress.memory)
    if progress.used_share:
        checks.at_most(
            "allocated share of the device's memory", max(progress.used_share), MAX_MEMORY_SHARE, ""
        )
    else:
        reason = target.unreported("the memory of its device (/stats)")
        checks.skip("allocated share of the device's memory", reason)
    checks.figures["answers"] = len(answers)
    checks.figures["refused"] = len(progress.answers) - len(answers)


async def _converse(target: Target, progress: SoakProgress, number: int) -> None:
    """Hold one conversation after another until the run is over."""
    chooser = random.Random(number)
    while True:
        messages: list[dict[str, str]] = []
        tokens = 0
        while tokens < FULL_SHARE * target.context:
            if progress.is_over:
                return
            turn = min(chooser.choice(TURN_TOKENS), target.usable // 4)
            messages.append(dict(target.prompt(next(progress.numbers), turn)[0]))
            answer = await target.client.chat(
                target.model, messages, chooser.choice(ANSWER_TOKENS), user=f"session-{number}"
            )
            progress.answers.append(answer)
            if answer.is_refused:
                messages.pop()
                await asyncio.sleep(answer.pause_s)
                continue
            if not answer.is_whole:
                await asyncio.sleep(answer.pause_s)
                break
            messages.append({"role": "assistant", "content": answer.text or "-"})
            tokens = answer.prompt_tokens + answer.output_tokens


async def _sample(target: Target, settings: ScenarioSettings, progress: SoakProgress) -> None:
    started = time.monotonic()
    while True:
        engines = (await target.stats()).get("engines", ())
        if settings.processes:
            progress.add_memory(PROCESSES, settings.processes.resident_bytes())
        else:
            progress.add_memory(PAGES_PROCESS, await target.metric(RESIDENT_METRIC))
            progress.add_memory(_engines_name(target), await _engines_bytes(target))
            progress.add_memory(LEDGER, _mean_allocated(engines))

        shares = [
            _allocated(engine) / engine["total_bytes"]
            for engine in engines
            if engine.get("total_bytes")
        ]
        if shares:
            progress.used_share.append(max(shares))

        seconds = time.monotonic() - started
        settings.progress(
            f"{seconds:.0f} of {60 * settings.minutes:.0f} s, {len(progress.answers)} answers"
        )
        await asyncio.sleep(SAMPLE_S)


def _engines_name(target: Target) -> str:
    return ENGINES.format(len(target.engines))


async def _engines_bytes(target: Target) -> float | None:
    """Return the resident bytes of all engines, or None if an engine does not report them."""
    sizes = [await metric(engine, name) for engine in target.engines for name in ENGINE_METRICS]
    reported = [size for size in sizes if size is not None]
    return sum(reported) if sizes and len(reported) == len(sizes) else None


def _mean_allocated(engines: Sequence[Document]) -> float | None:
    """Return the mean of the bytes that engines have allocated, or None without engines.

    A mean does not grow when another engine starts.
    """
    sizes = [_allocated(engine) for engine in engines if engine.get("ledger")]
    return statistics.mean(sizes) if sizes else None


def _allocated(engine: Document) -> float:
    return float(sum(line["allocated_bytes"] for line in engine["ledger"]))


def _check_growth(target: Target, checks: Checks, memory: Mapping[str, Sequence[float]]) -> None:
    """Check how much memory grew from the first to the last quarter after the warm-up."""
    if not memory:
        checks.skip(GROWTH, f"{target.unreported(RESIDENT_METRIC)}, or --pid")
        return
    for whose, samples in memory.items():
        _check_samples(checks, f"{GROWTH} ({whose})", samples)
    if not memory.keys() & {PROCESSES, _engines_name(target)}:  # too few samples are named above
        reason = f"{target.unreported('the memory of its engines')}, or --pid if it runs here"
        checks.skip(f"{GROWTH} (its engines)", reason)
    checks.figures["resident_mib"] = {
        whose: [round(value / MIB) for value in samples] for whose, samples in memory.items()
    }


def _check_samples(checks: Checks, name: str, samples: Sequence[float]) -> None:
    counted = samples[int(WARM_UP_SHARE * len(samples)) :]
    if len(counted) < MIN_SAMPLES:
        needed = f"{MIN_SAMPLES} samples after the warm-up"
        checks.skip(name, f"{len(counted)} of at least {needed}; give a longer --minutes")
        return
    part = len(counted) // 4
    early = statistics.median(counted[:part])
    late = statistics.median(counted[-part:])
    checks.at_most(name, late / early - 1, MAX_GROWTH_SHARE, "of its size")
