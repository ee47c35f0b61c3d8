"""Completions with several prompts in a request."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import grpc
import pytest
from ullage_testing.fake_engine import Script

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.call import Call, PausableDeadline
from ullage_router.http.openai.many_prompts import ManyPrompts
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.account import shared_account
from ullage_router.tenants.session import TenantSession

if TYPE_CHECKING:
    StartService = Any

KEY = "k" * 32


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, without [DONE]."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    "prompts", [["a", "bc", "def"], [[1], [2, 3], [4, 5, 6]], ["a", [2, 3], "def"]], ids=str
)
def test_whole(start_service: "StartService", prompts: Any) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.complete(prompts, return_token_ids=True, n=2)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert [choice["index"] for choice in body["choices"]] == list(range(6))
            texts = [choice["text"] for choice in body["choices"]]
            assert texts == ["Hello big world", "Hello1 big1 world1"] * 3
            lengths = [len(choice["prompt_token_ids"]) for choice in body["choices"]]
            assert lengths == [1, 1, 2, 2, 3, 3]
            assert body["usage"]["prompt_tokens"] == 6
            assert body["usage"]["completion_tokens"] == 18
            assert len(service.engine.requests) == 3
            sizes = sorted(len(sent.token_ids.ids) for sent in service.engine.requests)
            assert sizes == [1, 2, 3]
            name = answer.headers["x-request-id"]
            assert body["id"] == f"cmpl-{name}"
            ids = {sent.request_id for sent in service.engine.requests}
            assert ids == {name, f"{name}-1", f"{name}-2"}

    asyncio.run(scenario())


def test_streamed_with_the_official_client(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            stream = await service.openai.completions.create(
                model="tiny",
                prompt=["a", "bc"],
                n=2,
                logprobs=1,
                stream=True,
                stream_options={"include_usage": True},
            )
            texts = ["", "", "", ""]
            reasons: list[Any] = [None] * 4
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                last = chunk
            assert texts == ["Hello big world", "Hello1 big1 world1"] * 2
            assert reasons == ["stop"] * 4
            assert last.usage.prompt_tokens == 3
            assert last.usage.completion_tokens == 12

    asyncio.run(scenario())


def test_each_is_admitted_by_itself(start_service: "StartService") -> None:
    """Prompts for which there is no room now wait for the others."""

    async def scenario() -> None:
        # One prompt fits at a time, and the queue holds one.
        routing = {"queue": {"max_requests": 1}}
        async with start_service(single=(16,), routing=routing) as service:
            prompts = ["x" * 100] * 12
            answer = await service.complete(prompts, max_tokens=20)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == 12
            assert answer.json()["usage"]["completion_tokens"] == 36

    asyncio.run(scenario())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_first_error_ends_all(start_service: "StartService", is_streamed: bool) -> None:
    async def scenario() -> None:
        async with start_service(max_model_len=100) as service:
            answer = await service.complete(["a", "x" * 300], stream=is_streamed)
            lines = [line for line in answer.text.split("\n") if '"error"' in line]
            error = json.loads(lines[-1].removeprefix("data: "))["error"]
            assert error["param"] == "prompt[1]"
            assert error["code"] == "context_length_exceeded"
            if not is_streamed:
                assert answer.status_code == 400
            await service.until(lambda: service.router.service.pipeline.inflight == 0)

            refusal = ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "NO", "no")
            service.engine.script.refuse = refusal
            answer = await service.complete(["a", "b"], stream=is_streamed)
            assert answer.status_code == 400
            await service.until(lambda: service.router.service.pipeline.inflight == 0)

    asyncio.run(scenario())


def test_an_answer_that_has_begun_does_not_begin_again(start_service: "StartService") -> None:
    """It shares its first answer with a client that reads faster, and falls too far behind."""
    words = tuple(f"{index:05d}" * 4000 for index in range(600))
    body = {"temperature": 0, "stream": True, "max_tokens": 1000}

    async def scenario() -> None:
        async with start_service(single=(400, 400)) as service:
            begin = asyncio.Event()
            for engine in service.engines:
                engine.script = Script(words=words, hold=begin)
            asked = {"model": "tiny", "prompt": ["a", "b"], **body}
            request = service.http.build_request("POST", "/v1/completions", json=asked)
            sending = asyncio.ensure_future(service.http.send(request, stream=True))
            await service.until(lambda: sum(e.active for e in service.engines) == 2)
            fast = asyncio.ensure_future(service.complete("a", **body))
            coalescer = service.router.service.coalescer
            await service.until(lambda: coalescer.joined == 1)
            begin.set()
            slow = await sending
            assert text_of((await fast).text.splitlines(), 0) == "".join(words)
            lines = [line async for line in slow.aiter_lines()]
            await slow.aclose()
            errors = [line for line in lines if '"error"' in line]
            assert "SLOW_READER" in errors[0]
            assert "".join(words).startswith(text_of(lines, 0))

    asyncio.run(scenario())


def text_of(lines: list[str], index: int) -> str:
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def test_a_client_that_leaves_cancels_all(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.pause = asyncio.Event()
            body = {"prompt": ["a", "b", "c"], "stream": True}
            async with service.http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    break
            await service.until(lambda: len(service.engine.cancelled) == 3)
            await service.until(lambda: service.router.service.pipeline.inflight == 0)

    asyncio.run(scenario())


def test_answers_longer_than_what_waits(start_service: "StartService") -> None:
    """More events than the router keeps all arrive."""

    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.words = ("word ",) * 200
            answer = await service.complete(["a", "b", "c"], max_tokens=200)
            assert [len(choice["text"]) for choice in answer.json()["choices"]] == [1000] * 3

    asyncio.run(scenario())


class ShortPipeline:
    """Answers each prompt with its text, and breaks off the first answer to "b" after that."""

    def __init__(self) -> None:
        self.served: list[str] = []

    @asynccontextmanager
    async def serve(self, call: Call, _: object) -> AsyncIterator[Any]:
        self.served.append(call.request.text)
        yield self

    accepted = inference_pb2.Accepted()

    async def events(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        text = self.served[-1]
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text))
        if text == "b" and self.served.count("b") == 1:
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER", "read faster")
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished())


def test_an_answer_that_has_begun_is_never_given_twice() -> None:
    """A shortage in the midst of an answer is an error, since a new try would repeat its words."""

    async def scenario() -> None:
        pipeline: Any = ShortPipeline()
        tenant = TenantSession(shared_account())
        requests = [inference_pb2.GenerateRequest(text=text) for text in "ab"]
        deadline = PausableDeadline(time.monotonic() + 60, time.monotonic() + 60, 60)
        first = Call(requests[0], RequestRecord("id"), tenant, deadline)
        many = ManyPrompts(pipeline, first, requests, 0, 60.0, 60.0)
        texts = []
        with pytest.raises(ServiceError, match="read faster"):
            async with many.serve() as stream:
                async for event in stream.events():
                    if isinstance(event, inference_pb2.GenerateResponse):
                        texts.append(event.delta.text)
        assert "".join(texts) == "ab"

    asyncio.run(scenario())


def test_cached_tokens_are_those_of_all_prompts(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            tiers = [
                inference_pb2.CachedTokens(tier="device", tokens=16),
                inference_pb2.CachedTokens(tier="host", tokens=32),
            ]
            cached = inference_pb2.Usage(cached_tokens=48, cached_by_tier=tiers)
            service.engine.script.cached = cached
            expected = {
                "cached_tokens": 144,
                "cached_tokens_details": {"device": 48, "host": 96},
            }
            prompts = ["a", "b", "c"]
            whole = (await service.complete(prompts)).json()
            assert whole["usage"]["prompt_tokens_details"] == expected
            options = {"include_usage": True, "continuous_usage_stats": True}
            answer = await service.complete(prompts, stream=True, stream_options=options)
            for chunk in events(answer.text)[-2:]:
                assert chunk["usage"]["prompt_tokens_details"] == expected

    asyncio.run(scenario())


def test_wrong_lists_are_refused(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            wrong: list[Any] = [["a"] * 129, [1, "a"], [[1], 2], [[]], ["a", ""], []]
            for prompt in wrong:
                answer = await service.complete(prompt)
                assert answer.status_code == 400, prompt
                assert answer.json()["error"]["param"].startswith("prompt")
            answer = await service.complete(["a"] * 128, n=16, logprobs=20, max_tokens=2000)
            assert answer.json()["error"]["param"] == "prompt"
            assert "fewer prompts" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_quotas_count_each(start_service: "StartService", tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "t").write_text(KEY)
    rules = {"name": "t", "requests_per_minute": 3}
    tenants = {"keys_dir": str(tmp_path / "keys"), "tenants": [rules]}

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            key = {"authorization": f"Bearer {KEY}"}
            for prompts, status in ((["a"] * 4, 400), (["a"] * 2, 200), (["a"] * 2, 429)):
                body = {"prompt": prompts}
                answer = await service.http.post("/v1/completions", json=body, headers=key)
                assert answer.status_code == status, answer.text
            assert int(answer.headers["retry-after"]) > 0

    asyncio.run(scenario())


def test_the_body_stays_charged_until_each_prompt_is_rendered() -> None:
    """A prompt that is put back and rendered again does not count for another."""
    released: list[bool] = []
    first = MagicMock(spec=Call)
    first.tenant.max_concurrency = 1
    first.record.request_id = "a"
    first.record.arrived = 0.0
    first.replace_key = first.idempotency_key = ""
    first.release_body = lambda: released.append(True)
    requests = [inference_pb2.GenerateRequest(text=text) for text in "ab"]
    many = ManyPrompts(MagicMock(), first, requests, 1, 10.0, 10.0)
    many._call(0).release_body()
    many._call(0).release_body()
    assert not released
    many._call(1).release_body()
    assert released
