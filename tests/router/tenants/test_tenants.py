"""Tenants over both protocols: keys, quotas and what clients are told."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import openai
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.process.api_keys import entry
from ullage_common.process.config_file import ConfigError
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_router.http.openai import endpoint

if TYPE_CHECKING:
    Service = Any
    StartService = Any

ALICE = "sk-alice-0123456789"
BOB = "sk-bob-0123456789"
ROGUE = "sk-rogue-0123456789"
GONE_S = 30.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder as a mounted Secret."""
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "alice").write_text(entry(ALICE))
    (folder / "bob").write_text(BOB)
    return folder


def section(keys: Path, *tenants: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"keys_dir": str(keys), "tenants": tenants, **more}


def client(service: "Service", key: str) -> openai.AsyncOpenAI:
    made: openai.AsyncOpenAI = service.openai.with_options(api_key=key)
    return made


async def chat(service: "Service", key: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hi"}]
    return await client(service, key).chat.completions.create(
        model="tiny", messages=messages, **more
    )


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def grpc_refusal(service: "Service", *metadata: tuple[str, str]) -> ServiceError:
    request = inference_pb2.GenerateRequest(text="Hi")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in service.grpc.Generate(request, metadata=metadata):
            pass
    return from_rpc_error(caught.value)


async def until(service: "Service", condition: Any) -> None:
    async with asyncio.timeout(GONE_S):
        while not await condition():  # noqa: ASYNC110 - files are looked at once a second
            await asyncio.sleep(0.05)


def test_keys_over_http(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(tenants=section(keys, {"name": "alice"})) as service:
            for key in (ALICE, BOB):
                answer = await chat(service, key)
                assert answer.choices[0].message.content == "Hello big world"
                assert (await client(service, key).models.list()).data[0].id == "tiny"
            with pytest.raises(openai.AuthenticationError) as wrong:
                await chat(service, ROGUE)
            assert wrong.value.code == "invalid_api_key"
            assert wrong.value.type == "invalid_request_error"
            assert wrong.value.response.headers["www-authenticate"] == "Bearer"
            assert ROGUE not in str(wrong.value)
            with pytest.raises(openai.AuthenticationError):
                await client(service, ROGUE).models.list()
            for headers in ({}, {"authorization": ALICE}, {"authorization": f"Basic {ALICE}"}):
                answer = await service.http.post("/v1/completions", json={}, headers=headers)
                assert answer.status_code == 401
            for path in ("/healthz", "/readyz"):
                assert (await service.http.get(path)).status_code == 200
            for path in ("/metrics", "/stats"):
                assert (await service.http.get(path)).status_code == 404
                assert (await service.monitoring.get(path)).status_code == 200
            assert len(service.engine.requests) == 2

    asyncio.run(scenario())


def test_keys_over_grpc(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(tenants=section(keys)) as service:
            metadata = (("authorization", f"Bearer {ALICE}"),)
            model = await service.grpc.GetModel(inference_pb2.GetModelRequest(), metadata=metadata)
            assert model.model == "tiny"
            request = inference_pb2.GenerateRequest(text="Hi")
            answer = [r async for r in service.grpc.Generate(request, metadata=metadata)]
            assert answer[-1].HasField("finished")
            for wrong in ((), (("authorization", f"Bearer {ROGUE}"),)):
                error = await grpc_refusal(service, *wrong)
                assert error.code is grpc.StatusCode.UNAUTHENTICATED
                assert error.reason == "INVALID_API_KEY"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.grpc.GetModel(inference_pb2.GetModelRequest())
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(scenario())


def test_a_refused_key_is_told_before_the_body_is_read(
    start_service: "StartService", keys: Path
) -> None:
    """Whoever has no key cannot make the router keep eight megabytes."""

    async def scenario() -> None:
        async with start_service(tenants=section(keys)) as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000000\r\n\r\n{"
            )
            async with asyncio.timeout(GONE_S):
                assert b" 401 " in await reader.readline()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    asyncio.run(scenario())


def test_what_a_tenant_may_not(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        alice = {"name": "alice", "models": ["another"], "max_priority": 3, "priority": 2}
        tenants = section(keys, alice, {"name": "bob", "enabled": False})
        async with start_service(tenants=tenants) as service:
            with pytest.raises(openai.PermissionDeniedError) as model:
                await chat(service, ALICE)
            assert model.value.code == "MODEL_NOT_ALLOWED"
            assert model.value.param == "model"
            with pytest.raises(openai.PermissionDeniedError) as disabled:
                await chat(service, BOB)
            assert disabled.value.code == "TENANT_DISABLED"
            error = await grpc_refusal(service, ("authorization", f"Bearer {BOB}"))
            assert error.code is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(scenario())


def test_priorities(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        alice = {"name": "alice", "max_priority": 7, "priority": 2}
        async with start_service(tenants=section(keys, alice)) as service:
            metadata = (("authorization", f"Bearer {ALICE}"),)
            for asked in (0, 7, -4):
                request = inference_pb2.GenerateRequest(text="Hi", priority=asked)
                assert [r async for r in service.grpc.Generate(request, metadata=metadata)]
            assert [request.priority for request in service.engine.requests] == [2, 7, -4]
            request = inference_pb2.GenerateRequest(text="Hi", priority=8)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in service.grpc.Generate(request, metadata=metadata):
                    pass
            assert from_rpc_error(caught.value).reason == "PRIORITY_NOT_ALLOWED"

    asyncio.run(scenario())


def test_a_low_priority_of_a_tenant_is_no_refusal(
    start_service: "StartService", keys: Path
) -> None:
    """0, as which no priority arrives, asks for nothing."""

    async def scenario() -> None:
        alice = {"name": "alice", "priority": -10}
        async with start_service(tenants=section(keys, alice)) as service:
            await chat(service, ALICE)
            assert service.engine.requests[-1].priority == -10

    asyncio.run(scenario())


def test_requests_per_minute(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        tenants = section(keys, {"name": "alice", "requests_per_minute": 2})
        async with start_service(tenants=tenants) as service:
            for left in ("1", "0"):
                body = {"prompt": "Hi"}
                answer = await service.http.post(
                    "/v1/completions", json=body, headers=bearer(ALICE)
                )
                assert answer.headers["x-ratelimit-limit-requests"] == "2"
                assert answer.headers["x-ratelimit-remaining-requests"] == left
            assert answer.headers["x-ratelimit-reset-requests"] in ("1m0s", "60s", "59s")
            with pytest.raises(openai.RateLimitError) as caught:
                await chat(service, ALICE)
            error = caught.value
            assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
            assert "requests per minute 2" in error.message
            assert 1 <= int(error.response.headers["retry-after"]) <= 30
            told = await grpc_refusal(service, ("authorization", f"Bearer {ALICE}"))
            assert told.reason == "RATE_LIMIT_EXCEEDED"
            assert told.metadata["limit"] == "requests_per_minute"
            assert told.retry_after_s is not None
            assert 1 <= told.retry_after_s <= 30
            assert await chat(service, BOB)

    asyncio.run(scenario())


def test_what_is_left_is_told_over_grpc(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(
            tenants=section(keys, defaults={"requests_per_minute": 9})
        ) as service:
            request = inference_pb2.GenerateRequest(text="Hi")
            metadata = (("authorization", f"Bearer {ALICE}"),)
            call = service.grpc.Generate(request, metadata=metadata)
            assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "8"
            assert len([response async for response in call]) == 5

    asyncio.run(scenario())


def test_tokens_per_minute(start_service: "StartService", keys: Path) -> None:
    """Charged in advance as 2 + 32 expected, corrected to 2 + 3."""

    async def scenario() -> None:
        tenants = section(keys, {"name": "alice", "tokens_per_minute": 40})
        async with start_service(tenants=tenants) as service:
            service.engine.script.pause = asyncio.Event()
            body = {"prompt": "Hi"}
            post = service.http.post("/v1/completions", json=body, headers=bearer(ALICE))
            first = asyncio.create_task(post)
            await service.until(lambda: service.engine.active == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                await chat(service, ALICE)
            error = caught.value
            assert (error.code, error.type) == ("rate_limit_exceeded", "tokens")
            assert error.response.headers["x-ratelimit-limit-tokens"] == "40"
            assert error.response.headers["x-ratelimit-remaining-tokens"] in ("6", "7", "8")
            service.engine.script.pause.set()
            assert (await first).status_code == 200
            [usage] = (await service.stats())["tenants"]["usage"]
            assert usage["tokens_left"] >= 35
            assert (usage["prompt_tokens"], usage["output_tokens"]) == (2, 3)
            assert usage["limited"] == {"tokens_per_minute": 1}

    asyncio.run(scenario())


def test_a_prompt_above_the_quota_is_a_mistake(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        tenants = section(keys, {"name": "alice", "tokens_per_minute": 40})
        async with start_service(tenants=tenants) as service:
            with pytest.raises(openai.BadRequestError) as caught:
                await client(service, ALICE).completions.create(model="tiny", prompt="x" * 41)
            assert caught.value.code == "PROMPT_ABOVE_QUOTA"
            assert "(40)" in caught.value.message
            assert not service.engine.requests

    asyncio.run(scenario())


def test_a_refused_request_costs_no_tokens(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        tenants = section(keys, {"name": "alice", "tokens_per_minute": 40})
        async with start_service(tenants=tenants, routing={"ladder": ["reject"]}) as service:
            full = ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "no")
            service.engine.script.refuse = full
            for _ in range(3):
                answer = await service.http.post(
                    "/v1/completions", json={"prompt": "Hi"}, headers=bearer(ALICE)
                )
                assert answer.status_code == 400
            [usage] = (await service.stats())["tenants"]["usage"]
            assert (usage["tokens_left"], usage["active"]) == (40, 0)

    asyncio.run(scenario())


def test_concurrency(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        tenants = section(keys, defaults={"concurrency": 1})
        async with start_service(tenants=tenants) as service:
            service.engine.script.pause = asyncio.Event()
            stream = await chat(service, ALICE, stream=True)
            with pytest.raises(openai.RateLimitError) as caught:
                await chat(service, ALICE)
            assert "concurrency 1" in caught.value.message
            assert int(caught.value.response.headers["retry-after"]) >= 1
            others = asyncio.create_task(chat(service, BOB))
            await service.until(lambda: service.engine.active == 2)
            await stream.close()  # a client that goes leaves its place
            await service.until(lambda: service.engine.active == 1)
            service.engine.script.pause.set()
            assert await others
            assert await chat(service, ALICE)

    asyncio.run(scenario())


def test_a_tenant_that_reads_slowly_does_not_keep_its_place(
    start_service: "StartService", keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "CHARACTER_BYTES", 1)

    async def scenario() -> None:
        tenants = section(keys, defaults={"concurrency": 2})
        async with start_service(tenants=tenants) as service:
            service.engine.script.words = ("w" * 1_000_000,) * 32  # more than sockets hold
            body = json.dumps({"model": "tiny", "prompt": "Hi"}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            head += b"".join(f"{k}: {v}\r\n".encode() for k, v in bearer(ALICE).items())
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            clients = [
                await asyncio.open_connection("127.0.0.1", service.router.http_port)
                for _ in range(2)
            ]
            for reader, writer in clients:
                writer.write(head + body)
                assert b" 200 " in await reader.readline()

            service.engine.script.words = ("w",)
            assert await chat(service, ALICE)
            for reader, writer in clients:
                assert len(await reader.read()) > 32_000_000
                writer.close()

    asyncio.run(scenario())


def test_the_longest_output(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(
            tenants=section(keys, {"name": "alice", "max_tokens": 2})
        ) as service:
            raw = client(service, ALICE).completions.with_raw_response
            told = await raw.create(model="tiny", prompt="Hi", max_tokens=50)
            assert told.headers["x-ullage-degraded"] == "max_tokens=2"
            assert told.parse().choices[0].text == "Hello big"
            await client(service, ALICE).completions.create(model="tiny", prompt="Hi", max_tokens=1)
            assert [r.stop.max_tokens for r in service.engine.requests] == [2, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["alone", "shared"])
def test_a_client_that_leaves_before_its_first_token_pays_for_its_prompt(
    start_service: "StartService", keys: Path, temperature: float
) -> None:
    async def scenario() -> None:
        alice = {"name": "alice", "tokens_per_minute": 10_000}
        async with start_service(tenants=section(keys, alice)) as service:
            service.engine.script.hold = asyncio.Event()
            body = {"prompt": "Hi there", "temperature": temperature}
            asked = asyncio.create_task(
                service.http.post("/v1/completions", json=body, headers=bearer(ALICE))
            )
            await service.until(lambda: service.engine.active == 1)
            asked.cancel()
            await asyncio.wait([asked])
            await service.until(lambda: service.router.service.pipeline.inflight == 0)
            (usage,) = service.router.service.tenants.snapshot()["tenants"]["usage"]
            assert (usage["prompt_tokens"], usage["output_tokens"]) == (len("Hi there"), 0)

    asyncio.run(scenario())


def test_a_tenants_stream_waits_for_its_next_token(
    start_service: "StartService", keys: Path
) -> None:
    """The engine has sent everything; one tenant has all of it, the other the first token."""

    async def scenario() -> None:
        slow = {"name": "alice", "tokens_per_second": 0.001}
        quick = {"name": "bob", "tokens_per_second": 10_000}
        async with start_service(tenants=section(keys, slow, quick)) as service:
            body = {"prompt": "Hi", "stream": True}
            path = "/v1/completions"
            async with service.http.stream("POST", path, json=body, headers=bearer(ALICE)) as told:
                lines = told.aiter_lines()
                assert "Hello" in await anext(lines)
                other = await service.http.post(path, json=body, headers=bearer(BOB))
                assert "world" in other.text
                assert "[DONE]" in other.text
                await service.until(lambda: service.engine.active == 0)
                rest = asyncio.create_task(_rest(lines))
                done, _ = await asyncio.wait({rest}, timeout=0.3)
                assert not done
                rest.cancel()
            await service.until(lambda: service.router.service.pipeline.inflight == 0)

    asyncio.run(scenario())


async def _rest(lines: Any) -> list[str]:
    return [line async for line in lines if line]


def test_anonymous(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        anonymous = {"name": "anonymous", "requests_per_minute": 1}
        tenants = section(keys, anonymous, anonymous="allow", protect_stats=True)
        async with start_service(tenants=tenants) as service:
            assert (await service.complete()).status_code == 200
            assert (await service.complete()).status_code == 429
            with pytest.raises(openai.AuthenticationError):
                await chat(service, ROGUE)
            assert await chat(service, ALICE)
            assert (await service.monitoring.get("/stats")).status_code == 401
            stats = await service.monitoring.get("/stats", headers=bearer(ALICE))
            assert {t["name"] for t in stats.json()["tenants"]["usage"]} == {"alice", "anonymous"}

    asyncio.run(scenario())


def test_keys_change_while_it_runs(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(tenants=section(keys, {"name": "alice"})) as service:

            async def is_known(key: str) -> bool:
                answer = await service.http.get("/v1/models", headers=bearer(key))
                return answer.status_code == 200

            (keys / "alice").write_text(entry(ROGUE))
            await until(service, lambda: is_known(ROGUE))
            assert not await is_known(ALICE)
            (keys / "alice").write_text("broken")

            async def has_problem() -> bool:
                return bool((await service.stats())["tenants"]["keys"]["problems"])

            await until(service, has_problem)
            assert await is_known(ROGUE)
            assert await is_known(BOB)
            metrics = (await service.monitoring.get("/metrics")).text
            assert "ullage_router_key_problems 1.0" in metrics
            (keys / "alice").unlink()
            await until(service, lambda: _not(is_known(ROGUE)))
            assert not await has_problem()

    asyncio.run(scenario())


async def _not(condition: Any) -> bool:
    return not await condition


def test_metrics_know_the_listed_alone(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        async with start_service(tenants=section(keys, {"name": "alice"})) as service:
            await chat(service, ALICE)
            await chat(service, BOB)
            with pytest.raises(openai.AuthenticationError):
                await chat(service, ROGUE)
            text = (await service.monitoring.get("/metrics")).text
            name = "ullage_router_tenant_requests_total"
            assert f'{name}{{code="200",tenant="alice"}} 1.0' in text
            assert f'{name}{{code="200",tenant="other"}} 1.0' in text
            assert 'tenant="bob"' not in text
            assert 'ullage_router_tenant_tokens_total{kind="output",tenant="alice"} 3.0' in text
            assert 'ullage_router_auth_failures_total{reason="wrong_key"} 1.0' in text
            latest = (await service.stats())["latest"]
            assert [record["tenant"] for record in latest] == ["", "bob", "alice"]

    asyncio.run(scenario())


def test_a_start_without_keys_is_refused(start_service: "StartService", tmp_path: Path) -> None:
    async def start(folder: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            async with start_service(tenants=section(folder)):
                pass
        return str(caught.value)

    assert "No such file" in asyncio.run(start(tmp_path / "none"))
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "alice").write_text("sha256:1")
    assert "64 lower-case hexadecimal digits" in asyncio.run(start(tmp_path / "keys"))


@pytest.mark.parametrize(
    ("tenants", "problem"),
    [
        ([{"name": "other"}], "'other'"),
        ([{"name": "Alice"}], "lower-case"),
        ([{"name": "a"}, {"name": "a"}], "share a name"),
        ([{"name": "a", "weight": 0}], "weight"),
    ],
)
def test_mistakes_in_the_configuration(
    start_service: "StartService", keys: Path, tenants: list[dict[str, Any]], problem: str
) -> None:
    async def start() -> None:
        async with start_service(tenants=section(keys, *tenants)):
            pass

    with pytest.raises(ConfigError, match=problem):
        asyncio.run(start())


def test_several_routers_share_a_limit(start_service: "StartService", keys: Path) -> None:
    async def scenario() -> None:
        alice = {"name": "alice", "requests_per_minute": 100, "concurrency": 1}
        async with start_service(tenants=section(keys, alice, share=0.5)) as service:
            body = {"prompt": "Hi"}
            answer = await service.http.post("/v1/completions", json=body, headers=bearer(ALICE))
            assert answer.headers["x-ratelimit-limit-requests"] == "50"

    asyncio.run(scenario())
