"""Reads an engine's timeline (`ullage profile --timeline`) as measured steps."""

import gzip
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ullage_engine.scheduler.batch_plan import SchedulerLimits
from ullage_replay.cost import Curve, MeasuredStep, StepSize

IDLE_S = 0.02
"""Pauses between steps from this length on are waits for requests, in seconds."""
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_LEAST_PAUSES = 5
"""Fewest pauses with about the same number of sequences that count."""


class TimelineError(Exception):
    """A timeline lacks what a cost model needs. The message says so in one line."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step of a timeline, with the requests whose tokens it computed."""

    began_unix: float
    ended_unix: float
    measured: MeasuredStep
    num_sequences: int
    request_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineTimeline:
    """An engine's timeline: the worker's facts, and its steps in order."""

    limits: SchedulerLimits
    longest_step_s: float
    steps: list[TimedStep]


def read_timeline(compressed: bytes) -> EngineTimeline:
    """Read a timeline's file.

    Raises:
        TimelineError: the engine is older than this program, or is no native engine.
    """
    document = json.loads(gzip.decompress(compressed))
    about = document.get("otherData", {})
    if "limits" not in about:
        raise TimelineError(
            "the engine's timeline does not state its limits, as vLLM's and older engines' do not; "
            "measure a native engine of this version"
        )
    began = about["began_unix_s"]
    events = [event for event in document["traceEvents"] if event.get("name") == "step"]
    return EngineTimeline(
        limits=msgspec.convert(about["limits"], SchedulerLimits),
        longest_step_s=about["longest_step_s"],
        steps=sorted((_step(began, each) for each in events), key=lambda step: step.began_unix),
    )


def _step(began: float, event: Mapping[str, Any]) -> TimedStep:
    args = event["args"]
    size = StepSize(
        args["decodes"], args["prompt_tokens"], args["decode_context"], args["prompt_context"]
    )
    since = began + event["ts"] / 1e6
    seconds = event["dur"] / 1e6
    return TimedStep(
        since,
        since + seconds,
        MeasuredStep(size, seconds),
        args["sequences"],
        frozenset(args["request_ids"]),
    )


def pauses_between(steps: Sequence[TimedStep]) -> Curve:
    """Return the mean pause between two steps in seconds, by the first one's sequences.

    Pauses in which the worker waits for requests do not count, nor does the longest hundredth.

    Raises:
        TimelineError: the steps do not follow one another.
    """
    by_bucket: dict[int, list[tuple[int, float]]] = {}
    for before, after in itertools.pairwise(steps):
        pause = after.began_unix - before.ended_unix
        if 0 <= pause < IDLE_S and before.request_ids & after.request_ids:
            bucket = max(each for each in _BUCKETS if each <= before.num_sequences)
            by_bucket.setdefault(bucket, []).append((before.num_sequences, pause))

    points = []
    for _, pauses in sorted(by_bucket.items()):
        if len(pauses) >= _LEAST_PAUSES:
            count = sum(number for number, _ in pauses) / len(pauses)
            points.append((count, trimmed_mean(pause for _, pause in pauses)))
    if not points:
        raise TimelineError("no step follows another one; measure answers of several tokens")
    return Curve(tuple(points))


def trimmed_mean(values: Iterable[float]) -> float:
    """Return the mean without the largest hundredth, which other processes have caused."""
    ordered = sorted(values)
    kept = ordered[: max(1, len(ordered) - len(ordered) // 100)]
    return sum(kept) / len(kept)
