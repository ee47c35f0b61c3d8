"""gRPC channels and servers: their options, addresses, health, reflection, and the guard of their
requests.

Options stand in one place so that both ends agree. The guard refuses requests that are too long or
no valid message, with details as for any bad request: left to itself gRPC answers bytes that cannot
be parsed with UNKNOWN and says no more. Health is grpc.health.v1 with the services `liveness` and
`readiness`.
"""

import contextlib
import inspect
import ipaddress
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from ullage_common.wire.errors import ServiceError, abort, invalid

if TYPE_CHECKING:  # generic in its type stubs alone
    Handler = grpc.RpcMethodHandler[Any, Any]

MAX_REQUEST_BYTES = 8 << 20
"""Longest serialized request that is parsed."""

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


# A tokenizer.json with a 200k vocabulary is about 30 MB; prompts and tokens are far smaller.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# gRPC reads as much before anybody looks at a key. Its own refusal has no details; RequestGuard's
# has, so what is a little too long must reach it.
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
)


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """Opens a channel to `host:port`; it connects lazily and reconnects by itself.

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
    """Opens a channel like `open_channel`, for threads, whose calls wait."""
    if credentials is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(target, credentials, options=_named(server_name))


def _named(server_name: str) -> tuple[tuple[str, int | str], ...]:
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return (*CHANNEL_OPTIONS, *named)


NO_RECORDS = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""Errors of getaddrinfo that are answers: a headless Service without pods has no records."""


def addresses(records: Iterable[tuple[Any, ...]], port: str) -> set[str]:
    """Returns `ip:port` of every A record that getaddrinfo gave, or `[ip]:port` of every AAAA
    record where there is no A record.

    A process that has both is one process, whose address of the first kind is taken.
    """
    by_family: dict[int, set[str]] = {}
    for family, *_, (ip, *_) in records:
        by_family.setdefault(family, set()).add(
            f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}"
        )
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or set()


def is_address(host: str) -> bool:
    """Whether it is an IP address, and not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


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


def new_server(is_shared: bool = False) -> grpc.aio.Server:
    """Creates a server without services and ports; it refuses requests that it cannot read.

    Args:
        is_shared: other processes of the same user may listen on its port too.
    """
    options = (*SERVER_OPTIONS, ("grpc.so_reuseport", int(is_shared)))
    return grpc.aio.server(options=options, interceptors=(RequestGuard(),))


LIVENESS = "liveness"
READINESS = "readiness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Owns a server's health, which is not ready until it is set."""

    def __init__(self) -> None:
        self._servicer = HealthServicer()

    async def attach(self, server: grpc.aio.Server, services: Iterable[str]) -> None:
        """Adds health and reflection of the named services to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        await self.set_live(True)
        await self.set_ready(False)

    def attach_alone(self, server: grpc.aio.Server) -> None:
        """Adds health without reflection to a server for probes, which speak no TLS."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_live(self, live: bool) -> None:
        await self._servicer.set(LIVENESS, _SERVING if live else _NOT_SERVING)

    async def set_ready(self, ready: bool) -> None:
        for service in ("", READINESS):
            await self._servicer.set(service, _SERVING if ready else _NOT_SERVING)
