"""The Responses API over WebSockets, as OpenAI's client and a plain one meet it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest
from ullage_testing.fake_engine import MODEL
from ullage_testing.raw_websocket import RawWebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from ullage_router.http.responses.answers import EVENTS

if TYPE_CHECKING:
    Service = Any
    StartService = Any

WAIT_S = 20.0
WORDS = "Hello big world"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CREATE: Any = {"type": "response.create", "model": MODEL}
STORING: Any = {"routing": {"responses": {"enabled": True}}}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
HERMES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}


@contextlib.asynccontextmanager
async def opened(service: "Service", **headers: str) -> AsyncIterator[ClientConnection]:
    url = f"ws://127.0.0.1:{service.router.http_port}/v1/responses"
    async with connect(url, additional_headers=headers, ping_interval=None) as socket:
        yield socket


async def read_answer(socket: ClientConnection) -> list[Any]:
    """The events of the next answer."""
    events: list[Any] = []
    async with asyncio.timeout(WAIT_S):
        while not events or events[-1]["type"] not in LAST:
            events.append(json.loads(await socket.recv()))
    return events


async def ask(socket: ClientConnection, **body: Any) -> Any:
    """Send a request, and return its last event."""
    await socket.send(json.dumps(CREATE | body))
    return (await read_answer(socket))[-1]


def told(service: "Service") -> str:
    """The prompt that the engine was sent last. Its tokens are bytes."""
    ids = service.engine.requests[-1].token_ids.ids
    return str(service.router.service.engines.model.decode(list(ids)))


def test_the_official_client_speaks_over_a_socket(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            async with service.openai.responses.connect() as connection:
                for text in ("Hi", "And?"):
                    await connection.response.create(model=MODEL, input=text)
                    async with asyncio.timeout(WAIT_S):
                        async for event in connection:
                            assert event.type != "error", event
                            if event.type == "response.completed":
                                break
                    assert event.response.output_text == WORDS
                    assert told(service) == f"<user>{text}\n<assistant>"
            latest = (await service.stats())["latest"]
            assert [each["status"] for each in latest] == [200, 200]

    asyncio.run(scenario())


def test_events_are_those_of_streams(start_service: "StartService") -> None:
    """The same types, fields and numbers, without [DONE]."""

    async def scenario() -> None:
        async with start_service() as service, opened(service) as socket:
            await socket.send(json.dumps(CREATE | {"input": "Hi"}))
            events = await read_answer(socket)
            stream = await service.openai.responses.create(model=MODEL, input="Hi", stream=True)
            streamed = [event async for event in stream]
            assert [e["type"] for e in events] == [e.type for e in streamed]
            assert [e["sequence_number"] for e in events] == list(range(len(events)))
            assert [sorted(e) for e in events] == [sorted(e.model_fields_set) for e in streamed]
            for event in events:
                assert any(_fits(event, kind) for kind in EVENTS), event
            assert events[-1]["response"]["store"] is False

    asyncio.run(scenario())


def _fits(event: Any, kind: type) -> bool:
    try:
        msgspec.convert(event, kind)
    except msgspec.ValidationError:
        return False
    return True


def test_the_latest_response_is_continued_on_its_connection(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            async with opened(service) as socket, opened(service) as other:
                first = (await ask(socket, input="One", store=False))["response"]
                following = await ask(socket, input="Two", previous_response_id=first["id"])
                second = following["response"]
                assert second["previous_response_id"] == first["id"]
                prompt = f"<user>One\n<assistant>{WORDS}\n<user>Two\n<assistant>"
                assert told(service) == prompt

                for name, where in ((first["id"], socket), (second["id"], other)):
                    error = await ask(where, input="Three", previous_response_id=name)
                    assert (error["status"], error["error"]["code"]) == (
                        400,
                        "previous_response_not_found",
                    )
                    assert error["error"]["param"] == "previous_response_id"
                    assert name in error["error"]["message"]
                third = await ask(socket, input="Three", previous_response_id=second["id"])
                assert third["type"] == "response.completed"
                assert told(service).startswith(prompt + WORDS)
            answer = await service.http.get(f"/v1/responses/{second['id']}")
            assert answer.status_code == 404

    asyncio.run(scenario())


def test_a_failed_continuation_forgets_the_response(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service, opened(service) as socket:
            first = (await ask(socket, input="One"))["response"]["id"]
            error = await ask(socket, input="Two", temperature=-1)
            assert error["type"] == "error"
            output = {"type": "function_call_output", "call_id": "call_missing", "output": "x"}
            error = await ask(socket, input=[output], previous_response_id=first)
            assert error["error"]["param"] == "input[0].call_id"
            assert "call_missing" in error["error"]["message"]
            error = await ask(socket, input="Three", previous_response_id=first)
            assert error["error"]["code"] == "previous_response_not_found"

    asyncio.run(scenario())


def test_tools_are_used_over_a_connection(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service, opened(service) as socket:
            service.engine.script.words = (f"<tool_call>{CALL}</tool_call>",)
            called = (await ask(socket, input="Oslo?", tools=[TOOL]))["response"]
            (call,) = called["output"]
            service.engine.script.words = ("-4",)
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "cold"}
            last = await ask(
                socket, input=[output], tools=[TOOL], previous_response_id=called["id"]
            )
            assert last["response"]["output"][0]["content"][0]["text"] == "-4"
            assert f"<tool_call>{CALL}</tool_call>" in told(service)
            assert "<tool>cold" in told(service)

    asyncio.run(scenario())


def test_stored_responses_are_shared_with_http(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(**STORING) as service, opened(service) as socket:
            first = (await ask(socket, input="One"))["response"]
            assert first["store"] is True
            read = await service.openai.responses.retrieve(first["id"])
            assert read.output_text == WORDS
            posted = await service.openai.responses.create(
                model=MODEL, input="Two", previous_response_id=first["id"]
            )
            last = await ask(socket, input="Three", previous_response_id=posted.id, store=False)
            assert last["response"]["store"] is False
            assert "<user>One" in told(service)
            with pytest.raises(openai.NotFoundError):
                await service.openai.responses.retrieve(last["response"]["id"])

    asyncio.run(scenario())


REFUSED: Any = {
    "type": ({"type": "response.cancel", "input": "Hi"}, "type"),
    "no type": ({"type": None, "input": "Hi"}, "type"),
    "generate": (CREATE | {"input": "Hi", "generate": False}, "generate"),
    "stream": (CREATE | {"input": "Hi", "stream": False}, "stream"),
    "stream_id": (CREATE | {"input": "Hi", "stream_id": "main"}, "stream_id"),
    "background": (CREATE | {"input": "Hi", "background": True}, "background"),
    "input": (CREATE, "input"),
    "store": (CREATE | {"input": "Hi", "store": True}, "store"),
    "image": (
        CREATE | {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]},
        "input[0].content[0].type",
    ),
}  # fmt: skip


def test_errors_name_the_field_and_leave_the_connection_open(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service, opened(service) as socket:
            wrong = {}
            for name, (body, field) in REFUSED.items():
                await socket.send(json.dumps(body))
                (error,) = await read_answer(socket)
                if (error["status"], error["error"]["param"]) != (400, field):
                    wrong[name] = error
            assert wrong == {}
            await socket.send("no JSON")
            (error,) = await read_answer(socket)
            assert (error["status"], error["error"]["param"]) == (400, "body")
            error = await ask(socket, input="Hi", model="other")
            assert (error["status"], error["error"]["code"]) == (404, "model_not_found")
            assert (await ask(socket, input="Hi"))["type"] == "response.completed"

    asyncio.run(scenario())


def test_a_failure_in_mid_answer_is_an_event(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service, opened(service) as socket:
            first = (await ask(socket, input="One"))["response"]["id"]
            service.engine.script.fail_after = 1
            failed = await ask(socket, input="Two", previous_response_id=first)
            assert failed["type"] == "response.failed"
            service.engine.script.fail_after = None
            again = await ask(socket, input="Two", previous_response_id=first)
            assert again["error"]["code"] == "previous_response_not_found"

    asyncio.run(scenario())


def test_long_messages_have_the_bounds_of_bodies(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service, opened(service) as socket:
            for size in (100_000, 3 << 20):
                error = await ask(socket, input="x" * size)
                assert error["error"]["code"] == "context_length_exceeded"
            await socket.send(json.dumps(CREATE | {"input": "x" * (9 << 20)}))
            (error,) = await read_answer(socket)
            assert (error["status"], error["error"]["code"]) == (413, "BODY_TOO_LARGE")
            async with asyncio.timeout(WAIT_S):
                await socket.wait_closed()
            assert socket.close_code == 1009

    asyncio.run(scenario())


def test_an_answer_that_is_long_in_coming_is_no_different(start_service: "StartService") -> None:
    """A stream over HTTP begins with a sign of life. Here there are pings."""

    async def scenario() -> None:
        streaming = {"keepalive": 0.05, "coalesce_tokens": 1}
        async with start_service(streaming=streaming) as service, asyncio.timeout(WAIT_S):
            hold = service.engine.script.hold = asyncio.Event()
            client = await RawWebSocket.open(service.router.http_port, "/v1/responses")
            await client.send(json.dumps(CREATE | {"input": "Hi"}))
            await client.pings(4)
            hold.set()
            first = (await client.messages(1))[0]
            assert json.loads(first)["type"] == "response.created"
            client.writer.close()

    asyncio.run(scenario())


def test_keys_and_quotas_hold_for_each_message(
    start_service: "StartService", tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for tenant in ("alice", "bob"):
        (keys / tenant).write_text(f"{tenant}-key-0123456789")
    tenants = {
        "keys_dir": str(keys),
        "tenants": [{"name": "alice", "requests_per_minute": 2}],
    }

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                with pytest.raises(InvalidStatus) as caught:
                    async with opened(service, **headers):
                        pass
                assert caught.value.response.status_code == 401
            alice = {"authorization": "Bearer alice-key-0123456789"}
            bob = {"authorization": "Bearer bob-key-0123456789"}
            async with opened(service, **alice) as socket, opened(service, **bob) as other:
                first = (await ask(socket, input="One"))["response"]
                await ask(socket, input="Two")
                error = await ask(socket, input="Three")
                assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
                assert error["error"]["retry_after"] > 0
                assert (await ask(other, input="One"))["type"] == "response.completed"
                error = await ask(other, input="Two", previous_response_id=first["id"])
                assert error["error"]["code"] == "previous_response_not_found"
            usage = (await service.stats())["tenants"]["usage"]
            assert next(each for each in usage if each["name"] == "alice")["requests"] == 2

    asyncio.run(scenario())


def test_a_key_that_is_revoked_ends_no_socket_but_its_messages(
    start_service: "StartService", tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for tenant in ("alice", "bob"):
        (keys / tenant).write_text(f"{tenant}-key-0123456789")
    tenants = {"keys_dir": str(keys), "tenants": []}

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            alice = {"authorization": "Bearer alice-key-0123456789"}
            async with opened(service, **alice) as socket:
                assert (await ask(socket, input="One"))["type"] == "response.completed"
                (keys / "alice").unlink()
                async with asyncio.timeout(WAIT_S):
                    while (  # noqa: ASYNC110 - the router polls its keys
                        await service.http.get("/v1/models", headers=alice)
                    ).is_success:
                        await asyncio.sleep(0.05)
                error = await ask(socket, input="Two")
                assert (error["status"], error["error"]["code"]) == (401, "invalid_api_key")
            assert len(service.engine.requests) == 1

    asyncio.run(scenario())


def test_headers_of_the_handshake_hold_for_each_message(start_service: "StartService") -> None:
    headers = {"x-session-id": "one", "traceparent": PARENT, "x-ullage-timeout": "0.3"}

    async def scenario() -> None:
        async with start_service() as service, opened(service, **headers) as socket:
            for text in ("One", "Two"):
                assert (await ask(socket, input=text))["type"] == "response.completed"
                assert service.engine.requests[-1].session_id == "one"
                assert service.engine.metadata[-1]["traceparent"] == PARENT
            service.engine.script.hold = asyncio.Event()
            for text in ("Three", "Four"):
                failed = await ask(socket, input=text)
                assert failed["type"] in ("error", "response.failed"), failed
                assert "0.3 s" in json.dumps(failed)

    asyncio.run(scenario())


def test_a_client_that_disconnects_cancels_its_request(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.pause = asyncio.Event()
            async with opened(service) as socket:
                await socket.send(json.dumps(CREATE | {"input": "Hi"}))
                async with asyncio.timeout(WAIT_S):
                    await socket.recv()
            await service.until(lambda: len(service.engine.cancelled) == 1)
            await service.until(lambda: service.router.service.pipeline.inflight == 0)
            assert (await service.stats())["latest"][0]["status"] == 499

    asyncio.run(scenario())


def test_a_router_that_stops_ends_its_answers_first(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service, opened(service) as socket:
            hold = service.engine.script.hold = asyncio.Event()
            await socket.send(json.dumps(CREATE | {"input": "Hi"}))
            await service.until(lambda: service.engine.active == 1)
            stopping = asyncio.create_task(service.router.stop())
            hold.set()
            assert (await read_answer(socket))[-1]["type"] == "response.completed"
            async with asyncio.timeout(WAIT_S):
                await socket.wait_closed()
            assert socket.close_code == 1001
            await stopping

    asyncio.run(scenario())


def test_pages_of_others_open_no_socket(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            with pytest.raises(InvalidStatus) as caught:
                async with opened(service, origin="https://evil.example"):
                    pass
            assert caught.value.response.status_code == 403

    asyncio.run(scenario())


def test_a_plain_get_and_a_compaction_are_refused_by_name(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.http.get("/v1/responses")
            assert answer.status_code == 426
            assert answer.headers["upgrade"] == "websocket"
            assert answer.headers["connection"] == "upgrade"
            assert answer.json()["error"]["code"] == "UPGRADE_REQUIRED"
            answer = await service.http.get("/v1/responses", headers={"connection": "close"})
            assert answer.headers["connection"] == "upgrade, close"
            with pytest.raises(openai.NotFoundError, match="truncation") as caught:
                await service.openai.responses.compact(model=MODEL, input="Hi")
            assert caught.value.code == "COMPACTION_NOT_SUPPORTED"

    asyncio.run(scenario())


def test_memory_of_latest_responses_is_bounded(start_service: "StartService") -> None:
    small: Any = {"routing": {"responses": {"max_bytes": 20_000}}}

    async def scenario() -> None:
        async with (
            start_service(max_model_len=20_000, single=(2000,), **small) as service,
            contextlib.AsyncExitStack() as stack,
        ):
            sockets = [await stack.enter_async_context(opened(service)) for _ in range(6)]
            names = [(await ask(each, input="x" * 2000))["response"]["id"] for each in sockets]
            error = await ask(sockets[0], input="Two", previous_response_id=names[0])
            assert error["error"]["code"] == "previous_response_not_found"
            last = await ask(sockets[-1], input="Two", previous_response_id=names[-1])
            assert last["type"] == "response.completed"

    asyncio.run(scenario())
