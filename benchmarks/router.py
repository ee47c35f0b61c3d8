#!/usr/bin/env python3
"""Requests/s, added latency, streams and memory of the router, beside other routers in one run.

usage: router.py [--quick] [--engines 1,8,64] [--rounds 3] [--seconds 3] [--requests 100000]
                 [--interval-ms 5 --connections 256] [--traced]
                 [--peers DIR [--production-stack SOURCE]]

Every engine answers at once, so what is measured is the router: ours tokenises, predicts, admits
and logs each request; the peers are plain proxies. Load, engines and routers are processes of this
machine, and routers take turns within each round, so ratios hold where absolute figures depend on
what else the machine does. CPU is that of the router's processes for each request.

With --interval-ms engines stream a token at a time, as real ones do: at once is the best case of a
proxy, which relays all of a stream's bytes in one piece. It takes more --connections then.

With --engines all is measured once before each of these numbers of engines, a decision alone as
well (router_decide.py).

With --traced ours is measured with spans, too: of all requests and of a tenth of them, sent to a
collector here that throws them away.

--peers DIR measures vllm-router (Rust, from PyPI) and production-stack's router (Python) too; their
virtual environments are made in DIR when they are not there. SOURCE is what pip installs the latter
from: a checkout or a git URL.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from processes import end, free_ports

HERE = Path(__file__).resolve().parent
RUST = "vllm-router==0.1.17"
PRODUCTION_STACK = "git+https://github.com/vllm-project/production-stack"
FLOORS = (
    "floors: a decision takes <= 60 us with 64 engines; at 16 engines at least 2 x the Python "
    "router's requests/s, unary and streamed, and added latency at 300/s p50 <= 2 ms; 1000 streams "
    "without an error; memory flat"
)
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chat requests on a port."""

    name: str
    port: int
    process: psutil.Process

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_s(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self.family())

    def resident_mb(self) -> float:
        return sum(p.memory_info().rss for p in self.family()) / 1e6


@dataclass(slots=True)
class Row:
    """The measurements of one target."""

    per_second: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """By whether answers were streamed."""
    cpu_us: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    p50_ms: float | None = None
    p99_ms: float | None = None
    """At the fixed rate."""
    errors: int = 0


def addresses(ports: Sequence[int]) -> list[str]:
    return [f"127.0.0.1:{port}" for port in ports]


def decision_us(ports: Sequence[int]) -> float:
    """What router_decide.py says."""
    command = [sys.executable, str(HERE / "router_decide.py"), *map(str, ports)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"error: decisions: {result.stderr.strip()[-400:]}")
    return float(result.stdout)


class Machine:
    """Starts processes and ends them."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    def start(self, name: str, command: Sequence[str]) -> psutil.Process:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(end, process)
        return psutil.Process(process.pid)

    def start_listening(self, name: str, command: Sequence[str]) -> tuple[list[int], int]:
        """Start a process that prints its ports; return them and its id."""
        path = self._folder / f"{name}.log"
        log = self._stack.enter_context(path.open("wb"))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        self._stack.callback(end, process)
        assert process.stdout
        line = self._stack.enter_context(process.stdout).readline()
        if not line:
            raise SystemExit(f"error: {name} has ended: {path.read_text()[-400:]}")
        return json.loads(line), process.pid

    def engines(self, name: str, count: int, *more: str) -> tuple[list[int], psutil.Process]:
        """Start engines in one process, each on a port of its own; returns when all listen."""
        command = [sys.executable, str(HERE / "router_engine.py"), *["0"] * count, *more]
        ports, pid = self.start_listening(name, command)
        return ports, psutil.Process(pid)

    def collector(self) -> str:
        """Start a thread that takes spans as an OpenTelemetry collector does; return its URL."""
        method = "opentelemetry.proto.collector.trace.v1.TraceService"
        export = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
        server = grpc.server(ThreadPoolExecutor(2))
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(method, {"Export": export}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self._stack.callback(server.stop, None)
        return f"http://127.0.0.1:{port}"

    def router(self, name: str, engine_ports: Sequence[int], **more: Any) -> Target:
        """Start ours; `more` are further parts of its configuration."""
        [port] = free_ports(1)
        host = {"host": "127.0.0.1", "port": 0}
        config = {
            "model": "fake",
            "http": host | {"port": port},
            "grpc": host,
            "metrics": host,
            "pools": [{"name": "single", "targets": addresses(engine_ports)}],
            **more,
        }
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "ullage_router.main", "--config", str(path)]
        target = Target(name, port, self.start(name, command))
        wait_ready(port, "/readyz")
        return target

    def peer(self, name: str, command: Sequence[str]) -> Target:
        [port] = free_ports(1)
        target = Target(name, port, self.start(name, [*command, "--port", str(port)]))
        wait_ready(port, "/v1/models")
        return target


def wait_ready(port: int, path: str) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if time.monotonic() > until:
                raise SystemExit(f"error: nothing is ready on port {port}: {error}") from error
            time.sleep(0.1)


def load(target: Target, *options: str) -> dict[str, Any]:
    """What router_load.py says."""
    command = [sys.executable, str(HERE / "router_load.py"), str(target.port), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"error: {target.name}: {result.stderr.strip()[-400:]}")
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def measure(targets: Sequence[Target], options: argparse.Namespace) -> dict[str, Row]:
    """Requests/s in turns, then latency at the fixed rate."""
    rows = {target.name: Row() for target in targets}
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


def throughput(target: Target, row: Row, is_streamed: bool, options: argparse.Namespace) -> None:
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


def table(rows: dict[str, Row], base: str) -> None:
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


def ratios(rows: dict[str, Row], name: str) -> None:
    for other in rows:
        if "(" in other:
            unary, streamed = (ratio(rows[name], rows[other], kind) for kind in (False, True))
            print(f"{name} / {other}: {unary:.2f} x requests/s, {streamed:.2f} x streamed")


def ratio(own: Row, other: Row, is_streamed: bool) -> float:
    medians = [statistics.median(row.per_second[is_streamed]) for row in (own, other)]
    return medians[0] / medians[1]


def memory(target: Target, requests: int) -> None:
    """Resident memory before, in the middle and after."""
    load(target, "--requests", str(max(200, requests // 10)), "--seconds", "600")
    sizes = [target.resident_mb()]
    for _ in range(2):
        load(target, "--requests", str(requests // 2), "--seconds", "600")
        sizes.append(target.resident_mb())
    line = ", ".join(f"{size:.1f}" for size in sizes)
    print(f"memory over {requests} requests (start, middle, end): {line} MB")


def streams(machine: Machine, count: int) -> None:
    """Open `count` streams at once, each of most of a second."""
    ports, _ = machine.engines("slow-engine", 1, "--interval-ms", "50")
    target = machine.router("streams", ports)
    options = ["--connections", str(count), "--requests", str(count), "--seconds", "60"]
    result = load(target, "--stream", *options)
    print(f"{count} concurrent streams: {result['requests']} whole, {result['errors']} errors")


def measure_before(machine: Machine, num_engines: int, options: argparse.Namespace) -> list[Target]:
    """Print one table; return its measurements."""
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], epilog=FLOORS)
    parser.add_argument("--quick", action="store_true", help="one short round, few requests")
    parser.add_argument("--engines", type=counts, default=[1], help="numbers of engines: 1,8,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--interval-ms", type=float, default=0.0, help="between two tokens")
    parser.add_argument("--rate", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--traced", action="store_true", help="also with spans")
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


if __name__ == "__main__":
    main()
