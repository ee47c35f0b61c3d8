"""Measure the router's requests/s, added latency, concurrent streams and memory.

Every engine answers at once, so the figures show the router alone. Ullage's router tokenizes,
predicts, admits and logs each request, while the other routers are plain proxies. The load, the
engines and the routers are processes on this machine. Routers take turns within each round, so the
ratios between them hold even if absolute figures depend on the machine's load. The CPU time per
request includes all processes of a router.

With --interval-ms, engines stream one token at a time, like real engines. Without --interval-ms, a
proxy relays all bytes of a stream in one piece, which is the proxy's best case. Use more
--connections together with --interval-ms.

With --engines, each number of engines gets a separate table, with the time of one decision.

With --traced, the router is also measured with spans for all requests, and with spans for a tenth
of the requests. A collector in this process discards the spans.

With --peers DIR, vllm-router (Rust, from PyPI) and production-stack's router (Python) are measured,
too. Their virtual environments are created in DIR unless they exist. --production-stack names what
pip installs the latter from: a checkout or a git URL.

examples:
  python -m benchmarks router --quick
  python -m benchmarks router --engines 1,16,64 --peers .peers
  python -m benchmarks router --interval-ms 5 --connections 256
  python -m benchmarks router --traced --rounds 14
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.router.machine import Machine, Target, addresses, wait_ready
from benchmarks.support.options import new_parser

RUST = "vllm-router==0.1.17"
PRODUCTION_STACK = "git+https://github.com/vllm-project/production-stack"
FLOORS = (
    "floors: a decision takes <= 60 us with 64 engines; at 16 engines at least 2 x the Python "
    "router's requests/s, unary and streamed, and added latency at 300/s p50 <= 2 ms; 1000 streams "
    "without an error; memory flat"
)


@dataclass(slots=True)
class Measurements:
    """The measurements of one target server."""

    per_second: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Requests/s in each round, by whether answers were streamed (as in all dictionaries here)."""
    cpu_us: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    p50_ms: float | None = None
    p99_ms: float | None = None
    """Latency percentiles p50 and p99 at the fixed rate, in milliseconds."""
    errors: int = 0


