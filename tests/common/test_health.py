"""The health service: statuses change for everybody, whatever single clients do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ullage_testing.http2_frames import HEADERS, PREFACE, SETTINGS, Frame, call, call_fields

from ullage_common.wire.channels import open_channel
from ullage_common.wire.servers import LIVENESS, READINESS, Health, new_probe_server

ENOUGH_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NO_WINDOW = Frame(SETTINGS, 0, 0, (4).to_bytes(2) + (0).to_bytes(4))
"""The setting INITIAL_WINDOW_SIZE: the client takes no byte of a message."""


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@contextlib.asynccontextmanager
async def served(health: Health) -> AsyncIterator[int]:
    server = new_probe_server()
    health.attach_alone(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def watch_and_read_nothing(port: int, service: str) -> asyncio.StreamWriter:
    """Begins to watch; returns once the server has begun its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = asked(service).SerializeToString()
    frames = [NO_WINDOW, *call(1, call_fields("/grpc.health.v1.Health/Watch"), request)]
    writer.write(PREFACE + b"".join(frame.encoded() for frame in frames))
    kind = None
    while kind != HEADERS:
        head = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(head[:3]))
        kind = head[3]
    return writer


def test_a_client_that_watches_and_reads_nothing_keeps_no_status_from_changing() -> None:
    async def scenario() -> None:
        health = Health()
        health.set_ready(False)
        async with served(health) as port, open_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            async with asyncio.timeout(ENOUGH_S):
                writers = [await watch_and_read_nothing(port, each) for each in ("", READINESS)]
                statuses = stub.Watch(asked(READINESS))
                assert (await statuses.read()).status == NOT_SERVING

                health.set_ready(True)
                assert (await stub.Check(asked(READINESS))).status == SERVING
                assert (await statuses.read()).status == SERVING
            statuses.cancel()
            for writer in writers:
                writer.close()

    asyncio.run(scenario())


def test_a_service_is_watched_before_it_is_known() -> None:
    async def scenario() -> None:
        health = Health()
        async with served(health) as port, open_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            async with asyncio.timeout(ENOUGH_S):
                assert (await stub.Check(asked(""))).status == SERVING
                with pytest.raises(grpc.aio.AioRpcError, match="name liveness or readiness") as no:
                    await stub.Check(asked(LIVENESS))
                assert no.value.code() is grpc.StatusCode.NOT_FOUND

                statuses = stub.Watch(asked(LIVENESS))
                assert (await statuses.read()).status == UNKNOWN
                health.set_live(True)
                assert (await statuses.read()).status == SERVING
                health.set_live(False)
                assert (await statuses.read()).status == NOT_SERVING
            statuses.cancel()

    asyncio.run(scenario())
