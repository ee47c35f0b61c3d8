"""Measures whether refused clients that obey Retry-After are refused again."""

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.support.kv_engine import MODEL, blocks_of
from benchmarks.support.router_process import START_S, process, ready, start_router

PROMPT = OUTPUT = 40
"""Number of prompt tokens and of output tokens in each request."""
LIMIT_S = 300.0


@dataclass
class ReturningClient:
    """A client that retries after the time in Retry-After.

    Attributes:
        number: the client's number, which makes its prompt unique.
        told_s: seconds in each Retry-After that the client received.
    """

    number: int
    told_s: list[int] = field(default_factory=list)

    async def ask(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send the request repeatedly until it is served."""
        prompt = f"{self.number:010d}".ljust(PROMPT, "x")
        body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True}
        while True:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                text = await response.text()
                if response.status == 200:
                    return
                if response.status != 429:
                    sys.exit(f"error: status {response.status}: {text}")
                self.told_s.append(int(response.headers["retry-after"]))
            await asyncio.sleep(self.told_s[-1])


async def run(refused: int, slots: int, token_s: float) -> dict[str, object]:
    async with contextlib.AsyncExitStack() as stack:
        to = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        blocks = slots * blocks_of(PROMPT, OUTPUT)
        command = [sys.executable, "-m", "benchmarks.support.kv_engine", "--blocks", str(blocks)]
        engine = await stack.enter_async_context(
            process(*command, "--token-s", str(token_s), log=to / "engine.log")
        )
        assert engine.stdout
        line = await asyncio.wait_for(engine.stdout.readline(), START_S)
        address = f"127.0.0.1:{json.loads(line)['port']}"
        url, _ = await start_router(stack, MODEL, [address], to)

        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await ready(session, url, 1)

        clients = list[ReturningClient]()
        tasks = list[asyncio.Task[None]]()
        numbers = itertools.count()
        began = time.monotonic()

        async with asyncio.timeout(LIMIT_S):
            while sum(bool(client.told_s) for client in clients) < refused:
                clients.append(ReturningClient(next(numbers)))
                tasks.append(asyncio.create_task(clients[-1].ask(session, url)))
                await asyncio.sleep(0.005)
            await asyncio.gather(*tasks)

        delays = Counter(client.told_s[0] for client in clients if client.told_s)
        return {
            "clients": len(clients),
            "refused": delays.total(),
            "refused_again": sum(len(client.told_s) > 1 for client in clients),
            "retry_after": dict(sorted(delays.items())),
            "took_s": round(time.monotonic() - began, 1),
            "shortest_s": round(len(clients) / slots * OUTPUT * token_s, 1),
        }


def measure(refused: int, slots: int, token_s: float) -> int:
    """Run all clients, print the figures, and return the exit status."""
    figures = asyncio.run(run(refused, slots, token_s))
    print(json.dumps(figures))
    return 0 if figures["refused_again"] == 0 else 1