def decision_us(ports: Sequence[int]) -> float:
    """Return the microseconds per decision, measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.router.decide", *map(str, ports)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"error: decisions: {result.stderr.strip()[-400:]}")
    return float(result.stdout)


def load(target: Target, *options: str) -> dict[str, Any]:
    """Send load to a target from a separate process, and return the figures."""
    command = [sys.executable, "-m", "benchmarks.router.clients", str(target.port), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"error: {target.name}: {result.stderr.strip()[-400:]}")
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def measure(targets: Sequence[Target], options: argparse.Namespace) -> dict[str, Measurements]:
    """Measure the requests/s of all targets in turns, then the latency at the fixed rate."""
    rows = {target.name: Measurements() for target in targets}
    for _ in range(options.rounds):
        for is_streamed in (False, True):
            for target in targets:
                throughput(target, rows[target.name], is_streamed, options)
    for target in targets:
        row = rows[target.name]
        result = load(target, "--rate", str(options.rate), "--seconds", str(options.seconds))
        row.p50_ms, row.p99_ms = result["p50_ms"], result["p99_ms"]
        row.errors += result["errors"]
    return rows


def throughput(
    target: Target, row: Measurements, is_streamed: bool, options: argparse.Namespace
) -> None:
    kind = ["--stream"] if is_streamed else []
    before = target.cpu_s()
    result = load(
        target,
        "--connections",
        str(options.connections),
        "--seconds",
        str(options.seconds),
        *kind,
    )
    row.per_second[is_streamed].append(result["per_second"])
    row.cpu_us[is_streamed].append(1e6 * (target.cpu_s() - before) / max(1, result["requests"]))
    row.errors += result["errors"]


def peers(machine: Machine, ports: Sequence[int], options: argparse.Namespace) -> Iterator[Target]:
    folder = Path(options.peers)
    engines = [f"http://{address}" for address in addresses(ports)]
    rust = make_venv(folder / "rust", [RUST])
    yield machine.peer(
        "vllm-router (Rust)",
        [str(rust / "bin/vllm-router"), "--policy", "round_robin", "--worker-urls", *engines],
    )
    python = make_venv(folder / "python", ["--ignore-requires-python", options.production_stack])
    command = [str(python / "bin/vllm-router"), "--host", "127.0.0.1"]
    command += ["--service-discovery", "static", "--static-backends", ",".join(engines)]
    command += ["--static-models", ",".join(["fake"] * len(engines))]
    command += ["--routing-logic", "roundrobin"]
    yield machine.peer("production-stack (Python)", command)


def make_venv(folder: Path, packages: list[str]) -> Path:
    if not (folder / "bin/vllm-router").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin/pip"), "install", "-q", *packages], check=True)
    return folder


def table(rows: dict[str, Measurements], base: str) -> None:
    head = ("router", "req/s", "CPU us", "streamed/s", "CPU us", "added p50", "p99 ms", "errors")
    print("{:28}{:>10}{:>9}{:>12}{:>9}{:>11}{:>9}{:>8}".format(*head))
    for name, row in rows.items():
        cells: list[object] = [name]
        for is_streamed in (False, True):
            cells.append(f"{statistics.median(row.per_second[is_streamed]):.0f}")
            cells.append(f"{statistics.median(row.cpu_us[is_streamed]):.0f}")
        for own, direct in ((row.p50_ms, rows[base].p50_ms), (row.p99_ms, rows[base].p99_ms)):
            cells.append(f"{(own or 0.0) - (direct or 0.0):.2f}")
        print("{:28}{:>10}{:>9}{:>12}{:>9}{:>11}{:>9}{:>8}".format(*cells, row.errors))


def ratios(rows: dict[str, Measurements], name: str) -> None:
    for other in rows:
        if "(" in other:
            unary, streamed = (ratio(rows[name], rows[other], kind) for kind in (False, True))
            print(f"{name} / {other}: {unary:.2f} x requests/s, {streamed:.2f} x streamed")


def ratio(own: Measurements, other: Measurements, is_streamed: bool) -> float:
    medians = [statistics.median(row.per_second[is_streamed]) for row in (own, other)]
    return medians[0] / medians[1]


def memory(target: Target, requests: int) -> None:
    """Print a router's resident memory before, halfway through and after the requests."""
    load(target, "--requests", str(max(200, requests // 10)), "--seconds", "600")
    sizes = [target.resident_mb()]
    for _ in range(2):
        load(target, "--requests", str(requests // 2), "--seconds", "600")
        sizes.append(target.resident_mb())
    line = ", ".join(f"{size:.1f}" for size in sizes)
    print(f"memory over {requests} requests (start, middle, end): {line} MB")


def streams(machine: Machine, count: int) -> None:
    """Open `count` streams at once. Each stream lasts most of a second."""
    ports, _ = machine.engines("slow-engine", 1, "--interval-ms", "50")
    target = machine.router("streams", ports)
    options = ["--connections", str(count), "--requests", str(count), "--seconds", "60"]
    result = load(target, "--stream", *options)
    print(f"{count} concurrent streams: {result['requests']} whole, {result['errors']} errors")


def measure_before(machine: Machine, num_engines: int, options: argparse.Namespace) -> list[Target]:
    """Print the table of routers in front of `num_engines` engines.

    Returns:
        The targets that were measured.
    """
    pace = ["--interval-ms", str(options.interval_ms)]
    http_ports, http_engine = machine.engines(f"http-{num_engines}", num_engines, "--http", *pace)
    grpc_ports, _ = machine.engines(f"engines-{num_engines}", num_engines, *pace)
    for port in http_ports:
        wait_ready(port, "/v1/models")
    print(f"{num_engines} engines: a decision takes {decision_us(grpc_ports):.0f} us", flush=True)

    targets = [
        Target("none", http_ports[0], http_engine),
        machine.router("ullage", grpc_ports),
    ]

    if options.traced:
        url = machine.collector()
        for name, percent in (("ullage, traced", 100), ("ullage, a tenth traced", 10)):
            tracing = {"endpoint": url, "sample_percent": percent}
            targets.append(machine.router(name, grpc_ports, tracing=tracing))

    if options.peers:
        targets += peers(machine, http_ports, options)

    rows = measure(targets, options)
    table(rows, "none")
    ratios(rows, "ullage")
    return targets


def run(folder: Path, options: argparse.Namespace) -> None:
    for num_engines in options.engines:
        with contextlib.ExitStack() as stack:
            machine = Machine(stack, folder)
            targets = measure_before(machine, num_engines, options)
            if num_engines == options.engines[0]:
                streams(machine, options.streams)
                memory(targets[1], options.requests)
    print(FLOORS)


def counts(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = new_parser("router", __doc__, FLOORS)
    parser.add_argument("--quick", action="store_true", help="one short round, few requests")
    parser.add_argument("--engines", type=counts, default=[1], help="numbers of engines: 1,8,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--interval-ms", type=float, default=0.0, help="time between two tokens")
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument(
        "--traced", action="store_true", help="also measure the router with tracing"
    )
    parser.add_argument("--peers", help="folder of the other routers' virtual environments")
    parser.add_argument("--production-stack", default=PRODUCTION_STACK)
    options = parser.parse_args()

    if options.quick:
        options.rounds = 1
        options.seconds = 0.5
        options.requests = 200
        options.streams = 50
        options.connections = 8
        options.rate = 20.0

    with contextlib.ExitStack() as stack:
        run(Path(stack.enter_context(tempfile.TemporaryDirectory())), options)
