#!/usr/bin/env python3
"""Ullage beside llama.cpp's server and vLLM: speed, memory, start and quality, in one sitting.

usage: compare.py DIR [--rounds 2] [--concurrency 1,8,32] [--only ullage,vllm] [--quality]
                  [--json FILE] [--plot FILE]

Installs the two others below DIR if they are not there: some gigabytes; llama.cpp is compiled. Logs
are written there, too. Then starts one server after another, never two at once, with the same model
and limits out of the way, and sends each the load of load.py: 32 requests at each concurrency, 180
tokens in, all different, and 64 out, greedy, streamed. A few requests before it are not measured.
Prints for each server and concurrency, as means of the rounds:

tok/s         output tokens a second
TTFT p50      median time to the first text, ms
inter-token   median of the mean time between a request's tokens, ms
E2E p95       time to the end of the stream, ms
CPU/token     processor time of the server for an output token, prompts included, ms
others        cores that other programs took meanwhile: quiet is below 0.1
load          the machine's load average over a minute, when the concurrency began

and the ratios of Ullage to the better of the others. With --quality, too, what the served format
adds to the perplexity of the file's own weights (quality.py).

exit status: 0 the goal is reached or, as not all servers ran, not judged; 1 it is not reached
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from load import OUTPUT, level
from peers import CORES, NAME, SERVERS, Running, Server, progress, running
from plots import draw_bars

from ullage_engine.model_config.dtypes import cpu_computes_bfloat16

HERE = Path(__file__).resolve().parent
OURS = "ullage"
REQUESTS = 32
WARM_UP = ((1, 2), (8, 8))
"""Concurrencies and requests of what is not measured."""
WARM_UP_SEED = 999
LEAST_THROUGHPUT, MOST_TTFT = 1.5, 0.6
GOAL = f"goal: tok/s >= {LEAST_THROUGHPUT:g} and TTFT p50 <= {MOST_TTFT:g} times the better peer's"
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
COLUMNS = {
    "tok/s": "output_tokens_per_s",
    "TTFT p50": "ttft_p50_ms",
    "inter-token": "time_per_token_p50_ms",
    "E2E p95": "e2e_p95_ms",
    "CPU/token": "cpu_ms_per_token",
}


@dataclass(frozen=True)
class Round:
    """What one start of a server gave."""

    ready_s: float
    pss_mb: float
    """Proportional resident memory after the load."""
    levels: Mapping[int, Mapping[str, float]]
    """Figures by concurrency."""


@dataclass(frozen=True)
class Ratio:
    """Ullage beside the better of the others at one concurrency."""

    concurrency: int
    throughput: float
    throughput_peer: str
    ttft: float
    ttft_peer: str

    @property
    def is_reached(self) -> bool:
        return self.throughput >= LEAST_THROUGHPUT and self.ttft <= MOST_TTFT

    def __str__(self) -> str:
        speed = f"tok/s x{self.throughput:.2f} ({self.throughput_peer})"
        wait = f"TTFT p50 x{self.ttft:.2f} ({self.ttft_peer})"
        return (
            f"c={self.concurrency}: {speed}, {wait}: {'reached' if self.is_reached else 'MISSED'}"
        )


def means(rounds: Sequence[Round]) -> dict[int, dict[str, float]]:
    """Means of the rounds' figures by concurrency."""
    return {
        concurrency: {
            figure: statistics.mean(each.levels[concurrency][figure] for each in rounds)
            for figure in figures
        }
        for concurrency, figures in rounds[0].levels.items()
    }


