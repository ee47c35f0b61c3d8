"""`ullage up` as a process, and what starts and ends processes of tests."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from ullage_testing.ports import free_port

READY_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Service:
    """A running `ullage up`."""

    process: subprocess.Popen[str]
    state: dict[str, Any]

    @property
    def http_url(self) -> str:
        return str(self.state["http_url"])

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


StartService = Callable[[Path], Service]


@contextlib.contextmanager
def services(tmp_path_factory: pytest.TempPathFactory, weights_dir: Path) -> Iterator[StartService]:
    """Starts services on free ports, which end when the block does."""
    with contextlib.ExitStack() as stack:

        def start(manifest: Path) -> Service:
            folder = tmp_path_factory.mktemp("service")
            state_file = folder / "state.json"
            http_port = free_port()
            grpc_port = free_port()
            command = [sys.executable, "-m", "ullage_cli.main", "up"]
            command += ["-f", str(manifest), "--state-file", str(state_file)]
            command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
            command += ["--run-dir", str(stack.enter_context(run_dir(weights_dir)))]
            with (folder / "log").open("w") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, text=True)
            stack.callback(end, process)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not state_file.exists():
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            return Service(process, json.loads(state_file.read_text()))

        yield start


@contextlib.contextmanager
def run_dir(weights_dir: Path) -> Iterator[Path]:
    """A folder with a short path, for sockets, in which models are prepared already."""
    with tempfile.TemporaryDirectory(prefix="ull", dir="/tmp") as path:
        folder = Path(path)
        (folder / "weights").symlink_to(weights_dir, target_is_directory=True)
        yield folder


def end(process: "subprocess.Popen[Any]") -> None:
    """Stops a process as Kubernetes would, and by force after that."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
