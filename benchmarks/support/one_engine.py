"""Runs one real engine with SmolLM2 on the CPU, for benchmarks that inject faults."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml

from benchmarks.support.options import SMOLLM2
from benchmarks.support.processes import free_ports
from ullage.admin.v1 import admin_pb2_grpc
from ullage.headroom.v1 import headroom_pb2, headroom_pb2_grpc
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire.channels import open_channel

MODEL = SMOLLM2
WORKERS = {"ullage_engine.worker.main", "ullage_engine.vllm_worker"}
START_S = 120.0


@dataclass(frozen=True)
class Engine:
    """A running engine, with gRPC stubs."""

    process: asyncio.subprocess.Process
    address: str
    metrics_url: str
    inference: Any
    admin: Any
    headroom: Any

    def worker_pid(self) -> int | None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if WORKERS & set(child.cmdline()):
                    return int(child.pid)
        return None

    async def ooms(self) -> int:
        """Return the number of steps that ran out of memory since the engine started."""

        def scrape() -> str:
            with urllib.request.urlopen(self.metrics_url, timeout=10) as response:
                return str(response.read().decode())

        match = re.search(
            r"^ullage_oom_events_total\{.*\} (\S+)$", await asyncio.to_thread(scrape), re.M
        )
        return int(float(match[1])) if match else 0

    async def state(self) -> headroom_pb2.Headroom:
        return (await self.headroom.GetHeadroom(headroom_pb2.GetHeadroomRequest())).headroom


@contextlib.asynccontextmanager
async def start_engine(
    folder: Path, log: str | None, **sections: dict[str, Any] | str
) -> AsyncIterator[Engine]:
    """Run an engine until the block ends, and yield once the engine is ready.

    Args:
        folder: run directory of the engine, with its configuration and weights.
        log: file for the engine's log, or None to discard the log.
        sections: fields of the engine's configuration by section, instead of the defaults.
    """
    grpc_port, metrics_port = free_ports(2)
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump(_config(folder, grpc_port, metrics_port, sections)))

    command = [sys.executable, "-m", "ullage_engine.main", "--config", str(path)]
    stderr = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    process = await asyncio.create_subprocess_exec(*command, stderr=stderr)
    os.close(stderr)

    async with open_channel(f"127.0.0.1:{grpc_port}") as channel:
        engine = Engine(
            process,
            f"127.0.0.1:{grpc_port}",
            f"http://127.0.0.1:{metrics_port}/metrics",
            inference_pb2_grpc.InferenceServiceStub(channel),
            admin_pb2_grpc.AdminServiceStub(channel),
            headroom_pb2_grpc.HeadroomServiceStub(channel),
        )

        try:
            await _ready(engine, log)
            yield engine
        finally:
            await end_process(process)


def _config(
    folder: Path, grpc_port: int, metrics_port: int, sections: dict[str, dict[str, Any] | str]
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": {"source": MODEL, "name": "smollm2"},
        "device": "cpu",
        "server": {
            "host": "127.0.0.1",
            "grpc_port": grpc_port,
            "metrics_port": metrics_port,
            "run_dir": str(folder),
            "weights_dir": str(folder / "weights"),
            "allow_fault_injection": True,
        },
    }
    for name, fields in sections.items():
        config[name] = fields if isinstance(fields, str) else {**config.get(name, {}), **fields}
    return config


async def _ready(engine: Engine, log: str | None) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if engine.process.returncode is not None:
            status = engine.process.returncode
            raise SystemExit(f"error: the engine ended with status {status}{_last_words(log)}")
        with contextlib.suppress(grpc.aio.AioRpcError):
            if (await engine.state()).ready:
                return
        await asyncio.sleep(0.1)
    raise SystemExit(f"error: the engine was not ready within {START_S:g} s{_last_words(log)}")


def _last_words(log: str | None) -> str:
    """Return the name and the last line of a log file (empty without a log)."""
    if log is None:
        return ""
    lines = Path(log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f", see {log}: {lines[-1] if lines else 'it is empty'}"


async def end_process(process: asyncio.subprocess.Process) -> None:
    """End a process with SIGTERM, and with SIGKILL if it has not ended within 30 s."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), 30)
    except TimeoutError:
        process.kill()
        await process.wait()
