"""Errors that cross rooms of the engine.

WeightsError      the model cannot be loaded
WorkerStartError  the worker cannot serve with this configuration
LayoutError       the model cannot be shared out as asked (in `ullage_engine.parallel.layout`)
RankFailedError   another rank has reported why it cannot serve
ProofError        this start computes otherwise than the one that was verified
GroupLostError    another rank is gone
MemoryShortError  other processes hold memory that this worker needs
"""


class WeightsError(Exception):
    """The weights cannot be used; one line naming the file or tensor, what is wrong, what to do."""


class WorkerStartError(Exception):
    """The worker cannot serve with this configuration; the message is one line naming the field."""


class RankFailedError(Exception):
    """Another rank cannot serve; one line with its rank and its reason."""

    def __init__(self, message: str, may_retry: bool = False, is_unproven: bool = False) -> None:
        """`may_retry`: nobody foresaw the reason, so another start may do better. `is_unproven`:
        the reason is a ProofError."""
        super().__init__(message)
        self.may_retry = may_retry
        self.is_unproven = is_unproven


class ProofError(Exception):
    """This start computes otherwise than the one that was verified; another may do better. The
    message is one line."""


class GroupLostError(RuntimeError):
    """Another rank is gone, or out of step with this one; only a new group helps."""


class MemoryShortError(Exception):
    """Steps cannot be computed, since other processes hold memory of the device; another worker
    takes a KV pool that fits beside them. The message is one line."""


GROUP_LOST = 3
"""Exit status of a rank that ends because another did, or a collective with it failed."""

MEMORY_SHORT = 5
"""Exit status of a worker that ends with a MemoryShortError; 4 is a rank's."""

OUT_OF_MEMORY = 6
"""Exit status of a worker or rank that a step which ran out of memory ends, and of the worker whose
group that rank was of."""

HOST_SHORT = 8
"""Exit status of a worker whose host gave no memory to it, or to a rank of it, beside what steps
have set aside."""

UNPROVEN = 7
"""Exit status of a worker whose start ends with a ProofError."""


def is_unproven(error: Exception) -> bool:
    """Return whether a start failed because it, or another rank, computes otherwise than before."""
    if isinstance(error, RankFailedError):
        return error.is_unproven
    return isinstance(error, ProofError)


def one_line(error: Exception) -> str:
    """Describe an unforeseen error for a message: its class and its first line."""
    if isinstance(error, RankFailedError | ProofError):
        return str(error)
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
