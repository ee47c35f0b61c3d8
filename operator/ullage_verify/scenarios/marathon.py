"""Injects many faults at random times, and checks the streams for lost text and long pauses."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ullage_verify.client import ChatAnswer
from ullage_verify.criteria import Checks
from ullage_verify.faults import Fault
from ullage_verify.kinds import KINDS, RequestKind
from ullage_verify.quantiles import quantile
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import Target, TargetError

TOKENS = 160
SLOW_BUFFER_BYTES = 4096
"""Size of the receive buffers of a client that reads slowly."""
SLOW_PIECES = 5
"""Number of events after each of which a slow client pauses."""
SLOW_READ_S = 0.4
PAUSE_S = (0.1, 2.0)
"""Minimum and maximum number of seconds between a recovery and the next fault."""
DOUBLE_EVERY = 5
"""Every fifth injection consists of two faults, the second of which does not await recovery."""
DOUBLE = "two in a row"
COVERAGE_FAULTS = 50
"""Number of faults from which on every kind of request must have been hit."""
EFFECT_S = 0.5
"""Seconds within which a fault takes effect. An engine injects one a few steps after the call."""
PATIENCE_S = 120.0
"""Seconds without recovery after which the server counts as dead."""
POLL_S = 0.02
RETRY_S = 0.5


@dataclass
class Stream:
    """The requests of one kind, which a client sends one after the other."""

    kind: RequestKind
    expected: str | None
    """Response text without faults, or None if the server does not repeat it."""
    answers: list[ChatAnswer] = field(default_factory=list)
    is_open: bool = False
    """Whether a request is being answered."""
    began_at: float = 0.0
    """Time at which the current or last request was sent, on the monotonic clock."""
    moved_at: float = 0.0
    """Time at which that request was sent, last received text or ended."""
    served_at: float = 0.0
    """Time at which a request last received text or was answered in full."""
    requests: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each request that has ended since the last call of `forget`."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each time without text while a request was open, since the last `forget`.

    The wait for the first text counts.
    """

    @property
    def is_timed(self) -> bool:
        """Return whether pauses of this stream say something about the server."""
        return self.kind.is_streamed and not self.kind.is_read_slowly

    def begin(self) -> None:
        """Record that a request is sent."""
        self.is_open = True
        self.began_at = time.monotonic()
        self.moved_at = self.began_at

    def on_text(self, _: ChatAnswer) -> None:
        """Record that the current request received text."""
        self._move()
        self.served_at = self.moved_at

    def end(self, answer: ChatAnswer) -> None:
        """Record that the current request ended."""
        self._move()
        if answer.is_whole:
            self.served_at = self.moved_at
        self.is_open = False
        self.requests.append((self.began_at, self.moved_at))
        self.answers.append(answer)

    def forget(self) -> None:
        """Forget pauses and requests that have ended."""
        self.pauses.clear()
        self.requests.clear()

    def was_open(self, at: float) -> bool:
        """Return whether a request was being answered at a time since the last `forget`."""
        return (self.is_open and self.began_at < at) or any(
            start < at < end for start, end in self.requests
        )

    def longest_pause_s(self, since: float) -> float | None:
        """Return the longest pause that ended after `since`, in seconds, or None without one."""
        return max((end - start for start, end in self.pauses if end > since), default=None)

    def _move(self) -> None:
        now = time.monotonic()
        self.pauses.append((self.moved_at, now))
        self.moved_at = now


class Hit(NamedTuple):
    """A fault in the middle of a request."""

    fault: str
    kind: str
    """Kind of the request."""
    pause_s: float | None
    """Longest pause of the stream until all streams went on, in seconds.

    None for responses that are not streamed or are read slowly.
    """


