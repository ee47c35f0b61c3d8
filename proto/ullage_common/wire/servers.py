"""gRPC servers: their options, health and reflection.

Servers report their health over grpc.health.v1, with the services `liveness` and `readiness`. Every
server has a `RequestGuard`.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ullage_common.wire.call_names import Server
from ullage_common.wire.channels import KEEPALIVE_MS, MAX_MESSAGE_BYTES
from ullage_common.wire.request_guard import (
    MAX_CALLS,
    MAX_PUBLIC_CALLS,
    SMALL_REQUEST_BYTES,
    RequestGuard,
)

MAX_RECEIVED_BYTES = 16 * 1024 * 1024
"""Maximum size in bytes of a message that gRPC receives.

This limit is higher than the request guard's limit, so that the guard refuses a message first. Only
the guard's errors have details.
"""
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # By default a server answers keepalive pings more often than every 5 minutes with GOAWAY.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Find peers that vanished, and peers that connect and stay silent.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A second program on the port is an error. By default gRPC would share the port with it.
    ("grpc.so_reuseport", 0),
)
NARROW_WINDOWS = (("grpc.http2.bdp_probe", 0),)
"""Options of a server that accepts RPCs from any client.

By default, flow-control windows grow with a connection's speed, and would admit megabytes of
requests that the server is not reading yet. A message that is being read always gets a window of
its full length.
"""

LIVENESS = "liveness"
READINESS = "readiness"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Bind a server to an address, and return the port on which the server will listen.

    Args:
        address: `host:port`, with port 0 for any free port.
        credentials: TLS credentials, or None for plaintext.

    Raises:
        RuntimeError: the server cannot listen there.
    """
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


def new_server(
    guard: RequestGuard | None = None,
    options: Sequence[tuple[str, int]] = (),
) -> grpc.aio.Server:
    """Create a server that has no services or ports yet. Its guard refuses malformed requests.

    Args:
        guard: admits RPCs, or None to admit every RPC from every client.
        options: options in addition to SERVER_OPTIONS.
    """
    server = Server(
        interceptors=(guard or RequestGuard(),),
        options=(*SERVER_OPTIONS, *options),
        # The guard bounds calls, with a reason. This bounds the refusals that are on their way.
        max_calls=2 * (MAX_CALLS + MAX_PUBLIC_CALLS),
    )
    return cast(grpc.aio.Server, server)


def new_probe_server() -> grpc.aio.Server:
    """Create a server for public methods with small requests: health checks and headroom."""
    small = (("grpc.max_receive_message_length", 2 * SMALL_REQUEST_BYTES),)
    return new_server(RequestGuard(lambda method, metadata: None), small)


class _HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # without stubs
    """The service grpc.health.v1.Health.

    Unlike the servicer of grpcio-health-checking, this one holds no lock while it writes. A client
    that watches and reads nothing keeps no status from changing.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {"": _SERVING}
        self._changed = asyncio.Event()

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        """Set a service's status, and wake all who watch."""
        self._statuses[service] = status
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> health_pb2.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"service {request.service!r} is unknown; name {LIVENESS} or {READINESS}",
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status == sent:
                await changed.wait()
                continue
            await context.write(health_pb2.HealthCheckResponse(status=status))
            sent = status


class Health:
    """Reports over grpc.health.v1 whether a server is live, and whether it is ready for requests.

    A new server is live but not ready.
    """

    def __init__(self) -> None:
        self._servicer = _HealthService()

    def attach(self, server: grpc.aio.Server, services: Iterable[str]) -> None:
        """Add the health service and reflection to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        names = (*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        self.set_live(True)
        self.set_ready(False)

    def attach_alone(self, server: grpc.aio.Server) -> None:
        """Add the health service, but no reflection, to a probe server (which has no TLS)."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def set_live(self, live: bool) -> None:
        """Set the health of the `liveness` service."""
        self._servicer.set(LIVENESS, _SERVING if live else _NOT_SERVING)

    def set_ready(self, ready: bool) -> None:
        """Set the health of the `readiness` service and of the server as a whole."""
        for service in ("", READINESS):
            self._servicer.set(service, _SERVING if ready else _NOT_SERVING)
