#!/usr/bin/env python3
"""Closed-loop load on an OpenAI-compatible server: output tokens/s, TTFT, time per token.

usage: load.py URL MODEL [--concurrency 1,8] [--requests 32] [--input-words 140] [--output 64]

Every request has a prompt of its own, asks for exactly `--output` tokens, greedy, streamed. Prints
one JSON object a concurrency.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass

import aiohttp

WORDS = [
    "anchor",
    "barrel",
    "cable",
    "deck",
    "engine",
    "flag",
    "gale",
    "harbour",
    "island",
    "jetty",
    "keel",
    "lantern",
    "mast",
]


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
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                usage = json.loads(line[6:]).get("usage") or usage
    ended = time.perf_counter()
    return Sample(
        first - started, ended - started, usage["prompt_tokens"], usage["completion_tokens"]
    )


async def level(
    url: str, model: str, concurrency: int, requests: int, words: int, tokens: int
) -> dict[str, float]:
    """Figures of one concurrency: every worker sends its next request when the last one ended."""
    numbers = iter(range(concurrency * 100_000, concurrency * 100_000 + requests))
    samples: list[Sample] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def worker() -> None:
            for number in numbers:
                text = prompt(number, words)
                samples.append(await request(session, url, model, text, tokens))

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
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
    parser.add_argument("--input-words", type=int, default=140)
    parser.add_argument("--output", type=int, default=64)
    o = parser.parse_args()
    for concurrency in map(int, o.concurrency.split(",")):
        row = level(o.url, o.model, concurrency, o.requests, o.input_words, o.output)
        print(json.dumps(asyncio.run(row)), flush=True)


if __name__ == "__main__":
    main()
