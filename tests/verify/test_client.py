"""The client records status, text, gaps and failures as they come over a real socket."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_verify.client import ChatAnswer, OpenAIClient

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
FIRST = 'data: {"choices": [{"delta": {"content": "schön "}}]}\n\n'.encode()
SECOND = b'data: {"choices": [{"delta": {"content": "day"}}]}\n\n'
END = (
    b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], '
    b'"usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)

Send = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer_to(send: Send, silence_s: float = 5.0) -> ChatAnswer:
    """Return what the client records of a server that sends these bytes."""

    async def scenario() -> ChatAnswer:
        async with served(send, silence_s) as client:
            return await client.chat("m", [{"role": "user", "content": "Hi"}], 8)

    return asyncio.run(scenario())


@contextlib.asynccontextmanager
async def served(send: Send, silence_s: float = 5.0) -> AsyncIterator[OpenAIClient]:
    """Yield a client of a server that sends these bytes to each request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await send(writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, OpenAIClient(f"http://{host}:{port}/v1/", silence_s=silence_s) as client:
        yield client


def sending(*parts: bytes, pause_s: float = 0.0) -> Send:
    async def send(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return send


@given(st.lists(st.integers(1, 200), max_size=8))
def test_a_stream_is_read_whatever_its_pieces_are(cuts: list[int]) -> None:
    whole = HEAD + b": keep-alive\n\n" + FIRST + SECOND + END
    places = sorted({min(cut, len(whole)) for cut in cuts})
    parts = [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]
    answer = answer_to(sending(*parts))
    assert (answer.outcome, answer.text, answer.finish_reason) == ("200", "schön day", "stop")
    assert (answer.prompt_tokens, answer.output_tokens, answer.num_pieces) == (3, 2, 2)


def test_choices_and_tool_calls_are_texts_of_their_own() -> None:
    call = {"index": 0, "function": {"name": "get_", "arguments": '{"a":'}}
    events = [
        {"index": 1, "delta": {"content": "b"}},
        {"index": 0, "delta": {"content": "a"}},
        {"index": 2, "delta": {"tool_calls": [call]}},
        {"index": 2, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}},
        {"index": 1, "delta": {"content": "B"}},
    ]
    parts = [f"data: {json.dumps({'choices': [each]})}\n\n".encode() for each in events]
    answer = answer_to(sending(HEAD, *parts, END))
    assert answer.texts == {0: "a", 1: "bB", 2: 'get_{"a":1}'}
    assert answer.text == 'abBget_{"a":1}'


@pytest.mark.parametrize(
    "event",
    [
        {"choices": None, "usage": None, "error": None},
        {"choices": [], "usage": {"prompt_tokens": None}},
        {"choices": [{"index": None, "delta": None, "finish_reason": None}]},
    ],
)
def test_null_fields_are_as_good_as_none(event: dict[str, Any]) -> None:
    part = b"data:" + json.dumps(event).encode() + b"\n\n"  # a space after the colon is optional
    answer = answer_to(sending(HEAD, FIRST, part, SECOND, END))
    assert (answer.outcome, answer.text) == ("200", "schön day")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_text(name: str) -> None:
    event = {"choices": [{"delta": {name: "Hmm.", "content": None}}]}
    answer = answer_to(sending(HEAD, f"data: {json.dumps(event)}\n\n".encode(), END))
    assert (answer.text, answer.num_pieces) == ("Hmm.", 1)
    assert answer.first_at is not None


@pytest.mark.parametrize("body", ["[1]", '"x"', '{"choices": [3]}', '{"choices": 7}', "{"])
def test_a_body_of_another_form_is_broken(body: str) -> None:
    async def scenario() -> ChatAnswer:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        async with served(sending(f"{head}\r\n\r\n{body}".encode())) as client:
            return await client.post("chat/completions", {})

    assert asyncio.run(scenario()).outcome == "broken"


def test_a_client_that_obeys_does_not_wait_for_a_day() -> None:
    head = b"HTTP/1.1 429 Later\r\nretry-after: 86400\r\ncontent-length: 0\r\n\r\n"

    async def scenario() -> int:
        async with asyncio.timeout(5), served(sending(head)) as client:
            return len(await client.obey("m", [], 1))

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize(
    ("parts", "outcome", "words"),
    [
        ([HEAD + FIRST], "broken", "without a finish reason"),
        ([HEAD + FIRST + b"data: [DONE]\n\n"], "broken", "without a finish reason"),
        ([HEAD + b'data: {"error": {"message": "no memory"}}\n\n' + END], "broken", "no memory"),
        ([HEAD + b"data: {nonsense\n\n"], "broken", "broken off"),
        ([b"HTTP/1.1 500 Oh\r\ncontent-length: 3\r\n\r\nbad"], "500", "bad"),
        ([], "broken", "broken off"),
    ],
)
def test_failures(parts: list[bytes], outcome: str, words: str) -> None:
    answer = answer_to(sending(*parts))
    assert answer.outcome == outcome
    assert words in answer.error
    assert not answer.is_whole


def test_silence_counts_as_a_gap() -> None:
    answer = answer_to(sending(HEAD + FIRST, b"", pause_s=5.0), silence_s=0.3)
    assert answer.outcome == "silent"
    assert answer.longest_gap_s >= 0.3


def test_the_longest_gap_is_between_two_texts() -> None:
    answer = answer_to(sending(HEAD + FIRST, SECOND, END, pause_s=0.2))
    assert 0.15 < answer.longest_gap_s < 2.0
    assert answer.ttft_s < answer.seconds


def test_a_refusal_says_when_to_return() -> None:
    head = b"HTTP/1.1 429 Later\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n"
    answer = answer_to(sending(head))
    assert (answer.is_refused, answer.retry_after_s) == (True, 7.0)


@pytest.mark.parametrize("header", ["inf", "nan", "-1", "0", "Wed, 21 Oct 2026 07:28:00 GMT", ""])
def test_a_time_that_no_client_can_wait_is_no_time(header: str) -> None:
    head = f"HTTP/1.1 429 Later\r\nretry-after: {header}\r\ncontent-length: 0\r\n\r\n"
    answer = answer_to(sending(head.encode()))
    assert answer.retry_after_s is None
    assert answer.pause_s == 1.0


def test_nobody_answers() -> None:
    async def scenario() -> ChatAnswer:
        async with OpenAIClient("http://127.0.0.1:9") as client:
            return await client.chat("m", [], 1)

    assert asyncio.run(scenario()).outcome == "broken"


def test_silence_before_the_end_of_a_whole_answer_is_a_pause() -> None:
    """A server that cuts an answer after its time limit ends it well."""
    answer = answer_to(sending(HEAD, FIRST, END, pause_s=0.3))
    assert answer.is_whole
    assert answer.longest_gap_s >= 0.3
