"""Injects many faults at random times, and checks the streams for lost text and long pauses."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ullage_verify.client import ChatAnswer
from ullage_verify.criteria import Checks
from ullage_verify.faults import Fault
from ullage_verify.kinds import KINDS, RequestKind
from ullage_verify.quantiles import quantile
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import Target, TargetError

TOKENS = 160
MAX_GAP_S = 30.0
SLOW_BUFFER_BYTES = 4096
"""Size of the receive buffers of a client that reads slowly."""
SLOW_PIECES = 5
"""Number of events after each of which a slow client pauses."""
SLOW_READ_S = 0.4
PAUSE_S = (0.1, 2.0)
"""Minimum and maximum number of seconds between a recovery and the next fault."""
PATIENCE_S = 120.0
"""Seconds without recovery after which the server counts as dead."""
POLL_S = 0.02
RETRY_S = 0.5


@dataclass
class Marathon:
    """The state of a marathon: which streams have finished and which faults have been injected."""

    expected: Mapping[RequestKind, str]
    """Response text of each kind of request in a run without faults."""
    answers: list[tuple[RequestKind, ChatAnswer]] = field(default_factory=list)
    faults: list[tuple[str, float]] = field(default_factory=list)
    """Name of each fault, and the time on the monotonic clock at which it had been injected."""
    last_text_at: float = 0.0
    """Time at which any stream last received text, on the monotonic clock."""
    is_over: bool = False

    def on_text(self, answer: ChatAnswer) -> None:
        """Record that a stream has received text."""
        self.last_text_at = answer.last_at or 0.0

    def gaps(self, name: str = "") -> list[float]:
        """Return the longest pause of each stream that was running at a fault, sorted.

        Responses that are not streamed or are read slowly are left out, because their pauses say
        nothing about the server.

        Args:
            name: name of the faults to consider (empty for all).
        """
        times = [at for each, at in self.faults if name in (each, "")]
        return sorted(
            answer.longest_gap_s
            for kind, answer in self.answers
            if answer.num_pieces
            and not kind.is_read_slowly
            and any(answer.began_at < at < answer.ended_at for at in times)
        )


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Inject random faults while a stream of each kind runs, and check all responses."""
    expected = await _undisturbed(target, checks)
    if not expected:
        return
    marathon = Marathon(expected)
    streams = [asyncio.create_task(_stream(target, marathon, kind)) for kind in expected]
    try:
        is_alive = await _make_faults(settings, marathon)
        marathon.is_over = True
        if is_alive:
            await asyncio.gather(*streams)
    finally:
        for stream in streams:
            stream.cancel()
    checks.holds(
        "the server comes back from every fault",
        is_alive,
        f"{settings.num_faults}",
        f"{len(marathon.faults)}",
    )
    _check(checks, marathon)


async def _undisturbed(target: Target, checks: Checks) -> Mapping[RequestKind, str]:
    """Return the response text of each kind of request in a run without faults.

    A kind is left out if its response is incomplete or empty, or differs between two such runs.
    """
    runs = [await asyncio.gather(*(_ask(target, kind) for kind in KINDS)) for _ in range(2)]
    expected: dict[RequestKind, str] = {}
    for kind, first, second in zip(KINDS, *runs, strict=True):
        if not first.is_whole:
            checks.skip(f"{kind.name}: {kind.question}", f"the server answers {first.outcome}")
        elif not first.text or first.text != second.text:
            checks.skip(f"{kind.name}: {kind.question}", "the answers differ without a fault, too")
        else:
            expected[kind] = first.text
    return expected


async def _stream(target: Target, marathon: Marathon, kind: RequestKind) -> None:
    while not marathon.is_over:
        answer = await _ask(target, kind, marathon)
        marathon.answers.append((kind, answer))
        if not answer.is_whole:
            await asyncio.sleep(answer.pause_s)


async def _ask(target: Target, kind: RequestKind, marathon: Marathon | None = None) -> ChatAnswer:
    messages = [{"role": "user", "content": kind.question}]
    on_text = marathon.on_text if marathon else None
    if not (kind.is_read_slowly and marathon):
        return await target.client.chat(target.model, messages, TOKENS, on_text, **kind.fields)

    async with target.client.with_buffers(SLOW_BUFFER_BYTES) as client:
        return await client.chat(target.model, messages, TOKENS, _dawdle, **kind.fields)


async def _dawdle(answer: ChatAnswer) -> None:
    """Wait after each of the first events of a stream."""
    if answer.num_pieces <= SLOW_PIECES:
        await asyncio.sleep(SLOW_READ_S)


async def _make_faults(settings: ScenarioSettings, marathon: Marathon) -> bool:
    """Inject the faults, and return whether the server recovered from each of them."""
    chooser = random.Random(1)
    names = sorted(settings.faults)
    for number in range(settings.num_faults):
        await asyncio.sleep(chooser.uniform(*PAUSE_S))
        name = chooser.choice(names)
        settings.progress(f"fault {number + 1} of {settings.num_faults}: {name}")
        hit_at = await _hit(settings.faults[name])
        if hit_at is None:
            return False
        marathon.faults.append((name, hit_at))
        over_at = time.monotonic()
        while marathon.last_text_at <= over_at:
            if time.monotonic() > over_at + PATIENCE_S:
                return False
            await asyncio.sleep(POLL_S)
    return True


async def _hit(fault: Fault) -> float | None:
    """Inject a fault, retrying until the server accepts it.

    Returns:
        The time at which the server was hit, on the monotonic clock, or None if it was not hit
        within PATIENCE_S.
    """
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            return await fault()
        except TargetError:
            await asyncio.sleep(RETRY_S)
    return None


def _check(checks: Checks, marathon: Marathon) -> None:
    answered = [(kind, each) for kind, each in marathon.answers if not each.is_refused]
    lost = [(kind, each) for kind, each in answered if not each.is_whole]
    differing = [
        kind for kind, each in answered if each.is_whole and each.text != marathon.expected[kind]
    ]
    seen = f"{len(lost)} of {len(answered)}"
    if lost:
        kind, answer = lost[0]
        seen += f" ({kind.name}: {answer.error[:60]})"
    checks.holds("lost answers", not lost, "0", seen)

    counts = Counter(kind.name for kind in differing)
    seen = f"{len(differing)} of {len(answered)}"
    if differing:
        seen += f" ({', '.join(f'{count} {name}' for name, count in sorted(counts.items()))})"
    checks.holds("answers with other words", not differing, "0", seen)

    gaps = marathon.gaps()
    if not gaps:
        checks.skip("p95 of the longest pause", "no answer had a fault in its middle")
        return
    checks.at_most("p95 of the longest pause", quantile(gaps, 0.95), MAX_GAP_S)
    checks.figures["faults"] = len(marathon.faults)
    checks.figures["answers"] = len(answered)
    checks.figures["disturbed"] = len(gaps)
    checks.figures["pause_p50_s"] = round(quantile(gaps, 0.5), 3)
    checks.figures["pause_max_s"] = round(gaps[-1], 3)
    numbers = Counter(name for name, _ in marathon.faults)
    for name, count in sorted(numbers.items()) if len(numbers) > 1 else ():
        if some := marathon.gaps(name):
            checks.at_most(
                f"p95 of the longest pause, {count} x {name}", quantile(some, 0.95), MAX_GAP_S
            )
