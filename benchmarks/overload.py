#!/usr/bin/env python3
"""Ten times the capacity: goodput, how fast the rest is refused, and that nothing hangs.

usage: overload.py [--seconds 60] [--factor 10] [--engines 2] [--quick]

Starts engines with bounded KV (`kv_engine.py`) and one `ullage-router`, a process each, and sends
requests at `--factor` times the rate that the engines' memory can serve, at even intervals and
whatever comes back (an open loop). Refused at once is what never waited in the queue. Prints one
JSON object:

capacity          requests/s that the engines' KV has room for
goodput_share     answers/s in full during the load, over the capacity; without the first seconds
refused_p50_ms    from sending a request to the whole of its refusal, those that waited left out
router_cpu_ms     processor time of the router for a request
hangs             requests without an answer at their time limit

missed            figures that are worse than their floors (FLOORS); --quick has none

exit status: 0 no hang, only 200, 429, 503 and 504, and no floor missed; 1 otherwise
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from kv_engine import MODEL, blocks_of

HERE = Path(__file__).resolve().parent
PROMPT = "x" * 100
OUTPUT_TOKENS = 40
BLOCKS = blocks_of(len(PROMPT), OUTPUT_TOKENS)
ALLOWED = {200, 429, 503, 504}
REQUEST_TIMEOUT_S = 30.0
HANG_S = REQUEST_TIMEOUT_S + 10.0
START_S = 60.0
QUEUED = "QUEUE_TIMEOUT"
LEAST_GOODPUT_SHARE = 0.9
MOST_REFUSED_P99_MS = 20.0
FLOORS = (
    f"floors: goodput_share >= {LEAST_GOODPUT_SHARE:g}, refused_p99_ms <= {MOST_REFUSED_P99_MS:g}"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    seconds: float
    factor: float
    engines: int
    slots: int
    """Requests that an engine's KV holds at once."""
    token_s: float
    queue: int

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.engines * self.slots / (OUTPUT_TOKENS * self.token_s)

    @property
    def ramp_s(self) -> float:
        """Until the engines are full and the first answers have come."""
        return min(2 * OUTPUT_TOKENS * self.token_s, self.seconds / 3)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    """0: it hung."""
    code: str
    ended: float
    took_s: float


