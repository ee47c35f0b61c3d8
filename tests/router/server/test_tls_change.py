"""TLS towards engines, turned on and off under load: routers speak both, then engines change one by
one, then routers speak the new one alone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from ullage_testing.certificates import Authority
from ullage_testing.fake_engine import MODEL, FakeEngine
from ullage_testing.ports import hold, port_of

from ullage_common.config.router import RouterConfig
from ullage_common.process.config_file import read_file
from ullage_common.wire.tls import Certificates, speaks_tls
from ullage_router.main import Router

ENGINES = "demo-engine.test"
CLIENTS = 4
LIMIT_S = 60.0


@asynccontextmanager
async def running_engine(name: str, certificates: Certificates | None) -> AsyncIterator[FakeEngine]:
    with hold() as held:  # it starts there once more
        engine = FakeEngine(name, "single", 100, 2000)
        engine.credentials = certificates and certificates.server_credentials()
        await engine.start(port_of(held))
        try:
            yield engine
        finally:
            await engine.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - the condition belongs to others
            await asyncio.sleep(0.01)


def states(router: Router) -> list[str]:
    return [engine.state for engine in router.service.engines.all()]


@asynccontextmanager
async def running_router(
    folder: Path, engines: list[FakeEngine], tls: dict[str, Any], state: str = "ready"
) -> AsyncIterator[Router]:
    """A router that has found all engines, in that state."""
    document = {
        "model": MODEL,
        **{port: {"host": "127.0.0.1", "port": 0} for port in ("http", "grpc", "metrics")},
        "pools": [{"name": "single", "targets": [engine.address for engine in engines]}],
        "tls": tls,
    }
    path = folder / "router.yaml"
    path.write_text(json.dumps(document))
    router = Router(read_file(path, RouterConfig))
    await router.start()
    try:
        await until(lambda: states(router) == [state] * len(engines))
        yield router
    finally:
        await router.stop()


class Load:
    """Clients that ask without a pause, through the router that a Service would choose."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.answers: list[int] = []
        self._clients = [asyncio.create_task(self._ask()) for _ in range(CLIENTS)]

    async def _ask(self) -> None:
        async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False, verify=False) as client:
            while True:
                url = f"http://127.0.0.1:{self.router.http_port}/v1/completions"
                answer = await client.post(url, json={"model": MODEL, "prompt": "Hi"})
                self.answers.append(answer.status_code)

    async def more(self, number: int = 20) -> None:
        """Wait for so many more answers."""
        wanted = len(self.answers) + number
        await until(lambda: len(self.answers) >= wanted or any(c.done() for c in self._clients))

    async def end(self) -> None:
        """Raise what ended a client before."""
        for client in self._clients:
            client.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._clients)


async def roll(engine: FakeEngine, router: Router, certificates: Certificates | None) -> None:
    """Replace an engine as a StatefulSet does: it drains, ends, and starts in another mode."""
    engine.push(draining=True)
    [seen] = [each for each in router.service.engines.all() if each.address == engine.address]
    await until(lambda: seen.state == "draining" and not engine.active and not seen.inflight)
    engine.headroom.draining = False
    engine.credentials = certificates and certificates.server_credentials()
    await engine.restart()
    await until(lambda: seen.state == "ready")


@pytest.mark.parametrize("is_turned_on", [True, False], ids=["on", "off"])
def test_no_request_is_lost(tmp_path: Path, is_turned_on: bool) -> None:
    async def scenario() -> None:
        authority = Authority()
        folder = authority.issue(tmp_path / "engine", ENGINES)
        own = str(authority.issue(tmp_path / "router", "router.test"))
        secure = {"engines": {"dir": own, "server_name": ENGINES}}
        mixed = {"engines": {**secure["engines"], "accept_plaintext": True}}
        before, after = ({}, secure) if is_turned_on else (secure, {})

        certificates = Certificates(folder, folder)
        await certificates.start()
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(certificates.close)
            had = None if is_turned_on else certificates
            has = certificates if is_turned_on else None
            engines = [
                await stack.enter_async_context(running_engine(name, had))
                for name in ("single-0", "single-1")
            ]
            async with contextlib.AsyncExitStack() as routers:
                load = Load(
                    await routers.enter_async_context(running_router(tmp_path, engines, before))
                )
                await load.more()
                both = await stack.enter_async_context(running_router(tmp_path, engines, mixed))
                load.router = both
                await load.more()

            for engine in engines:
                await roll(engine, both, has)
                asked = len(engine.requests)
                await load.more()
                await until(lambda engine=engine, asked=asked: len(engine.requests) > asked)

            load.router = await stack.enter_async_context(running_router(tmp_path, engines, after))
            await load.more()

            modes = [await speaks_tls(engine.address) for engine in engines]
            assert modes == [is_turned_on] * 2
            await load.end()
        assert set(load.answers) == {200}

    asyncio.run(scenario())


def test_a_router_that_speaks_both_verifies_engines_with_tls(tmp_path: Path) -> None:
    """An engine of another authority is not called in plaintext instead."""

    async def scenario() -> None:
        authority = Authority()
        stranger = Authority()
        folder = stranger.issue(tmp_path / "engine", ENGINES)
        (folder / "ca.crt").write_bytes(authority.pem)
        own = str(authority.issue(tmp_path / "router", "router.test"))
        mixed = {"engines": {"dir": own, "server_name": ENGINES, "accept_plaintext": True}}
        certificates = Certificates(folder, folder)
        await certificates.start()
        async with (
            running_engine("single-0", certificates) as engine,
            running_router(tmp_path, [engine], mixed, "connecting") as router,
        ):
            [seen] = router.service.engines.all()
            await until(lambda: "handshake failed" in seen.trouble.lower())
            assert not engine.requests
        await certificates.close()

    asyncio.run(scenario())


def test_what_speaks_neither_is_not_taken_for_either(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with server:
            assert await speaks_tls(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") is None
        with hold() as held:
            assert await speaks_tls(f"127.0.0.1:{port_of(held)}") is None
        engine = FakeEngine("single-0", "single", 100, 2000)
        await engine.start()
        assert await speaks_tls(engine.address) is False
        await engine.stop()
        folder = Authority().issue(tmp_path / "engine", ENGINES)
        pair = [((folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes())]
        engine.credentials = grpc.ssl_server_credentials(pair)
        await engine.start()
        assert await speaks_tls(engine.address) is True
        await engine.stop()

    asyncio.run(scenario())
