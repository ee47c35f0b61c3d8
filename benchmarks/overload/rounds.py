"""Compares variants of a service in alternating rounds, while the machine is quiet.

Every round measures all variants in turn, so that slow drifts of the machine's speed affect all of
them alike. Each round also records how much CPU other processes took meanwhile.
"""

import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from ullage_verify.client import ChatAnswer
from ullage_verify.quantiles import quantile

QUIET_CORES = 0.1
"""Largest number of cores that other processes may use when a measurement begins."""
LOOK_S = 2.0


@dataclass
class Measured:
    """What one variant showed in one round."""

    values: dict[str, list[float]]
    """Measured values by figure, one for each answer."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of requests by outcome, which is an HTTP status or a failure."""
    others: float = 0.0
    """Average number of cores that other processes used meanwhile."""


Variant = Callable[[int], Awaitable[Measured]]
"""Measures one variant. The argument is the round's number, from which prompts are drawn."""


def measured(answers: Sequence[ChatAnswer]) -> Measured:
    """Return the times of the complete answers, in seconds, and the outcomes of all."""
    whole = [answer for answer in answers if answer.is_whole]
    values = {
        "first token": [answer.ttft_s for answer in whole],
        "end": [answer.seconds for answer in whole],
    }
    return Measured(values, Counter(answer.outcome for answer in answers))


@dataclass(frozen=True)
class Comparison:
    """The rounds of all variants."""

    rounds: Mapping[str, Sequence[Measured]]

    def quantiles(self, variant: str, figure: str, share: float) -> list[float]:
        """Return the quantile of a figure in each round."""
        return [quantile(each.values[figure], share) for each in self.rounds[variant]]

    def ratios(self, variant: str, base: str, figure: str, share: float) -> list[float]:
        """Return the ratio of the quantiles of two variants, for each round."""
        pairs = zip(
            self.quantiles(variant, figure, share),
            self.quantiles(base, figure, share),
            strict=True,
        )
        return [own / other for own, other in pairs if other]

    def outcomes(self) -> Counter[str]:
        """Return the number of requests of all rounds and variants, by outcome."""
        total = Counter[str]()
        for rounds in self.rounds.values():
            for each in rounds:
                total += each.outcomes
        return total

    def show(self, figure: str, share: float, title: str) -> None:
        """Print a figure of all variants, with the outcomes and the CPU of other processes."""
        print(f"  {title}")
        for variant, rounds in self.rounds.items():
            seen = spread(self.quantiles(variant, figure, share))
            outcomes = Counter[str]()
            for each in rounds:
                outcomes += each.outcomes
            others = max(each.others for each in rounds)
            print(f"    {variant:30} {seen:26} {text(outcomes)}; others at most {others:.2f} cores")


@dataclass(frozen=True)
class Verdict:
    """A figure of the requirements, with its limit and what was seen."""

    name: str
    seen: str
    limit: str
    is_met: bool

    def show(self) -> None:
        print(f"  {'met   ' if self.is_met else 'MISSED'} {self.name}: {self.seen} ({self.limit})")


def most_ratio(name: str, ratios: Sequence[float], limit: float) -> Verdict:
    """Judge the median of the rounds' ratios by an upper limit."""
    median = statistics.median(ratios)
    return Verdict(name, f"{spread(ratios)} times", f"at most {limit:.2f}", median <= limit)


def only(name: str, outcomes: Counter[str], allowed: set[str]) -> Verdict:
    """Judge that all requests had one of the allowed outcomes."""
    return Verdict(name, text(outcomes), ", ".join(sorted(allowed)), not set(outcomes) - allowed)


def spread(values: Sequence[float]) -> str:
    """Return the median of the values with the smallest and the largest, as text."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "nothing"


async def alternate(variants: Mapping[str, Variant], rounds: int, patience_s: float) -> Comparison:
    """Measure all variants in turn, in every round, each once the machine is quiet.

    Every second round has the opposite order, so that no variant always comes first.
    """
    results: dict[str, list[Measured]] = {name: [] for name in variants}
    for number in range(rounds):
        order = list(variants)
        for name in order if number % 2 == 0 else reversed(order):
            await quiet(patience_s)
            cpu = OthersCPU()
            one = await variants[name](number)
            one.others = cpu.cores()
            results[name].append(one)
            progress(f"round {number + 1} of {rounds}, {name}: {text(one.outcomes)}")
    return Comparison(results)


class OthersCPU:
    """Measures the CPU time of all processes that this process did not start, from now on.

    Time that the machine's host took away counts, too.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._own = _own_cpu()
        self._busy = _busy_s()

    def cores(self) -> float:
        """Return the average number of cores that other processes have used since the start."""
        seconds = time.monotonic() - self._began
        own = _own_cpu()
        # A process that has ended takes its times with it.
        own_s = sum(own[pid] - self._own.get(pid, 0.0) for pid in own)
        return max(0.0, _busy_s() - self._busy - own_s) / seconds


def _own_cpu() -> dict[int, float]:
    """Return the CPU seconds of this process and of those that it started, by process id."""
    seconds: dict[int, float] = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds[process.pid] = times.user + times.system
    return seconds


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


async def quiet(patience_s: float) -> None:
    """Wait until other processes use hardly any CPU, for at most `patience_s` seconds."""
    until = time.monotonic() + patience_s
    while True:
        cpu = OthersCPU()
        await asyncio.sleep(LOOK_S)
        cores = cpu.cores()
        if cores <= QUIET_CORES:
            return
        if time.monotonic() > until:
            progress(f"others use {cores:.1f} cores, and the wait is over")
            return


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
