"""Balances prefill work across the engines of a pool.

Causal attention over a prompt of N tokens computes N * (N + 1) / 2 query-key pairs. For each token,
the rest of a layer costs as much as `mlp_products` query-key pairs. The work, measured in pairs,
is:

    work(N) = N * (N + 1) / 2 + mlp_products * N

`balance` assigns the prompts from longest to shortest, each to the least loaded engine that has
memory for the prompt. This is the longest-processing-time rule (Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969). The critical path is the work of the busiest engine. If
the engines are idle to begin with, it is at most 4/3 of the optimum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def pairs(tokens: int) -> int:
    """Return the number of query-key pairs in causal attention over a prompt."""
    return tokens * (tokens + 1) // 2


def work(tokens: int, mlp_products: int) -> int:
    """Return the work of prefilling a prompt, measured in query-key pairs."""
    return pairs(tokens) + mlp_products * tokens


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an engine that may receive prompts."""

    id: str
    work: int
    """Prefill work already on the engine, excluding the prompts to place."""
    room: int
    """Bytes of KV memory available for the prompts to place."""


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """A prompt to place on an engine for prefill."""

    work: int
    engine: str
    """Key of the prompt's current engine, where its bytes are reserved."""
    sizes: Mapping[str, int]
    """Bytes that the prompt needs on each engine to which it may move, by engine key."""


def balance(tasks: Sequence[PrefillTask], engines: Sequence[EngineLoad]) -> list[str]:
    """Assign each task to an engine, and return one engine key per task.

    Tasks stay on their current engines unless moving them reduces the work of the busiest engine.

    Args:
        engines: all engines that hold a task, and any others to which tasks may move. Others to
            which no task may move, such as a canary's engines, are ignored.
    """
    possible = {key for task in tasks for key in (task.engine, *task.sizes)}
    engines = [engine for engine in engines if engine.id in possible]
    present = [task.engine for task in tasks]
    balanced = _longest_first(tasks, engines)
    if balanced and critical_path(tasks, balanced, engines) < critical_path(
        tasks, present, engines
    ):
        return balanced
    return present


def critical_path(
    tasks: Sequence[PrefillTask], placement: Sequence[str], engines: Sequence[EngineLoad]
) -> int:
    """Return the total prefill work of the busiest engine, which is the critical path.

    Args:
        placement: key of the engine to which each task is assigned, in the order of `tasks`.
    """
    total = {engine.id: engine.work for engine in engines}
    for task, key in zip(tasks, placement, strict=True):
        total[key] = total.get(key, 0) + task.work
    return max(total.values(), default=0)


def _longest_first(tasks: Sequence[PrefillTask], engines: Sequence[EngineLoad]) -> list[str]:
    """Assign tasks to engines, starting with the longest task.

    Return one engine key per task, or an empty list if any task does not fit.
    """
    total = {engine.id: engine.work for engine in engines}
    room = {engine.id: engine.room for engine in engines}
    placement = [""] * len(tasks)

    for number, task in sorted(enumerate(tasks), key=lambda item: -item[1].work):
        fits = [key for key, size in task.sizes.items() if size <= room.get(key, -1)]
        if not fits:
            return []
        best = min(fits, key=lambda key: (total[key], key))
        placement[number] = best
        total[best] += task.work
        room[best] -= task.sizes[best]
    return placement
