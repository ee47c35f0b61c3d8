"""The order of an engine's headroom reports, and the interval between them."""

import math
from typing import Literal

# Unreported free memory is wasted, but every report costs time on the router.
MIN_REPORT_INTERVAL_MS = 20
MAX_REPORT_INTERVAL_MS = 200
MAX_REPORTS_PER_S = 500
"""Maximum number of reports per second, over all engines."""

ReportKind = Literal["next", "gap", "old", "restart"]


class ReportSequence:
    """Checks the epoch and the sequence number of every report.

    The sequence number grows by one with each push of a stream. The epoch identifies one run of
    the engine's server.

    Args:
        counts_earlier: whether to count workers that were lost before the first report. They count
            for a canary, which exists only for its trial and may fail before a router discovers it.
            Losses of a stable engine may be weeks old.
    """

    def __init__(self, counts_earlier: bool = False) -> None:
        self.epoch: int | None = None
        self.sequence = 0
        self.missed = 0
        """Number of reports that never arrived."""
        self.old = 0
        """Number of ignored reports, which were duplicates or arrived too late."""
        self.restarts = 0
        """Number of restarts of the engine's server."""
        self.workers_lost = 0
        """Number of times that the engine's workers or server ended unexpectedly."""
        self._counts_earlier = counts_earlier
        self._reported_restarts: int | None = None

    def on_connect(self) -> None:
        """Start a new sequence, since every stream numbers its reports from the beginning."""
        self.sequence = 0

    def take(self, epoch: int, sequence: int) -> ReportKind:
        """Classify a report.

        All kinds except `old` are used, since every report has the full state.
        """
        if epoch != self.epoch:
            return self._restart(epoch, sequence)
        if self.sequence and sequence <= self.sequence:
            self.old += 1
            return "old"

        missed = sequence - self.sequence - 1 if self.sequence else 0
        self.missed += missed
        self.sequence = sequence
        return "gap" if missed else "next"

    def on_worker_restarts(self, worker_restarts: int) -> None:
        """Count the worker restarts given in an accepted report.

        Args:
            worker_restarts: number of restarts since the server started.
        """
        if self._reported_restarts is not None:  # earlier restarts do not count for this router
            self.workers_lost += max(0, worker_restarts - self._reported_restarts)
        self._reported_restarts = worker_restarts

    def _restart(self, epoch: int, sequence: int) -> ReportKind:
        kind: ReportKind = "next" if self.epoch is None else "restart"
        self.restarts += kind == "restart"
        self.workers_lost += kind == "restart"
        self._reported_restarts = 0 if kind == "restart" or self._counts_earlier else None
        self.epoch = epoch
        self.sequence = sequence
        return kind


def report_interval_ms(num_engines: int) -> int:
    """Return the shortest time between two reports of an engine, in milliseconds.

    The interval grows with the number of engines, so that all engines together send at most
    MAX_REPORTS_PER_S.
    """
    interval_ms = math.ceil(1000 * num_engines / MAX_REPORTS_PER_S)
    return max(MIN_REPORT_INTERVAL_MS, min(MAX_REPORT_INTERVAL_MS, interval_ms))
