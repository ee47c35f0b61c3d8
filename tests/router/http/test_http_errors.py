"""Everything that is wrong with a request is said in OpenAI's envelope, naming the field."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import Body, asgi
from ullage_router.http.openai.endpoint import Dialect, GenerateEndpoint, Parsed
from ullage_router.http.openai.errors import openai_errors
from ullage_router.tenants.session import TenantSession

if TYPE_CHECKING:
    Service = Any
    StartService = Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TEXT = [{"type": "text", "text": ""}]


def called(count: int) -> dict[str, Any]:
    """A turn with so many calls."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * count}


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": HI * 8193}, "messages"),
    ({"messages": [{"role": "user", "content": TEXT * 8193}]}, "messages[0].content"),
    ({"messages": [called(129)]}, "messages[0].tool_calls"),
    ({"messages": [called(128)] * 65}, "messages"),
    ({"messages": HI, "max_tokens": -1}, "max_tokens"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "max_tokens": 1.5}, "max_tokens"),
    ({"messages": HI, "max_completion_tokens": -3}, "max_completion_tokens"),
    ({"messages": HI, "temperature": "NaN"}, "temperature"),
    ({"messages": HI, "temperature": -0.1}, "temperature"),
    ({"messages": HI, "temperature": 2.5}, "temperature"),
    ({"messages": HI, "temperature": True}, "temperature"),
    ({"messages": HI, "top_p": -0.1}, "top_p"),
    ({"messages": HI, "allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
    ({"messages": HI, "bad_words": [" "]}, "bad_words"),
    ({"messages": HI, "bad_words": ["a" * 257]}, "bad_words"),
    ({"messages": HI, "bad_words": ["a"] * 65}, "bad_words"),
    ({"messages": HI, "bad_words": ["a"], "use_beam_search": True}, "bad_words"),
    ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
    ({"messages": HI, "top_p": 1.1}, "top_p"),
    ({"messages": HI, "min_p": -0.5}, "min_p"),
    ({"messages": HI, "top_k": -2}, "top_k"),
    ({"messages": HI, "presence_penalty": 3}, "presence_penalty"),
    ({"messages": HI, "frequency_penalty": -3}, "frequency_penalty"),
    ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty"),
    ({"messages": HI, "repetition_penalty": 1e-30}, "repetition_penalty"),
    ({"messages": HI, "repetition_penalty": 101}, "repetition_penalty"),
    ({"messages": HI, "seed": "x"}, "seed"),
    ({"messages": HI, "stop": 5}, "stop"),
    ({"messages": HI, "stop": [""]}, "stop"),
    ({"messages": HI, "stop": ["x"] * 17}, "stop"),
    ({"messages": HI, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"messages": HI, "logprobs": 5}, "logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HI, "stream": "yes"}, "stream"),
    ({"messages": HI, "n": 0}, "n"),
    ({"messages": HI, "n": 17}, "n"),
    ({"messages": HI, "n": True}, "n"),
    ({"messages": HI, "best_of": 17}, "best_of"),
    ({"messages": HI, "length_penalty": 2.0}, "length_penalty"),
    ({"messages": HI, "session_id": "s" * 257}, "session_id"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"messages": HI, "logit_bias": {"5": True}}, "logit_bias[...]"),
    ({"messages": HI, "logit_bias": {"five": 1}}, "logit_bias['five']"),
    ({"messages": HI, "logit_bias": {"-5": 1}}, "logit_bias['-5']"),
    (
        {"messages": HI, "logit_bias": {"99999999999999999999": 1}},
        "logit_bias['99999999999999999999']",
    ),
    ({"messages": HI, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"messages": HI, "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"messages": HI, "min_tokens": -1}, "min_tokens"),
    ({"messages": HI, "min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"messages": HI, "model": 5}, "model"),
    ({"messages": HI, "reasoning_effort": 1}, "reasoning_effort"),
    ({"messages": HI, "chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"messages": HI, "chat_template_kwargs": {"x": "a" * 20_000}}, "chat_template_kwargs"),
]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [1] * ((1 << 20) + 1)}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "x", "use_beam_search": True, "n": 9}, "n"),
    ({"prompt": "x", "use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
    ({"prompt": "x", "use_beam_search": True, "best_of": 9}, "best_of"),
    ({"prompt": "x", "use_beam_search": True, "stream": True}, "stream"),
    ({"prompt": "x", "use_beam_search": True, "length_penalty": 99.0}, "length_penalty"),
    (
        {"prompt": "x", "use_beam_search": True, "stop_token_ids": list(range(17))},
        "stop_token_ids",
    ),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "logprobs": -1}, "logprobs"),
]


def asked(field: bytes) -> bytes:
    """A body with a field that no client of JSON writes."""
    return b'{"messages":[{"role":"user","content":"x"}],' + field + b"}"


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "body"),
    (b"{", "body"),
    (b"[]", "body"),
    (b'"text"', "body"),
    (b"\xff\xfe", "body"),
    (b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', "body"),
    (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', "body"),
    (b'{"messages":[{"role":"user","content":"x"}],"temperature":Infinity}', "body"),
    (b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}', "temperature"),
    (b'{"messages":[{"role":"user","content":"\\ud800 and more text"}]}', ""),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "body"),
    (asked(b'"structured_outputs":{"json":{"const":"\xff"}}'), "structured_outputs.json"),
    (
        asked(
            b'"response_format":{"type":"json_schema",'
            b'"json_schema":{"name":"x","schema":{"const":"\xff"}}}'
        ),
        "response_format.json_schema.schema",
    ),
    (asked(b'"logit_bias":{"0000000000099999999999":1}'), "logit_bias['00000000000999999999']"),
    (
        asked(b'"logit_bias":{"' + b"0" * 11 + b"9" * 5000 + b'":1}'),
        "logit_bias['00000000000999999999']",
    ),
    (b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    (b'{"messages":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
    (b'{"messages":[],"tools":[' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"]}", "body"),
]


JSON = {"content-type": "application/json"}


def refused(answer: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param != "":
        assert error["param"] == param, error
    return error


def test_wrong_fields(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for path, cases in ((CHAT, BAD_CHATS), (COMPLETIONS, BAD_COMPLETIONS)):
                for body, param in cases:
                    error = refused(await service.http.post(path, json=body), 400, param)
                    assert error["type"] == "invalid_request_error"
                    assert param.split("[")[0] in error["message"]
            assert service.engine.requests == []

    asyncio.run(scenario())


def test_wrong_bodies(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for content, param in BAD_BODIES:
                refused(await service.http.post(CHAT, content=content, headers=JSON), 400, param)
                assert (await service.stats())["latest"][0]["status"] == 400
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())


def test_a_conversation_of_many_contexts_is_refused(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            turns = [
                {"role": "user", "content": "word " * 100_000},
                {"role": "user", "content": "x"},
            ]
            answer = await service.http.post(CHAT, json={"messages": turns})
            assert "characters" in refused(answer, 400, "messages")["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
def test_a_huge_body_is_refused_unread(start_service: "StartService", is_chunked: bool) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(12):  # few, as a reply is lost to whoever still sends 2 s after it
            yield b"x" * (1 << 20)

    async def scenario() -> None:
        async with start_service() as service:
            headers = JSON if is_chunked else JSON | {"content-length": str(12 << 20)}
            answer = await service.http.post(CHAT, content=body(), headers=headers)
            assert refused(answer, 413, "body")["code"] == "BODY_TOO_LARGE"
            assert answer.headers["connection"] == "close"
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())


def test_a_declared_huge_body_is_answered_before_it_is_sent(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
            )
            assert b" 413 " in await asyncio.wait_for(reader.readline(), 30)
            writer.close()

    asyncio.run(scenario())


def test_not_http_at_all(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
            writer.write(b"\x16\x03\x01 gibberish\r\n\r\n")
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 30)
            writer.close()
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())


def test_unknown_paths_methods_and_models(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            http = service.http
            assert refused(await http.get("/v2"), 404, None)["code"] == "NOT_FOUND"
            wrong_method = await http.get(CHAT)
            assert refused(wrong_method, 405, None)["code"] == "METHOD_NOT_ALLOWED"
            assert wrong_method.headers["allow"] == "POST"
            answer = await service.chat(model="gpt-4")
            assert refused(answer, 404, "model")["code"] == "model_not_found"
            refused(await http.get("/v1/models/gpt-4"), 404, "model")
            assert (await http.get("/v1/models/tiny")).json()["id"] == "tiny"
            listed = (await http.get("/v1/models")).json()
            assert [model["id"] for model in listed["data"]] == ["tiny"]
            assert listed["data"][0]["max_model_len"] == 2000
            assert listed["data"][0]["sampling_defaults"] == {}

    asyncio.run(scenario())


REFUSING = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('Begin with\n a user') }}{% endif %}"
    "{{ messages[0].content }}"
)


def test_a_refusal_of_the_chat_template_has_its_words(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=REFUSING) as service:
            turns = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "Hi"}]
            answer = await service.chat(messages=turns)
            error = refused(answer, 400, "messages")
            assert "chat template: Begin with a user" in error["message"]
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())


def test_what_asks_for_nothing_is_ignored(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            neutral = {
                "n": 1,
                "best_of": 1,
                "use_beam_search": False,
                "length_penalty": 1.0,
                "tools": [],
                "tool_choice": "auto",
                "response_format": {"type": "text"},
                "logit_bias": {},
                "user": "someone",
                "an_unknown_field": {"deep": [1, 2, {"x": None}]},
                "temperature": None,
                "stop": None,
                "guided_json": None,
                "skip_special_tokens": True,
                "truncation_side": "left",
                "thinking_token_budget": None,
                "logprob_token_ids": [],
                "watermarking": False,
                "early_stopping": False,
                "vllm_xargs": {},
            }
            answer = await service.chat(**neutral)
            assert answer.status_code == 200, answer.text

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncation_side", "right"),
        ("thinking_token_budget", 0),
        ("logprob_token_ids", [1]),
        ("repetition_detection", {"max_pattern_size": 4}),
        ("watermarking", True),
        ("early_stopping", True),
        ("vllm_xargs", {"a": 1}),
    ],
)
def test_fields_of_vllm_that_would_change_the_answer_are_refused(
    start_service: "StartService", field: str, value: Any
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for answer in (
                await service.chat(**{field: value}),
                await service.complete(**{field: value}),
            ):
                assert f"{field} is" in refused(answer, 400, field)["message"]

    asyncio.run(scenario())


def test_errors_are_counted(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.chat(n=17)
            await service.chat()
            metrics = (await service.monitoring.get("/metrics")).text
            assert 'ullage_router_requests_total{code="400"} 1.0' in metrics
            assert 'ullage_router_requests_total{code="200"} 1.0' in metrics
            latest = (await service.stats())["latest"]
            assert [entry["status"] for entry in latest] == [200, 400]
            assert json.dumps(latest)

    asyncio.run(scenario())


def broken(body: Body, tenant: TenantSession) -> Parsed:
    raise ValueError("a bug")


def test_a_bug_in_reading_a_body_is_counted_too(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            endpoint = GenerateEndpoint(
                service.router.service, Dialect(broken, openai_errors("messages"))
            )
            transport = httpx.ASGITransport(asgi(endpoint, HTTPLimits()))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                answer = await http.post(CHAT, json={})
            assert answer.status_code == 500
            assert "a bug" not in answer.text
            (latest,) = (await service.stats())["latest"]
            assert (latest["status"], latest["error"]) == (500, "INTERNAL")

    asyncio.run(scenario())


MEMORY_SHORT = ServiceError(
    grpc.StatusCode.UNAVAILABLE,
    "MEMORY_SHORT",
    "other processes hold memory of the device that this engine needs, or its container is at "
    "resources.limits.memory; try again",
    retry_after_s=10.0,
)


def test_memory_that_others_hold_is_a_503_with_a_time_to_come_back(
    start_service: "StartService",
) -> None:
    """Over HTTP and gRPC, once every engine has said so."""

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.script.refuse = MEMORY_SHORT
            answer = await service.complete()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("MEMORY_SHORT", "service_unavailable")
            assert "hold memory" in error["message"]

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in service.grpc.Generate(pb.GenerateRequest(text="Hi")):
                    pass
            refused = from_rpc_error(caught.value)
            assert (refused.code, refused.reason) == (MEMORY_SHORT.code, MEMORY_SHORT.reason)
            assert refused.retry_after_s == 10.0

    asyncio.run(scenario())


def test_an_engine_that_is_still_connecting_is_no_reason_to_call_a_prompt_too_long(
    start_service: "StartService",
) -> None:
    """The engine has described its model, and the stream for requests opens later."""

    async def scenario() -> None:
        opened = asyncio.Event()

        def prepare(engine: Any) -> None:
            engine.multiplex_hold = opened

        async with start_service(wait=False, prepare=prepare) as service:
            await service.until(lambda: service.engine.num_opening == 1)
            for path, more in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})):
                answer = await service.http.post(path, json={"model": "tiny", **more})
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "NO_ENGINE"
                assert int(answer.headers["retry-after"]) >= 1
            opened.set()
            await service.until(lambda: service.router.service.engines.is_ready)
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())
