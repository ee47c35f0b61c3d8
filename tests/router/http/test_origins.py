"""What web pages may do: Host and Origin on loopback addresses, content types, CORS."""

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.config.router import CORSSection
from ullage_router.http.limits import BodyRoom, HTTPLimits
from ullage_router.http.messages import SWITCH, Reply, Request
from ullage_router.http.origins import OriginGuard

if TYPE_CHECKING:
    Service = Any
    StartService = Any

CHAT = "https://chat.example.com"
ON = {"cors": {"allowed_origins": [CHAT]}}
BODY = {"model": "tiny", "prompt": "Hi"}
PATHS = ("/v1/models", "/v1/completions", "/console", "/console/events", "/stats", "/healthz")


def local(**more: Any) -> dict[str, Any]:
    """As `ullage up` starts a router."""
    http = {"host": "127.0.0.1", "port": 0, "public_stats": True}
    return {"http": http, "console": {"local": True}, **more}


def test_a_name_that_turned_into_this_machine_is_refused(start_service: "StartService") -> None:
    """DNS rebinding: the browser takes the router for the page's own server."""

    async def scenario() -> None:
        async with start_service(**local()) as service:
            for client in (service.http, service.monitoring):
                for path in PATHS:
                    page = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
                    for headers in (page, {"host": "evil.example"}):
                        answer = await client.get(path, headers=headers)
                        assert answer.status_code == 403, path
                        error = answer.json()["error"]
                        assert error["code"] == "HOST_NOT_ALLOWED"
                        assert "evil.example" in error["message"]
                        assert "spec.router.cors.allowedOrigins" in error["message"]
            answer = await service.http.post(
                "/v1/completions", json=BODY, headers={"host": "evil.example"}
            )
            assert answer.status_code == 403
            assert service.engine.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "127.0.0.2",
        "localhost:8000",
        "LOCALHOST.:8000",
        "app.localhost",
        "[::1]:8000",
        "host.docker.internal:8000",
        "laptop.local",
        "smollm2",
        "10.1.2.3:8000",
    ],
)
def test_names_of_this_machine_are_served(start_service: "StartService", host: str) -> None:
    async def scenario() -> None:
        async with start_service(**local()) as service:
            answer = await service.http.post(
                "/v1/completions", json=BODY, headers={"host": host, "origin": f"http://{host}"}
            )
            assert answer.status_code == 200
            assert "access-control-allow-origin" not in answer.headers
            assert (await service.monitoring.get("/metrics", headers={"host": host})).is_success

    asyncio.run(scenario())


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000"])
def test_pages_of_others_are_refused(start_service: "StartService", origin: str) -> None:
    async def scenario() -> None:
        async with start_service(**local()) as service:
            headers = {"origin": origin}
            for client in (service.http, service.monitoring):
                answer = await client.post("/v1/chat/completions", json=BODY, headers=headers)
                assert answer.status_code == 403
                assert answer.json()["error"]["code"] == "ORIGIN_NOT_ALLOWED"
                assert (await client.get("/console/events", headers=headers)).status_code == 403
            preflight = {**headers, "access-control-request-method": "POST"}
            answer = await service.http.options("/v1/chat/completions", headers=preflight)
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
            assert service.engine.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonp",
        "application/json, text/plain",
    ],
)
def test_a_body_that_is_not_called_json_is_refused(
    start_service: "StartService", kind: str | None
) -> None:
    """A page may send these types to any server, without the browser asking that first."""

    async def scenario() -> None:
        async with start_service(**local()) as service:
            headers = {} if kind is None else {"content-type": kind}
            for path in (
                "/v1/completions",
                "/v1/chat/completions",
                "/v1/embeddings",
                "/console/overload",
            ):
                answer = await service.http.post(
                    path, content=msgspec.json.encode(BODY), headers=headers
                )
                assert answer.status_code == 415, path
                error = answer.json()["error"]
                assert error["code"] == "CONTENT_TYPE_NOT_SUPPORTED"
                assert "application/json" in error["message"]
            assert service.engine.requests == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/json ;x"]
)
def test_json_is_served(start_service: "StartService", kind: str) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.http.post(
                "/v1/completions",
                content=msgspec.json.encode(BODY),
                headers={"content-type": kind},
            )
            assert answer.status_code == 200

    asyncio.run(scenario())


