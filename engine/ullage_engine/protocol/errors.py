"""Errors shared by the engine's packages, and the exit statuses of the engine's processes.

WeightsError      the model cannot be loaded
WorkerStartError  the worker cannot serve with this configuration
LayoutError       the ranks cannot share the model (in `ullage_engine.parallel.layout`)
RankFailedError   another rank has reported why it cannot serve
ProofError        this startup's results differ from a verified startup's results
GroupLostError    another rank has exited or is out of sync
MemoryShortError  other processes hold memory that this worker needs
"""

GROUP_LOST = 3
"""Exit status of a rank that exits because another rank exited or a collective failed."""

MEMORY_SHORT = 5
"""Exit status of a worker after a MemoryShortError. A rank exits with status 4 instead."""

OUT_OF_MEMORY = 6
"""Exit status of a worker or rank whose step ran out of device memory.

If a rank exits with this status, its group's worker exits with the same status.
"""

UNPROVEN = 7
"""Exit status of a worker whose startup fails with a ProofError."""

HOST_SHORT = 8
"""Exit status of a worker if it or one of its ranks could not allocate host memory.

Exhausting the host memory reserved for steps does not cause this status.
"""


class WeightsError(Exception):
    """The weights cannot be used.

    The message is one line that names the file or tensor, the problem and how to fix it.
    """


class WorkerStartError(Exception):
    """The worker cannot serve with this configuration.

    The message is one line that names the configuration field at fault.
    """


class RankFailedError(Exception):
    """Another rank cannot serve. The message is one line that names the rank and the reason."""

    def __init__(self, message: str, may_retry: bool = False, is_unproven: bool = False) -> None:
        """Create an error from another rank's failure report.

        Args:
            message: one line with the rank and the reason.
            may_retry: whether the failure was unexpected, so that restarting may help.
            is_unproven: whether the other rank failed with a ProofError.
        """
        super().__init__(message)
        self.may_retry = may_retry
        self.is_unproven = is_unproven


class ProofError(Exception):
    """The results computed at this startup differ from those of a previously verified startup.

    Restarting may help. The message is one line.
    """


class GroupLostError(RuntimeError):
    """Another rank has exited or is out of sync with this rank. Recovery requires a new group."""


class MemoryShortError(Exception):
    """Too little device memory is left to compute steps, because other processes use it.

    A new worker allocates a KV pool that fits the remaining memory. The message is one line.
    """


def is_unproven(error: Exception) -> bool:
    """Return whether a start failed because its results could not be confirmed.

    This is the case if `error` is a ProofError, or reports that another rank had one.
    """
    if isinstance(error, RankFailedError):
        return error.is_unproven
    return isinstance(error, ProofError)


def one_line(error: Exception) -> str:
    """Summarise an unexpected error in one line: its class and the first line of its message."""
    if isinstance(error, RankFailedError | ProofError):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
