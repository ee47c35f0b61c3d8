"""Memory of a router process while bodies of eight megabytes arrive, many at once."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers
from ullage_testing.fake_engine import MODEL, TEMPLATE, TOKENIZER, FakeEngine
from ullage_testing.peak_memory import PeakMemory
from ullage_testing.ports import free_port
from ullage_testing.raw_http import exchange

MOST_BYTES = 64 << 20
"""Memory above that of an idle process."""
COUNT = 8
SIZE = 7_900_000
CHAT = "chat/completions"

SAID = b"Some <words> of code_and | more 3x5, as usual. "
TRIMMED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>' }}"
    "{% endfor %}<|im_start|>assistant\n"
)

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}<|im_start|>assistant\n"
)
"""Writes thoughts and calls as well."""


def filled(part: bytes) -> bytes:
    return part * (SIZE // len(part))


def said(*messages: bytes) -> bytes:
    return b'{"messages":[%b]}' % b",".join(messages)


def message(role: bytes, content: bytes, field: bytes = b"content") -> bytes:
    return b'{"role":"%b","%b":"%b"}' % (role, field, content)


def called(arguments: bytes) -> bytes:
    function = b'{"name":"f","arguments":"%b"}' % arguments
    call = b'{"id":"c","type":"function","function":%b}' % function
    return b'{"role":"assistant","tool_calls":[%b]}' % call


ASKED = message(b"user", b"x")
PART = b'{"type":"text","text":"%b"}' % (SAID * 20_000)
BODIES: dict[str, tuple[str, bytes]] = {
    "one text": (CHAT, said(message(b"user", filled(SAID)))),
    "one text of ideographs": (
        CHAT,
        said(message(b"user", filled("\u4f60<|\u597d\u3002".encode()))),
    ),
    "one text of ASCII and an ideograph": (
        CHAT,
        said(message(b"user", filled(SAID) + "\u4f60".encode())),
    ),
    "text parts": (
        CHAT,
        said(b'{"role":"user","content":[%b]}' % b",".join([PART] * (SIZE // len(PART)))),
    ),
    "a long answer": (CHAT, said(message(b"assistant", filled(SAID)), ASKED)),
    "a long thought": (
        CHAT,
        said(message(b"assistant", filled(SAID), b"reasoning_content"), ASKED),
    ),
    "a long result": (CHAT, said(called(b"{}"), message(b"tool", filled(SAID)), ASKED)),
    "long arguments": (CHAT, said(called(filled(SAID)), ASKED)),
    "a question that ends a thought": (
        CHAT,
        said(message(b"user", filled(SAID) + b"</think>"), message(b"assistant", b"ok"), ASKED),
    ),
    "an answer that ends a thought": (
        CHAT,
        said(message(b"user", b"a"), message(b"assistant", filled(SAID) + b"</think>"), ASKED),
    ),
    "many turns": (CHAT, said(*[message(b"user", SAID * 20)] * 8000)),
    "many turns with emoji": (
        CHAT,
        said(*[message(b"user", SAID * 20 + "\U0001f600".encode())] * 7900),
    ),
    "a prompt": ("completions", b'{"prompt":"%b"}' % filled(SAID)),
    "a response to a text": ("responses", b'{"input":"%b"}' % filled(SAID)),
    "a response to items": (
        "responses",
        b'{"input":[%b]}' % b",".join([message(b"user", SAID * 20)] * 8000),
    ),
    "long instructions": ("responses", b'{"input":"x","instructions":"%b"}' % filled(SAID)),
    "a message": ("messages", b'{"max_tokens":1,%b' % said(message(b"user", filled(SAID)))[1:]),
    "a long system text": (
        "messages",
        b'{"max_tokens":1,"system":"%b",%b' % (filled(SAID), said(ASKED)[1:]),
    ),
    "an input": ("embeddings", b'{"input":"%b"}' % filled(SAID)),
}


def bounded_by_nothing() -> bytes:
    """A tokenizer with a normalizer, special tokens, and a token so long that no text is too long
    by the number of its characters."""
    tokenizer = Tokenizer.from_buffer(TOKENIZER)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("x" + "_" * 90, normalized=False)])
    return bytes(tokenizer.to_str(), "utf-8")


def http(path: str, body: bytes) -> bytes:
    head = b"POST /v1/%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (path.encode(), len(body)) + body


@contextlib.asynccontextmanager
async def router_process(tmp_path: Path, engine: FakeEngine) -> AsyncIterator[tuple[int, int]]:
    """Run a router that has answered a request; yields its process id and port."""
    await engine.start(free_port())
    port = free_port()
    address = {"host": "127.0.0.1", "port": 0}
    document = {
        "model": MODEL,
        "http": {**address, "port": port},
        "grpc": address,
        "metrics": address,
        "pools": [{"name": "single", "targets": [engine.address]}],
    }
    config = tmp_path / "router.yaml"
    config.write_text(json.dumps(document))
    command = [sys.executable, "-m", "ullage_router.main", "--config", str(config)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr
    try:
        async with asyncio.timeout(60):
            while b'"listening"' not in await process.stderr.readline():
                pass
            draining = asyncio.create_task(process.stderr.read())
            small = http(CHAT, said(ASKED))
            while b" 200 " not in (await asyncio.to_thread(exchange, port, small))[:16]:  # noqa: ASYNC110 - the engine becomes known to another process
                await asyncio.sleep(0.05)
        yield process.pid, port
    finally:
        process.terminate()
        await process.wait()
        await draining
        await engine.stop()


async def failures(
    tmp_path: Path, engine: FakeEngine, served: frozenset[str]
) -> list[tuple[str, int, set[bytes]]]:
    """Return the kinds of bodies that took too much memory, or got another answer than there is.

    Args:
        served: kinds that fit, for the template leaves their long texts out.
    """
    found = []
    async with router_process(tmp_path, engine) as (pid, port):
        for name, (path, body) in BODIES.items():
            data = http(path, body)
            peak = PeakMemory(pid)
            answers = await asyncio.gather(
                *(asyncio.to_thread(exchange, port, data) for _ in range(COUNT))
            )
            grown = peak.grown_bytes >> 20
            statuses = {answer[9:12] for answer in answers}
            # A router with much to do may put some off, but not all.
            right = b"200" if name in served else b"400"
            if grown > MOST_BYTES >> 20 or statuses - {b"503"} != {right}:
                found.append((name, grown, statuses))
    return found


THOUGHT = frozenset({"a long thought"})


def test_eight_bodies_of_any_kind_at_once(tmp_path: Path) -> None:
    for tokenizer, template, served in (
        (TOKENIZER, TEMPLATE, THOUGHT),
        (bounded_by_nothing(), TRIMMED, THOUGHT),
        (bounded_by_nothing(), THINKING, frozenset[str]()),
    ):
        engine = FakeEngine("single-0", "single", 10_000, 1 << 17)
        engine.tokenizer = tokenizer
        engine.vocab_size = Tokenizer.from_buffer(tokenizer).get_vocab_size()
        engine.template = template
        assert not asyncio.run(failures(tmp_path, engine, served))
