"""Which engine computes which prompts, by what they cost and not by their number: pure.

A prompt of N tokens multiplies N * (N + 1) / 2 pairs of queries and keys and sends N tokens through
everything else of a layer. In units of one pair's products that is

    work(N) = N * (N + 1) / 2 + mlp_products * N

`balance` gives prompts, longest first, to the engine that has least to do (Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969: at most 4/3 of the shortest critical path when engines are
idle), as far as their memory allows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def pairs(tokens: int) -> int:
    """Products of queries and keys that causal attention over a prompt takes."""
    return tokens * (tokens + 1) // 2


def work(tokens: int, mlp_products: int) -> int:
    """What computing a prompt costs, in products of a query and a key."""
    return pairs(tokens) + mlp_products * tokens


@dataclass(frozen=True, slots=True)
class Lane:
    """An engine that may get prompts."""

    id: str
    work: int
    """Before any of them."""
    room: int
    """Bytes available to all of them."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to be placed."""

    work: int
    lane: str
    """Where it is now; it has its bytes there."""
    sizes: Mapping[str, int]
    """Bytes that it takes on each engine that it may go to."""


def balance(jobs: Sequence[Job], lanes: Sequence[Lane]) -> list[str]:
    """The lane of each job; where they are, unless another way ends sooner."""
    present = [job.lane for job in jobs]
    found = _longest_first(jobs, lanes)
    if found and critical_path(jobs, found, lanes) < critical_path(jobs, present, lanes):
        return found
    return present


def critical_path(jobs: Sequence[Job], places: Sequence[str], lanes: Sequence[Lane]) -> int:
    """Work of the engine that has most to do."""
    total = {lane.id: lane.work for lane in lanes}
    for job, place in zip(jobs, places, strict=True):
        total[place] = total.get(place, 0) + job.work
    return max(total.values(), default=0)


def _longest_first(jobs: Sequence[Job], lanes: Sequence[Lane]) -> list[str]:
    """Empty when the memory does not allow it."""
    total = {lane.id: lane.work for lane in lanes}
    room = {lane.id: lane.room for lane in lanes}
    places = [""] * len(jobs)
    for number, job in sorted(enumerate(jobs), key=lambda item: -item[1].work):
        fits = [lane for lane, size in job.sizes.items() if size <= room.get(lane, -1)]
        if not fits:
            return []
        best = min(fits, key=lambda lane: (total[lane], lane))
        places[number] = best
        total[best] += job.work
        room[best] -= job.sizes[best]
    return places