async def preflight(client: Any, origin: str, path: str = "/v1/chat/completions") -> Any:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,X-Stainless-Lang, b@d",
    }
    return await client.options(path, headers=headers)


@pytest.mark.parametrize("origins", [[CHAT, "https://other.example"], ["*"]])
def test_an_allowed_page_uses_the_api(start_service: "StartService", origins: list[str]) -> None:
    async def scenario() -> None:
        cors = {"allowed_origins": origins}
        async with start_service(**local(cors=cors)) as service:
            allowed = "*" if origins == ["*"] else CHAT
            answer = await preflight(service.http, CHAT)
            assert answer.status_code == 204
            found = answer.headers
            assert found["access-control-allow-origin"] == allowed
            assert "POST" in found["access-control-allow-methods"]
            names = found["access-control-allow-headers"]
            assert names == "authorization, content-type, x-stainless-lang"
            assert int(found["access-control-max-age"]) > 0
            assert found["vary"] == "origin"

            headers = {"origin": CHAT}
            document = (await service.http.get("/openapi.json")).json()
            described = document["components"]["headers"]
            assert "x-ullage-resumed-inexact" in described
            for stream in (False, True):
                answer = await service.http.post(
                    "/v1/completions", json=BODY | {"stream": stream}, headers=headers
                )
                assert answer.status_code == 200
                assert answer.headers["access-control-allow-origin"] == allowed
                exposed = answer.headers["access-control-expose-headers"].split(", ")
                assert {"retry-after", *described} <= set(exposed)
            answer = await service.http.post("/v1/completions", json={}, headers=headers)
            assert answer.status_code == 400
            assert answer.headers["access-control-allow-origin"] == allowed, "errors are read, too"
            answer = await service.http.get("/v1/models", headers=headers)
            assert answer.headers["access-control-allow-origin"] == allowed

    asyncio.run(scenario())


def test_other_pages_and_paths_stay_closed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(**local(**ON)) as service:
            assert (await preflight(service.http, "https://evil.example")).status_code == 403
            assert (await preflight(service.http, CHAT + ".evil.example")).status_code == 403
            for client, path in (
                (service.http, "/stats"),
                (service.http, "/console"),
                (service.monitoring, "/stats"),
                (service.monitoring, "/v1/chat/completions"),
            ):
                answer = await client.get(path, headers={"origin": CHAT})
                assert "access-control-allow-origin" not in answer.headers
            named = {"host": "chat.example.com"}
            assert (await service.http.get("/v1/models", headers=named)).status_code == 200
            answer = await service.http.get("/v1/models")
            assert answer.headers["vary"] == "origin"
            assert "access-control-allow-origin" not in answer.headers

    asyncio.run(scenario())


def test_off_by_default_nothing_is_added(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.http.get("/v1/models")
            assert "vary" not in answer.headers
            own = {"origin": str(service.http.base_url).rstrip("/")}
            answer = await service.http.options("/v1/chat/completions", headers=own)
            assert answer.status_code == 204
            assert not [name for name in answer.headers if name.startswith("access-control")]

    asyncio.run(scenario())


def test_openai_clients_need_no_change(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(**local()) as service:
            client: openai.AsyncOpenAI = service.openai
            answer = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}]
            )
            assert answer.choices[0].message.content == "Hello big world"
            assert [model.id async for model in client.models.list()] == ["tiny"]

    asyncio.run(scenario())


# Where a router listens on all addresses, as in a pod.


