"""gRPC channels and servers: their options, addresses, health, reflection, and the guard of their
requests.

Options stand in one place so that both ends agree. The guard refuses requests that are too long or
no valid message, with details as for any bad request: left to itself gRPC answers bytes that cannot
be parsed with UNKNOWN and says no more. Health is grpc.health.v1 with the services `liveness` and
`readiness`.
"""

import asyncio
import contextlib
import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from ullage_common.wire.call_limits import CallCount, OpenPlaces, Place, ReceiveRoom
from ullage_common.wire.call_names import Server
from ullage_common.wire.errors import ServiceError, abort, invalid
from ullage_common.wire.message_size import check_message, is_light

if TYPE_CHECKING:  # generic in its type stubs alone
    Handler = grpc.RpcMethodHandler[Any, Any]

MAX_REQUEST_BYTES = 8 << 20
"""Longest serialized request that is parsed."""
SMALL_REQUEST_BYTES = 16 << 10
"""Longest serialized request whose parts are not counted."""
MAX_RECEIVED_AT_ONCE = 32
"""Requests that arrive at one time on a server: what they may take is MAX_RECEIVED_BYTES each. One
tenant, or one peer where there are no tenants, has at most half of them."""
MAX_RECEIVED_PUBLIC = 8
"""Requests of methods for everybody that arrive at one time."""
PLACE_TIMEOUT_S = 20.0
"""Longest wait in seconds for one of the places where requests arrive; as long as over HTTP."""
PLACE_GRACE_S = 5.0
"""Seconds for which a request may be on its way while others wait for its place."""
RECEIVE_TIMEOUT_S = 30.0
"""Seconds within which a request must arrive once it has a place; as long as over HTTP."""
PUBLIC_TIMEOUT_S = 5.0
"""The same for methods for everybody, whose requests are small."""
STREAM_TIMEOUT_S = 30.0
"""Longest stream of requests to a method for everybody: reflection."""
MAX_CALLS = 4096
"""Calls that a server has at one time; half of them for one tenant, or for one peer where there are
no tenants."""
MAX_PUBLIC_CALLS = 512
"""Calls of methods for everybody that a server has beside them, watches of health and headroom
among them."""

Context = grpc.aio.ServicerContext[Any, Any]


Admit = Callable[[str, Mapping[str, str]], str | None]
"""Return the tenant whose call it is, by method and metadata; None: a method for everybody. Raise
ServiceError where the call is refused."""
Run = Callable[[int, str, Callable[[], Any]], Awaitable[Any]]
"""Run a function that handles so many bytes of a tenant, away from the event loop if they are many.
"""


def admit_all(method: str, metadata: Mapping[str, str]) -> str | None:
    """Admit every call, as a call of nobody."""
    return ""


async def run_apart(num_bytes: int, tenant: str, work: Callable[[], Any]) -> Any:
    """Run a function, in a thread if it handles many bytes."""
    if num_bytes <= SMALL_REQUEST_BYTES:
        return work()
    return await asyncio.to_thread(work)


class RequestGuard(grpc.aio.ServerInterceptor):
    """Refuses calls before their request is received, and requests before the service sees them.

    A server that knows nothing of its clients receives whatever they send before it calls anything.
    So a call that is not admitted ends with its metadata, the requests that arrive at one time are
    few, none may take long, and one is parsed only when its parts were counted, as is each message
    of a stream. Calls are counted by tenants, and by peers where nobody knows whose they are.

    reasons
        CALLS_FULL         the server has too many calls, or the tenant
        BODIES_FULL        too many requests arrive
        BODY_LATE          it does not arrive in time
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
            ServiceError: there are too many, or this one made way for others.
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
        """Return a handler of few streams at a time, each of which ends soon: a message that
        arrives takes memory, and nobody knows whose it is."""
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
        """Return the requests of a stream, and a context that reads them."""
        stream = _RequestStream(context, partial(self._parse_apart, parse, tenant, context))
        return stream, stream

    async def _parse_apart(self, parse: Any, tenant: str, context: Context, data: bytes) -> Any:
        """Parse a message of a stream; one of many parts has a place, away from the event loop.

        Raises:
            ServiceError: it has no place in time, has too many parts, or cannot be read.
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
            ServiceError: it has no place or is not there in time, is too large, or cannot be read.
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
    """The requests of a stream, and its context, which reads them.

    Args:
        context: gRPC's, which reads bytes.
        parse: makes a message of bytes.
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
        """Return the next request; EOF behind the last one.

        Raises:
            ServiceError: it has too many parts, or cannot be read.
        """
        data = await self._context.read()
        return await self._parse(data) if isinstance(data, bytes) else data


Hold = Callable[[str, asyncio.Timeout], contextlib.AbstractContextManager[Place]]


async def _receive(
    requests: AsyncIterator[bytes], name: str, limit_s: float, owner: str, hold: Hold
) -> bytes:
    """Return the bytes of a request that has a place, which it may lose.

    Raises:
        ServiceError: it is not there in time, the place is lost, or no request comes.
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
    """Return a peer's address without the port, which differs for each connection."""
    return str(context.peer()).rpartition(":")[0]


