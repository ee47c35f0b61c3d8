"""Sends closed-loop load to an OpenAI-compatible server, and measures tokens/s and latencies.

Every request has a unique prompt (163 words are 180 tokens with SmolLM2's template), requests an
exact number of tokens, and is greedy and streamed. The words are in the system message, so that
prompts differ from their fourth token on.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
"""Words that are one token each in common vocabularies."""
INPUT_WORDS = 163
OUTPUT = 64


class ServerError(SystemExit):
    """A server failed to start or to answer. The message ends the program."""


class _NotAnswered(Exception):
    """A request was not answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request, with times in seconds."""

    status: int
    """HTTP status (0 if the connection broke, or the stream ended before its last token)."""
    error: str
    """The server's error (empty for a complete answer)."""
    ttft: float
    e2e: float
    longest_pause: float
    prompt_tokens: int
    tokens: int


def messages(number: int, words: int) -> list[dict[str, str]]:
    """Return the messages of prompt number `number`.

    Prompts with different numbers differ before a prefix cache can match a block.
    """
    chooser = random.Random(number)
    text = " ".join(chooser.choice(WORDS) for _ in range(words))
    return [{"role": "system", "content": text}, {"role": "user", "content": "Go on."}]


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[dict[str, str]], tokens: int
) -> Answer:
    """Send one request, and read its stream to the end. Errors become part of the answer."""
    body = {
        "model": model,
        "messages": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }

    started = last = time.perf_counter()
    status = 0
    error = ""
    first = 0.0
    pause = 0.0
    usage = {"prompt_tokens": 0, "completion_tokens": 0}

    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            status = response.status
            if status != 200:
                error = f"answered {status}: {(await response.text())[:300]}"
            async for chunk in _chunks(response):
                if "error" in chunk:
                    error = f"broke off an answer: {json.dumps(chunk['error'])[:300]}"
                # The first chunk of some servers has a role and no text.
                if any(choice["delta"].get("content") for choice in chunk.get("choices", ())):
                    now = time.perf_counter()
                    first = first or now
                    pause = max(pause, now - last)
                    last = now
                usage = chunk.get("usage") or usage

        if not error and usage["completion_tokens"] != tokens:
            error = f"sent {usage['completion_tokens']} of {tokens} tokens"
    except TimeoutError:
        error = f"was silent or slow for {time.perf_counter() - started:.0f} s"
    except (aiohttp.ClientError, json.JSONDecodeError) as broken:
        error = f"broke off an answer: {broken or type(broken).__name__}"

    ended = time.perf_counter()
    if error and status == 200:
        status = 0
    return Answer(
        status=status,
        error=error,
        ttft=(first or ended) - started,
        e2e=ended - started,
        longest_pause=pause,
        prompt_tokens=usage["prompt_tokens"],
        tokens=usage["completion_tokens"],
    )


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream, without keep-alive comments and the end marker."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


async def level(
    url: str,
    model: str,
    concurrency: int,
    requests: int,
    words: int = INPUT_WORDS,
    tokens: int = OUTPUT,
    seed: int = 0,
    server: str = "",
) -> dict[str, float]:
    """Measure a closed loop with one concurrency, and return the figures.

    Args:
        url: base URL of the server.
        model: name of the server's model.
        concurrency: number of workers. Each sends its next request when the last one has ended.
        requests: total number of requests.
        words: number of words per prompt.
        tokens: number of tokens per answer.
        seed: a number below 1,000. Other seeds and other concurrencies have different prompts.
        server: name of the server in messages, instead of its URL.

    Raises:
        ServerError: a request was not answered with 200 and all its tokens.
    """
    first = (concurrency * 1000 + seed) * 1000
    numbers = iter(range(first, first + requests))
    answers: list[Answer] = []
    # Some servers close a connection after a stream, while the next request is in flight.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def worker() -> None:
            for number in numbers:
                answers.append(await ask(session, url, model, messages(number, words), tokens))
                if answers[-1].error:
                    raise _NotAnswered(answers[-1].error)

        started = time.perf_counter()
        try:
            await asyncio.gather(*(worker() for _ in range(concurrency)))
        except _NotAnswered as cause:
            raise ServerError(f"error: {server or url} {cause}") from cause
        wall = time.perf_counter() - started
    return figures(concurrency, answers, wall)


def figures(concurrency: int, answers: list[Answer], wall: float) -> dict[str, float]:
    per_token = [(s.e2e - s.ttft) / max(1, s.tokens - 1) for s in answers]
    ends = sorted(s.e2e for s in answers)
    return {
        "concurrency": concurrency,
        "requests": len(answers),
        "prompt_tokens": round(statistics.mean(s.prompt_tokens for s in answers), 1),
        "output_tokens": round(statistics.mean(s.tokens for s in answers), 1),
        "output_tokens_per_s": round(sum(s.tokens for s in answers) / wall, 1),
        "ttft_p50_ms": round(1e3 * statistics.median(s.ttft for s in answers), 1),
        "time_per_token_p50_ms": round(1e3 * statistics.median(per_token), 2),
        "e2e_p95_ms": round(1e3 * ends[int(0.95 * (len(ends) - 1))], 1),
    }
