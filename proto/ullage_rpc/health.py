"""grpc.health.v1 with the services `liveness` and `readiness`, and server reflection."""

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

LIVENESS = "liveness"
READINESS = "readiness"

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Owner of a server's health; not ready until told so."""

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
