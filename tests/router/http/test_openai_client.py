"""What users of OpenAI's official client meet: answers, exceptions, retries, helpers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import openai
import pydantic
import pytest

from ullage.headroom.v1 import headroom_pb2
from ullage_common.wire.errors import ServiceError

if TYPE_CHECKING:
    Service = Any
    StartService = Any

BLOCK = 16_000
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
WORDS = "Hello big world"


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def synchronously(service: "Service", work: Callable[[openai.OpenAI], None]) -> None:
    """Runs `work` with the synchronous client, in a thread."""
    url = f"http://127.0.0.1:{service.router.http_port}/v1"

    def run() -> None:
        with (
            httpx.Client(timeout=60, trust_env=False) as http,
            openai.OpenAI(base_url=url, api_key="none", http_client=http, max_retries=0) as client,
        ):
            work(client)

    await asyncio.to_thread(run)


def test_models(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            models = service.openai.models
            assert [model.id async for model in await models.list()] == ["tiny"]
            found = await models.retrieve("tiny")
            assert (found.object, found.owned_by, found.created) == ("model", "ullage", 1.7e9)
            with pytest.raises(openai.NotFoundError) as caught:
                await models.retrieve("big")
            assert caught.value.code == "model_not_found"
            assert caught.value.type == "invalid_request_error"

    asyncio.run(scenario())


def test_the_synchronous_client(start_service: "StartService") -> None:
    def work(client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(**ASK, n=2, seed=3, stop=["END"])
        assert [choice.message.content for choice in whole.choices] == [WORDS, "Hello1 big1 world1"]
        assert [choice.index for choice in whole.choices] == [0, 1]
        with client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        assert text_of(chunks) == WORDS
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == whole.usage.prompt_tokens + 3  # type: ignore[union-attr]
        assert [model.id for model in client.models.list()] == ["tiny"]

    async def scenario() -> None:
        async with start_service() as service:
            await synchronously(service, work)
            sent = service.engine.requests[0]
            assert (sent.sampling.seed, sent.samples.n) == (3, 2)
            assert list(sent.stop.stop_strings) == ["END"]

    asyncio.run(scenario())


def test_several_streamed_answers(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            stream = await service.openai.chat.completions.create(**ASK, n=2, stream=True)
            texts = {0: "", 1: ""}
            reasons = {}
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    if choice.finish_reason:
                        reasons[choice.index] = choice.finish_reason
            assert texts == {0: WORDS, 1: "Hello1 big1 world1"}
            assert reasons == {0: "stop", 1: "stop"}

    asyncio.run(scenario())


def test_what_is_harmless_is_ignored(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.openai.chat.completions.create(
                **ASK,
                user="u1",
                metadata={"k": "v"},
                store=False,
                service_tier="auto",
                safety_identifier="s",
                prompt_cache_key="p",
                verbosity="low",
                reasoning_effort="medium",
                extra_body={"nobody_knows": {"this": 1}},
            )
            assert answer.choices[0].message.content == WORDS
            assert answer.choices[0].message.refusal is None

    asyncio.run(scenario())


THINKING = (
    "{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Reasoning: {{ reasoning_effort }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def test_variables_of_the_chat_template_are_passed_on(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(template=THINKING) as service:
            chat = service.openai.chat.completions
            quick = {"chat_template_kwargs": {"enable_thinking": False}}
            await chat.create(**ASK)
            await chat.create(**ASK, reasoning_effort="high", extra_body=quick)
            model = service.router.service.engines.model
            ids = [list(request.token_ids.ids) for request in service.engine.requests]
            text = ASK["messages"][0]["content"]
            assert [model.decode(prompt) for prompt in ids] == [
                f"Reasoning: medium|{text}",
                f"Reasoning: high|{text}<think></think>",
            ]

    asyncio.run(scenario())


def test_raw_responses_and_request_ids(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            chat = service.openai.chat.completions
            raw = await chat.with_raw_response.create(**ASK, extra_headers={"x-request-id": "r1"})
            assert raw.headers["x-ullage-action"] == "accept"
            assert raw.headers["x-ullage-engine"] == "single-0"
            assert int(raw.headers["x-ullage-predicted-kv-bytes"]) > 0
            assert raw.request_id == "r1"
            answer = raw.parse()
            assert answer._request_id == "r1"
            assert answer.id == "chatcmpl-r1"
            async with chat.with_streaming_response.create(**ASK, stream=True) as response:
                assert response.headers["x-request-id"]
                lines = [line async for line in response.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            with pytest.raises(openai.BadRequestError) as caught:
                await chat.create(**ASK, temperature=9, extra_headers={"x-request-id": "r2"})
            assert caught.value.request_id == "r2"

    asyncio.run(scenario())


def failing(code: grpc.StatusCode, reason: str) -> ServiceError:
    return ServiceError(code, reason, "scripted")


def test_exceptions(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            chat = service.openai.chat.completions
            script = service.engine.script
            with pytest.raises(openai.BadRequestError) as bad:
                await chat.create(**ASK, temperature=9)
            assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
            with pytest.raises(openai.NotFoundError) as unknown:
                await chat.create(**ASK | {"model": "big"})
            assert unknown.value.param == "model"
            script.refuse = failing(grpc.StatusCode.INTERNAL, "REQUEST_FAILED")
            with pytest.raises(openai.InternalServerError) as broken:
                await chat.create(**ASK)
            assert broken.value.code == "REQUEST_FAILED"

    asyncio.run(scenario())


def test_a_prompt_above_the_context_is_told_in_openais_words(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(max_model_len=100) as service:
            for text in ("x" * 95, "x" * 300, "x" * 3000):
                chat = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
                with pytest.raises(openai.BadRequestError) as asked:
                    await service.openai.chat.completions.create(**chat, max_tokens=50)
                with pytest.raises(openai.BadRequestError) as completed:
                    await service.openai.completions.create(model="tiny", prompt=f"{text}12345")
                for told, param in ((asked.value, "messages"), (completed.value, "prompt")):
                    assert (told.code, told.param) == ("context_length_exceeded", param)
                    assert told.type == "invalid_request_error"
                    # LangChain and LiteLLM search the text for either, and not for the code.
                    assert "prompt is too long" in told.message
                    assert "this model's maximum context length is 100 tokens" in told.message
            latest = (await service.stats())["latest"]
            assert {entry["error"] for entry in latest} == {"CONTEXT_TOO_LONG"}

    asyncio.run(scenario())


def test_no_engine_is_a_503(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(pools={"single": ["127.0.0.1:1"]}, wait=False) as service:
            with pytest.raises(openai.InternalServerError) as caught:
                await service.openai.chat.completions.create(**ASK)
            assert (caught.value.status_code, caught.value.code) == (503, "NO_ENGINE")

    asyncio.run(scenario())


def test_an_unknown_key_is_an_authentication_error(
    start_service: "StartService", tmp_path: Path
) -> None:
    async def scenario() -> None:
        (tmp_path / "keys").mkdir()
        (tmp_path / "keys" / "alice").write_text("sk-alice-0123456789")
        tenants = {"keys_dir": str(tmp_path / "keys"), "tenants": []}
        async with start_service(tenants=tenants) as service:
            with pytest.raises(openai.AuthenticationError):
                await service.openai.chat.completions.create(**ASK)
            known = service.openai.with_options(api_key="sk-alice-0123456789")
            answer = await known.chat.completions.create(**ASK)
            assert answer.choices[0].message.content == WORDS

    asyncio.run(scenario())


def test_the_client_comes_back_when_it_is_told_to(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing={"ladder": ["reject"]}) as service:
            engine = service.engine
            releases = [headroom_pb2.Release(after_ms=700, bytes=90 * BLOCK)]
            engine.push(headroom_bytes=0, releases=releases)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.headroom.headroom_bytes == 0)
            with pytest.raises(openai.RateLimitError) as caught:
                await service.openai.chat.completions.create(**ASK)
            assert caught.value.type == "rate_limit_error"
            assert caught.value.response.headers["retry-after"] == "1"

            stats = service.router.service.stats
            before = len(stats.latest())
            patient = service.openai.with_options(max_retries=3)
            chat = patient.chat.completions.with_raw_response
            task = asyncio.ensure_future(chat.create(**ASK))
            await service.until(lambda: len(stats.latest()) > before)
            engine.push(headroom_bytes=100 * BLOCK)
            raw = await task
            assert raw.retries_taken >= 1
            assert raw.parse().choices[0].message.content == WORDS

    asyncio.run(scenario())


def test_a_timeout_of_the_client_ends_the_work(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.hold = asyncio.Event()
            impatient = service.openai.with_options(timeout=1.0)
            with pytest.raises(openai.APITimeoutError):
                await impatient.chat.completions.create(**ASK)
            await service.until(lambda: len(service.engine.cancelled) == 1)

    asyncio.run(scenario())


def test_closing_a_stream_ends_the_work(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.pause = asyncio.Event()
            stream = await service.openai.chat.completions.create(**ASK, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            await service.until(lambda: bool(service.engine.cancelled))
            assert len(service.engine.cancelled) == len(service.engine.requests) == 1

    asyncio.run(scenario())


def test_an_answer_that_breaks_off_raises(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.fail_after = 2
            stream = await service.openai.chat.completions.create(**ASK, stream=True)
            got = ""
            with pytest.raises(openai.APIError) as caught:
                async for chunk in stream:
                    got += chunk.choices[0].delta.content or ""
            assert got == "Hello big"
            assert caught.value.code == "WORKER_LOST"

    asyncio.run(scenario())


def test_legacy_completions(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            completions = service.openai.completions
            echoed = await completions.create(model="tiny", prompt="Say: ", echo=True)
            assert echoed.choices[0].text == f"Say: {WORDS}"
            told = await completions.create(model="tiny", prompt="Hi", logprobs=1, max_tokens=9)
            assert told.choices[0].logprobs.tokens == ["Hello", " big", " world"]
            assert told.choices[0].logprobs.token_logprobs == [-0.5] * 3
            assert told.usage.completion_tokens == 3
            stream = await completions.create(model="tiny", prompt="Hi", stream=True)
            assert "".join([c.choices[0].text async for c in stream]) == WORDS
            with pytest.raises(openai.BadRequestError) as caught:
                await completions.create(model="tiny", prompt="x", suffix="y")
            assert caught.value.param == "suffix"

    asyncio.run(scenario())


class ProcessSlot(pydantic.BaseModel):
    city: str
    degrees: int


def test_parsed_answers(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.words = ('{"city": "Os', 'lo", "degrees": -4}')
            chat = service.openai.chat.completions
            answer = await chat.parse(**ASK, response_format=ProcessSlot)
            assert answer.choices[0].message.parsed == ProcessSlot(city="Oslo", degrees=-4)
            schema = json.loads(service.engine.requests[0].grammar.json_schema)
            assert schema["required"] == ["city", "degrees"]
            async with chat.stream(**ASK, response_format=ProcessSlot) as stream:
                kinds = {event.type async for event in stream}
                final = await stream.get_final_completion()
            assert {"chunk", "content.delta", "content.done"} <= kinds
            assert final.choices[0].message.parsed == ProcessSlot(city="Oslo", degrees=-4)

    asyncio.run(scenario())


def test_parsed_calls(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.words = ('{"city": "Os', 'lo", "degrees": -4}')
            answer = await service.openai.chat.completions.parse(
                **ASK, tools=[openai.pydantic_function_tool(ProcessSlot)], tool_choice="required"
            )
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.parsed_arguments == ProcessSlot(city="Oslo", degrees=-4)

    asyncio.run(scenario())
