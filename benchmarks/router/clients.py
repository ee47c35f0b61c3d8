"""Send load to a chat endpoint over raw connections from one process, and print a JSON object.

usage: python -m benchmarks.router.clients PORT [--connections 64] [--seconds 3] [--rate 0]
                                                [--requests 0] [--stream]

The loop is closed: each connection sends its next request when it has received an answer. With
--rate, the loop is open: requests begin at even intervals, whether or not earlier requests have
been answered. With --requests, the load ends after that number of requests. A latency is the time
in milliseconds from sending a request to the last byte of its answer.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import deque
from typing import Any

import uvloop

QUESTION = "hello there how are you"
PLACE = b"00000000"
"""Placeholder for a request's number. Unique numbers make a tokenizer cache useless."""
END_OF_CHUNKS = b"0\r\n\r\n"
CLIENT_TIMEOUT_S = 60.0


def request(is_streamed: bool) -> bytes:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": f"{QUESTION} {PLACE.decode()}"}],
        "max_tokens": 16,
        "stream": is_streamed,
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Connection(asyncio.Protocol):
    """A connection with one request in flight."""

    def __init__(self, last_words: bytes) -> None:
        self._last_words = last_words
        self._read = bytearray()
        self._waiting: asyncio.Future[bool] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        head_end = self._read.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._read[:head_end]).lower()
        _, has_length, length = head.partition(b"content-length: ")
        if has_length:
            is_over = len(self._read) >= head_end + 4 + int(length.split(b"\r\n")[0])
        else:
            is_over = self._read.endswith(END_OF_CHUNKS)
        if is_over:
            self._finish(head.startswith(b"http/1.1 200") and self._last_words in self._read)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._finish(False)

    async def ask(self, data: bytes) -> bool:
        """Send a request, and return whether the answer was complete and successful."""
        if self._transport is None:
            return False
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._waiting

    def _finish(self, is_good: bool) -> None:
        self._read.clear()
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(is_good)


class Load:
    """Requests to one port, and their latencies."""

    def __init__(self, port: int, is_streamed: bool) -> None:
        self._port = port
        self._before, self._after = request(is_streamed).split(PLACE)
        self._number = random.randrange(10 ** (len(PLACE) - 1))  # differs from earlier runs
        self._last_words = b"data: [DONE]" if is_streamed else b'"finish_reason"'
        self.latencies: list[float] = []
        self.errors = 0

    async def connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: Connection(self._last_words), "127.0.0.1", self._port
        )
        return connection

    async def once(self, connection: Connection) -> None:
        self._number += 1
        number = b"%0*d" % (len(PLACE), self._number)
        started = time.perf_counter()
        if await connection.ask(self._before + number + self._after):
            self.latencies.append(time.perf_counter() - started)
        else:
            self.errors += 1

    async def closed(self, connections: int, seconds: float, requests: int) -> None:
        until = time.perf_counter() + seconds
        remaining = requests or 1 << 60

        async def worker(connection: Connection) -> None:
            nonlocal remaining
            while remaining > 0 and time.perf_counter() < until and not self.errors:
                remaining -= 1
                await self.once(connection)

        opened = await asyncio.gather(*(self.connect() for _ in range(connections)))
        await asyncio.gather(*map(worker, opened))

    async def open(self, rate: float, seconds: float) -> None:
        idle: deque[Connection] = deque()
        tasks: set[asyncio.Task[None]] = set()

        async def one() -> None:
            connection = idle.popleft() if idle else await self.connect()
            await self.once(connection)
            idle.append(connection)

        started = time.perf_counter()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
            task = asyncio.create_task(one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)


def percentile(values: list[float], share: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


async def main(options: argparse.Namespace) -> None:
    load = Load(options.port, options.stream)
    started = time.perf_counter()

    async with asyncio.timeout(options.seconds + CLIENT_TIMEOUT_S):
        if options.rate:
            await load.open(options.rate, options.seconds)
        else:
            await load.closed(options.connections, options.seconds, options.requests)

    wall = time.perf_counter() - started
    ms = [1000 * latency for latency in load.latencies]
    result = {
        "requests": len(ms),
        "errors": load.errors,
        "per_second": round(len(ms) / wall, 1),
        "p50_ms": ms and round(statistics.median(ms), 3),
        "p99_ms": ms and round(percentile(ms, 0.99) or 0.0, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--stream", action="store_true")
    uvloop.run(main(parser.parse_args()))