async def status(
    path: str,
    local_address: str,
    is_api: bool = True,
    cors: CORSSection | None = None,
    scheme: str = "http",
    **more: str,
) -> int:
    """Answers a request that came in at an address."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("no body is read")

    async def serve(request: Request, reply: Reply) -> None:
        await reply.whole(200, [], b"")

    headers = [(name.encode(), value.encode()) for name, value in more.items()]
    scope = {"method": "GET", "path": path, "headers": headers, "server": (local_address, 8000)}
    scope["scheme"] = scheme
    request = Request(scope, receive, HTTPLimits(), BodyRoom(1))
    await OriginGuard(serve, "0.0.0.0", cors, is_api=is_api)(request, Reply(request, send))
    return int(sent[0]["status"])


EVIL = {"host": "evil.example:9090", "origin": "http://evil.example:9090"}


@pytest.mark.parametrize(
    ("path", "local_address", "is_api", "headers", "expected"),
    [
        # Over the network a proxy may have any name, and a page's origin is its own.
        ("/v1/models", "10.0.0.5", True, EVIL, 200),
        ("/v1/models", "10.0.0.5", True, {"host": "llm", "origin": CHAT}, 200),
        # kubectl port-forward arrives over the pod's loopback interface.
        ("/v1/models", "127.0.0.1", True, EVIL, 403),
        ("/v1/models", "::1", True, EVIL, 403),
        ("/v1/models", "::ffff:127.0.0.1", True, EVIL, 403),
        ("/v1/models", "127.0.0.1", True, {"host": "localhost:8000", "origin": CHAT}, 403),
        ("/v1/models", "127.0.0.1", True, {"host": "localhost:8000"}, 200),
        # A mesh's proxy may arrive there as well, with no browser behind it.
        ("/v1/models", "127.0.0.1", True, {"host": "llm.default.example"}, 200),
        ("/console/events", "127.0.0.1", False, {"host": "evil.example"}, 403),
        ("/stats", "127.0.0.1", False, {"host": "evil.example"}, 403),
        ("/stats", "127.0.0.1", False, {"host": "127.0.0.1:9090"}, 200),
        ("/metrics", "127.0.0.1", False, {"host": "llm.default.example"}, 200),
        ("/measures/wait", "127.0.0.1", False, {"host": "llm.default.example"}, 200),
        ("/console/events", "10.0.0.5", False, {"host": "llm.default.example"}, 200),
    ],
)
def test_in_a_pod_forwarded_connections_are_checked(
    path: str, local_address: str, is_api: bool, headers: dict[str, str], expected: int
) -> None:
    assert asyncio.run(status(path, local_address, is_api, **headers)) == expected


def test_over_tls_the_certificate_says_who_answers() -> None:
    own = {"host": "llm.example.com", "origin": "https://llm.example.com"}
    assert asyncio.run(status("/v1/models", "127.0.0.1", scheme="https", **own)) == 200
    other = own | {"origin": "https://evil.example"}
    assert asyncio.run(status("/v1/models", "127.0.0.1", scheme="https", **other)) == 403


labels = st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True)
names = st.lists(labels, min_size=2, max_size=4).map(".".join)


@given(names, st.sampled_from(["", ":80", ":8000", "."]))
def test_no_name_that_can_be_registered_passes(name: str, rest: str) -> None:
    if name.rpartition(".")[2] in ("localhost", "local", "internal"):
        return
    host = name + rest
    sent = {"host": host, "origin": f"http://{host}"}
    assert asyncio.run(status("/console", "127.0.0.1", False, **sent)) == 403
    allowed = CORSSection(allowed_origins=(f"https://{name}", f"http://{host}"))
    assert asyncio.run(status("/console", "127.0.0.1", False, allowed, **sent)) == 200


def test_sockets_of_foreign_pages_are_refused_on_any_address() -> None:
    """Browsers send no preflight for a WebSocket, on a public address either."""

    async def status(origin: str, *, is_socket: bool) -> int:
        headers = [(b"host", b"router.example"), (b"origin", origin.encode())]
        scope: dict[str, Any] = {
            "method": "GET",
            "path": "/v1/responses",
            "headers": headers,
            "server": ("10.0.0.1", 8000),
        }
        if is_socket:
            scope[SWITCH] = lambda *_: None
        sent: list[Any] = []

        async def serve(_: Request, reply: Reply) -> None:
            await reply.whole(200, [], b"")

        async def send(message: Any) -> None:
            sent.append(message)

        limits = HTTPLimits()
        request = Request(scope, _never, limits, BodyRoom(limits.max_held_bytes))
        guard = OriginGuard(serve, "0.0.0.0", CORSSection(allowed_origins=[CHAT]), is_api=True)
        await guard(request, Reply(request, send))
        return int(sent[0]["status"])

    async def scenario() -> None:
        assert await status("https://evil.example", is_socket=True) == 403
        assert await status("https://evil.example", is_socket=False) == 200
        assert await status(CHAT, is_socket=True) == 200
        assert await status("http://router.example", is_socket=True) == 200

    asyncio.run(scenario())


async def _never() -> Any:
    raise AssertionError("the request has no body")
