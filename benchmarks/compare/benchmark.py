"""Compare the speed, memory, start-up and quality of Ullage with llama.cpp's server and vLLM.

The benchmark installs the other two servers in DIR unless they are there already. This downloads
some gigabytes and compiles llama.cpp. Logs are written to DIR, too. Only one server runs at a time,
with the same model, and with limits that no request reaches. All servers get the same load: 32
greedy, streamed requests at each concurrency, with 64 output tokens. Prompts have 180 tokens, which
differ from the fourth token on. Before the load, a few requests warm up the server and are not
measured.

For each server, the benchmark prints the seconds from the start to the first answer, and the
resident memory after the load (PSS, which counts shared pages once). For each concurrency, it
prints these means over all rounds:

tokens in     tokens per prompt, for which all servers must report the same number
tok/s         output tokens per second
TTFT p50      median time to the first text, ms
inter-token   median of each request's mean time between tokens, ms
E2E p95       time to the end of the stream, ms
CPU/token     the server's CPU time per output token, including prompts, ms
others        cores that other programs used meanwhile: a quiet machine is below 0.1
load          the machine's load average over a minute, when the concurrency began

Then it prints the ratios of Ullage to the better of the other servers. With --quality, it also
prints by how much the served format raises the perplexity of the file's own weights
(`python -m benchmarks quality`).

A peer that cannot be installed, crashes or answers wrongly is left out by name, with all its
figures, and the goal is judged over the rest. Apart from that, the goal is judged only if nothing
was left out: all servers, 1, 8 and 32 concurrent requests, two or more rounds, --quality, and
Ullage with examples/bench.yaml. The file of --json is written after each server, with all figures
so far.

examples:
  python -m benchmarks compare .peers --quality --json bench.json
  python -m benchmarks compare .peers --only ullage,vllm --rounds 1 --concurrency 8
  python -m benchmarks compare .peers --only ullage -f examples/smollm2.yaml

exit status: 0 the goal is reached, 1 it is missed, 2 something failed or an option is wrong, 3 the
goal is not judged, 130 interrupted
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.compare.servers import CORES, MANIFEST, SERVERS, Running, Server, progress, running
from benchmarks.support.load import OUTPUT, ServerError, level
from benchmarks.support.options import new_parser
from benchmarks.support.plots import draw_bars
from ullage_engine.model_config.dtypes import cpu_computes_bfloat16

QUALITY = (sys.executable, "-m", "benchmarks", "quality", "--forms", "auto")
OURS = "ullage"
REQUESTS = 32
WARM_UP = ((1, 2), (8, 8))
"""Concurrency and number of requests in each phase of the warm-up."""
WARM_UP_SEED = 999
LEAST_THROUGHPUT = 1.5
MOST_TTFT = 0.6
GOAL = (
    f"goal: tok/s >= {LEAST_THROUGHPUT:g} and TTFT p50 <= {MOST_TTFT:g} times the better peer's, "
    "perplexity within 0.5 % of the file's own"
)
JUDGED_LEVELS = (1, 8, 32)
LEAST_ROUNDS = 2
STATUSES = {"reached": 0, "missed": 1, "not judged": 3}
FAILED = 2
INTERRUPTED = 130
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
Makers = Mapping[str, Callable[[Path], Server]]
COLUMNS = {
    "tokens in": "prompt_tokens",
    "tok/s": "output_tokens_per_s",
    "TTFT p50": "ttft_p50_ms",
    "inter-token": "time_per_token_p50_ms",
    "E2E p95": "e2e_p95_ms",
    "CPU/token": "cpu_ms_per_token",
}


@dataclass(frozen=True)
class Round:
    """The figures from one run of a server."""

    ready_s: float
    pss_mb: float
    """Proportional resident memory (PSS) after the load."""
    levels: Mapping[int, Mapping[str, float]]
    """Figures by concurrency."""


@dataclass(frozen=True)
class Ratio:
    """Ullage compared with the better of the other servers at one concurrency."""

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
    """Return the means of the rounds' figures by concurrency."""
    return {
        concurrency: {
            figure: statistics.mean(each.levels[concurrency][figure] for each in rounds)
            for figure in figures
        }
        for concurrency, figures in rounds[0].levels.items()
    }


