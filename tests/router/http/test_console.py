"""The console's paths: where they are served and to whom, the events, and the overload."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from ullage_testing.fake_engine import MODEL

from ullage_common.config.router import (
    ConsoleSection,
    PoolSection,
    RouterConfig,
    ServerTLS,
    TLSSection,
)
from ullage_common.process.api_keys import entry, new_key
from ullage_router.http.console.console import MAX_PENDING, MAX_READERS, Console, RecordBuffer
from ullage_router.server.service import RouterService
from ullage_router.telemetry.record import RequestRecord

if TYPE_CHECKING:
    Service = Any
    StartService = Any

LOCAL = {"local": True}
FULL = {"queue": {"max_requests": 1, "timeout": 1.5}}


class Events:
    """The events of one reader."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self, name: str) -> dict[str, Any]:
        """Returns the data of the next event of a name."""
        is_named = False
        async for line in self._lines:
            if line.startswith("event: "):
                is_named = line == f"event: {name}"
            if is_named and line.startswith("data: "):
                data: dict[str, Any] = json.loads(line[6:])
                return data
        raise EOFError

    async def record(self, request_id: str) -> dict[str, Any]:
        while True:
            for record in (await self.next("decisions"))["records"]:
                if record["request_id"] == request_id:
                    found: dict[str, Any] = record
                    return found


@contextlib.asynccontextmanager
async def events(client: httpx.AsyncClient, **headers: str) -> AsyncIterator[Events]:
    async with client.stream("GET", "/console/events", headers=headers) as response:
        assert response.status_code == 200
        yield Events(response)


async def push(service: "Service", headroom_bytes: int) -> None:
    """Has the engine report it, and waits until the router knows."""
    service.engine.push(headroom_bytes=headroom_bytes)
    (engine,) = service.router.service.engines.all()
    await service.until(lambda: engine.headroom.headroom_bytes == headroom_bytes)


async def test_the_page_allows_itself_nothing_from_elsewhere(
    start_service: "StartService",
) -> None:
    async with start_service(console=LOCAL) as service:
        for client in (service.http, service.monitoring):
            page = await client.get("/console")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            policy = page.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
            assert "unsafe" not in policy
            for name in ("console.css", "console.js"):
                assert f'"/console/{name}"' in page.text
                assert (await client.get(f"/console/{name}")).status_code == 200
            assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
            assert (await client.put("/console")).status_code == 405


async def test_it_is_off_where_nobody_turned_it_on(start_service: "StartService") -> None:
    async with start_service() as service:
        assert (await service.http.get("/console")).status_code == 404
        page = await service.monitoring.get("/console")
        assert "ullage_router_requests" in page.text  # of /metrics, as on every unknown path
        chat = await service.monitoring.post("/v1/chat/completions", json={})
        assert "ullage_router_requests" in chat.text


async def test_on_a_cluster_only_the_port_of_the_metrics_has_it(
    start_service: "StartService",
) -> None:
    async with start_service(console={}) as service:
        for path in ("/console", "/console/events", "/console/console.js"):
            assert (await service.http.get(path)).status_code == 404
        assert (await service.monitoring.get("/console")).status_code == 200
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = await service.monitoring.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello big world"
        overload = await service.monitoring.post("/console/overload", json={})
        assert overload.headers["content-type"].startswith("text/plain")
        async with events(service.monitoring) as told:
            assert (await told.next("state"))["console"] == {"local": False, "chat": True}


async def test_without_a_certificate_nobody_chats_where_clients_need_one(tmp_path: Path) -> None:
    for client_ca_dir, has_chat in ((None, True), (str(tmp_path), False)):
        config = RouterConfig(
            model=MODEL,
            pools=(PoolSection(name="single", targets=("127.0.0.1:1",)),),
            tls=TLSSection(router=ServerTLS(dir=str(tmp_path), client_ca_dir=client_ca_dir)),
        )
        console = Console(RouterService(config), ConsoleSection())
        assert ("/v1/chat/completions" in console.routes()) is has_chat


async def test_events_tell_of_engines_answers_and_refusals(start_service: "StartService") -> None:
    async with start_service(console=LOCAL, routing=FULL) as service:
        await service.chat("before anybody looks")
        async with events(service.http) as told:
            state = await told.next("state")
            (engine,) = state["engines"]
            assert (engine["id"], engine["state"]) == ("single-0", "ready")
            assert state["queue"]["oldest_s"] == 0
            assert "latest" not in state
            earlier = (await told.next("decisions"))["records"]
            assert [record["status"] for record in earlier] == [200]

            answer = await service.chat("Hi")
            record = await told.record(answer.headers["x-request-id"])
            assert record["action"] == "accept"
            assert record["predicted_bytes"] > 0
            assert record["retry_after_s"] is None

            await push(service, headroom_bytes=500)
            refused = await service.chat("Hi")
            assert refused.status_code == 429
            record = await told.record(refused.headers["x-request-id"])
            assert (record["action"], record["error"]) == ("reject", "QUEUE_TIMEOUT")
            assert record["retry_after_s"] == int(refused.headers["retry-after"])
            assert record["predicted_bytes"] > record["available_bytes"] == 500

            stats = await service.stats()
            assert stats["output_tokens"] == 6
            await service.router.stop()  # which an open page does not hold up
            with contextlib.suppress(EOFError):
                while True:
                    await told.next("state")


async def test_protected_stats_protect_the_events_too(
    start_service: "StartService", tmp_path: Path
) -> None:
    key = new_key()
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(entry(key))
    tenants = {"keys_dir": str(keys), "protect_stats": True, "anonymous": "allow"}
    async with start_service(console=LOCAL, tenants=tenants) as service:
        for client in (service.http, service.monitoring):
            assert (await client.get("/console")).status_code == 200
            assert (await client.get("/console/events")).status_code == 401
            async with events(client, authorization=f"Bearer {key}") as told:
                assert (await told.next("state"))["model"] == MODEL


async def test_readers_are_few_and_a_slow_one_is_told_what_it_missed(
    start_service: "StartService",
) -> None:
    reader = RecordBuffer(())
    for index in range(MAX_PENDING + 44):
        reader.put(RequestRecord(f"r{index}"))
    taken: Any = reader.take()
    assert (len(taken["records"]), taken["skipped"]) == (MAX_PENDING, 44)
    assert taken["records"][0]["request_id"] == "r44"
    assert reader.take() is None

    async with start_service(console=LOCAL) as service, contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_READERS):
            await stack.enter_async_context(events(service.http))
        refused = await service.http.get("/console/events")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "CONSOLE_BUSY"


async def test_an_overload_is_sent_once_and_only_for_the_page(
    start_service: "StartService",
) -> None:
    async with start_service(console=LOCAL, routing=FULL) as service:
        await push(service, headroom_bytes=500)
        post = service.http.post
        form = {"content-type": "text/plain"}  # which other sites' pages may send
        assert (await post("/console/overload", content="{}", headers=form)).status_code == 415
        assert (await post("/console/overload", json={"requests": 0})).status_code == 400
        async with events(service.http) as told:
            asked = {"requests": 5, "sentences": 2, "max_tokens": 8}
            begun = await post("/console/overload", json=asked)
            assert (begun.status_code, begun.json()["requests"]) == (202, 5)
            assert (await post("/console/overload", json=asked)).status_code == 429
            ended: dict[str, int] = {}
            while len(ended) < 5:
                for record in (await told.next("decisions"))["records"]:
                    ended[record["request_id"]] = record["status"]
        assert set(ended) == {f"{begun.json()['prefix']}-{index}" for index in range(5)}
        assert set(ended.values()) == {429}
