"""Faults of real processes: every request ends, with 200, 429, 503 or 504 and nothing else."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[3]
ENGINE = [sys.executable, "-m", "benchmarks.support.kv_engine"]
OVERLOAD = [sys.executable, "-m", "benchmarks", "overload"]
ROUTER = [sys.executable, "-m", "ullage_router.main"]
PATIENCE_S = 60.0
ALLOWED = {200, 429, 503, 504}
LINGER = 200
"""Output tokens of a request that is still running when the fault comes."""


class Process:
    """A child; `line` reads what it says of itself."""

    def __init__(self, child: asyncio.subprocess.Process, address: str) -> None:
        self.child = child
        self.address = address

    async def kill(self) -> None:
        self.child.kill()
        await self.child.wait()

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    async def totals(self) -> dict[str, int]:
        """Ends an engine, which says what it served."""
        self.child.terminate()
        assert self.child.stdout
        line = await asyncio.wait_for(self.child.stdout.readline(), PATIENCE_S)
        return dict(json.loads(line))


class Service:
    """Engines and a router, each a process."""

    def __init__(self, engines: list[Process], router: Process, http: httpx.AsyncClient) -> None:
        self.engines = engines
        self.router = router
        self.http = http

    def ask(self, tokens: int = 4, **more: Any) -> "asyncio.Task[httpx.Response]":
        body = {"prompt": "x" * 40, "max_tokens": tokens, **more}
        return asyncio.ensure_future(self.http.post("/v1/completions", json=body))

    async def stats(self) -> dict[str, Any]:
        return dict((await self.http.get("/stats")).json())

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first /stats that fulfil it."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(found := await self.stats()):  # noqa: ASYNC110 - processes have no events
                await asyncio.sleep(0.05)
        return found

    async def busy(self, count: int) -> Process:
        """The engine on which `count` requests run."""
        engines = (await self.until(lambda s: busiest(s)["inflight"] == count))["engines"]
        at = max(engines, key=lambda e: e["inflight"])["address"]
        return next(engine for engine in self.engines if engine.address == at)


def busiest(stats: dict[str, Any]) -> dict[str, Any]:
    return dict(max(stats["engines"], key=lambda e: e["inflight"]))


@contextlib.asynccontextmanager
async def engine(name: str, *arguments: str) -> AsyncIterator[Process]:
    child = await asyncio.create_subprocess_exec(
        *ENGINE, "--name", name, *arguments, cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout
        line = await asyncio.wait_for(child.stdout.readline(), PATIENCE_S)
        yield Process(child, f"127.0.0.1:{json.loads(line)['port']}")
    finally:
        await end(child)


@contextlib.asynccontextmanager
async def router(tmp_path: Path, targets: list[str], **sections: Any) -> AsyncIterator[Process]:
    anywhere = {"host": "127.0.0.1", "port": 0}
    config = {
        "model": "tiny",
        **dict.fromkeys(("grpc", "metrics"), anywhere),
        "http": {**anywhere, "public_stats": True},
        "pools": [{"name": "single", "targets": targets}],
        # A busy machine refuses nothing for its speed.
        "slo": {"ttft_p95": 600.0, "e2e_p95": 600.0},
        **sections,
    }
    path = tmp_path / "router.yaml"
    path.write_text(json.dumps(config))
    log = path.with_suffix(".log")
    with log.open("wb") as errors:
        child = await asyncio.create_subprocess_exec(*ROUTER, "--config", str(path), stderr=errors)
    try:
        yield Process(child, f"127.0.0.1:{await listening(log)}")
    finally:
        await end(child)


async def end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        os.kill(child.pid, signal.SIGCONT)
        child.kill()
        await child.wait()


async def listening(log: Path) -> int:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := [line for line in lines(log) if '"listening"' in line]):  # noqa: ASYNC110 - processes have no events
            await asyncio.sleep(0.05)
    return int(json.loads(found[0])["http_port"])


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines()


@contextlib.asynccontextmanager
async def service(
    tmp_path: Path, engines: int = 2, blocks: int = 100, **sections: Any
) -> AsyncIterator[Service]:
    async with contextlib.AsyncExitStack() as stack:
        options = ("--blocks", str(blocks))
        started = [
            await stack.enter_async_context(engine(f"engine-{n}", *options)) for n in range(engines)
        ]
        targets = [process.address for process in started]
        at = await stack.enter_async_context(router(tmp_path, targets, **sections))
        http = httpx.AsyncClient(
            base_url=f"http://{at.address}", timeout=PATIENCE_S, trust_env=False
        )
        found = Service(started, at, await stack.enter_async_context(http))
        await found.until(lambda s: [e["state"] for e in s["engines"]] == ["ready"] * engines)
        yield found


def test_an_engine_is_killed_before_the_first_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path) as run:
            for other in run.engines:  # stopped, they take requests and say nothing
                other.signal(signal.SIGSTOP)
            tasks = [run.ask(session_id="s") for _ in range(3)]
            victim = await run.busy(3)
            for other in run.engines:
                if other is not victim:
                    other.signal(signal.SIGCONT)
            await victim.kill()
            answers = await asyncio.gather(*tasks)
            assert [answer.status_code for answer in answers] == [200] * 3
            assert len({answer.headers["x-ullage-engine"] for answer in answers}) == 1

    asyncio.run(scenario())


def test_an_engine_is_killed_during_streams(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path) as run:
            tasks = [run.ask(LINGER, stream=True, session_id="s") for _ in range(3)]
            victim = await run.busy(3)
            await run.until(lambda s: busiest(s)["reports"]["received"] > 0)
            await asyncio.sleep(0.5)  # tokens flow by now, or the requests simply move
            await victim.kill()
            for answer in await asyncio.gather(*tasks):
                assert answer.status_code in ALLOWED
                if answer.status_code == 200:
                    assert answer.text.rstrip().endswith("data: [DONE]")
            assert (await run.ask()).status_code == 200

    asyncio.run(scenario())


def test_a_stopped_engine_is_left_for_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path) as run:
            for other in run.engines:
                other.signal(signal.SIGSTOP)
            task = run.ask()
            wedged = await run.busy(1)
            for other in run.engines:
                if other is not wedged:
                    other.signal(signal.SIGCONT)
            answer = await task
            assert answer.status_code == 200
            states = {e["address"]: e["state"] for e in (await run.stats())["engines"]}
            assert states[wedged.address] == "stale"
            assert (await run.ask()).status_code == 200
            wedged.signal(signal.SIGCONT)
            await run.until(lambda s: {e["state"] for e in s["engines"]} == {"ready"})

    asyncio.run(scenario())


def test_the_only_engine_is_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = {"request_timeout": 5.0}
        async with service(tmp_path, engines=1, limits=limits) as run:
            streaming = run.ask(LINGER, stream=True)
            await run.busy(1)
            run.engines[0].signal(signal.SIGSTOP)
            answers = await asyncio.gather(streaming, *(run.ask() for _ in range(4)))
            assert {answer.status_code for answer in answers[1:]} <= {503, 504}
            assert answers[0].status_code in ALLOWED

    asyncio.run(scenario())


def test_the_router_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, engines=1, blocks=400) as run:
            tasks = [run.ask(1000) for _ in range(4)]
            await run.busy(4)
            await run.router.kill()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(result, httpx.TransportError), result
            async with router(tmp_path, [run.engines[0].address]) as again:
                url = f"http://{again.address}/stats"
                async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(PATIENCE_S):
                    while not is_empty((await http.get(url)).json()):  # noqa: ASYNC110 - processes have no events
                        await asyncio.sleep(0.05)
            totals = await run.engines[0].totals()
            assert (totals["cancelled"], totals["served"]) == (4, 0)
            assert totals["free"] == totals["blocks"]

    asyncio.run(scenario())


def is_empty(stats: dict[str, Any]) -> bool:
    """An engine is ready and runs nothing."""
    return [e.get("requests_running") for e in stats["engines"]] == [0]


JSON = {"content-type": "application/json"}
BAD_BODIES = (b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt": 1e999}', b"{}" * 1000)


def test_bad_bodies_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, engines=1) as run:
            for body in BAD_BODIES:
                answer = await run.http.post("/v1/completions", content=body, headers=JSON)
                assert answer.status_code == 400, body[:20]
            large = b'{"prompt": "' + b"x" * (9 << 20) + b'"}'
            answer = await run.http.post("/v1/completions", content=large, headers=JSON)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "BODY_TOO_LARGE"
            assert (await run.ask()).status_code == 200

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def connection(address: str) -> AsyncIterator[None]:
    """One that has sent half a head and sends no more."""
    host, _, port = address.partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def test_slow_clients_hurt_nobody_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path, engines=1) as run, contextlib.AsyncExitStack() as stack:
            for _ in range(200):
                await stack.enter_async_context(connection(run.router.address))
            answers = await asyncio.gather(*(run.ask() for _ in range(4)))
            assert [answer.status_code for answer in answers] == [200] * 4

    asyncio.run(scenario())


def test_overload_ends_in_answers_and_refusals() -> None:
    done = subprocess.run(
        [*OVERLOAD, "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["hangs"], found["is_well"]) == (0, True)
    assert found["statuses"]["200"] >= 4
    assert found["refused"] > found["statuses"]["200"]


def test_too_little_goodput_fails_the_overload_benchmark() -> None:
    little = ["--factor", "0.1", "--seconds", "3", "--slots", "2", "--token-s", "0.01"]
    done = subprocess.run(
        [*OVERLOAD, *little], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout)["missed"] == ["goodput_share"]
    assert "floors: goodput_share >= 0.9" in done.stderr
