"""Compare Ullage with vLLM to vLLM's own server: speed, a killed engine, an overload.

The benchmark starts `vllm serve` and, with the same checkpoint and arguments, an `ullage-engine`
with vLLM behind an `ullage-router`. It sends both the same streamed requests (180 tokens in, 64
out) in turns. Then it sends each server ten times the requests that the server can handle, for
`--overload-s` seconds, and kills the process that computes while 8 streams run. Run this with the
Python that has vLLM. The benchmark prints one JSON object:

speed       by concurrency and server: output tokens/s and the median time to first token in ms,
            as medians of all rounds, with the ratio and the difference
kill        how many of 8 streams ended with an error, and the longest pause of the others in s
overload    statuses, the time of refusals in ms, and the time to first token in s

examples:
  .venv-vllm/bin/python -m benchmarks vllm server --rounds 3
  .venv-vllm/bin/python -m benchmarks vllm server --quick

exit status: 0 all streams of Ullage ended well and only 200 and 429 were answered, 1 otherwise
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.support import load
from benchmarks.support.load import INPUT_WORDS, OUTPUT, Answer, messages
from benchmarks.support.one_engine import start_engine
from benchmarks.support.processes import free_ports
from benchmarks.support.router_process import ready, start_router

MODEL = "smollm2"
START_S = 300.0
SEQUENCES = 32
KV_BYTES = 1 << 30
WARM_UP_SEED = 999


_EXPLAINED = set[tuple[str, int]]()
"""Pairs of server and status for which an answer was already printed."""


@dataclass(frozen=True)
class ServerUnderTest:
    """One of the two servers to compare."""

    name: str
    url: str
    compute_pid: Callable[[], int]
    """Returns the id of the process that computes the model."""


async def ask(
    session: aiohttp.ClientSession, server: ServerUnderTest, number: int, output: int
) -> Answer:
    """Send one streamed request, and read the answer to its end."""
    answer = await load.ask(session, server.url, MODEL, messages(number, INPUT_WORDS), output)
    if answer.error and (server.name, answer.status) not in _EXPLAINED:
        _EXPLAINED.add((server.name, answer.status))
        print(server.name, answer.error, file=sys.stderr)
    return answer


async def kill(session: aiohttp.ClientSession, server: ServerUnderTest) -> dict[str, Any]:
    """Kill the process that computes while 8 streams run, and return the streams' outcomes."""
    streams = [
        asyncio.create_task(ask(session, server, 900_000 + index, 2 * OUTPUT)) for index in range(8)
    ]
    await asyncio.sleep(3.0)
    os.kill(server.compute_pid(), signal.SIGKILL)
    answers = await asyncio.gather(*streams)
    good = [each for each in answers if each.status == 200]
    pauses = [round(each.longest_pause, 1) for each in good]
    return {"errors_of_8": 8 - len(good), "longest_pause_s": max(pauses, default=None)}


async def overload(
    session: aiohttp.ClientSession, server: ServerUnderTest, rate: float, seconds: float
) -> dict[str, Any]:
    """Send `rate` requests per second at even intervals, without waiting for answers."""
    tasks = list[asyncio.Task[Answer]]()
    started = time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(session, server, 500_000 + number, OUTPUT)))

    answers = await asyncio.gather(*tasks)
    refused = sorted(each.e2e * 1e3 for each in answers if each.status == 429)
    served = sorted(each.ttft for each in answers if each.status == 200)
    return {
        "requests_per_s": round(rate, 1),
        "statuses": dict(Counter(str(each.status) for each in answers)),
        "refused_p50_ms": _quantile(refused, 0.5),
        "refused_p99_ms": _quantile(refused, 0.99),
        "ttft_p50_s": _quantile(served, 0.5),
        "ttft_p99_s": _quantile(served, 0.99),
    }


def _quantile(ordered: list[float], share: float) -> float | None:
    return round(ordered[int(share * (len(ordered) - 1))], 2) if ordered else None


@contextlib.asynccontextmanager
async def ullage(folder: Path) -> AsyncIterator[ServerUnderTest]:
    """Run Ullage's engine with vLLM behind a router."""
    run = folder / "ullage"
    run.mkdir()
    sections: dict[str, Any] = {
        "engine": "vllm",
        "memory": {"device_bytes": 6 << 30, "safety_reserve": 32 << 20, "max_kv": KV_BYTES},
        "batching": {"max_sequences": SEQUENCES},
        "limits": {"request_timeout": 300},
        "model": {"max_model_len": 4096, "dtype": "bfloat16"},
        "server": {"weights_dir": str(folder / "weights"), "owns_cores": True},
    }

    log = str(folder / "engine.log")
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(start_engine(run, log, **sections))

        slo = {"ttft_p95": 15.0, "e2e_p95": 40.0}
        url, _ = await start_router(stack, MODEL, [engine.address], folder, slo)
        async with aiohttp.ClientSession() as session:
            await ready(session, url, 1)
        pid = engine.worker_pid
        yield ServerUnderTest("ullage", url, lambda: pid() or 0)


