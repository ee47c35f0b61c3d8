"""Counts the falls of engines during a trial, as the engines themselves report them. Pure.

An engine counts the workers that its server lost, and the kubelet counts the containers that ended.
Both counts belong to one pod, so neither depends on when a router read its file, on which address a
name resolved to, or on which operator looked. Routers count too, but from the moment at which they
hear of a canary, which may be after its fall.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine pod's revision and counts, as the operator reads them now."""

    uid: str
    pool: str
    """The pod's pool, which is another one for a canary."""
    pod_revision: str
    """Revision of the StatefulSet that created the pod; empty if it is unknown."""
    restarts: int
    """Number of container restarts of the pod."""
    epoch: int = 0
    """Life of the engine's server that `workers_lost` belongs to; 0 before the first report."""
    workers_lost: int = 0
    """Number of workers that this life of the server lost."""
    is_fresh: bool = True
    """Whether the engine reports now, so that its count is the present one."""
    trouble: str = ""
    """Why the operator could not follow its reports last; empty while they come."""


@dataclass(frozen=True, slots=True)
class FallCount:
    """Falls of one pod during a trial, with the counts that they were read from."""

    is_canary: bool
    restarts: int = 0
    epoch: int = 0
    workers_lost: int = 0
    falls: int = 0


Falls = Mapping[str, FallCount]
"""Falls of a trial by the pods' uid, including deleted pods."""


def counted(before: Falls, canary: Iterable[EngineReport], stable: Iterable[EngineReport]) -> Falls:
    """Return the counts with the present reports of engines.

    The whole life of a canary's pod counts, since the pod lives for its trial only. A stable pod
    counts from the first report in the trial.
    """
    counts = dict(before)
    for report in canary:
        count = counts.get(report.uid, FallCount(is_canary=True))
        counts[report.uid] = _with_report(count, report)
    for report in stable:
        if report.uid in counts:
            counts[report.uid] = _with_report(counts[report.uid], report)
        elif report.epoch:
            counts[report.uid] = FallCount(
                False, report.restarts, report.epoch, report.workers_lost
            )
    return counts


def _with_report(count: FallCount, report: EngineReport) -> FallCount:
    falls = count.falls + max(0, report.restarts - count.restarts)
    after = replace(count, restarts=max(count.restarts, report.restarts), falls=falls)

    if not report.epoch:
        return after

    # A new server counts from zero, and the kubelet has counted the end of the one before.
    workers_before = count.workers_lost if report.epoch == count.epoch else 0
    return replace(
        after,
        epoch=report.epoch,
        workers_lost=report.workers_lost,
        falls=falls + max(0, report.workers_lost - workers_before),
    )


def total(falls: Falls, is_canary: bool) -> int:
    """Return the falls of one side."""
    return sum(count.falls for count in falls.values() if count.is_canary is is_canary)
