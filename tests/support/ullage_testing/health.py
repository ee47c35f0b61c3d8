"""Waits for a server's health over grpc.health.v1."""

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

ENOUGH_S = 20.0


async def becomes(engine: Any, service: str, status: int) -> None:
    """Wait until a service of an engine has a status."""
    stub = health_pb2_grpc.HealthStub(engine.channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
    async with asyncio.timeout(ENOUGH_S):
        async for response in call:
            if response.status == status:
                break
    call.cancel()
