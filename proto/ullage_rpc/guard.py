"""Refuses requests that are too long or no valid message, with details as for any bad request.

Left to itself gRPC answers bytes that cannot be parsed with UNKNOWN and says no more.
"""

import contextlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from ullage_rpc.errors import ServiceError, abort, invalid

MAX_REQUEST_BYTES = 8 << 20
"""Longest serialized request that is parsed."""

if TYPE_CHECKING:  # generic in its type stubs alone
    Handler = grpc.RpcMethodHandler[Any, Any]
Context = grpc.aio.ServicerContext[Any, Any]


class RequestGuard(grpc.aio.ServerInterceptor):
    """Aborts with INVALID_ARGUMENT before the service sees a request it cannot read.

    reasons
        BODY_TOO_LARGE     more than MAX_REQUEST_BYTES
        MALFORMED_MESSAGE  not the wire format of the message, or a string that is not UTF-8
    """

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        behavior: Any = handler.unary_stream or handler.unary_unary
        is_generator = inspect.isasyncgenfunction(behavior)
        rebuild: Any = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        guarded: Handler = rebuild(
            _guarded_generator(behavior) if is_generator else _guarded_coroutine(behavior),
            _guarded_reader(handler.request_deserializer),
            handler.response_serializer,
        )
        return guarded


def _guarded_reader(parse: Any) -> Callable[[bytes], Any]:
    """Returns what is wrong instead of raising it: only a handler can say it to the client."""
    # A generated message's FromString is a method of its class.
    name = getattr(getattr(parse, "__self__", None), "__name__", "request")

    def read(data: bytes) -> Any:
        if len(data) > MAX_REQUEST_BYTES:
            return _too_large(name, len(data))
        try:
            return parse(data) if parse else data
        except DecodeError as error:
            return _malformed(name, error)

    return read


def _guarded_generator(behavior: Any) -> Callable[[Any, Context], AsyncGenerator[Any]]:
    async def respond(request: Any, context: Context) -> AsyncGenerator[Any]:
        if isinstance(request, ServiceError):
            await abort(context, request)
        async with contextlib.aclosing(behavior(request, context)) as responses:
            async for response in responses:
                yield response

    return respond


def _guarded_coroutine(behavior: Any) -> Callable[[Any, Context], Awaitable[Any]]:
    async def respond(request: Any, context: Context) -> Any:
        if isinstance(request, ServiceError):
            await abort(context, request)
        return await behavior(request, context)

    return respond


def _too_large(name: str, size: int) -> ServiceError:
    message = f"{name} has {size} bytes; send at most {MAX_REQUEST_BYTES}"
    return invalid(name, message, "BODY_TOO_LARGE")


def _malformed(name: str, error: DecodeError) -> ServiceError:
    message = f"{name} cannot be read ({error}); send a protobuf message with strings in UTF-8"
    return invalid(name, message, "MALFORMED_MESSAGE")
