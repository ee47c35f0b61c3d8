"""Starts routers and fake engines as processes on this machine."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.support.processes import end, free_ports

READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server that accepts chat requests on a port."""

    name: str
    port: int
    process: psutil.Process

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_s(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self.family())

    def resident_mb(self) -> float:
        return sum(p.memory_info().rss for p in self.family()) / 1e6


def addresses(ports: Sequence[int]) -> list[str]:
    return [f"127.0.0.1:{port}" for port in ports]


class Machine:
    """Starts processes, which end when the machine's exit stack is closed."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    def start(self, name: str, command: Sequence[str]) -> psutil.Process:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(end, process)
        return psutil.Process(process.pid)

    def start_listening(self, name: str, command: Sequence[str]) -> tuple[list[int], int]:
        """Start a process that prints its ports, and return the ports and the process id."""
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
        """Start engines in one process, each on its own port, and return when all listen."""
        command = [sys.executable, "-m", "benchmarks.router.engine", *["0"] * count, *more]
        ports, pid = self.start_listening(name, command)
        return ports, psutil.Process(pid)

    def collector(self) -> str:
        """Start a thread that accepts spans like an OpenTelemetry collector, and return its URL."""
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
        """Start Ullage's router.

        Args:
            name: name of the target and of its files.
            engine_ports: ports of the router's engines.
            more: additional sections of the router's configuration.
        """
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