@dataclass
class Marathon:
    """The state of a marathon: its streams, and what faults have hit."""

    streams: Sequence[Stream]
    num_faults: int = 0
    hits: list[Hit] = field(default_factory=list)
    is_over: bool = False

    def has_recovered(self, since: float) -> bool:
        """Return whether all open streams were served since a time, and there is at least one.

        A new request is not enough: the wait for its first text would count for the next fault.
        """
        timed = [stream for stream in self.streams if stream.is_timed and stream.is_open]
        return bool(timed) and all(stream.served_at > since for stream in timed)


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Inject random faults while a stream of each kind runs, and check all responses.

    If the call is cancelled, the responses that have ended by then are checked.
    """
    marathon = Marathon(await _undisturbed(target, checks))
    if not any(stream.is_timed for stream in marathon.streams):
        checks.holds("a stream that faults can hit", False, "at least 1", "none")
        return

    tasks = [asyncio.create_task(_keep_asking(target, marathon, each)) for each in marathon.streams]
    try:
        is_alive = await _make_faults(settings, marathon)
        marathon.is_over = True
        if is_alive:
            await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        if marathon.num_faults:
            _check_answers(checks, marathon)
            _check_pauses(checks, marathon, settings.gap_s)
        raise
    finally:
        for task in tasks:
            task.cancel()

    checks.holds(
        "the server comes back from every fault",
        is_alive and marathon.num_faults >= settings.num_faults,
        f"{settings.num_faults}",
        f"{marathon.num_faults}",
    )
    _check_answers(checks, marathon)
    _check_pauses(checks, marathon, settings.gap_s)


async def _undisturbed(target: Target, checks: Checks) -> Sequence[Stream]:
    """Send each kind of request twice without faults, and return the streams to run.

    A kind is left out if the server does not answer it. If the two texts differ or are empty, or
    the server lowered a parameter, the stream's words are not compared.
    """
    runs = [await asyncio.gather(*(_ask(target, kind) for kind in KINDS)) for _ in range(2)]
    streams = []
    for kind, first, second in zip(KINDS, *runs, strict=True):
        name = f"{kind.name}: {kind.question}"
        if not (first.is_whole and second.is_whole):
            outcome = second.outcome if first.is_whole else first.outcome
            checks.skip(name, f"the server answers {outcome}")
            continue
        is_degraded = bool(first.degraded or second.degraded)
        is_repeated = bool(first.text) and first.text == second.text and not is_degraded
        if is_degraded:
            lowered = f"the server lowered {first.degraded or second.degraded}"
            checks.skip(f"{name}: the same words", lowered)
        elif not is_repeated:
            checks.skip(f"{name}: the same words", "the answers differ without a fault, too")
        streams.append(Stream(kind, first.text if is_repeated else None))
    return streams


async def _keep_asking(target: Target, marathon: Marathon, stream: Stream) -> None:
    while not marathon.is_over:
        stream.begin()
        answer = await _ask(target, stream.kind, stream)
        stream.end(answer)
        if not answer.is_whole:
            await asyncio.sleep(answer.pause_s)


async def _ask(target: Target, kind: RequestKind, stream: Stream | None = None) -> ChatAnswer:
    messages = [{"role": "user", "content": kind.question}]
    on_text = stream.on_text if stream else None
    if not (kind.is_read_slowly and stream):
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
    number = 0
    while marathon.num_faults < settings.num_faults:
        number += 1
        await asyncio.sleep(chooser.uniform(*PAUSE_S))
        is_double = number % DOUBLE_EVERY == 0 and marathon.num_faults + 2 <= settings.num_faults
        chosen = [chooser.choice(names) for _ in range(1 + is_double)]
        if not await _inject(settings, marathon, chosen, chooser.uniform(*PAUSE_S)):
            return False
    return True


async def _inject(
    settings: ScenarioSettings, marathon: Marathon, names: Sequence[str], pause_s: float
) -> bool:
    """Inject faults, and wait until all streams go on.

    Args:
        settings: has the faults.
        marathon: the streams.
        names: one fault, or two that follow each other after `pause_s`.
        pause_s: time in seconds between two faults.

    Returns:
        Whether the streams have gone on.
    """
    for stream in marathon.streams:
        stream.forget()

    first_at: float | None = None
    for name in names:
        if first_at is not None:
            await asyncio.sleep(pause_s)
        fault_number = marathon.num_faults + 1
        settings.progress(f"fault {fault_number} of {settings.num_faults}: {name}")
        hit_at = await _hit(settings.faults[name])
        if hit_at is None:
            return False
        marathon.num_faults += 1
        first_at = first_at or hit_at

    await asyncio.sleep(EFFECT_S)
    over_at = time.monotonic()
    while not marathon.has_recovered(over_at):
        if time.monotonic() > over_at + PATIENCE_S:
            return False
        await asyncio.sleep(POLL_S)

    assert first_at is not None, "at least one fault was injected"
    title = names[0] if len(names) == 1 else DOUBLE
    for stream in marathon.streams:
        if not stream.was_open(first_at):
            continue
        longest_s = stream.longest_pause_s(first_at) if stream.is_timed else None
        marathon.hits.append(Hit(title, stream.kind.name, longest_s))
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


def _check_answers(checks: Checks, marathon: Marathon) -> None:
    """Check that no answer was lost or has other words.

    A server may lower parameters for lack of memory. If it says so, the words are not compared.
    """
    answered: list[tuple[Stream, ChatAnswer]] = []
    num_refused = 0
    for stream in marathon.streams:
        served = [answer for answer in stream.answers if not answer.is_refused]
        answered += [(stream, answer) for answer in served]
        num_refused += len(stream.answers) - len(served)

    lost = [(stream, answer) for stream, answer in answered if not answer.is_whole]
    seen = f"{len(lost)} of {len(answered)}"
    if lost:
        stream, answer = lost[0]
        seen += f" ({stream.kind.name}: {answer.error[:60]})"
    checks.holds("lost answers", bool(answered) and not lost, "0", seen)

    compared = [
        (stream, answer)
        for stream, answer in answered
        if answer.is_whole and stream.expected is not None and not answer.degraded
    ]
    if compared:
        counts = Counter(
            stream.kind.name for stream, answer in compared if answer.text != stream.expected
        )
        seen = f"{counts.total()} of {len(compared)}"
        if counts:
            seen += f" ({', '.join(f'{count} {name}' for name, count in sorted(counts.items()))})"
        checks.holds("answers with other words", not counts, "0", seen)

    checks.figures["faults"] = marathon.num_faults
    checks.figures["answers"] = len(answered)
    checks.figures["refused"] = num_refused
    checks.figures["degraded"] = sum(bool(answer.degraded) for _, answer in answered)


def _check_pauses(checks: Checks, marathon: Marathon, limit_s: float) -> None:
    """Check how long streams paused, and that faults hit every kind of request."""
    hits = Counter((hit.fault, hit.kind) for hit in marathon.hits)
    checks.figures["hits"] = {f"{fault}, {kind}": n for (fault, kind), n in sorted(hits.items())}
    if marathon.num_faults >= COVERAGE_FAULTS:
        totals = Counter(hit.kind for hit in marathon.hits)
        fewest = min((stream.kind.name for stream in marathon.streams), key=lambda n: totals[n])
        checks.at_least(
            "faults in the middle of each kind of request", totals[fewest], 1, f"({fewest})"
        )

    pauses = _pauses(marathon.hits)
    if not pauses:
        checks.skip("p95 of the longest pause", "no stream had a fault in its middle")
        return

    checks.at_most("p95 of the longest pause", quantile(pauses, 0.95), limit_s)
    checks.figures["pause_p50_s"] = round(quantile(pauses, 0.5), 3)
    checks.figures["pause_max_s"] = round(pauses[-1], 3)
    checks.figures["disturbed"] = len(pauses)

    kinds = sorted({hit.kind for hit in marathon.hits})
    checks.figures["pause_p95_s"] = {
        kind: round(quantile(some, 0.95), 3)
        for kind in kinds
        if (some := _pauses(hit for hit in marathon.hits if hit.kind == kind))
    }
    faults = sorted({hit.fault for hit in marathon.hits})
    for fault in faults if len(faults) > 1 else ():
        some = _pauses(hit for hit in marathon.hits if hit.fault == fault)
        if some:
            name = f"p95 of the longest pause, {fault}"
            checks.at_most(name, quantile(some, 0.95), limit_s)


def _pauses(hits: Iterable[Hit]) -> list[float]:
    """Return the pauses of streams, shortest first."""
    return sorted(hit.pause_s for hit in hits if hit.pause_s is not None)
