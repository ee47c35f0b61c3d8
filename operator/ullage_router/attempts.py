"""Which failures of an engine another may not have, and what a client is told when none helped."""

import grpc

from ullage.inference.v1 import inference_pb2
from ullage_router import errors
from ullage_rpc.errors import ServiceError

MAX_ENGINE_FAILURES = 3
# A request at which engines break may be the cause, and must not go on to break them all.
MAX_BREAKAGES = 2
BREAKAGES = frozenset({"WORKER_LOST", "REQUEST_FAILED"})
# Failures that another engine may not have; anything else is the request's own.
ANOTHER_ENGINE_MAY = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        *errors.OF_THE_ROUTER,
    }
)
# Failures that say nothing of the request: it may come back.
_NO_ENGINE = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, *errors.OF_THE_ROUTER}
)


def is_enough(failures: list[ServiceError]) -> bool:
    """Whether a request that failed so on engines goes to no other."""
    breakages = sum(error.reason in BREAKAGES for error in failures)
    return len(failures) >= MAX_ENGINE_FAILURES or breakages >= MAX_BREAKAGES


def as_told(error: ServiceError, timeout_s: float, num_failures: int) -> ServiceError:
    """What the client is told when no engine could serve the request."""
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.deadline(timeout_s)
    if error.code in _NO_ENGINE:
        return ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            "NO_ENGINE",
            f"{num_failures} attempts failed, the last with: {error.message}; retry",
            retry_after_s=error.retry_after_s or 1,
        )
    return error


def check_ending(finished: inference_pb2.Finished | inference_pb2.SampleFinished) -> None:
    """An engine that drains may cut an answer off; nobody asked for that here."""
    if finished.reason == inference_pb2.FINISH_REASON_CANCELLED:
        raise errors.broken_stream("the engine cancelled it")
