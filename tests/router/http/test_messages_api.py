"""Anthropic's Messages API, as plain clients meet it, and its official one where there is one."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError

if TYPE_CHECKING:
    Service = Any
    StartService = Any

WORDS = "Hello big world"
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: Any = [{"role": "user", "content": "Oslo?"}]
ASK: Any = {"model": "tiny", "max_tokens": 50, "messages": USER}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HARMONY = HERMES.replace("tool_call>", "|channel|>")


def told(service: "Service") -> str:
    """Return the prompt that the engine was sent last. Its tokens are bytes."""
    ids = service.engine.requests[-1].token_ids.ids
    return str(service.router.service.engines.model.decode(list(ids)))


async def send(service: "Service", path: str = PATH, **more: Any) -> Any:
    return await service.http.post(path, json=ASK | more)


async def events(service: "Service", **more: Any) -> list[dict[str, Any]]:
    answer = await send(service, stream=True, **more)
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, _, data = block.partition("\ndata: ")
        event = json.loads(data)
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_a_whole_message(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.cached = inference_pb2.Usage(cached_tokens=4)
            answer = await send(
                service,
                system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "kind."}],
                temperature=0.5,
                top_k=7,
                stop_sequences=["END"],
                metadata={"user_id": "u"},
            )
            message = answer.json()
            assert answer.status_code == 200
            assert message["content"] == [{"type": "text", "text": WORDS}]
            assert (message["type"], message["role"]) == ("message", "assistant")
            assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
            assert message["id"] == f"msg_{answer.headers['request-id']}"
            assert told(service) == "<system>Be\n\nkind.\n<user>Oslo?\n<assistant>"
            prompt = len(told(service))
            assert message["usage"] == {
                "input_tokens": prompt - 4,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": 3,
            }
            sent = service.engine.requests[0]
            assert (sent.stop.max_tokens, sent.sampling.top_k) == (50, 7)
            assert list(sent.stop.stop_strings) == ["END"]

    asyncio.run(scenario())


def test_a_stream_has_the_events_in_their_order(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            found = await events(service)
            assert [event["type"] for event in found] == [
                "message_start",
                "content_block_start",
                *3 * ["content_block_delta"],
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
            assert "".join(event["delta"]["text"] for event in found[2:5]) == WORDS
            assert found[0]["message"]["usage"]["input_tokens"] == len(told(service))
            assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
            assert found[-2]["usage"]["output_tokens"] == 3

    asyncio.run(scenario())


def test_a_silent_stream_gets_pings(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(streaming={"coalesce_tokens": 1, "keepalive": 0.1}) as service:
            service.engine.script.pause = asyncio.Event()
            lines = []
            async with service.http.stream("POST", PATH, json=ASK | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if line == "event: ping":
                        service.engine.script.pause.set()
            assert "event: ping" in lines
            assert lines[lines.index("event: ping") + 1] == 'data: {"type":"ping"}'

    asyncio.run(scenario())


def test_blocks_become_turns(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            turns: Any = [
                *USER,
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": ""},
                    {"type": "text", "text": "Look."},
                    {"type": "tool_use", "id": "t1", "name": "get_weather",
                     "input": {"city": "Oslo"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [
                        {"type": "text", "text": "-4"}
                    ]},
                    {"type": "text", "text": "And now?"},
                ]},
            ]  # fmt: skip
            assert (await send(service, messages=turns)).status_code == 200
            assert told(service) == (
                "<user>Oslo?\n<assistant>Look.<think>Hm</think>"
                f"<tool_call>{CALL}</tool_call>\n<tool>-4\n<user>And now?\n<assistant>"
            )

    asyncio.run(scenario())


def test_a_call_whole_and_streamed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            service.engine.script.words = ("Look.\n<tool", f"_call>{CALL}</tool_", "call>")
            message = (await send(service, tools=[WEATHER])).json()
            assert '<tools>[{"type": "function", "function": {"name":' in told(service)
            text, call = message["content"]
            assert text["text"] == "Look."
            assert (call["type"], call["name"]) == ("tool_use", "get_weather")
            assert call["input"] == {"city": "Oslo"}
            assert message["stop_reason"] == "tool_use"

            found = await events(service, tools=[WEATHER])
            starts = [e["content_block"] for e in found if e["type"] == "content_block_start"]
            assert [block["type"] for block in starts] == ["text", "tool_use"]
            assert starts[1]["input"] == {}
            pieces = [e["delta"] for e in found if e["type"] == "content_block_delta"]
            inputs = [p["partial_json"] for p in pieces if p["type"] == "input_json_delta"]
            assert json.loads("".join(inputs)) == {"city": "Oslo"}

            for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
                assert (await send(service, tools=[WEATHER], tool_choice=choice)).status_code == 200
                assert service.engine.requests[-1].HasField("grammar")
            await send(service, tools=[WEATHER], tool_choice={"type": "none"})
            assert "<tools>" not in told(service)

    asyncio.run(scenario())


def test_arguments_are_streamed_piece_by_piece(start_service: "StartService") -> None:
    """The official client joins the pieces."""

    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            words = ("<tool_call>", CALL[:-9], CALL[-9:-5], CALL[-5:], "</tool_call>")
            service.engine.script.words = words
            found = await events(service, tools=[WEATHER])
            pieces = [e["delta"] for e in found if e["type"] == "content_block_delta"]
            assert len(pieces) >= 3
            assert "".join(piece["partial_json"] for piece in pieces) == '{"city": "Oslo"}'
            assert found[-2]["delta"]["stop_reason"] == "tool_use"

    asyncio.run(scenario())


def test_any_forces_several_calls_where_they_are_allowed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            first = 'get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
            second = '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}'
            service.engine.script.words = (first, second, "\n</tool_call>")
            several = {"type": "any", "disable_parallel_tool_use": False}
            message = (await send(service, tools=[WEATHER], tool_choice=several)).json()
            cities = [block["input"]["city"] for block in message["content"]]
            assert cities == ["Oslo", "Rome"]
            assert message["stop_reason"] == "tool_use"

            service.engine.script.words = ('{"city": "Oslo"}',)
            for choice in ({"type": "any"}, {"type": "any", "disable_parallel_tool_use": True}):
                message = (await send(service, tools=[WEATHER], tool_choice=choice)).json()
                assert [block["input"] for block in message["content"]] == [{"city": "Oslo"}]

    asyncio.run(scenario())


def test_text_after_a_call_is_a_block(start_service: "StartService") -> None:
    """However the answer is cut into tokens, and however many of them come together."""

    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            text = f"Hm\n<tool_call>{CALL}</tool_call> So it is."
            for cut in range(1, len(text)):
                service.engine.script.words = (text[:cut], text[cut:])
                message = (await send(service, tools=[WEATHER])).json()
                before, call, after = message["content"]
                assert before["text"] == "Hm"
                assert call["input"] == {"city": "Oslo"}
                assert after["text"].strip() == "So it is."
                assert message["stop_reason"] == "tool_use"

    asyncio.run(scenario())


EMPTY = CALL.replace('"city": "Oslo"', "")
BROKEN = CALL[:-1] + "; oops"


@pytest.mark.parametrize(
    ("words", "cut", "content", "reason"),
    [
        ((f"<tool_call>{BROKEN}",), False, [BROKEN[BROKEN.index('{"city') :]], "end_turn"),
        ((f"<tool_call>{CALL[:-6]}",), True, ['{"city": "O'], "max_tokens"),
        (
            (f"<tool_call>{CALL}</tool_call><tool_call>{CALL[:-6]}",),
            False,
            [{"city": "Oslo"}, '{"city": "O'],
            "tool_use",
        ),
        ((f"<tool_call>{EMPTY}</tool_call>",), False, [{}], "tool_use"),
    ],
    ids=["broken", "cut", "second-cut", "empty"],
)
def test_only_whole_calls_are_calls(
    start_service: "StartService", words: Any, cut: bool, content: list[Any], reason: str
) -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            service.engine.script.words = words
            if cut:
                service.engine.script.reason = inference_pb2.FINISH_REASON_LENGTH
            message = (await send(service, tools=[WEATHER])).json()
            found = [block.get("input", block.get("text")) for block in message["content"]]
            assert found == content
            assert message["stop_reason"] == reason

            streamed: list[Any] = []
            ends: list[Any] = []
            for event in await events(service, tools=[WEATHER]):
                if event["type"] == "content_block_start":
                    is_first = not streamed
                    assert event["content_block"]["type"] == "tool_use" or not is_first
                    streamed.append("")
                if event["type"] == "content_block_delta":
                    delta = event["delta"]
                    streamed[-1] += delta.get("partial_json", delta.get("text"))
                if event["type"] in ("message_delta", "error"):
                    ends.append(event)
            wanted = [each if isinstance(each, str) else json.dumps(each) for each in content]
            assert "".join(streamed) == "".join(wanted)

            # A block that has begun cannot become text. No client may take it for a whole call.
            [end] = ends
            if cut or not isinstance(content[-1], str):
                assert end["delta"]["stop_reason"] == reason
            else:
                assert end["error"]["code"] == "BROKEN_CALL"
                assert "get_weather" in end["error"]["message"]

    asyncio.run(scenario())


def test_thoughts_come_where_they_are_asked_for(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HARMONY) as service:
            service.engine.script.words = (
                "<|channel|>analysis<|message|>Hm",
                ", so<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            )
            thinking = {"type": "enabled", "budget_tokens": 1024}
            thought, said = (await send(service, thinking=thinking)).json()["content"]
            assert thought == {"type": "thinking", "thinking": "Hm, so", "signature": ""}
            assert said["text"] == "Yes"
            deltas = [
                event["delta"]["type"]
                for event in await events(service, thinking=thinking)
                if event["type"] == "content_block_delta"
            ]
            assert deltas[0] == "thinking_delta"
            assert deltas[-1] == "text_delta"
            for more in ({}, {"thinking": {"type": "disabled"}}):
                content = (await send(service, **more)).json()["content"]
                assert content == [{"type": "text", "text": "Yes"}]

    asyncio.run(scenario())


def test_why_an_answer_ended(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.reason = inference_pb2.FINISH_REASON_LENGTH
            assert (await send(service)).json()["stop_reason"] == "max_tokens"
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            form = {"format": {"type": "json_schema", "schema": schema}}
            await send(service, output_config=form)
            assert json.loads(service.engine.requests[-1].grammar.json_schema) == schema

    asyncio.run(scenario())


def test_tokens_are_counted_as_they_are_rendered(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            body = {"model": "tiny", "messages": USER, "system": "Be kind.", "tools": [WEATHER]}
            counted = await service.http.post(COUNT, json=body)
            assert not service.engine.requests
            await service.http.post(PATH, json=body | {"max_tokens": 5})
            assert counted.json() == {"input_tokens": len(told(service))}
            assert counted.headers["request-id"] == counted.headers["x-request-id"]
            wrong = await service.http.post(COUNT, json=body | {"model": "big"})
            assert wrong.json()["error"]["type"] == "not_found_error"

    asyncio.run(scenario())


def test_a_key_may_come_in_x_api_key(start_service: "StartService", tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text("alice-secret-key-0123456789abcdef")
    tenants = {"keys_dir": str(keys), "anonymous": "deny", "tenants": [{"name": "alice"}]}

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            key = "alice-secret-key-0123456789abcdef"
            for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
                answer = await service.http.post(PATH, json=ASK, headers=headers)
                assert answer.status_code == 200, answer.text
            for headers in ({}, {"x-api-key": "wrong"}):
                for path in (PATH, COUNT):
                    answer = await service.http.post(path, json=ASK, headers=headers)
                    error = answer.json()
                    assert (answer.status_code, error["type"]) == (401, "error")
                    assert error["error"]["type"] == "authentication_error"

    asyncio.run(scenario())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "assistant", "content": "It"}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
    (
        {"tools": [WEATHER | {"input_schema": {"type": "string"}}]},
        "tools[0].input_schema.type",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "b"}, "tools": [WEATHER]}, "tool_choice.name"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "hard"}}, "thinking.type"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
]


def test_sdks_see_that_a_thread_needs_the_whole_conversation(
    start_service: "StartService",
) -> None:
    """Without this code the SDK's tool runner gives up after the refusal."""

    async def scenario() -> None:
        async with start_service() as service:
            error = (await send(service, thread={"type": "create"})).json()["error"]
            assert error["details"]["error_code"] == "thread_unsupported_request"
            assert error["details"]["unsupported"] == ["thread"]

            answer = await send(service, thread=None)
            assert answer.status_code == 200

    asyncio.run(scenario())


