#!/usr/bin/env python3
"""Ready time, memory and speed of the example service, against the floors it must keep.

usage: serve.py [-f examples/smollm2.yaml] [--concurrency 1,8,32] [--requests 32]

Starts `ullage up`, drives it with load.py, stops it. Memory is the sum over all its processes:
resident (pages shared between processes counted in each) and proportional (counted once).
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from load import level

HERE = Path(__file__).resolve().parent
FLOORS = "floors: ready <= 15 s, resident <= 2000 MB, 8 concurrent >= 120 output tokens/s"


def start(manifest: Path, state_file: Path) -> tuple[subprocess.Popen[bytes], float]:
    """The running service and the seconds it took to be ready."""
    command = [sys.executable, "-m", "ullage_operator.cli.main", "up", "-f", str(manifest)]
    command += ["--http-port", "0", "--grpc-port", "0", "--state-file", str(state_file)]
    started = time.monotonic()
    service = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not state_file.exists():
        if service.poll() is not None:
            raise SystemExit(f"error: ullage up exited with status {service.returncode}")
        time.sleep(0.02)
    return service, time.monotonic() - started


def memory(service: subprocess.Popen[bytes]) -> dict[str, int]:
    """Bytes over the whole family of processes, in MB."""
    root = psutil.Process(service.pid)
    infos = [p.memory_full_info() for p in (root, *root.children(recursive=True))]
    return {
        "processes": len(infos),
        "resident_mb": sum(info.rss for info in infos) // 10**6,
        "proportional_mb": sum(info.pss for info in infos) // 10**6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], epilog=FLOORS)
    parser.add_argument("-f", "--file", type=Path, default=HERE.parent / "examples/smollm2.yaml")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state_file = Path(folder, "state.json")
        service, ready_s = start(options.file, state_file)
        try:
            state: dict[str, Any] = json.loads(state_file.read_text())
            print(json.dumps({"ready_s": round(ready_s, 1), **memory(service)}), flush=True)
            for concurrency in map(int, options.concurrency.split(",")):
                url, model = state["http_url"], state["model"]
                row = asyncio.run(level(url, model, concurrency, options.requests))
                print(json.dumps(row), flush=True)
            print(json.dumps(memory(service)), flush=True)
        finally:
            service.send_signal(signal.SIGINT)
            status = service.wait(60)
    print(FLOORS)
    return status


if __name__ == "__main__":
    sys.exit(main())