def _served(behavior: Any, handler: "Handler") -> "Handler":
    """Return a handler whose behaviour receives its request, or its requests, itself."""
    is_streaming = handler.response_streaming or inspect.isasyncgenfunction(behavior)
    make = (
        grpc.stream_stream_rpc_method_handler
        if is_streaming
        else grpc.stream_unary_rpc_method_handler
    )
    return _handler(make(behavior, None, handler.response_serializer))


def _refusing(error: ServiceError) -> "Handler":
    """Return a handler that ends its call before anything of it is received."""

    async def refuse(requests: Any, context: Context) -> None:
        await abort(context, error)

    return _handler(grpc.stream_stream_rpc_method_handler(refuse))


Enter = Callable[[Context], contextlib.AbstractAsyncContextManager[None]]
Begin = Callable[[AsyncIterator[bytes], Context], Awaitable[tuple[Any, Context]]]
"""Return a call's request, or its requests, and the context that its behaviour has."""


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
        "the server has as many calls as it takes of you or of all; end some, or retry",
        retry_after_s=1,
    )


def _bodies_full() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "BODIES_FULL",
        "requests that arrive have all places; retry",
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


# A tokenizer.json with a 200k vocabulary is about 30 MB; prompts and tokens are far smaller.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# gRPC's own refusal has no details; RequestGuard's has, so what is a little too long must reach it.
MAX_RECEIVED_BYTES = 16 * 1024 * 1024
KEEPALIVE_MS = 20_000

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted engine must be found again at once, not after gRPC's default of up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that one attempt has, which a busy machine needs; it delays no other.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 0),
)

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without this a server answers keepalive pings more frequent than 5 minutes with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Peers that vanished, and those that connect and say nothing.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
)


NARROW_WINDOWS = (("grpc.http2.bdp_probe", 0),)
"""Options of a server that takes calls from anybody: windows that grow with a connection's speed
let in megabytes of calls that nobody reads yet. A message that is read has its own length's window.
"""


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """Open a channel to `host:port`; it connects lazily and reconnects by itself.

    Args:
        credentials: None for plaintext.
        server_name: that the server's certificate must have, whatever the target is called.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_named(server_name))


def open_blocking_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.Channel:
    """Open a channel like `open_channel`, for threads, whose calls wait."""
    if credentials is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, credentials, options=_named(server_name))


def _named(server_name: str) -> tuple[tuple[str, int | str], ...]:
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return (*CHANNEL_OPTIONS, *named)


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """The port that a server listens on from its start.

    Raises:
        RuntimeError: it cannot listen there.
    """
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def new_server(
    is_shared: bool = False,
    guard: RequestGuard | None = None,
    options: Sequence[tuple[str, int]] = (),
) -> grpc.aio.Server:
    """Create a server without services and ports; it refuses requests that it cannot read.

    Args:
        is_shared: other processes of the same user may listen on its port too.
        guard: admits calls; None: everybody may call everything.
        options: in addition to those of all servers.
    """
    server = Server(
        interceptors=(guard or RequestGuard(),),
        options=(*SERVER_OPTIONS, ("grpc.so_reuseport", int(is_shared)), *options),
        # The guard counts calls and says why it refuses one; this bounds refusals on their way.
        max_calls=2 * (MAX_CALLS + MAX_PUBLIC_CALLS),
    )
    return cast(grpc.aio.Server, server)


def new_probe_server(is_shared: bool = False) -> grpc.aio.Server:
    """Create a server whose methods are for everybody and have small requests: health, for the
    kubelet's probes, and headroom.

    Args:
        is_shared: other processes of the same user may listen on its port too.
    """
    small = (("grpc.max_receive_message_length", 2 * SMALL_REQUEST_BYTES),)
    return new_server(is_shared, RequestGuard(lambda method, metadata: None), small)


LIVENESS = "liveness"
READINESS = "readiness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Owns a server's health, which is not ready until it is set."""

    def __init__(self) -> None:
        self._servicer = HealthServicer()

    async def attach(self, server: grpc.aio.Server, services: Iterable[str]) -> None:
        """Add health and reflection of the named services to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        await self.set_live(True)
        await self.set_ready(False)

    def attach_alone(self, server: grpc.aio.Server) -> None:
        """Add health without reflection to a server for probes, which speak no TLS."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_live(self, live: bool) -> None:
        await self._servicer.set(LIVENESS, _SERVING if live else _NOT_SERVING)

    async def set_ready(self, ready: bool) -> None:
        for service in ("", READINESS):
            await self._servicer.set(service, _SERVING if ready else _NOT_SERVING)