def ratios(figures: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[Ratio]:
    """Compare the servers at each concurrency (empty if Ullage or all others were left out)."""
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


def check_prompts(figures: Mapping[str, Mapping[int, Mapping[str, float]]]) -> None:
    """Raise ServerError if servers counted different numbers of tokens in the same prompts."""
    for concurrency in next(iter(figures.values()), ()):
        tokens = {name: each[concurrency]["prompt_tokens"] for name, each in figures.items()}
        if len(set(tokens.values())) > 1:
            said = ", ".join(f"{name} {number:g}" for name, number in tokens.items())
            raise ServerError(
                f"error: the same prompts have other numbers of tokens: {said}: do the servers "
                "have the same tokenizer and chat template?"
            )


@dataclass(frozen=True)
class Quality:
    """The perplexity of the served format compared with the file's own weights."""

    is_kept: bool
    gates: Sequence[str]


@dataclass
class Sitting:
    """All measurements of this run of the benchmark so far."""

    manifest: Path
    json: Path | None
    machine: Mapping[str, Any] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """The reason of each peer that failed."""
    quality: Quality | None = None

    def add(self, server: Server, measured: Round) -> None:
        self.servers[server.name] = server
        self.rounds.setdefault(server.name, []).append(measured)
        self.save()

    def leave_out(self, peer: str, reason: str) -> None:
        """Drop a peer that failed, with what was measured of it, and say so."""
        print(f"{reason}\n{peer} is left out", file=sys.stderr, flush=True)
        self.failures[peer] = reason.removeprefix("error: ")
        self.rounds.pop(peer, None)
        self.save()

    def save(self) -> None:
        if self.json:
            self.json.write_text(json.dumps(self.result(), indent=2, default=asdict) + "\n")

    def result(self) -> dict[str, Any]:
        """Return all measurements and the verdict."""
        figures = {name: means(rounds) for name, rounds in self.rounds.items()}
        compared = ratios(figures)
        return {
            "machine": self.machine,
            "servers": {
                name: {
                    "version": self.servers[name].version,
                    "how": self.servers[name].how,
                    "rounds": [asdict(each) for each in rounds],
                    "means": figures[name],
                }
                for name, rounds in self.rounds.items()
            },
            "failures": self.failures,
            "ratios": compared,
            "quality": self.quality,
            "goal": GOAL,
            "left_out": self.left_out(),
            "verdict": self.verdict(compared),
        }

    def left_out(self) -> list[str]:
        """Return the conditions of the goal that were not measured."""
        rounds = [each for name in SERVERS for each in self.rounds.get(name, ())]
        wanted = {
            "all servers": self.rounds.keys() | self.failures.keys() >= set(SERVERS),
            "a peer that answers": bool(self.rounds.keys() - {OURS}),
            f"{', '.join(map(str, JUDGED_LEVELS))} concurrent": all(
                each.levels.keys() >= set(JUDGED_LEVELS) for each in rounds
            ),
            f"{LEAST_ROUNDS} rounds": all(
                len(each) >= LEAST_ROUNDS for each in self.rounds.values()
            ),
            "--quality": self.quality is not None,
            f"Ullage with {MANIFEST.name}": self.manifest.resolve() == MANIFEST,
        }
        return [what for what, is_there in wanted.items() if not is_there]

    def verdict(self, compared: Sequence[Ratio]) -> str:
        if self.left_out():
            return "not judged"
        judged = [each.is_reached for each in compared if each.concurrency in JUDGED_LEVELS]
        is_kept = self.quality is not None and self.quality.is_kept
        return "reached" if all(judged) and is_kept else "missed"


def machine() -> dict[str, Any]:
    """Return a description of the machine, with its peak rates as measured by torch."""
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
    one, other = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: one @ other) / 1e9


class CpuTimes:
    """Measures the CPU time of a server, and of all other programs on its cores, from now on."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._began = time.monotonic()
        self._server_s, self._other_s = self._seconds()

    def spent(self) -> tuple[float, float]:
        """Return the server's CPU seconds, and the average number of cores that others used."""
        server_s, other_s = self._seconds()
        cores = (other_s - self._other_s) / (time.monotonic() - self._began)
        return server_s - self._server_s, max(0.0, cores)

    def _seconds(self) -> tuple[float, float]:
        by_core = psutil.cpu_times(percpu=True)
        busy = sum(
            each.user + each.nice + each.system + each.irq + each.softirq + each.steal
            for each in (by_core[core] for core in CORES)
        )
        server_s = self._server.cpu_s()
        return server_s, busy - server_s - time.process_time()


def measure(server: Server, levels: Sequence[int], log: Path) -> Round:
    """Start a server, send the load, measure the server and end it."""
    with running(server, log) as run:
        print(f"{server.name}: ready after {run.ready_s:.1f} s", file=sys.stderr, flush=True)
        load = partial(level, run.url, server.model, server=f"{server.name} (its log: {log})")
        with progress(f"{server.name}, warm-up"):
            for concurrency, requests in WARM_UP:
                asyncio.run(load(concurrency, requests, seed=WARM_UP_SEED))

        figures = {}
        for concurrency in levels:
            load_average = os.getloadavg()[0]

            times = CpuTimes(run)
            with progress(f"{server.name}, {concurrency} concurrent"):
                measured = asyncio.run(load(concurrency, REQUESTS))
            server_s, other_cores = times.spent()
            figures[concurrency] = measured | {
                "cpu_ms_per_token": 1e3 * server_s / (REQUESTS * OUTPUT),
                "other_cores": other_cores,
                "load_average": load_average,
            }
            print(f"{server.name:10}{_row(figures[concurrency])}", file=sys.stderr, flush=True)
        return Round(run.ready_s, run.pss_bytes() / 1e6, figures)


