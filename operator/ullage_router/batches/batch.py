"""The record of a batch, as the disk has it, and the states through which a batch goes."""

from typing import Literal, get_args

import msgspec

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
Ending = Literal["completed", "expired", "cancelled", "failed"]
STATUSES: tuple[Status, ...] = get_args(Status)
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
WINDOW = "24h"
"""The only completion window, as in OpenAI's API."""
WINDOW_S = 86_400


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """An error in the input file of a batch."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Number of the line in the file, from 1."""


class Batch(msgspec.Struct, kw_only=True):
    """A batch. Times are in Unix seconds."""

    id: str
    tenant: str
    """Name of the tenant that owns the batch (empty without tenants)."""
    endpoint: str
    input_file_id: str
    output_name: str
    """Id of the file with the answers. The file exists only if there is one."""
    error_name: str
    """Id of the file with the requests that failed. The file exists only if there is one."""
    output_ttl: int
    """Seconds for which both files are kept."""
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: Status = "validating"
    ending: Ending | None = None
    """The last status, if it is certain already."""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    has_output: bool = False
    """Whether the file with the answers is complete."""
    has_errors: bool = False
    """Whether the file with the requests that failed is complete."""
    total: int = 0
    """Number of requests."""
    completed: int = 0
    """Number of requests that were answered."""
    failed: int = 0
    """Number of requests that failed."""
    errors: list[BatchError] = []

    @property
    def has_ended(self) -> bool:
        """Whether the batch is in its last state."""
        return self.status in ENDED

    @property
    def ended_at(self) -> int:
        """The time at which the batch ended, or 0 if it has not ended."""
        times = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return max(time or 0 for time in times)

    def enter(self, status: Status, now: float) -> None:
        """Enter a state."""
        self.status = status
        if status != "validating":
            setattr(self, f"{status}_at", int(now))
