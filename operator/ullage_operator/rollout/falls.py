"""Counts engine crashes during a canary trial, from the engines' own counters.

A crash, called a fall here, is the loss of a worker or the exit of a container. An engine's server
counts the workers that it lost, and the kubelet counts container restarts. Both counters belong to
a single pod. Their values therefore do not depend on when a router reloaded its rollout file, on
which address a name resolved to, or on which operator read them.

Routers also count crashes, but only once they know about a canary, so they miss its earlier
crashes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The revision and the current crash counters of one engine pod."""

    uid: str
    pool: str
    """Name of the pod's pool. A canary is treated as a separate pool."""
    pod_revision: str
    """Revision of the StatefulSet from which the pod was created (empty if unknown)."""
    restarts: int
    """Number of container restarts of the pod."""
    epoch: int = 0
    """Number that identifies one run of the engine's server (0 before the first report)."""
    workers_lost: int = 0
    """Number of workers that the server has lost during the run `epoch`."""
    is_fresh: bool = True
    """Whether the engine's last report is recent enough to use."""
    trouble: str = ""
    """Why the operator does not receive the engine's reports (empty while they arrive)."""


@dataclass(frozen=True, slots=True)
class FallCount:
    """One pod's number of crashes during a trial, and its counters at the last report."""

    is_canary: bool
    restarts: int = 0
    epoch: int = 0
    workers_lost: int = 0
    falls: int = 0


Falls = Mapping[str, FallCount]
"""Crashes during a trial by pod uid, including those of deleted pods."""


def counted(before: Falls, canary: Iterable[EngineReport], stable: Iterable[EngineReport]) -> Falls:
    """Return the crash counts, updated from the engines' current reports.

    A canary's pod exists only for its trial, so all of its crashes count. For a stable pod, only
    crashes after its first report in the trial count.
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

    # A new server counts from zero, and the kubelet has counted the end of the old server.
    workers_before = count.workers_lost if report.epoch == count.epoch else 0
    return replace(
        after,
        epoch=report.epoch,
        workers_lost=report.workers_lost,
        falls=falls + max(0, report.workers_lost - workers_before),
    )


def total(falls: Falls, is_canary: bool) -> int:
    """Return the total number of crashes of the canary or of the stable engines."""
    return sum(count.falls for count in falls.values() if count.is_canary is is_canary)