def test_errors_have_anthropics_form(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for more, field in REFUSED:
                answer = await send(service, **more)
                error = answer.json()
                assert answer.status_code == 400, more
                assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
                assert error["error"]["param"] == field, error
                assert field.partition("[")[0] in error["error"]["message"]
            assert not service.engine.requests
            for answer, kind in (
                (await service.http.get(PATH), "invalid_request_error"),
                (await service.http.get(PATH + "/nothing"), "not_found_error"),
                (await service.http.post(PATH, content=b"x"), "invalid_request_error"),
            ):
                assert answer.json()["error"]["type"] == kind
            assert "param" in (await service.http.get("/v1/nothing")).json()["error"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_refusal_keeps_its_status_and_retry_after(
    start_service: "StartService", is_streamed: bool
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.refuse = ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM", "full", retry_after_s=3
            )
            headers = {"x-ullage-timeout": "2"}
            body = ASK | {"stream": is_streamed}
            answer = await service.http.post(PATH, json=body, headers=headers)
            assert answer.status_code == 429
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1

    asyncio.run(scenario())


def test_a_stream_that_breaks_off_ends_with_an_error(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.fail_after = 1
            service.engine.script.failure = ServiceError(
                grpc.StatusCode.INTERNAL, "REQUEST_FAILED", "its step cannot be computed"
            )
            last = (await events(service))[-1]
            assert last["type"] == "error"
            assert last["error"]["type"] == "api_error"
            assert last["error"]["code"] == "REQUEST_FAILED"

    asyncio.run(scenario())


def test_the_official_client(start_service: "StartService") -> None:
    anthropic = pytest.importorskip("anthropic")

    async def scenario() -> None:
        async with start_service(template=HERMES) as service:
            url = f"http://127.0.0.1:{service.router.http_port}"
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
                message = await client.messages.create(**ASK)
                assert message.content[0].text == WORDS
                async with client.messages.stream(**ASK) as stream:
                    assert (await stream.get_final_message()).content[0].text == WORDS
                counted = await client.messages.count_tokens(model="tiny", messages=USER)
                assert counted.input_tokens == message.usage.input_tokens
                with pytest.raises(anthropic.NotFoundError):
                    await client.messages.create(**ASK | {"model": "big"})

    asyncio.run(scenario())
