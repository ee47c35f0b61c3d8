"""Bodies within the limit of bytes, made to cost time or memory: others are served meanwhile."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from ullage_testing.loop_watch import MOST_HELD_S, MOST_S, watched_loop
from ullage_testing.peak_memory import PeakMemory
from ullage_testing.raw_http import exchange

from ullage_common.wire.errors import ServiceError
from ullage_router.http.openai import decoding, requests

if TYPE_CHECKING:
    StartService = Any

MOST_BYTES = 64 << 20
"""Memory that bodies may take for a moment, with themselves."""
CHAT = "chat/completions"
COMPLETIONS = "completions"
EMBEDDINGS = "embeddings"


def listed(element: bytes, size: int = 8_000_000) -> bytes:
    """A JSON list of equal elements that has about so many bytes."""
    return b"[%b]" % b",".join([element] * (size // (len(element) + 1)))


def asked(field: bytes, value: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"x"}],"%b":%b}' % (field, value)


def said(message: bytes) -> bytes:
    return b'{"messages":[%b]}' % message


def called(arguments: str, count: int = 1) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call] * count}
    return json.dumps({"messages": [message, {"role": "user", "content": "x"}]}).encode()


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


MANY_NUMBERS = b",".join(b'"%d":1' % i for i in range(100_000))
BODIES: dict[str, tuple[str, bytes]] = {
    "a field nobody knows": (CHAT, asked(b"x", listed(b"[]"))),
    "a field nobody serves": (CHAT, asked(b"functions", listed(b"[]"))),
    "numbers nobody serves": (CHAT, asked(b"functions", listed(b"1"))),
    "objects nobody serves": (CHAT, asked(b"documents", b"{%b}" % MANY_NUMBERS)),
    "variables": (CHAT, asked(b"chat_template_kwargs", b'{"a":%b}' % listed(b"[]"))),
    "many variables": (CHAT, asked(b"chat_template_kwargs", b"{%b}" % MANY_NUMBERS)),
    "tools": (CHAT, asked(b"tools", listed(b"{}", 300_000))),
    "tools of lists": (CHAT, asked(b"tools", b'[{"type":%b}]' % listed(b"[]", 1_000_000))),
    "logit_bias": (CHAT, asked(b"logit_bias", b"{%b}" % MANY_NUMBERS)),
    "stop": (CHAT, asked(b"stop", listed(b'""'))),
    "stop_token_ids": (CHAT, asked(b"stop_token_ids", listed(b"1"))),
    "choices": (CHAT, asked(b"structured_outputs", b'{"choice":%b}' % listed(b'""'))),
    "a schema": (CHAT, asked(b"structured_outputs", b'{"json":%b}' % listed(b"[]"))),
    "a regex": (CHAT, asked(b"structured_outputs", b'{"regex":"%b"}' % (b"a?" * 4_000_000))),
    "audio": (CHAT, said(b'{"role":"user","content":"","audio":%b}' % listed(b"[]"))),
    "messages": (CHAT, said(b",".join([b'{"role":""}'] * 650_000))),
    "parts": (CHAT, said(b'{"role":"user","content":%b}' % listed(b'{"type":"text","text":""}'))),
    "escapes": (CHAT, said(b'{"role":"user","content":"%b"}' % (b"\\n" * 4_000_000))),
    "accents": (CHAT, said(b'{"role":"user","content":"%b"}' % (b"\\u00e9" * 1_300_000))),
    "quotes": (CHAT, said(b'{"role":"user","content":"%b"}' % (b'\\"' * 4_000_000))),
    "half a surrogate pair": (CHAT, asked(b"x", listed(b"[]"))[:-1] + b',"y":"\\ud800"}'),
    "half pairs": (CHAT, asked(b"x", listed(b'"\\ud800"', 2_000_000))),
    "backslashes": (COMPLETIONS, b'{"prompt":"%bx\\ud800"}' % (b"\\" * 8_000_000)),
    "few backslashes": (COMPLETIONS, b'{"prompt":"%bx\\ud800"}' % (b"\\" * 15_000)),
    "backslashes of inputs": (EMBEDDINGS, b'{"input":"%bx\\ud800"}' % (b"\\" * 8_000_000)),
    "backslashes of no JSON": (CHAT, b"\\ud800" + b"\\" * 8_000_000),
    "one field": (CHAT, asked(b"x", b'1,%b,"y":1' % b",".join([b'"stop":[]'] * 800_000))),
    "calls' arguments": (CHAT, called(json.dumps({"a": [[]] * 1_450_000}))),
    "small arguments": (CHAT, called(json.dumps({"a": [[]] * 10_000}), 128)),
    "deep arguments": (CHAT, called(nested(900), 128)),
    "token ids": (COMPLETIONS, b'{"prompt":%b}' % listed(b"12345", 6_000_000)),
    "a list of token ids": (COMPLETIONS, b'{"prompt":[%b]}' % listed(b"12345", 6_000_000)),
    "too many token ids": (COMPLETIONS, b'{"prompt":%b}' % listed(b"1")),
    "prompts": (COMPLETIONS, b'{"prompt":%b}' % listed(b"[]")),
    "texts": (COMPLETIONS, b'{"prompt":%b}' % listed(b'""')),
    "inputs": (EMBEDDINGS, b'{"input":%b}' % listed(b"[]")),
    "lists of input": (EMBEDDINGS, b'{"input":%b}' % listed(listed(b"12345", 6_000), 6_000_000)),
    "input token ids": (EMBEDDINGS, b'{"input":%b}' % listed(b"12345", 6_000_000)),
}  # fmt: skip


@contextlib.asynccontextmanager
async def asking_health(port: int) -> AsyncIterator[list[bytes]]:
    """Ask for /healthz all the time; yields the answers."""
    answers: list[bytes] = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def ask() -> None:
        while True:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            answers.append(await reader.readuntil(b"}"))
            await asyncio.sleep(0.005)

    asking = asyncio.create_task(ask())
    try:
        yield answers
    finally:
        asking.cancel()
        writer.close()


@pytest.mark.parametrize("context", [2_000, 120_000])
def test_no_body_holds_up_others(start_service: "StartService", context: int) -> None:
    failures = []

    async def scenario() -> None:
        async with start_service(max_model_len=context) as service:
            port = service.router.http_port
            await asyncio.to_thread(exchange, port, http(CHAT, said(b"{}")))
            for name, (path, body) in BODIES.items():
                data = http(path, body)
                peak = PeakMemory()
                async with asking_health(port) as answers, watched_loop() as watch:
                    answer = await asyncio.to_thread(exchange, port, data)
                grown = peak.grown_bytes
                is_refused = b" 400 " in answer[:16] and all(b" 200 " in each for each in answers)
                is_quick = watch.turn_s <= MOST_S and watch.stall_s <= MOST_HELD_S
                if not (is_refused and is_quick and grown <= MOST_BYTES):
                    failures.append((name, answer[:300], watch.turn_s, watch.stall_s, grown))

    asyncio.run(scenario())
    assert not failures


PART = b'{"type":"text","text":"a"}'
TOGETHER = ("escapes", "quotes", "audio", "calls' arguments", "too many token ids", "inputs")


@pytest.mark.parametrize("name", TOGETHER)
def test_eight_bodies_at_once_take_no_more_memory_than_one(
    start_service: "StartService", name: str
) -> None:
    path, body = BODIES[name]
    data = http(path, body)

    async def scenario() -> None:
        async with start_service(max_model_len=120_000) as service:
            port = service.router.http_port
            await asyncio.to_thread(exchange, port, data)  # what a process takes once
            peak = PeakMemory()
            sending = (asyncio.to_thread(exchange, port, data) for _ in range(8))
            answers = await asyncio.gather(*sending)
            assert {answer[9:12] for answer in answers} == {b"400"}
            assert peak.grown_bytes <= MOST_BYTES

    asyncio.run(scenario())


LEGAL: dict[str, tuple[str, bytes]] = {
    "messages": (CHAT, said(b",".join([b'{"role":"user","content":""}'] * 8192))),
    "calls": (CHAT, called(json.dumps({"path": "a.py", "lines": ["x = 1"] * 8}), 128)),
    "parts": (CHAT, said(b'{"role":"user","content":%b}' % listed(PART, 200_000))),
    "token ids": (COMPLETIONS, b'{"prompt":%b}' % listed(b"120", 400_000)),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body"), LEGAL.values(), ids=LEGAL)
def test_no_long_request_holds_up_others(
    start_service: "StartService", path: str, body: bytes
) -> None:
    async def scenario() -> None:
        async with start_service(single=(10_000,), max_model_len=120_000) as service:
            port = service.router.http_port
            async with asking_health(port), watched_loop() as watch:
                answer = await asyncio.to_thread(exchange, port, http(path, body))
            assert b" 200 " in answer[:16], answer[:500]
            watch.check()

    asyncio.run(scenario())


def http(path: str, body: bytes) -> bytes:
    head = b"POST /v1/%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (path.encode(), len(body)) + body


def pieces(count: int) -> str:
    return ",".join(map(str, range(count)))


LISTS: dict[str, tuple[bytes, list[list[int]] | None]] = {
    "ids": (f"[{pieces(20_000)}]".encode(), [list(range(20_000))]),
    "blanks": (f" [ {pieces(20_000)} , 7 ] ".encode(), [[*range(20_000), 7]]),
    "one list": (f"[[{pieces(20_000)}]]".encode(), [list(range(20_000))]),
    "two lists": (f"[ [{pieces(9_000)}] , [{pieces(9_000)}] ]".encode(), [list(range(9_000))] * 2),
    "an empty list": (f"[[], [{pieces(20_000)}]]".encode(), [[], list(range(20_000))]),
    "a negative id": (f"[{pieces(20_000)}, -1]".encode(), None),
    "a large id": (f"[{pieces(20_000)}, 4294967296]".encode(), None),
    "a fraction": (f"[{pieces(20_000)}, 1.5]".encode(), None),
    "a word": (f"[{pieces(20_000)}, true]".encode(), None),
    "an id behind lists": (f"[[{pieces(20_000)}], 1]".encode(), None),
    "an id before lists": (f"[1, [{pieces(20_000)}]]".encode(), None),
    "deeper lists": (f"[[[{pieces(20_000)}]]]".encode(), None),
    "a text": (f'["{pieces(20_000)}"]'.encode(), None),
    "few": (b"[1, 2]", None),
}


def test_long_lists_of_token_ids() -> None:
    for name, (text, expected) in LISTS.items():
        found = decoding.long_token_lists(msgspec.Raw(text.strip()), "prompt")
        assert (found and [list(ids) for ids in found]) == expected, name


@pytest.mark.parametrize(
    "field", ["seed", "messages[0].role", "stop_token_ids[0]", "tool_choice.type"]
)
def test_long_bodies_have_the_same_errors_as_short_ones(field: str) -> None:
    wrong: dict[str, Any] = {
        "seed": {"seed": "x"},
        "messages[0].role": {"messages": [{"role": 5}]},
        "stop_token_ids[0]": {"stop_token_ids": [-1]},
        "tool_choice.type": {"tool_choice": {"type": 5}},
    }
    errors = []
    for length in (10, 100_000):
        body = {"messages": [{"role": "user", "content": ""}], "user": "x" * length} | wrong[field]
        with pytest.raises(ServiceError) as caught:
            requests.parse_chat(json.dumps(body).encode())
        errors.append((caught.value.message, caught.value.metadata))
    assert errors[0] == errors[1]
    assert errors[0][1] == {"field": field}


def test_a_long_body_without_messages_is_refused() -> None:
    with pytest.raises(ServiceError, match="messages is missing; it is required"):
        requests.parse_chat(json.dumps({"user": "x" * 100_000}).encode())


HALF_PAIRS = {
    "at the end": (rb'{"prompt":"x\ud800"}', True),
    "at the end, in capitals": (rb'{"prompt":"x\uD83D"}', True),
    "before an escape": (rb'{"prompt":"x\ud83d\n"}', True),
    "before a field": (rb'{"prompt":"\ud800","model":"m"}', True),
    "before text": (rb'{"prompt":"\ud800 and more"}', True),
    "the second half": (rb'{"prompt":"\udc00"}', True),
    "two first halves": (rb'{"prompt":"\ud83d\ud83d"}', True),
    "behind a pair": (rb'{"prompt":"\ud83d\ude00\ud83d"}', True),
    "behind a backslash": (rb'{"prompt":"\\\ud83d"}', True),
    "before a backslash": (rb'{"prompt":"\ud83d\\ude00"}', True),
    "of a field that is skipped": (rb'{"prompt":"a","user":"\ud83d and more"}', True),
    "a body cut short": (rb'{"prompt":"x', False),
    "a backslash and letters, cut short": (rb'{"prompt":"\\ud800', False),
    "a pair, cut short": (rb'{"prompt":"\ud83d\ude00', False),
}


@pytest.mark.parametrize("padding", [0, 100_000])
def test_half_a_surrogate_pair_is_named(padding: int) -> None:
    wrong = []
    for name, (body, is_half) in HALF_PAIRS.items():
        padded = body.replace(b'{"', b'{"x":"%b","' % (b"x" * padding), 1)
        with pytest.raises(ServiceError) as caught:
            requests.parse_completion(padded)
        if ("half a surrogate pair" in caught.value.message) != is_half:
            wrong.append((name, caught.value.message))
    assert not wrong


SAID = b"Some <words> of code_and | more 3x5, as usual. "
CHATS: dict[str, bytes] = {
    "many turns": said(b",".join([b'{"role":"user","content":"%b"}' % (SAID * 20)] * 8000)),
    "answers": said(
        b",".join(
            [b'{"role":"assistant","content":"%b"},{"role":"user","content":"x"}' % (SAID * 40)]
            * 4000
        )
    ),
}


@pytest.mark.parametrize("body", CHATS.values(), ids=CHATS)
def test_eight_long_chats_at_once_take_no_more_memory_than_one(
    start_service: "StartService", body: bytes
) -> None:
    """They are far above the context, which is known when they are rendered and tokenised."""
    data = http(CHAT, body)
    assert 7_500_000 < len(body) < 8 << 20

    async def scenario() -> None:
        async with start_service(max_model_len=1 << 17) as service:
            port = service.router.http_port
            await asyncio.to_thread(exchange, port, data)  # what a process takes once
            peak = PeakMemory()
            sending = (asyncio.to_thread(exchange, port, data) for _ in range(8))
            answers = await asyncio.gather(*sending)
            # Those that find too many others before them are told to come back.
            assert {answer[9:12] for answer in answers} <= {b"400", b"503"}
            assert b"400" in {answer[9:12] for answer in answers}
            assert peak.grown_bytes <= MOST_BYTES

    asyncio.run(scenario())


def test_many_allowed_tools_are_counted_before_they_are_parsed() -> None:
    tool = {"type": "function", "function": {"name": "f"}} | {f"{i}": 0 for i in range(100)}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool] * 700,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }
    chat, _ = requests.parse_chat(json.dumps(body).encode())
    with pytest.raises(ServiceError, match="tools has more than 65536 objects"):
        requests.from_chat(chat)
