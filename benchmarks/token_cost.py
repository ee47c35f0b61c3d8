"""Measure each process's CPU time per streamed token outside the model's step, in microseconds.

The benchmark starts a router, and an engine whose worker does everything except computing the
model: a step sleeps for the time of a fast step. That time is a constant, plus a time per decoding
sequence, plus a time per prompt token. So all CPU time of the worker is the overhead of its steps.
Requests have about 200 tokens, and are greedy and streamed. A request's cost is divided among its
tokens. A step's cost is the cost of one token in each stream. The benchmark takes some minutes.

examples:
  python -m benchmarks token-cost
  python -m benchmarks token-cost --concurrency 32 --tokens 2048 --rounds 1

exit status: 0 all costs are within their bounds, 1 a cost is above its bound
"""

import argparse
import asyncio
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import uvloop
import yaml

from benchmarks.router.machine import Machine
from benchmarks.support.load import level
from benchmarks.support.one_engine import MODEL
from benchmarks.support.options import new_parser
from benchmarks.support.processes import free_ports

TEXT = (
    " The harbour lay quiet under a grey sky, and the boats moved only as much as the tide would"
    ' have it. "Nothing will come of it," said the pilot; yet at 7:45 the first lamp was lit.\n'
)
"""Text from which answers are made, so that their tokens have ordinary lengths."""
BOUNDS_US = {1: 1500.0, 32: 250.0}
"""Maximum CPU microseconds per token over all processes, by the number of streams."""
PROMPT_WORDS = 153
COMMAND = (sys.executable, "-m", "benchmarks", "token-cost")


def run_worker(step_ms: Sequence[float], arguments: Sequence[str]) -> int:
    """Run a worker whose steps take time but no CPU time."""
    from ullage_engine.model_loader.source import resolve_source
    from ullage_engine.protocol.step_plan import SampledToken, StepPlan
    from ullage_engine.runner.model_runner import ModelRunner
    from ullage_engine.tokenizer.tokenizer import load_tokenizer
    from ullage_engine.worker.main import main

    tokens = load_tokenizer(resolve_source(MODEL).path).tokenizer.encode(TEXT).ids
    of_step, of_sequence, of_prompt_token = (ms / 1000 for ms in step_ms)

    def execute(self: ModelRunner, plan: StepPlan) -> list[SampledToken]:
        until = time.perf_counter() + of_step
        sampled = []
        for chunk in plan.chunks:
            num_tokens = len(chunk.token_ids)
            until += of_sequence if num_tokens == 1 else of_prompt_token * num_tokens
            if chunk.sampling is not None:
                token_id = tokens[chunk.end % len(tokens)]
                sampled.append(SampledToken(chunk.request_id, token_id, 0.0, [], []))
        time.sleep(max(0.0, until - time.perf_counter()))
        return sampled

    ModelRunner.execute = execute  # type: ignore[method-assign]
    return main(arguments)


def run_engine(step_ms: str, config_path: Path) -> int:
    """Run an engine with this worker until SIGTERM."""
    from ullage_common.config.engine import EngineConfig
    from ullage_common.process.config_file import read_file
    from ullage_engine.server.app import EngineApp
    from ullage_engine.server.restart_policy import RestartPolicy
    from ullage_engine.server.supervisor import WorkerLaunch
    from ullage_engine.server.worker_env import launch_env, worker_env

    config = read_file(config_path, EngineConfig)
    program = [*COMMAND, "worker", step_ms, "--config", str(config_path)]
    environment = launch_env(config, worker_env)
    launch = WorkerLaunch(program, lambda endpoint: ["--endpoint", endpoint], environment)

    async def serve() -> None:
        stop = asyncio.Event()
        hurry = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await EngineApp(config, lambda _: launch, RestartPolicy()).run(stop, hurry)

    uvloop.run(serve())
    return 0


