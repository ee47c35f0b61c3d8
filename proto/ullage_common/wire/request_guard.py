"""Lets a gRPC server refuse bad RPCs and requests before they use many resources.

By default, a gRPC server receives a whole request before it runs any application code, and responds
with UNKNOWN if the bytes cannot be parsed. The guard admits an RPC by its metadata, limits how many
requests arrive at once and how long each may take, and counts a message's fields before parsing it.
Its errors carry the same details as those for any other bad request.
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
"""Maximum size in bytes of a request that is parsed without counting its fields first."""
MAX_RECEIVED_AT_ONCE = 32
"""Maximum number of requests that a server receives at once, each at most MAX_RECEIVED_BYTES.

A tenant, or a peer if the tenant is unknown, gets at most half of these slots.
"""
MAX_RECEIVED_PUBLIC = 8
"""Maximum number of requests to public methods that a server receives at once."""
PLACE_TIMEOUT_S = 20.0
"""Maximum seconds to wait for a free slot in which to receive a request, the same as over HTTP."""
PLACE_GRACE_S = 5.0
"""How long an arriving request keeps its slot even if other requests wait, in seconds."""
RECEIVE_TIMEOUT_S = 30.0
"""Seconds within which a request must arrive once it has a slot, the same as over HTTP."""
PUBLIC_TIMEOUT_S = 5.0
"""Seconds within which a request to a public method must arrive. Such requests are small."""
STREAM_TIMEOUT_S = 30.0
"""Maximum duration in seconds of a stream to a public method (reflection)."""
MAX_CALLS = 4096
"""Maximum number of concurrent RPCs on a server.

A tenant, or a peer if the tenant is unknown, has at most half of these RPCs.
"""
MAX_PUBLIC_CALLS = 512
"""Maximum number of additional RPCs to public methods, for example health watches."""

Context = grpc.aio.ServicerContext[Any, Any]
Admit = Callable[[str, Mapping[str, str]], str | None]
"""Function that decides whether to admit an RPC, given its method and metadata.

It returns the RPC's tenant, or None for a public method. It raises ServiceError to refuse
the RPC.
"""
Run = Callable[[int, str, Callable[[], Any]], Awaitable[Any]]
"""Function that runs another function, which processes a tenant's request of a given size.

A large request is processed off the event loop.
"""
Hold = Callable[[str, asyncio.Timeout], contextlib.AbstractContextManager[Place]]
Enter = Callable[[Context], contextlib.AbstractAsyncContextManager[None]]
Begin = Callable[[AsyncIterator[bytes], Context], Awaitable[tuple[Any, Context]]]
"""Function that returns an RPC's request (or stream of requests) and the handler's context."""


def admit_all(method: str, metadata: Mapping[str, str]) -> str | None:
    """Admit every RPC, without assigning it to a tenant."""
    return ""


async def run_apart(num_bytes: int, tenant: str, work: Callable[[], Any]) -> Any:
    """Run a function, using a thread if it processes more than SMALL_REQUEST_BYTES."""
    if num_bytes <= SMALL_REQUEST_BYTES:
        return work()
    return await asyncio.to_thread(work)


class RequestGuard(grpc.aio.ServerInterceptor):
    """Refuses RPCs before their requests are received, and requests before they reach the service.

    An RPC that is not admitted ends as soon as its metadata has arrived. The guard limits how many
    requests arrive at once, and how long each request may take. Each request, and each message in a
    stream, is parsed only after its fields have been counted. RPCs are counted per tenant, or per
    peer if the tenant is unknown.

    The guard refuses RPCs for these reasons:

        CALLS_FULL         the server or the tenant has too many RPCs
        BODIES_FULL        too many requests arrive at once
        BODY_LATE          the request did not arrive in time
        BODY_TOO_LARGE     the request has more than MAX_REQUEST_BYTES, or too many fields
        MALFORMED_MESSAGE  the request is not a valid message, or a string in it is not UTF-8

    Args:
        admit: returns an RPC's tenant, or refuses the RPC.
        run: runs the function that parses a long request.
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
        """Count an RPC against the limits while the block runs.

        Raises:
            ServiceError: there are too many RPCs, or this RPC lost its slot to another one.
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
        """Return a handler for a public streaming method that limits concurrency and duration.

        No tenant is charged for the memory of these streams' messages.
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
        """Return a stream's requests and the handler's context, which are the same object.

        A handler may therefore read the requests from either.
        """
        stream = _RequestStream(context, partial(self._parse_apart, parse, tenant, context))
        return stream, stream

    async def _parse_apart(self, parse: Any, tenant: str, context: Context, data: bytes) -> Any:
        """Parse one message of a stream, off the event loop if the message has many fields.

        Raises:
            ServiceError: the message got no slot in time, has too many fields, or is malformed.
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
        """Return the single request message of an RPC, along with the RPC's context."""
        return await self._read(parse, tenant, requests, context), context

    async def _read(
        self, parse: Any, tenant: str | None, requests: AsyncIterator[bytes], context: Context
    ) -> Any:
        """Receive and parse the single request message of an RPC.

        Raises:
            ServiceError: the request got no slot, arrived late, is too large, or cannot be parsed.
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
    """A stream's requests and context in one object, because handlers may read from either.

    Args:
        context: gRPC's context, from which raw messages are read.
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
            ServiceError: the request has too many fields, or cannot be parsed.
        """
        data = await self._context.read()
        return await self._parse(data) if isinstance(data, bytes) else data


async def _receive(
    requests: AsyncIterator[bytes], name: str, limit_s: float, owner: str, hold: Hold
) -> bytes:
    """Receive the bytes of a request.

    Args:
        hold: returns a context manager that holds a slot for the request. The slot may be revoked
            in favour of another owner.

    Raises:
        ServiceError: the request arrives late or never, or its slot is lost.
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
    """Return the metadata as a dictionary without binary values."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _handler(handler: Any) -> "Handler":
    """Cast a handler to asyncio's types, which gRPC's type stubs lack."""
    typed: Handler = handler
    return typed


def _address(context: Context) -> str:
    """Return a peer's address without its port, which differs for each connection."""
    return str(context.peer()).rpartition(":")[0]


def _served(behavior: Any, handler: "Handler") -> "Handler":
    """Return a handler that passes raw request bytes to `behavior`, which parses them itself."""
    is_streaming = handler.response_streaming or inspect.isasyncgenfunction(behavior)
    make = (
        grpc.stream_stream_rpc_method_handler
        if is_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return _handler(make(behavior, None, handler.response_serializer))


def _refusing(error: ServiceError) -> "Handler":
    """Return a handler that ends its RPC with an error before any request is received."""

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
    """Return the error for an RPC that exceeds the limit on concurrent RPCs."""
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
