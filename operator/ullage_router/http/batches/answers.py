"""The bodies of the Batch API's responses, as typed structures."""

from typing import Literal

from ullage_router.batches.batch import Batch, BatchError, Status
from ullage_router.http.openai.answers import Answer


class BatchErrorObject(Answer, frozen=True, kw_only=True):
    """An error in the input file of a batch."""

    code: str
    message: str
    param: str | None
    line: int | None
    """Number of the line in the file, from 1."""


class BatchErrors(Answer, frozen=True, kw_only=True):
    """The errors in the input file of a batch."""

    object: Literal["list"] = "list"
    data: list[BatchErrorObject]


class RequestCounts(Answer, frozen=True, kw_only=True):
    """Numbers of the requests of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(Answer, frozen=True, kw_only=True):
    """A batch. Times are in Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Answer, frozen=True, kw_only=True):
    """A page of the batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


_SAME = (
    "id",
    "endpoint",
    "input_file_id",
    "status",
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "metadata",
)
"""Fields that clients see as the record has them."""


def described(batch: Batch, window: str) -> BatchObject:
    """Return the description of a batch for clients.

    Args:
        batch: The batch.
        window: The completion window.
    """
    counts = RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed)
    return BatchObject(
        **{name: getattr(batch, name) for name in _SAME},
        completion_window=window,
        errors=_errors(batch.errors),
        output_file_id=batch.output_name if batch.has_output else None,
        error_file_id=batch.error_name if batch.has_errors else None,
        request_counts=counts,
    )


def _errors(errors: list[BatchError]) -> BatchErrors | None:
    data = [
        BatchErrorObject(code=each.code, message=each.message, param=each.param, line=each.line)
        for each in errors
    ]
    return BatchErrors(data=data) if data else None
