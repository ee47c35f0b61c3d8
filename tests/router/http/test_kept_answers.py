"""Memory and time for responses that are kept until they are complete."""

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.openai import endpoint
from ullage_router.http.openai.responses import ChatFormat, chat_logprob
from ullage_router.http.responses.input_items import encode_items
from ullage_router.http.responses.store import StoredResponse

if TYPE_CHECKING:
    Service = Any
    StartService = Any

CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
SCORED: Any = {"logprobs": True, "top_logprobs": 2}
RESPONSE: Any = {
    "model": "tiny",
    "input": "Hi",
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
}
NUM_ANSWER = 9
"""Log-probabilities of the fake engine's answer: three tokens, with two alternatives each."""


def test_an_answer_keeps_a_bounded_number(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_KEPT_BYTES", NUM_ANSWER * endpoint.LOGPROB_BYTES)

    async def refused(asked: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await asked
        assert caught.value.param == "logprobs"
        assert "ask for fewer answers, tokens or alternatives" in str(caught.value)

    async def scenario() -> None:
        async with start_service() as service:
            chats = service.openai.chat.completions
            completions = service.openai.completions
            responses = service.openai.responses
            assert (await chats.create(**CHAT, **SCORED)).choices[0].logprobs
            assert (await responses.create(**RESPONSE)).output

            await refused(chats.create(**CHAT, **SCORED, n=2))
            await refused(completions.create(model="tiny", prompt="Hi", logprobs=2, n=2))
            await refused(completions.create(model="tiny", prompt=["Hi", "Ho"], logprobs=2))
            await refused(responses.create(**RESPONSE | {"top_logprobs": 3}))

            # A chat's stream keeps none.
            stream = await chats.create(**CHAT, **SCORED, n=2, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason

            stream = await responses.create(**RESPONSE | {"top_logprobs": 3}, stream=True)
            last = [event async for event in stream][-1]
            assert last.type == "response.failed"
            assert "MiB of memory" in last.response.error.message

    asyncio.run(scenario())


def test_an_echoed_prompt_counts_in_each_answer(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes name a token of a hundred characters."""
    monkeypatch.setattr(endpoint, "LONG_TEXT", 8)
    monkeypatch.setattr(endpoint, "MAX_KEPT_BYTES", 3 * 8 * endpoint.CHARACTER_BYTES)

    async def scenario() -> None:
        async with start_service() as service:
            asked: Any = {"echo": True, "max_tokens": 1}
            assert (await service.complete("12345678", **asked, n=2)).status_code == 200
            answer = await service.complete("12345678", **asked, n=4)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "echo"

    asyncio.run(scenario())


def test_answers_at_one_time_share_the_memory(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is free again once an answer is sent."""
    most = HTTPLimits().max_kept_bytes
    monkeypatch.setattr(endpoint, "MAX_KEPT_BYTES", 2 * most)
    monkeypatch.setattr(endpoint, "LOGPROB_BYTES", most // NUM_ANSWER - 64)

    async def scenario() -> None:
        async with start_service() as service:
            chats = service.openai.chat.completions
            for _ in range(2):
                assert (await chats.create(**CHAT, **SCORED)).choices[0].logprobs

            answer = await service.chat(**SCORED | {"top_logprobs": 3})
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "ANSWERS_FULL"
            assert int(answer.headers["retry-after"]) >= 1
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())


def test_an_answer_that_nobody_reads_keeps_its_memory(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else clients that read slowly would hold more than all answers may have together."""
    most = HTTPLimits().max_kept_bytes
    words = ("w" * 1_000_000,) * 32
    monkeypatch.setattr(endpoint, "CHARACTER_BYTES", most * 6 // 10 // len("".join(words)))
    monkeypatch.setattr(endpoint, "MAX_KEPT_BYTES", most)

    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.words = words
            reader, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
            body = json.dumps(CHAT).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            assert b" 200 " in await reader.readline()

            refused = await service.chat()
            assert refused.status_code == 503, refused.text[:500]
            assert refused.json()["error"]["code"] == "ANSWERS_FULL"

            assert len(await reader.read()) > 32_000_000
            writer.close()
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())


def test_a_whole_answer_is_written_in_a_thread(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen long answers with all alternatives would take seconds of the event loop."""
    threads: list[threading.Thread] = []
    whole = ChatFormat.whole

    def noted(self: ChatFormat, *args: Any) -> Any:
        threads.append(threading.current_thread())
        return whole(self, *args)

    monkeypatch.setattr(ChatFormat, "whole", noted)

    async def scenario() -> None:
        async with start_service() as service:
            assert (await service.chat()).status_code == 200
            assert (await service.chat(**SCORED)).status_code == 200
            assert [each is threading.main_thread() for each in threads] == [True, False]

    asyncio.run(scenario())


def test_tokens_are_encoded_once() -> None:
    """The last events of a response repeat them four times."""
    entry = inference_pb2.TokenLogprob(
        token="é",
        logprob=-0.5,
        top=[inference_pb2.Alternative(token="e", logprob=-1.5, token_bytes=b"e")],
    )
    encoded = chat_logprob(entry)
    assert isinstance(encoded, msgspec.Raw)
    assert msgspec.json.decode(encoded) == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "e", "logprob": -1.5, "bytes": [101]}],
    }


def test_a_response_is_continued_without_parsing_its_logprobs() -> None:
    """They may take megabytes, whose parser would hold the GIL. These are none that it could."""
    part = {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": ["unparsed"]}
    message = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    before = StoredResponse(
        msgspec.json.encode({"output": [message]}), b"", b"[]", "resp_1", expires=1.0
    )
    first, last = msgspec.json.decode(encode_items("More", before))
    assert first == message | {"content": [part | {"logprobs": []}]}
    assert last["content"] == [{"type": "input_text", "text": "More"}]
