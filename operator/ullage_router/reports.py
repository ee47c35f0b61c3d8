"""The order of one engine's reports: which one counts, what was missed, when it began anew."""

from typing import Literal

Kind = Literal["next", "gap", "old", "restart"]


class ReportOrder:
    """Checks the epoch and the sequence number of every report.

    Sequence numbers grow by one a push of one stream; an epoch is one life of an engine's server.

    Args:
        counts_earlier: whether workers lost before the first report count. A canary's do: it lives
            for its trial only, and may fall before a router hears of it. Those of a stable engine
            may be weeks old.
    """

    def __init__(self, counts_earlier: bool = False) -> None:
        self.epoch: int | None = None
        self.sequence = 0
        self.missed = 0
        """Reports that never came."""
        self.old = 0
        """Reports that came twice or too late, and were passed over."""
        self.restarts = 0
        """New lives of the engine's server, the first one not counted."""
        self.workers_lost = 0
        """Ends of its workers and of its server that nobody asked for."""
        self._counts_earlier = counts_earlier
        self._restarts_told: int | None = None

    def connected(self) -> None:
        """A new stream begins: its numbers have nothing to do with the last one's."""
        self.sequence = 0

    def take(self, epoch: int, sequence: int) -> Kind:
        """What a report is; all but `old` are to be believed, for each tells the whole state."""
        if epoch != self.epoch:
            return self._restart(epoch, sequence)
        if self.sequence and sequence <= self.sequence:
            self.old += 1
            return "old"
        missed = sequence - self.sequence - 1 if self.sequence else 0
        self.missed += missed
        self.sequence = sequence
        return "gap" if missed else "next"

    def lost(self, worker_restarts: int) -> None:
        """What a report that was taken says about its workers.

        Args:
            worker_restarts: since the start of the server.
        """
        if self._restarts_told is not None:  # what was before the first report is another's count
            self.workers_lost += max(0, worker_restarts - self._restarts_told)
        self._restarts_told = worker_restarts

    def _restart(self, epoch: int, sequence: int) -> Kind:
        kind: Kind = "next" if self.epoch is None else "restart"
        self.restarts += kind == "restart"
        self.workers_lost += kind == "restart"
        self._restarts_told = 0 if kind == "restart" or self._counts_earlier else None
        self.epoch, self.sequence = epoch, sequence
        return kind