@contextlib.asynccontextmanager
async def process(*command: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ended when the block ends."""
    with log.open("wb") as errors:
        started = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
            await started.wait()


async def start_engine(stack: contextlib.AsyncExitStack, plan: Plan, number: int, to: Path) -> str:
    """The address of a new engine."""
    command = [sys.executable, str(HERE / "kv_engine.py"), "--name", f"engine-{number}"]
    command += ["--blocks", str(plan.slots * BLOCKS), "--token-s", str(plan.token_s)]
    log = to / f"engine-{number}.log"
    engine = await stack.enter_async_context(process(*command, log=log))
    assert engine.stdout
    line = await asyncio.wait_for(engine.stdout.readline(), START_S)
    return f"127.0.0.1:{json.loads(line)['port']}"


async def start_router(
    stack: contextlib.AsyncExitStack, plan: Plan, addresses: list[str], to: Path
) -> tuple[str, psutil.Process]:
    """The URL of a new router, and its process."""
    anywhere = {"host": "127.0.0.1", "port": 0}
    config = {
        "model": MODEL,
        "http": {**anywhere, "public_stats": True},
        "grpc": anywhere,
        "metrics": anywhere,
        "pools": [{"name": "single", "targets": addresses}],
        "routing": {
            "queue": {"max_requests": plan.queue, "timeout": REQUEST_TIMEOUT_S / 2},
        },
        "limits": {"request_timeout": REQUEST_TIMEOUT_S},
    }
    path, log = to / "router.yaml", to / "router.log"
    path.write_text(json.dumps(config))
    command = (sys.executable, "-m", "ullage_router.main", "--config", str(path))
    router = await stack.enter_async_context(process(*command, log=log))
    return f"http://127.0.0.1:{await listening(log)}", psutil.Process(router.pid)


async def listening(log: Path) -> int:
    """The HTTP port that a router's log names."""
    async with asyncio.timeout(START_S):
        while True:
            if line := find(log, '"listening"'):
                return int(json.loads(line)["http_port"])
            await asyncio.sleep(0.05)


def find(log: Path, word: str) -> str:
    """The first line with the word; empty when there is none yet."""
    return next((line for line in log.read_text().splitlines() if word in line), "")


async def ready(session: aiohttp.ClientSession, url: str, engines: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            async with session.get(f"{url}/stats") as response:
                states = (await response.json())["engines"]
            if [engine["state"] for engine in states] == ["ready"] * engines:
                return
            await asyncio.sleep(0.05)


async def ask(session: aiohttp.ClientSession, url: str) -> Answer:
    """One request, to its last byte."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS}
    started = time.monotonic()
    try:
        async with asyncio.timeout(HANG_S):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
                status, code = response.status, (answer.get("error") or {}).get("code") or ""
    except TimeoutError:
        status, code = 0, "HUNG"
    except aiohttp.ClientError as error:
        status, code = -1, type(error).__name__
    now = time.monotonic()
    return Answer(status, code, now, now - started)


async def load(session: aiohttp.ClientSession, url: str, plan: Plan) -> tuple[float, list[Answer]]:
    """When the load began, and every answer."""
    started, rate = time.monotonic(), plan.factor * plan.capacity
    tasks = []
    for number in range(int(rate * plan.seconds)):
        await asyncio.sleep(started + number / rate - time.monotonic())
        tasks.append(asyncio.create_task(ask(session, url)))
    return started, list(await asyncio.gather(*tasks))


def figures(plan: Plan, started: float, answers: list[Answer]) -> dict[str, Any]:
    """What is printed."""
    begin, end = started + plan.ramp_s, started + plan.seconds
    good = sum(a.status == 200 and begin <= a.ended < end for a in answers)
    refused = sorted(1e3 * a.took_s for a in answers if a.status == 429 and a.code != QUEUED)
    counts = Counter(f"{a.status} {a.code}".strip() for a in answers)
    return {
        "seconds": plan.seconds,
        "capacity": round(plan.capacity, 2),
        "offered": round(plan.factor * plan.capacity, 2),
        "requests": len(answers),
        "goodput": round(good / (end - begin), 2),
        "goodput_share": round(good / (end - begin) / plan.capacity, 3),
        "refused": len(refused),
        "refused_p50_ms": round(_quantile(refused, 0.5), 2),
        "refused_p99_ms": round(_quantile(refused, 0.99), 2),
        "statuses": dict(sorted(counts.items())),
        "hangs": sum(a.status == 0 for a in answers),
        "is_well": all(a.status in ALLOWED for a in answers),
    }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))] if ordered else 0.0


def missed(figures: Mapping[str, Any]) -> list[str]:
    """Names of the figures that are worse than their floors."""
    is_reached = {
        "goodput_share": figures["goodput_share"] >= LEAST_GOODPUT_SHARE,
        "refused_p99_ms": figures["refused_p99_ms"] <= MOST_REFUSED_P99_MS,
    }
    return [name for name, is_well in is_reached.items() if not is_well]


async def run(plan: Plan) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        to = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = [await start_engine(stack, plan, n, to) for n in range(plan.engines)]
        url, router = await start_router(stack, plan, addresses, to)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        await ready(session, url, plan.engines)
        before = cpu_s(router)
        started, answers = await load(session, url, plan)
        used_ms = 1e3 * (cpu_s(router) - before) / len(answers)
    return {**figures(plan, started, answers), "router_cpu_ms": round(used_ms, 3)}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], epilog=FLOORS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="requests an engine holds at once")
    parser.add_argument("--token-s", type=float, default=0.05)
    parser.add_argument("--queue", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="3 s of little load, without floors")
    o = parser.parse_args()
    if o.quick:
        o.seconds, o.slots, o.token_s, o.queue = 3.0, 2, 0.01, 4
    plan = Plan(o.seconds, o.factor, o.engines, o.slots, o.token_s, o.queue)
    figures = asyncio.run(run(plan))
    figures["missed"] = [] if o.quick else missed(figures)
    print(json.dumps(figures))
    print(FLOORS, file=sys.stderr)
    return 0 if figures["is_well"] and not figures["missed"] else 1


if __name__ == "__main__":
    sys.exit(main())
