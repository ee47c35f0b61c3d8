"""Refuses bad calls and requests of a gRPC server before they use many resources.

By default, a gRPC server receives everything that clients send before it calls any code. It answers
bytes that cannot be parsed with UNKNOWN. The guard admits a call by its metadata, limits how many
requests arrive at once and for how long, and counts a message's parts before parsing it. Its errors
have the same details as those for any other bad request.
"""

import asyncio
import contextlib
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from ullage_common.wire.call_limits import CallCount, OpenPlaces, Place, ReceiveRoom
from ullage_common.wire.errors import ServiceError, abort, invalid
from ullage_common.wire.message_size import check_message, is_light

if TYPE_CHECKING:  # generic in its type stubs alone
    Handler = grpc.RpcMethodHandler[Any, Any]

MAX_REQUEST_BYTES = 8 << 20
"""Maximum size of a serialized request, in bytes."""
SMALL_REQUEST_BYTES = 16 << 10
"""Maximum size in bytes of a serialized request that is parsed without counting its parts."""
MAX_RECEIVED_AT_ONCE = 32
"""Requests that may arrive on a server at one time, each of at most MAX_RECEIVED_BYTES.

A tenant, or a peer if the tenant is unknown, has at most half of the places.
"""
MAX_RECEIVED_PUBLIC = 8
"""Requests of public methods that arrive at one time."""
PLACE_TIMEOUT_S = 20.0
"""Maximum seconds to wait for a place to receive a request, the same as over HTTP."""
PLACE_GRACE_S = 5.0
"""Seconds for which a request may keep arriving while others wait for its place."""
RECEIVE_TIMEOUT_S = 30.0
"""Seconds within which a request must arrive once it has a place, the same as over HTTP."""
PUBLIC_TIMEOUT_S = 5.0
"""Seconds within which a request of a public method must arrive, since it is small."""
STREAM_TIMEOUT_S = 30.0
"""Maximum duration in seconds of a stream to a public method (reflection)."""
MAX_CALLS = 4096
"""Maximum number of concurrent calls of a server.

A tenant, or a peer if the tenant is unknown, has at most half of them.
"""
MAX_PUBLIC_CALLS = 512
"""Maximum number of additional calls of public methods, for example watches of health."""

Context = grpc.aio.ServicerContext[Any, Any]
Admit = Callable[[str, Mapping[str, str]], str | None]
"""Return the tenant of a call by its method and metadata, or None for a public method. Raise
ServiceError to refuse the call."""
Run = Callable[[int, str, Callable[[], Any]], Awaitable[Any]]
"""Run a function that handles a tenant's bytes, off the event loop if the bytes are many."""
Hold = Callable[[str, asyncio.Timeout], contextlib.AbstractContextManager[Place]]
Enter = Callable[[Context], contextlib.AbstractAsyncContextManager[None]]
Begin = Callable[[AsyncIterator[bytes], Context], Awaitable[tuple[Any, Context]]]
"""Return a call's request, or its stream of requests, and the context for its behaviour."""


def admit_all(method: str, metadata: Mapping[str, str]) -> str | None:
    """Admit every call, without a tenant."""
    return ""


async def run_apart(num_bytes: int, tenant: str, work: Callable[[], Any]) -> Any:
    """Run a function, in a thread if it handles many bytes."""
    if num_bytes <= SMALL_REQUEST_BYTES:
        return work()
    return await asyncio.to_thread(work)


