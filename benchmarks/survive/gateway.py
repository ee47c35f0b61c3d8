"""Runs a gateway with two workers behind it, all as processes of one server.

usage: python -m benchmarks.survive.gateway NAME DIR PORT

* `sglang-router` is SGLang's gateway in front of two llama.cpp servers.
* `dynamo` is NVIDIA Dynamo's frontend in front of two of its mockers, which compute nothing.
* `dynamo-migrating` is the same, but a stream may move to the other worker MIGRATIONS times. By
  default none moves.

They are installed below DIR unless they are there.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare import servers
from benchmarks.compare.servers import NAME, ROOT, Server, new_environment, run_install, version_of
from benchmarks.support.processes import end, free_ports

SGLANG_ROUTER = "0.3.2"
DYNAMO = "1.6.1"
DYNAMO_NEEDS = (
    *("aiohttp", "certifi", "kubernetes<33", "msgspec", "numpy", "packaging", "pyyaml", "pyzmq"),
    *("prometheus-client<1", "redis<9", "tqdm", "transformers", "zstandard"),
)
"""What ai-dynamo needs, without aisimulate, which PyPI does not have."""
MIGRATING = "dynamo-migrating"
MIGRATIONS = 2
CONTEXT = 4096
WORKER_OPTIONS = f"-np 8 -c {8 * CONTEXT}"
START_S = 120.0
PAUSE_S = 0.2
Run = Callable[[Sequence[str], Mapping[str, str]], None]
"""Function that runs a command with environment variables."""
WORKERS = ("llama-server", "dynamo.mocker", "ullage_engine.main")
"""Words by which the commands of workers differ from the command of a gateway."""


def sglang_router(folder: Path) -> Server:
    """Install SGLang's gateway and llama.cpp unless they are there."""
    python = new_environment(folder / "sglang-router")
    if version_of(python, "sglang-router") != SGLANG_ROUTER:
        command = [str(python), "-m", "pip", "install", f"sglang-router=={SGLANG_ROUTER}"]
        run_install("SGLang's gateway", command, folder / "sglang-router.log", {})
    servers.llama_cpp(folder)
    server = _server("sglang-router", SGLANG_ROUTER, folder)
    return replace(server, model="unknown")  # the name that it gives to the model of such workers


def dynamo(folder: Path, name: str = "dynamo") -> Server:
    """Install Dynamo's frontend and mocker unless they are there."""
    python = new_environment(folder / "dynamo")
    if version_of(python, "ai-dynamo") != DYNAMO:
        log = folder / "dynamo.log"
        pip = [str(python), "-m", "pip", "install"]
        needs = [*DYNAMO_NEEDS, f"ai-dynamo-runtime=={DYNAMO}"]
        run_install("Dynamo's runtime", [*pip, *needs], log, {})
        run_install("Dynamo", [*pip, "--no-deps", f"ai-dynamo=={DYNAMO}"], log, {})
    servers.vllm(folder)  # the mocker needs the tokenizer of the checkpoint
    return _server(name, DYNAMO, folder)


def dynamo_migrating(folder: Path) -> Server:
    """Install Dynamo unless it is there, and let streams move to another worker."""
    return dynamo(folder, MIGRATING)


def _server(name: str, version: str, folder: Path) -> Server:
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "benchmarks.survive.gateway", name, str(folder), str(port)]

    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return Server(name, version, "two workers", command, variables, context=CONTEXT)


@contextlib.contextmanager
def processes_of(name: str, folder: Path, port: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a gateway with two workers until the end of the block."""
    with contextlib.ExitStack() as stack:
        running = list[subprocess.Popen[bytes]]()

        def run(command: Sequence[str], variables: Mapping[str, str]) -> None:
            process = subprocess.Popen(command, env={**os.environ, **variables})
            stack.callback(end, process)
            running.append(process)

        if name in ("dynamo", MIGRATING):
            store = stack.enter_context(tempfile.TemporaryDirectory(prefix="ullage-dynamo-"))
            _run_dynamo(run, folder, port, store, MIGRATIONS if name == MIGRATING else 0)
        else:
            _run_sglang_router(run, folder, port)
        yield running


def _run_sglang_router(run: Run, folder: Path, port: int) -> None:
    worker = servers.llama_cpp(folder)
    urls = []
    for worker_port in free_ports(2):
        words = worker.command(worker_port)
        run([*words[: words.index("-np")], *WORKER_OPTIONS.split()], worker.environment)
        urls.append(f"http://127.0.0.1:{worker_port}")

    for url in urls:
        _await_health(url)
    python = folder / "sglang-router" / "bin" / "python"
    [metrics] = free_ports(1)
    command = [str(python), "-m", "sglang_router.launch_router", "--worker-urls", *urls]
    command += ["--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)]
    run([*command, "--prometheus-port", str(metrics)], {})


def _run_dynamo(run: Run, folder: Path, port: int, store: str, migrations: int) -> None:
    python = folder / "dynamo" / "bin" / "python"
    checkpoint = next((folder / "weights").glob("*/tokenizer.json")).parent
    variables = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": store,
        "HF_HUB_OFFLINE": "1",
    }
    worker = [str(python), "-m", "dynamo.mocker", "--model-path", str(checkpoint)]
    worker += ["--model-name", NAME, "--max-model-len", str(CONTEXT)]
    for _ in range(2):
        run(worker, variables)
    frontend = [str(python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
    frontend += ["--http-port", str(port), "--migration-limit", str(migrations)]
    run([*frontend, "--router-mode", "round-robin"], variables)


def _await_health(url: str) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if _is_healthy(url):
            return
        time.sleep(PAUSE_S)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    name, folder, port = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with processes_of(name, Path(folder), int(port)) as running:
        gateway = running[-1]
        return gateway.wait()


if __name__ == "__main__":
    sys.exit(main())