def ratios(figures: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[Ratio]:
    """Compares at each concurrency; empty where Ullage or all the others were left out."""
    others = {name: levels for name, levels in figures.items() if name != OURS}
    if OURS not in figures or not others:
        return []
    result = []
    for concurrency, ours in figures[OURS].items():
        speeds = {name: each[concurrency]["output_tokens_per_s"] for name, each in others.items()}
        waits = {name: each[concurrency]["ttft_p50_ms"] for name, each in others.items()}
        fastest = max(speeds, key=speeds.__getitem__)
        soonest = min(waits, key=waits.__getitem__)
        throughput = ours["output_tokens_per_s"] / speeds[fastest]
        ttft = ours["ttft_p50_ms"] / waits[soonest]
        result.append(Ratio(concurrency, throughput, fastest, ttft, soonest))
    return result


def machine() -> dict[str, Any]:
    """What the machine is and, measured with torch, what it can do at most."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict(
        [part.strip() for part in line.split(":", 1)]
        for line in cpuinfo.splitlines()
        if ":" in line
    )
    flags = fields.get("flags", "").split()
    with progress("measuring the machine"):
        return {
            "cpu": fields.get("model name", platform.processor()),
            "cores": len(CORES),
            "instruction_sets": [each for each in FLAGS if each in flags],
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "read_gb_per_s": round(_read_gb_per_s(), 1),
            "fp32_gflops": round(_matmul_gflops(torch.float32)),
            "bf16_gflops": round(_matmul_gflops(torch.bfloat16)) if cpu_computes_bfloat16() else 0,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }


def _best_s(operation: Any) -> float:
    def seconds() -> float:
        started = time.perf_counter()
        operation()
        return time.perf_counter() - started

    return min(seconds() for _ in range(7))


def _read_gb_per_s() -> float:
    values = torch.ones(1 << 27)
    return values.nbytes / _best_s(values.sum) / 1e9


def _matmul_gflops(dtype: torch.dtype) -> float:
    size = 2048
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: left @ right) / 1e9


class CpuTimes:
    """What a server and everything else but this program take of the processors, from now on."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._began = time.monotonic()
        self._server_s, self._other_s = self._seconds()

    def spent(self) -> tuple[float, float]:
        """Seconds of the server, and cores that others took on average."""
        server_s, other_s = self._seconds()
        cores = (other_s - self._other_s) / (time.monotonic() - self._began)
        return server_s - self._server_s, max(0.0, cores)

    def _seconds(self) -> tuple[float, float]:
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        server_s = self._server.cpu_s()
        return server_s, busy - server_s - time.process_time()


def measure(server: Server, levels: Sequence[int], log: Path) -> Round:
    """Starts a server, loads it, ends it."""
    with running(server, log) as run:
        print(f"{server.name}: ready after {run.ready_s:.1f} s", file=sys.stderr, flush=True)
        with progress(f"{server.name}, warm-up"):
            for concurrency, requests in WARM_UP:
                asyncio.run(level(run.url, NAME, concurrency, requests, seed=WARM_UP_SEED))
        figures = {}
        for concurrency in levels:
            figures[concurrency] = _measured(server, run, concurrency)
        return Round(run.ready_s, run.pss_bytes() / 1e6, figures)


def _measured(server: Server, run: Running, concurrency: int) -> dict[str, float]:
    load_average = os.getloadavg()[0]
    times = CpuTimes(run)
    with progress(f"{server.name}, {concurrency} concurrent"):
        figures = asyncio.run(level(run.url, NAME, concurrency, REQUESTS))
    server_s, other_cores = times.spent()
    figures |= {
        "cpu_ms_per_token": 1e3 * server_s / (REQUESTS * OUTPUT),
        "other_cores": other_cores,
        "load_average": load_average,
    }
    print(f"{server.name:10}{_row(figures)}", file=sys.stderr, flush=True)
    return figures


def _row(figures: Mapping[str, float]) -> str:
    cells = f"{figures['concurrency']:>4.0f}" + "".join(
        f"{figures[key]:>12.1f}" for key in COLUMNS.values()
    )
    return f"{cells}{figures['other_cores']:>8.2f}{figures['load_average']:>7.1f}"


def report(result: Mapping[str, Any]) -> None:
    """Prints everything that was measured."""
    for name, value in result["machine"].items():
        print(f"{name:18}{', '.join(value) if isinstance(value, list) else value}")
    print()
    for name, server in result["servers"].items():
        print(f"{name} {server['version']}: {server['how']}")
        ready = ", ".join(f"{each['ready_s']:.1f}" for each in server["rounds"])
        memory = ", ".join(f"{each['pss_mb']:.0f}" for each in server["rounds"])
        print(f"    ready after {ready} s; {memory} MB resident (PSS)")
    heads = "".join(f"{head:>12}" for head in COLUMNS)
    print(f"\n{'':10}{'c':>4}{heads}{'others':>8}{'load':>7}")
    for name, server in result["servers"].items():
        for figures in server["means"].values():
            print(f"{name:10}{_row(figures)}")
    for ratio in result["ratios"]:
        print(ratio)
    print(GOAL if result["ratios"] else f"{GOAL}; not judged, as not all servers ran")


def plot(path: Path, servers: Mapping[str, Any]) -> None:
    """Draws speed and first tokens by concurrency."""
    panels = []
    for figure, title in (("output_tokens_per_s", "output tok/s"), ("ttft_p50_ms", "TTFT p50, ms")):
        for concurrency in next(iter(servers.values()))["means"]:
            bars = {name: each["means"][concurrency][figure] for name, each in servers.items()}
            panels.append((f"{title}, {concurrency} concurrent", bars))
    draw_bars(path, panels)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything that the options ask for."""
    options.folder.mkdir(parents=True, exist_ok=True)
    servers = [SERVERS[name](options.folder.resolve()) for name in options.only]
    facts = machine()
    rounds: dict[str, list[Round]] = {server.name: [] for server in servers}
    for turn in range(options.rounds):
        # The first of a round is the last of the next one.
        for server in servers if turn % 2 == 0 else servers[::-1]:
            log = options.folder / f"{server.name}-{turn + 1}.log"
            rounds[server.name].append(measure(server, options.concurrency, log))
    figures = {name: means(each) for name, each in rounds.items()}
    return {
        "machine": facts,
        "servers": {
            server.name: {
                "version": server.version,
                "how": server.how,
                "rounds": [asdict(each) for each in rounds[server.name]],
                "means": figures[server.name],
            }
            for server in servers
        },
        "ratios": ratios(figures),
    }


def has_quality() -> bool:
    """Whether the perplexity of what is served is near enough to the file's own; prints both."""
    sys.stdout.flush()
    command = [sys.executable, str(HERE / "quality.py"), "--forms", "auto"]
    with progress("measuring perplexity"):
        return subprocess.run(command, check=False).returncode == 0


def _levels(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(SERVERS):
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))} is none of {', '.join(SERVERS)}"
        )
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the others are installed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=_levels, default="1,8,32")
    parser.add_argument("--only", type=_names, default=",".join(SERVERS), help="(%(default)s)")
    parser.add_argument("--quality", action="store_true", help="perplexity, too; some minutes")
    parser.add_argument("--json", type=Path, help="writes all figures there")
    parser.add_argument("--plot", type=Path, help="draws them there, as SVG")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        result = run(options)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2, default=asdict) + "\n")
        if options.plot:
            plot(options.plot, result["servers"])
        report(result)
        is_good = not options.quality or has_quality()
    except KeyboardInterrupt:
        return 130
    is_reached = all(each.is_reached for each in result["ratios"])
    return 0 if is_good and is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