class RequestGuard(grpc.aio.ServerInterceptor):
    """Refuses calls before their request is received, and requests before the service sees them.

    A call that is not admitted ends as soon as its metadata has arrived. The number of requests
    that arrive at one time is limited, and so is the time for each of them. Each request, and each
    message of a stream, is parsed only after its parts were counted. Calls are counted by tenant,
    or by peer if the tenant is unknown.

    The reasons of its refusals:

        CALLS_FULL         the server, or the tenant, has too many calls
        BODIES_FULL        too many requests arrive at once
        BODY_LATE          the request did not arrive in time
        BODY_TOO_LARGE     more than MAX_REQUEST_BYTES, or too many parts
        MALFORMED_MESSAGE  not the wire format of the message, or a string that is not UTF-8

    Args:
        admit: returns the tenant of a call, or refuses it.
        run: parses long requests.
    """

    def __init__(self, admit: Admit = admit_all, run: Run = run_apart) -> None:
        self._admit = admit
        self._run = run
        self._calls = CallCount(MAX_CALLS)
        self._public_calls = OpenPlaces(MAX_PUBLIC_CALLS)
        self._room = ReceiveRoom(MAX_RECEIVED_AT_ONCE, PLACE_GRACE_S, PLACE_TIMEOUT_S)
        self._public_room = OpenPlaces(MAX_RECEIVED_PUBLIC)
        self._streams = asyncio.Semaphore(MAX_RECEIVED_PUBLIC)

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        metadata = text_metadata(handler_call_details.invocation_metadata)
        try:
            tenant = self._admit(handler_call_details.method or "", metadata)
        except ServiceError as error:
            return _refusing(error)

        if handler.request_streaming and tenant is None:
            return self._public_stream(handler)
        behavior: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        receive: Any = self._receive_stream if handler.request_streaming else self._receive_one

        begin: Begin = partial(receive, handler.request_deserializer, tenant)
        enter = partial(self._enter, tenant)
        # Handlers of streams are called before anything is received.
        if inspect.isasyncgenfunction(behavior):
            return _served(_guarded_generator(enter, begin, behavior), handler)
        return _served(_guarded_coroutine(enter, begin, behavior), handler)

    @contextlib.asynccontextmanager
    async def _enter(self, tenant: str | None, context: Context) -> AsyncIterator[None]:
        """Count a call within the block.

        Raises:
            ServiceError: there are too many calls, or this one had to make room for another.
        """
        if tenant is None:
            async with self._enter_public(context):
                yield
            return
        owner = tenant or _address(context)
        if not self._calls.add(owner):
            raise calls_full()
        try:
            yield
        finally:
            self._calls.remove(owner)

    @contextlib.asynccontextmanager
    async def _enter_public(self, context: Context) -> AsyncIterator[None]:
        place: Place | None = None
        try:
            async with asyncio.timeout(None) as timeout:
                with self._public_calls.place(_address(context), timeout) as place:
                    yield
        except TimeoutError as error:
            if place and place.is_lost:
                raise calls_full() from error
            raise

    def _public_stream(self, handler: "Handler") -> "Handler":
        """Return a handler that bounds the number and the duration of streams.

        The memory of such streams' messages is charged to no tenant.
        """
        behavior: Any = handler.stream_stream
        if behavior is None or not inspect.isasyncgenfunction(behavior):
            return handler

        async def respond(requests: Any, context: Context) -> AsyncGenerator[Any]:
            if self._streams.locked():
                await abort(context, _too_many_streams())
            try:
                async with (
                    self._streams,
                    asyncio.timeout(STREAM_TIMEOUT_S),
                    contextlib.aclosing(behavior(requests, context)) as responses,
                ):
                    async for response in responses:
                        yield response
            except TimeoutError:
                await abort(context, _late("the stream's end", STREAM_TIMEOUT_S))

        limited = grpc.stream_stream_rpc_method_handler(
            respond, handler.request_deserializer, handler.response_serializer
        )
        return _handler(limited)

    async def _receive_stream(
        self, parse: Any, tenant: str, requests: AsyncIterator[bytes], context: Context
    ) -> tuple[Any, Any]:
        """Return the requests of a stream, and the context that reads them."""
        stream = _RequestStream(context, partial(self._parse_apart, parse, tenant, context))
        return stream, stream

    async def _parse_apart(self, parse: Any, tenant: str, context: Context, data: bytes) -> Any:
        """Parse a message of a stream, in a place off the event loop if it has many parts.

        Raises:
            ServiceError: the message has no place in time, has too many parts, or cannot be read.
        """
        kind = getattr(parse, "__self__", None)
        work = partial(_parse, parse, kind, getattr(kind, "__name__", "request"), data)
        if len(data) <= SMALL_REQUEST_BYTES or kind is None or is_light(data, kind.DESCRIPTOR):
            return work()
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._room.place(tenant or _address(context)))
            except TimeoutError as error:
                raise _bodies_full() from error
            return await self._run(len(data), tenant, work)

    async def _receive_one(
        self, parse: Any, tenant: str | None, requests: AsyncIterator[bytes], context: Context
    ) -> tuple[Any, Context]:
        """Return the one request of a call, and the call's context."""
        return await self._read(parse, tenant, requests, context), context

    async def _read(
        self, parse: Any, tenant: str | None, requests: AsyncIterator[bytes], context: Context
    ) -> Any:
        """Receive the one request of a call.

        Raises:
            ServiceError: the request got no place, was late, is too large, or cannot be parsed.
        """
        # A generated message's FromString is a method of its class.
        kind = getattr(parse, "__self__", None)
        name = getattr(kind, "__name__", "request")
        owner = tenant or _address(context)
        if tenant is None:
            data = await _receive(requests, name, PUBLIC_TIMEOUT_S, owner, self._public_room.place)
            if len(data) > SMALL_REQUEST_BYTES:
                raise _too_large(name, len(data), SMALL_REQUEST_BYTES)
            return data if parse is None else _parse(parse, kind, name, data)

        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._room.place(owner))
            except TimeoutError as error:
                raise _bodies_full() from error
            data = await _receive(requests, name, RECEIVE_TIMEOUT_S, owner, self._room.arriving)
            if len(data) > MAX_REQUEST_BYTES:
                raise _too_large(name, len(data), MAX_REQUEST_BYTES)
            if parse is None:
                return data
            work = partial(_parse, parse, kind, name, data)
            return await self._run(len(data), tenant, work)


