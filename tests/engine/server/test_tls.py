"""An engine behind mTLS: only who has a certificate of its authority is served."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import ConfigError
from ullage_common.wire.channels import open_channel

if TYPE_CHECKING:
    Authority = Any
    Serve = Any

NAME = "demo-engine.test"
NEWS_S = 30.0


@pytest.fixture
def authority(make_authority: Callable[[], "Authority"]) -> "Authority":
    return make_authority()


def secured(config: EngineConfig, folder: Path) -> EngineConfig:
    server = msgspec.structs.replace(config.server, tls_dir=str(folder), probe_port=0)
    return msgspec.structs.replace(config, server=server)


@contextlib.asynccontextmanager
async def connect(
    engine: Any, authority: "Authority", folder: Path | None
) -> AsyncIterator[grpc.aio.Channel]:
    own = [(folder / name).read_bytes() if folder else None for name in ("tls.key", "tls.crt")]
    credentials = grpc.ssl_channel_credentials(authority.pem, *own)
    async with open_channel(f"127.0.0.1:{engine._app.port}", credentials, NAME) as channel:
        yield channel


async def is_served(engine: Any, authority: "Authority", folder: Path | None) -> bool:
    """Whether a new connection gets an answer."""
    async with connect(engine, authority, folder) as channel:
        stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
        try:
            await stub.GetHeadroom(headroom_pb2.GetHeadroomRequest(), timeout=NEWS_S)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
    return True


def test_only_the_router_is_served(
    config: EngineConfig,
    serve: "Serve",
    authority: "Authority",
    make_authority: Callable[[], "Authority"],
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        folder = authority.issue(tmp_path / "engine", NAME)
        router = authority.issue(tmp_path / "router", "router.test")
        stranger = make_authority().issue(tmp_path / "stranger", "router.test")
        async with serve(secured(config, folder), ready=False) as engine:
            assert await is_served(engine, authority, router)
            assert not await is_served(engine, authority, None)
            assert not await is_served(engine, authority, stranger)
            with pytest.raises(grpc.aio.AioRpcError):  # plaintext
                await engine.state()

    asyncio.run(scenario())


def test_a_watch_outlives_a_new_certificate(
    config: EngineConfig,
    serve: "Serve",
    authority: "Authority",
    make_authority: Callable[[], "Authority"],
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        folder = authority.issue(tmp_path / "engine", NAME)
        router = authority.issue(tmp_path / "router", "router.test")
        async with (
            serve(secured(config, folder), ready=False) as engine,
            connect(engine, authority, router) as channel,
        ):
            stub = headroom_pb2_grpc.HeadroomServiceStub(channel)
            watch = stub.WatchHeadroom(headroom_pb2.WatchHeadroomRequest())
            first = await watch.read()
            newer = make_authority()
            newer.issue(folder, NAME)
            newcomer = newer.issue(tmp_path / "newcomer", "router.test")
            async with asyncio.timeout(NEWS_S):
                while not await is_served(engine, newer, newcomer):  # noqa: ASYNC110 - a new connection asks
                    await asyncio.sleep(0.05)
            assert not await is_served(engine, newer, router)
            last = await watch.read()
            assert last.headroom.sequence > first.headroom.sequence
            watch.cancel()

    asyncio.run(scenario())


def test_probes_and_headroom_need_no_certificate_and_nothing_else_is_told(
    config: EngineConfig, serve: "Serve", authority: "Authority", tmp_path: Path
) -> None:
    async def scenario() -> None:
        folder = authority.issue(tmp_path / "engine", NAME)
        async with (
            serve(secured(config, folder), ready=False) as engine,
            open_channel(f"127.0.0.1:{engine._app.probe_port}") as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="liveness"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            headrooms = headroom_pb2_grpc.HeadroomServiceStub(channel)
            told = await headrooms.GetHeadroom(headroom_pb2.GetHeadroomRequest())
            assert told.headroom.engine
            inference = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference.GetModel(inference_pb2.GetModelRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(scenario())


def test_a_start_without_an_authority_is_refused(
    config: EngineConfig, serve: "Serve", authority: "Authority", tmp_path: Path
) -> None:
    folder = authority.issue(tmp_path / "engine", NAME)
    (folder / "ca.crt").unlink()

    async def scenario() -> None:
        async with serve(secured(config, folder), ready=False):
            pass

    with pytest.raises(ConfigError, match=r"must have the key ca\.crt"):
        asyncio.run(scenario())
