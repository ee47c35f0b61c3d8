"""Errors that packages of the engine share, and the exit statuses of its processes.

WeightsError      the model cannot be loaded
WorkerStartError  the worker cannot serve with this configuration
LayoutError       the ranks cannot share the model (in `ullage_engine.parallel.layout`)
RankFailedError   another rank has reported why it cannot serve
ProofError        this start's results differ from those of the verified one
GroupLostError    another rank is gone
MemoryShortError  other processes hold memory that this worker needs
"""

GROUP_LOST = 3
"""Exit status of a rank that ends because another rank ended or a collective failed."""

MEMORY_SHORT = 5
"""Exit status of a worker that ends with a MemoryShortError. A rank's exit status is then 4."""

OUT_OF_MEMORY = 6
"""Exit status of a worker or rank whose step ran out of device memory.

If a rank has this status, the worker of its group has the same status.
"""

UNPROVEN = 7
"""Exit status of a worker whose start ends with a ProofError."""

HOST_SHORT = 8
"""Exit status of a worker if the worker or one of its ranks could not allocate host memory.

Running out of the host memory that is reserved for steps does not lead to this status.
"""


class WeightsError(Exception):
    """The weights cannot be used.

    The message is one line with the file or tensor, the fault and the remedy.
    """


class WorkerStartError(Exception):
    """The worker cannot serve with this configuration.

    The message is one line that names the field.
    """


class RankFailedError(Exception):
    """Another rank cannot serve. The message is one line with the rank and the reason."""

    def __init__(self, message: str, may_retry: bool = False, is_unproven: bool = False) -> None:
        """Create the error that another rank has reported.

        Args:
            message: one line with the rank and the reason.
            may_retry: whether the reason was unforeseen, so that another start may succeed.
            is_unproven: whether the reason is a ProofError.
        """
        super().__init__(message)
        self.may_retry = may_retry
        self.is_unproven = is_unproven


class ProofError(Exception):
    """The results of this start differ from the results of the verified start.

    Another start attempt may succeed. The message is one line.
    """


class GroupLostError(RuntimeError):
    """Another rank has ended or is out of step with this rank. Recovery needs a new group."""


class MemoryShortError(Exception):
    """Steps cannot be computed, because other processes hold device memory.

    A new worker allocates a KV pool that fits the remaining memory. The message is one line.
    """


def is_unproven(error: Exception) -> bool:
    """Return whether a start failed because a rank's results differ from the verified ones."""
    if isinstance(error, RankFailedError):
        return error.is_unproven
    return isinstance(error, ProofError)


def one_line(error: Exception) -> str:
    """Describe an unforeseen error for a message: its class and its first line."""
    if isinstance(error, RankFailedError | ProofError):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
