#!/usr/bin/env python3
"""Closed-loop load on an OpenAI-compatible server: output tokens/s, TTFT, time per token.

usage: load.py URL MODEL [--concurrency 1,8] [--requests 32] [--input-words 150] [--output 64]

Every request has a prompt of its own (150 words are 180 tokens with SmolLM2's template), asks for
exactly `--output` tokens, greedy, streamed. Prints one JSON object a concurrency.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass

import aiohttp

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
"""Words that are one token each in common vocabularies."""
INPUT_WORDS, OUTPUT = 150, 64


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished request; seconds."""

    ttft: float
    e2e: float
    prompt_tokens: int
    tokens: int


def prompt(number: int, words: int) -> str:
    chooser = random.Random(number)
    return " ".join(chooser.choice(WORDS) for _ in range(words))


async def request(
    session: aiohttp.ClientSession, url: str, model: str, text: str, tokens: int
) -> Sample:
    """Sends one request and reads its stream.

    Raises:
        SystemExit: the server did not answer with 200, or with another number of tokens.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first, usage = 0.0, {"prompt_tokens": 0, "completion_tokens": 0}
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            answer = (await response.text())[:300]
            raise SystemExit(f"error: {url} answered {response.status}: {answer}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                # The first chunk of some servers has a role and no text.
                if any(choice["delta"].get("content") for choice in chunk.get("choices", ())):
                    first = first or time.perf_counter()
                usage = chunk.get("usage") or usage
    ended = time.perf_counter()
    if usage["completion_tokens"] != tokens:
        raise SystemExit(f"error: {url} sent {usage['completion_tokens']} of {tokens} tokens")
    return Sample((first or ended) - started, ended - started, usage["prompt_tokens"], tokens)


async def level(
    url: str,
    model: str,
    concurrency: int,
    requests: int,
    words: int = INPUT_WORDS,
    tokens: int = OUTPUT,
    seed: int = 0,
) -> dict[str, float]:
    """Figures of one concurrency: every worker sends its next request when the last one ended.

    Prompts of another concurrency or seed (below 1,000) are other ones.
    """
    first = concurrency * 100_000 + seed * 100
    numbers = iter(range(first, first + requests))
    samples: list[Sample] = []
    # Some servers close a connection after a stream, while the next request is on its way.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def worker() -> None:
            for number in numbers:
                text = prompt(number, words)
                samples.append(await request(session, url, model, text, tokens))

        started = time.perf_counter()
        try:
            await asyncio.gather(*(worker() for _ in range(concurrency)))
        except aiohttp.ClientError as error:
            raise SystemExit(f"error: {url} broke off an answer: {error}") from error
        wall = time.perf_counter() - started
    return figures(concurrency, samples, wall)


def figures(concurrency: int, samples: list[Sample], wall: float) -> dict[str, float]:
    per_token = [(s.e2e - s.ttft) / max(1, s.tokens - 1) for s in samples]
    ends = sorted(s.e2e for s in samples)
    return {
        "concurrency": concurrency,
        "requests": len(samples),
        "prompt_tokens": round(statistics.mean(s.prompt_tokens for s in samples), 1),
        "output_tokens": round(statistics.mean(s.tokens for s in samples), 1),
        "output_tokens_per_s": round(sum(s.tokens for s in samples) / wall, 1),
        "ttft_p50_ms": round(1e3 * statistics.median(s.ttft for s in samples), 1),
        "time_per_token_p50_ms": round(1e3 * statistics.median(per_token), 2),
        "e2e_p95_ms": round(1e3 * ends[int(0.95 * (len(ends) - 1))], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-words", type=int, default=INPUT_WORDS)
    parser.add_argument("--output", type=int, default=OUTPUT)
    o = parser.parse_args()
    for concurrency in map(int, o.concurrency.split(",")):
        row = level(o.url, o.model, concurrency, o.requests, o.input_words, o.output)
        print(json.dumps(asyncio.run(row)), flush=True)


if __name__ == "__main__":
    main()