def start(machine: Machine, folder: Path, step_ms: str) -> tuple[str, dict[str, psutil.Process]]:
    """Start an engine and a router, and wait until the router uses the engine.

    Returns:
        The router's URL, and the processes by name.
    """
    grpc_port, metrics_port = free_ports(2)
    server = {"host": "127.0.0.1", "grpc_port": grpc_port, "metrics_port": metrics_port}
    config = {
        "model": {"source": MODEL, "name": "fake"},
        "device": "cpu",
        "memory": {"device_bytes": 2 << 30, "safety_reserve": 32 << 20, "max_kv": 512 << 20},
        "server": server | {"run_dir": str(folder), "weights_dir": str(folder / "weights")},
    }
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump(config))

    engine = machine.start("engine", [*COMMAND, "engine", step_ms, str(path)])
    router = machine.router("router", [grpc_port])
    worker = next(each for each in engine.children() if is_worker(each.cmdline()))

    url = f"http://127.0.0.1:{router.port}"
    return url, {"worker": worker, "server": engine, "router": router.process}


def is_worker(command: list[str]) -> bool:
    """Return whether a process is the active worker, and not the standby worker."""
    return "worker" in command and "--standby" not in command


def cpu_ns(process: psutil.Process) -> int:
    """Return the CPU time of a process's living threads in nanoseconds."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks)


def measure(
    url: str, processes: dict[str, psutil.Process], concurrency: int, options: argparse.Namespace
) -> dict[str, float]:
    """Return the CPU microseconds per token of each process, at one concurrency."""
    requests = max(concurrency, options.tokens // options.output)
    load = partial(level, url, "fake", words=PROMPT_WORDS, tokens=options.output)
    uvloop.run(load(concurrency=concurrency, requests=concurrency))
    before = {name: cpu_ns(process) for name, process in processes.items()}
    row = uvloop.run(load(concurrency=concurrency, requests=requests))
    num_tokens = row["requests"] * row["output_tokens"]
    costs = {
        name: (cpu_ns(process) - before[name]) / num_tokens / 1e3
        for name, process in processes.items()
    }
    return {**costs, "all": sum(costs.values()), "tpot_ms": row["time_per_token_p50_ms"]}


def run(folder: Path, options: argparse.Namespace) -> list[str]:
    """Measure and print all costs, and return those above their bounds."""
    faults = []
    with contextlib.ExitStack() as stack:
        url, processes = start(Machine(stack, folder), folder, options.step_ms)
        names = [*processes, "all", "tpot_ms"]
        print(f"{'streams':>8}" + "".join(f"{name:>10}" for name in names) + f"{'ms a step':>12}")
        for concurrency in options.concurrency:
            rows = [measure(url, processes, concurrency, options) for _ in range(options.rounds)]
            row = {name: statistics.median(each[name] for each in rows) for name in names}
            cells = "".join(f"{row[name]:>10.0f}" for name in processes)
            cells += f"{row['all']:>10.0f}{row['tpot_ms']:>10.2f}"
            print(f"{concurrency:>8}{cells}{concurrency * row['all'] / 1e3:>12.2f}", flush=True)
            bound = BOUNDS_US.get(concurrency, float("inf"))
            if row["all"] > bound:
                faults.append(f"{concurrency} streams: {row['all']:.0f} us, over {bound:.0f}")
    return faults


def main() -> int:
    if sys.argv[1:2] == ["worker"]:
        return run_worker(numbers(sys.argv[2]), sys.argv[3:])
    if sys.argv[1:2] == ["engine"]:
        return run_engine(sys.argv[2], Path(sys.argv[3]))

    parser = new_parser("token-cost", __doc__)
    parser.add_argument(
        "--concurrency", type=numbers, default=[1, 8, 32], help="streams (default: 1,8,32)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of all answers of a round")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds, of which the median counts (%(default)s)"
    )
    parser.add_argument(
        "--step-ms",
        default="4.4,0.65,0.15",
        help="times of a step, a decoding sequence and a token of a prompt (%(default)s)",
    )

    options = parser.parse_args()
    options.concurrency = [int(each) for each in options.concurrency]
    with tempfile.TemporaryDirectory() as folder:
        faults = run(Path(folder), options)

    for fault in faults:
        print(f"fault: {fault}")
    if not faults:
        print("within the bounds")
    return int(bool(faults))


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]
