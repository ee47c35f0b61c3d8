"""Checks the order of an engine's headroom reports, and determines the interval between them."""

import math
from typing import Literal

# Unreported free memory is wasted, but every report costs time on the router.
MIN_REPORT_INTERVAL_MS = 20
MAX_REPORT_INTERVAL_MS = 200
MAX_REPORTS_PER_S = 500
"""Target for the maximum number of reports per second from all engines combined."""

ReportKind = Literal["next", "gap", "old", "restart"]


class ReportSequence:
    """Checks each report's epoch and sequence number, and counts gaps and restarts.

    The sequence number increases by one with each report on a stream. The epoch changes when the
    engine's server restarts.

    Args:
        counts_earlier: whether to count workers that exited before the first report. These count
            for a canary, because it may fail before a router discovers it. For a stable engine,
            they may date back weeks.
    """

    def __init__(self, counts_earlier: bool = False) -> None:
        self.epoch: int | None = None
        self.sequence = 0
        self.missed = 0
        """Number of reports that were sent but never arrived."""
        self.old = 0
        """Number of reports that were ignored because they were duplicates or outdated."""
        self.restarts = 0
        """Number of times that the engine's server has restarted."""
        self.workers_lost = 0
        """Number of times that the engine's workers or server exited unexpectedly."""
        self._counts_earlier = counts_earlier
        self._reported_restarts: int | None = None

    def on_connect(self) -> None:
        """Start a new sequence, because each stream numbers its reports from the start."""
        self.sequence = 0

    def take(self, epoch: int, sequence: int) -> ReportKind:
        """Classify a report as next, gap, old or restart, from its epoch and sequence number.

        Callers ignore only `old` reports. Every report contains the full state, so a gap does no
        harm.
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
        """Count the worker restarts that have happened since the previous accepted report.

        Args:
            worker_restarts: number of worker restarts since the engine's server started.
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
    """Return the minimum interval between an engine's reports, in milliseconds.

    The interval grows with the number of engines, up to MAX_REPORT_INTERVAL_MS, so that all engines
    together send about MAX_REPORTS_PER_S.
    """
    interval_ms = math.ceil(1000 * num_engines / MAX_REPORTS_PER_S)
    return max(MIN_REPORT_INTERVAL_MS, min(MAX_REPORT_INTERVAL_MS, interval_ms))