@contextlib.asynccontextmanager
async def plain(folder: Path) -> AsyncIterator[ServerUnderTest]:
    """Run vLLM's own server with the checkpoint that Ullage converted."""
    [checkpoint] = (folder / "weights").glob("vllm-*")
    [port] = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", "4096", "--enforce-eager"]
    command += ["--max-num-seqs", str(SEQUENCES), "--kv-cache-memory-bytes", str(KV_BYTES)]
    log = (folder / "vllm.log").open("wb")
    process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def compute_pid() -> int:
        children = psutil.Process(process.pid).children(recursive=True)
        return max(children, key=lambda each: each.memory_info().rss).pid

    try:
        await _ready(url, process)
        yield ServerUnderTest("vllm", url, compute_pid)
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if _runs(process) else []
        for each in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _runs(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is None


async def _ready(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
        while True:
            if process.returncode is not None:
                raise SystemExit(f"error: vllm serve ended with status {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)


async def measure_speed(
    servers: list[ServerUnderTest], levels: list[int], rounds: int
) -> dict[str, Any]:
    """Measure both servers in turns, and return the medians of all rounds."""
    rows: dict[tuple[int, str], list[dict[str, float]]] = {}
    for turn in range(rounds):
        for level in levels:
            # The order reverses each turn.
            for server in servers if turn % 2 == 0 else servers[::-1]:
                row = await closed_loop(server, level, max(32, level), seed=turn)
                rows.setdefault((level, server.name), []).append(row)
                print(f"{server.name:7} {row}", file=sys.stderr, flush=True)

    result: dict[str, Any] = {}
    for level in levels:
        medians = {
            server.name: {
                key: round(statistics.median(each[key] for each in rows[level, server.name]), 1)
                for key in ("output_tokens_per_s", "ttft_p50_ms")
            }
            for server in servers
        }

        ours = medians["ullage"]
        theirs = medians["vllm"]
        ratio = ours["output_tokens_per_s"] / theirs["output_tokens_per_s"]
        result[str(level)] = {
            **medians,
            "throughput_ratio": round(ratio, 3),
            "ttft_added_ms": round(ours["ttft_p50_ms"] - theirs["ttft_p50_ms"], 1),
        }
    return result


async def closed_loop(
    server: ServerUnderTest, concurrency: int, requests: int, seed: int
) -> dict[str, float]:
    """Return one server's figures at one concurrency."""
    return await load.level(server.url, MODEL, concurrency, requests, seed=seed, server=server.name)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    levels = [int(level) for level in options.concurrency.split(",")]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    result: dict[str, Any] = {"kill": {}, "overload": {}}

    with tempfile.TemporaryDirectory() as name:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            ullage(Path(name)) as ours,
            plain(Path(name)) as theirs,
        ):
            servers = [ours, theirs]
            for server in servers:  # the first steps compile and allocate
                await closed_loop(server, 8, 16, WARM_UP_SEED)
            result["speed"] = await measure_speed(servers, levels, options.rounds)

            steps: list[tuple[str, Callable[[ServerUnderTest], Awaitable[dict[str, Any]]]]] = []
            top = result["speed"][str(levels[-1])]
            rate = 10 * top["vllm"]["output_tokens_per_s"] / OUTPUT
            steps.append(("overload", lambda s: overload(session, s, rate, options.overload_s)))
            # Killed last, because vLLM's own server does not restart.
            steps.append(("kill", lambda server: kill(session, server)))

            for kind, step in steps:
                for server in servers:
                    result[kind][server.name] = await step(server)
                    line = f"{kind} {server.name} {result[kind][server.name]}"
                    print(line, file=sys.stderr, flush=True)
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="8,32", help="levels, with commas between them")
    parser.add_argument("--overload-s", type=float, default=10.0)
    parser.add_argument("--quick", action="store_true", help="one round of 8, a short overload")


def main(options: argparse.Namespace) -> int:
    """Measure both servers and return the exit status."""
    if options.quick:
        options.rounds = 1
        options.concurrency = "8"
        options.overload_s = 3.0
    result = asyncio.run(run(options))
    print(json.dumps(result, indent=2))

    statuses = set(result["overload"]["ullage"]["statuses"])
    return int(bool(result["kill"]["ullage"]["errors_of_8"] or statuses - {"200", "429"}))
