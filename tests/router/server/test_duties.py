"""A duty of the router that fails once goes on: one exception must not end it unnoticed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.router import PoolSection, PrefillSection
from ullage_router.admission.prefill_window import PrefillWindow
from ullage_router.batches.runner import BatchRunner
from ullage_router.engines import engines as engines_module
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.server.service import RouterService
from ullage_router.tenants.registry import Tenants
from ullage_router.tickets import issuer as issuer_module
from ullage_router.tickets.book import OpenTickets

if TYPE_CHECKING:
    StartService = Any


class Failing:
    """Fails at the first calls, and then calls the function."""

    def __init__(self, function: Callable[..., Any], failures: int = 3) -> None:
        self._function = function
        self._failures = failures

    def __call__(self, *args: Any) -> Any:
        if self._failures:
            self._failures -= 1
            raise RuntimeError("a bug")
        return self._function(*args)

    @property
    def has_failed(self) -> bool:
        return not self._failures


def test_readiness_is_reported(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ready = Failing(RouterService.is_ready.fget)  # type: ignore[attr-defined]

    async def scenario() -> None:
        async with start_service() as service:
            health = health_pb2_grpc.HealthStub(service.channel)

            async def status() -> int:
                answer = await health.Check(health_pb2.HealthCheckRequest())
                return int(answer.status)

            async with asyncio.timeout(20):
                while await status() != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                monkeypatch.setattr(RouterService, "is_ready", property(is_ready))
                service.router.service.leave()
                while await status() != health_pb2.HealthCheckResponse.NOT_SERVING:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert is_ready.has_failed

    asyncio.run(scenario())


def test_expired_picks_are_swept(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweep = Failing(OpenTickets.sweep)
    monkeypatch.setattr(issuer_module, "SWEEP_INTERVAL_S", 0.02)
    monkeypatch.setattr(OpenTickets, "sweep", lambda book: sweep(book))
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "a").write_bytes(b"k" * 32 + b"\n")

    async def scenario() -> None:
        async with start_service(tickets={"keys_dir": str(keys), "ttl": 0.1}) as service:
            await service.until(lambda: sweep.has_failed)  # a pick sweeps, too, and would fail
            asked = pb.PricedRequest(prompt_tokens=10, max_tokens=16)
            await service.grpc.Pick(pb.PickRequest(requests=[asked]))
            [engine] = service.router.service.engines.all()
            assert engine.inflight == 1
            await service.until(lambda: engine.inflight == 0, 20)

    asyncio.run(scenario())


def test_engines_are_looked_up(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Failing(Engines.on_numerics_change, 6)
    monkeypatch.setattr(engines_module, "RESOLVE_INTERVAL_S", 0.02)
    monkeypatch.setattr(Engines, "on_numerics_change", lambda self: compare(self))

    async def scenario() -> None:
        async with start_service() as service:
            engines = service.router.service.engines
            await service.until(lambda: compare.has_failed)
            target = service.engine.address
            engines.set_canary((PoolSection(name="single", targets=(target,)),))
            await service.until(lambda: [e.state for e in engines.all()] == 2 * ["ready"])

    asyncio.run(scenario())


def test_a_lost_engine_is_followed_again(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loss = Failing(Engines.on_loss, 1)
    monkeypatch.setattr(Engines, "on_loss", lambda self, engine: on_loss(self, engine))

    async def scenario() -> None:
        async with start_service() as service:
            await service.engine.stop()
            await service.until(lambda: on_loss.has_failed)
            await service.engine.start(int(service.engine.address.rpartition(":")[2]))
            await service.until(lambda: service.engine_state("single-0") == "ready")
            assert (await service.complete()).status_code == 200

    asyncio.run(scenario())


class NoEngines:
    def get(self, key: str) -> None:
        raise RuntimeError("a bug")


def test_requests_of_a_prefill_window_go_on() -> None:
    async def scenario() -> None:
        window = PrefillWindow(PrefillSection(window=0.01), NoEngines())  # type: ignore[arg-type]
        waiting: Any = SimpleNamespace(
            engine=SimpleNamespace(pool="single", key="a"), choices=("a",), is_final=None
        )
        async with asyncio.timeout(20):
            await window.settle(waiting)

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_closed_does_not_end_the_end(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = Engine.close
    tenants_close = Tenants.close
    closed: list[object] = []

    async def fail(engine: Engine) -> None:
        await close(engine)
        raise RuntimeError("a bug")

    async def note(tenants: Tenants) -> None:
        closed.append(tenants)
        await tenants_close(tenants)

    monkeypatch.setattr(Engine, "close", fail)
    monkeypatch.setattr(Tenants, "close", note)

    async def scenario() -> None:
        async with start_service():
            pass

    asyncio.run(scenario())
    assert len(closed) == 1
    assert "an engine's connection was not closed" in caplog.messages


def test_readiness_ends_before_batches_are_waited_for(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    close = BatchRunner.close
    states: list[int] = []

    async def scenario() -> None:
        async with start_service(files={"dir": str(tmp_path)}) as service:
            health = health_pb2_grpc.HealthStub(service.channel)

            async def status() -> int:
                answer = await health.Check(health_pb2.HealthCheckRequest())
                return int(answer.status)

            async def note(batches: BatchRunner) -> None:
                if not states:
                    states.append(await status())
                await close(batches)

            async with asyncio.timeout(20):
                while await status() != health_pb2.HealthCheckResponse.SERVING:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            monkeypatch.setattr(BatchRunner, "close", note)
            await service.router.stop()

    asyncio.run(scenario())
    assert states == [health_pb2.HealthCheckResponse.NOT_SERVING]
