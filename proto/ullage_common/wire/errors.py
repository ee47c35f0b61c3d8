"""The error type that services send to clients, with conversions to and from google.rpc details."""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Never

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "ullage.dev"
MAX_MESSAGE_BYTES = 1024
"""Maximum bytes of an error's message at the end of an RPC.

gRPC refuses headers of more than 8 KiB, and the client would get neither code nor reason. A message
is there twice, and takes up to three times its bytes.
"""
MAX_VALUE_BYTES = 256
"""Maximum bytes of a value of an error's metadata at the end of an RPC."""
SLOW_CLIENT_GRACE_S = 5.0
"""Seconds after a request's time limit during which its client may still read the answer."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class ServiceError(Exception):
    """A refusal or failure that is reported to the client.

    Args:
        code: gRPC status code.
        reason: stable name in UPPER_SNAKE_CASE for programs (google.rpc.ErrorInfo.reason).
        message: one sentence for people, with the field, the value and the remedy.
        metadata: facts as strings, such as field, needed_bytes, available_bytes.
        retry_after_s: seconds after which to retry, or None if a retry cannot help.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"ServiceError({self.code.name}, {self.reason}, {self.message!r}, {self.metadata})"


def invalid(field: str, message: str, reason: str = "INVALID_FIELD") -> ServiceError:
    """Return an INVALID_ARGUMENT error that names the invalid field."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT, reason, message, metadata={"field": field}
    )


def slow_client() -> ServiceError:
    """Return the error for an answer that its client did not read in time."""
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "SLOW_CLIENT",
        "the answer was not read within the time limit; read faster or ask for less",
    )


def served_names(model: str, adapters: Iterable[str]) -> str:
    """Return, for error messages, a list of the names that a request may use as its `model`."""
    names = ", ".join(map(repr, sorted(adapters)))
    return f"{model!r} or its adapter {names}" if names else repr(model)


def to_status(error: ServiceError) -> status_pb2.Status:
    """Convert an error to a google.rpc.Status, with RetryInfo if a retry can help."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_pack(info)]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_pack(retry))
    return status_pb2.Status(code=error.code.value[0], message=error.message, details=details)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> Never:
    """End the RPC with the error, its details and gRPC's retry pushback."""
    status = rpc_status.to_status(to_status(_shortened(error)))
    # gRPC's retry logic reads this trailer and not RetryInfo. -1 forbids a retry.
    pushback = -1 if error.retry_after_s is None else int(error.retry_after_s * 1000)
    trailers = (*status.trailing_metadata, ("grpc-retry-pushback-ms", str(pushback)))
    # If the client has gone, the task is cancelled here, because gRPC never frees an answer that it
    # cannot send.
    await asyncio.sleep(0)
    try:
        await context.abort(status.code, status.details, trailers)
    except grpc.aio.AbortError as aborted:
        if task := asyncio.current_task():
            task.add_done_callback(partial(_release, aborted))
        raise
    raise AssertionError("context.abort returned")


def _shortened(error: ServiceError) -> ServiceError:
    """Return an error whose text, which may quote the client's, fits into headers."""
    return ServiceError(
        error.code,
        error.reason,
        _cut(error.message, MAX_MESSAGE_BYTES),
        metadata={name: _cut(value, MAX_VALUE_BYTES) for name, value in error.metadata.items()},
        retry_after_s=error.retry_after_s,
    )


def _cut(text: str, most: int) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= most else encoded[: most - 3].decode(errors="ignore") + "..."


def _release(aborted: grpc.aio.AbortError, task: object) -> None:
    """Drop the stack frames of the exception that ended an RPC.

    gRPC keeps the exception with the RPC, and the frames refer back to the RPC. Without this
    function, the RPC and its request would stay in memory until the next full garbage collection,
    which is rare.
    """
    aborted.__traceback__ = None
    aborted.__context__ = None


def from_rpc_error(error: grpc.aio.AioRpcError | grpc.Call) -> ServiceError:
    """Return the ServiceError that the peer raised, or a ServiceError for a transport failure."""
    message = error.details() or error.code().name
    return _from_details(error.code(), message, _details(error))


def from_status(status: Any) -> ServiceError:
    """Convert a google.rpc.Status to a ServiceError."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _from_details(code, status.message or code.name, status.details)


def _from_details(
    code: grpc.StatusCode, message: str, details: Iterable[AnyMessage]
) -> ServiceError:
    metadata: dict[str, str] = {}
    reason = code.name
    retry_after_s = None
    for detail in details:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
            metadata = dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return ServiceError(code, reason, message, metadata=metadata, retry_after_s=retry_after_s)


def _details(error: grpc.aio.AioRpcError | grpc.Call) -> list[AnyMessage]:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            return list(status.details)
    return []


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