def _row(figures: Mapping[str, float]) -> str:
    cells = f"{figures['concurrency']:>4.0f}" + "".join(
        f"{figures[key]:>12.1f}" for key in COLUMNS.values()
    )
    return f"{cells}{figures['other_cores']:>8.2f}{figures['load_average']:>7.1f}"


def report(result: Mapping[str, Any]) -> None:
    """Print all measurements."""
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

    for peer, reason in result["failures"].items():
        print(f"{peer} is left out: {reason.splitlines()[0]}")
    for ratio in result["ratios"]:
        print(ratio)
    sys.stdout.flush()


def plot(path: Path, servers: Mapping[str, Any]) -> None:
    """Draw throughput and TTFT by concurrency."""
    panels = []
    for figure, title in (("output_tokens_per_s", "output tok/s"), ("ttft_p50_ms", "TTFT p50, ms")):
        for concurrency in next(iter(servers.values()))["means"]:
            bars = {name: each["means"][concurrency][figure] for name, each in servers.items()}
            panels.append((f"{title}, {concurrency} concurrent", bars))
    draw_bars(path, panels)


def run(options: argparse.Namespace, makers: Makers, sitting: Sitting) -> None:
    """Measure all servers that the options select, except for peers that fail.

    Raises:
        ServerError: Ullage failed, or servers counted different numbers of tokens.
    """
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    servers = []
    for name in options.only:
        with leaving_out(name, sitting):
            servers.append(makers[name](options.file if name == OURS else folder))

    sitting.machine = machine()
    for turn in range(options.rounds):
        # The order reverses each round.
        for server in servers if turn % 2 == 0 else servers[::-1]:
            if server.name in sitting.failures:
                continue
            log = options.folder / f"{server.name}-{turn + 1}.log"
            with leaving_out(server.name, sitting):
                measured = measure(server, options.concurrency, log)
                sitting.add(server, measured)
            check_prompts({name: means(rounds) for name, rounds in sitting.rounds.items()})


@contextlib.contextmanager
def leaving_out(name: str, sitting: Sitting) -> Iterator[None]:
    """Leave out a peer that fails in the block. Ullage's own failure ends the benchmark."""
    try:
        yield
    except (ServerError, subprocess.CalledProcessError) as error:
        if name == OURS:
            raise
        sitting.leave_out(name, str(error))


def measure_quality(command: Sequence[str]) -> Quality:
    """Print and judge the perplexity of the served format and of the file's own weights."""
    with progress("measuring perplexity"):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    gates = [line for line in done.stdout.splitlines() if line.startswith(("pass ", "FAIL "))]
    if not gates or done.returncode not in (0, 1):
        raise ServerError(f"error: `{' '.join(command)}` ended with status {done.returncode}")
    return Quality(done.returncode == 0, gates)


def _levels(text: str) -> list[int]:
    levels = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= each <= REQUESTS for each in levels):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give numbers from 1 to {REQUESTS}, with commas between them"
        )
    return list(dict.fromkeys(levels))


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 1 on")
    return int(text)


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if unknown := set(names) - set(SERVERS):
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))} is none of {', '.join(SERVERS)}"
        )
    return names


def _manifest(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def _output(text: str) -> Path:
    path = Path(text)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder")
    return path


def _options() -> argparse.Namespace:
    parser = new_parser("compare", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the others are installed")
    parser.add_argument("--rounds", type=_rounds, default=2)
    parser.add_argument("--concurrency", type=_levels, default="1,8,32")
    parser.add_argument("--only", type=_names, default=",".join(SERVERS), help="(%(default)s)")
    parser.add_argument(
        "--quality", action="store_true", help="also measure the perplexity, which takes minutes"
    )
    parser.add_argument(
        "-f", "--file", type=_manifest, default=MANIFEST, help="manifest that Ullage serves"
    )
    parser.add_argument("--json", type=_output, help="write all figures to a file")
    parser.add_argument("--plot", type=_output, help="draw all figures as SVG")
    return parser.parse_args()


def main(makers: Makers = SERVERS, quality: Sequence[str] = QUALITY) -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sitting = Sitting(options.file, options.json)

    try:
        try:
            run(options, makers, sitting)
        finally:
            if sitting.rounds or sitting.failures:
                report(sitting.result())
        if options.plot and sitting.rounds:
            plot(options.plot, sitting.result()["servers"])
        if options.quality:
            sitting.quality = measure_quality(quality)
            sitting.save()
    except KeyboardInterrupt:
        return INTERRUPTED
    except ServerError as error:
        print(error, file=sys.stderr)
        return FAILED
    except Exception:  # an uncaught error would exit with 1, the status of a missed goal
        traceback.print_exc()
        return FAILED

    result = sitting.result()
    left_out = f", for want of: {'; '.join(result['left_out'])}" if result["left_out"] else ""
    print(f"{GOAL}: {result['verdict']}{left_out}")
    return STATUSES[result["verdict"]]