class _RequestStream:
    """The requests of a stream and its context in one object, as handlers may use either.

    Args:
        context: gRPC's context, which reads bytes.
        parse: parses a message.
    """

    def __init__(self, context: Context, parse: Callable[[bytes], Awaitable[Any]]) -> None:
        self._context = context
        self._parse = parse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (request := await self.read()) is not grpc.aio.EOF:
            yield request

    async def read(self) -> Any:
        """Return the next request, or EOF after the last one.

        Raises:
            ServiceError: the request has too many parts, or cannot be parsed.
        """
        data = await self._context.read()
        return await self._parse(data) if isinstance(data, bytes) else data


async def _receive(
    requests: AsyncIterator[bytes], name: str, limit_s: float, owner: str, hold: Hold
) -> bytes:
    """Receive the bytes of a request.

    Args:
        hold: keeps the place of the request, which it may lose to others.

    Raises:
        ServiceError: the request is late, its place is lost, or no request comes.
    """
    place: Place | None = None
    try:
        async with asyncio.timeout(limit_s) as timeout:
            with hold(owner, timeout) as place:
                return await anext(requests)
    except TimeoutError as error:
        is_lost = place is not None and place.is_lost
        raise (_bodies_full() if is_lost else _late(name, limit_s)) from error
    except StopAsyncIteration as error:
        raise invalid(name, f"the call has no {name}; send one") from error


def _parse(parse: Any, kind: Any, name: str, data: bytes) -> Any:
    if len(data) > SMALL_REQUEST_BYTES and kind is not None:
        check_message(data, kind.DESCRIPTOR)
    try:
        return parse(data)
    except DecodeError as error:
        raise _malformed(name, error) from error


def text_metadata(metadata: Any) -> dict[str, str]:
    """Return metadata without its binary values."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _handler(handler: Any) -> "Handler":
    """Return a handler with asyncio's types, which gRPC's stubs lack."""
    typed: Handler = handler
    return typed


def _address(context: Context) -> str:
    """Return a peer's address without its port, which differs for each connection."""
    return str(context.peer()).rpartition(":")[0]


def _served(behavior: Any, handler: "Handler") -> "Handler":
    """Return a handler whose function receives the call's requests itself."""
    is_streaming = handler.response_streaming or inspect.isasyncgenfunction(behavior)
    make = (
        grpc.stream_stream_rpc_method_handler
        if is_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return _handler(make(behavior, None, handler.response_serializer))


def _refusing(error: ServiceError) -> "Handler":
    """Return a handler that ends its call before receiving any request."""

    async def refuse(requests: Any, context: Context) -> None:
        await abort(context, error)

    return _handler(grpc.stream_stream_rpc_method_handler(refuse))


def _guarded_generator(
    enter: Enter, begin: Begin, behavior: Any
) -> Callable[[Any, Context], AsyncGenerator[Any]]:
    async def respond(requests: Any, context: Context) -> AsyncGenerator[Any]:
        try:
            async with enter(context):
                request, inner = await begin(requests, context)
                async with contextlib.aclosing(behavior(request, inner)) as responses:
                    async for response in responses:
                        yield response
        except ServiceError as error:
            await abort(context, error)

    return respond


def _guarded_coroutine(
    enter: Enter, begin: Begin, behavior: Any
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def respond(requests: Any, context: Context) -> Any:
        try:
            async with enter(context):
                request, inner = await begin(requests, context)
                return await behavior(request, inner)
        except ServiceError as error:
            await abort(context, error)

    return respond


def calls_full() -> ServiceError:
    """Return the refusal of a call above MAX_CALLS."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CALLS_FULL",
        "the server has reached its limit of calls, for you or in total; end some, or retry",
        retry_after_s=1,
    )


def _bodies_full() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "BODIES_FULL",
        "too many requests are arriving at once; retry",
        retry_after_s=1,
    )


def _too_many_streams() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "STREAMS_FULL",
        f"{MAX_RECEIVED_PUBLIC} such streams are open; retry",
        retry_after_s=1,
    )


def _late(name: str, limit_s: float) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "BODY_LATE",
        f"{name} did not arrive within {limit_s:g} s; send it at once",
    )


def _too_large(name: str, size: int, most: int) -> ServiceError:
    message = f"{name} has {size} bytes; send at most {most}"
    return invalid(name, message, "BODY_TOO_LARGE")


def _malformed(name: str, error: DecodeError) -> ServiceError:
    message = f"{name} cannot be read ({error}); send a protobuf message with strings in UTF-8"
    return invalid(name, message, "MALFORMED_MESSAGE")
