#!/usr/bin/env python3
"""What a streamed token costs outside of the model's step, in each process: microseconds of CPU.

Starts a router and an engine whose worker does all that a worker does except computing: a step
sleeps for as long as a fast one takes, which is so many milliseconds, and so many more for each
decoding sequence and each token of a prompt. So all CPU of the worker is what it does beside its
steps. Requests are of about 200 tokens, streamed, greedy; what a request costs once is shared out
among its tokens. A step's cost is that of as many tokens as there are streams. Takes some minutes.

exit status: 0 within the bounds, 1 over one
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

sys.path.insert(0, str(Path(__file__).parent))
from load import level
from one_engine import MODEL
from processes import free_ports
from router import Machine

TEXT = (
    " The harbour lay quiet under a grey sky, and the boats moved only as much as the tide would"
    ' have it. "Nothing will come of it," said the pilot; yet at 7:45 the first lamp was lit.\n'
)
"""What answers consist of, so that their tokens are of ordinary lengths."""
BOUNDS_US = {1: 1500.0, 32: 250.0}
"""Most CPU microseconds of a token over all processes, by streams."""
PROMPT_WORDS = 153


def run_worker(step_ms: Sequence[float], arguments: Sequence[str]) -> int:
    """A worker whose steps take time and no CPU."""
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
    """An engine with such a worker; ends on SIGTERM."""
    from ullage_common.config.engine import EngineConfig
    from ullage_common.process.config_file import read_file
    from ullage_engine.server.app import EngineApp
    from ullage_engine.server.restart_policy import RestartPolicy
    from ullage_engine.server.supervisor import WorkerLaunch
    from ullage_engine.server.worker_env import launch_env, worker_env

    config = read_file(config_path, EngineConfig)
    base = [sys.executable, __file__, "worker", step_ms, "--config", str(config_path)]
    launch = WorkerLaunch(
        lambda endpoint: [*base, "--endpoint", endpoint], launch_env(config, worker_env)
    )

    async def serve() -> None:
        stop = asyncio.Event()
        hurry = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await EngineApp(config, lambda _: launch, RestartPolicy()).run(stop, hurry)

    uvloop.run(serve())
    return 0


def start(machine: Machine, folder: Path, step_ms: str) -> tuple[str, dict[str, psutil.Process]]:
    """Start all; return the router's URL and the processes when it has an engine."""
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
    engine = machine.start("engine", [sys.executable, __file__, "engine", step_ms, str(path)])
    router = machine.router("router", [grpc_port])
    worker = next(each for each in engine.children() if is_worker(each.cmdline()))
    url = f"http://127.0.0.1:{router.port}"
    return url, {"worker": worker, "server": engine, "router": router.process}


def is_worker(command: list[str]) -> bool:
    """Whether it is the worker that computes, and not one that stands by."""
    return "worker" in command and "--standby" not in command


def cpu_ns(process: psutil.Process) -> int:
    """CPU time of all threads that live."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in tasks)


def measure(
    url: str, processes: dict[str, psutil.Process], concurrency: int, options: argparse.Namespace
) -> dict[str, float]:
    """Microseconds of CPU for each token by process, at one concurrency."""
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
    """Measure and print all costs; return those above their bounds."""
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
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: token_cost.py --concurrency 32 --tokens 2048 --rounds 1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--concurrency", type=numbers, default=[1, 8, 32], help="streams (default: 1,8,32)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of all answers of a round")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2, help="medians are of them (%(default)s)")
    parser.add_argument(
        "--step-ms",
        default="4.4,0.65,0.15",
        help="of a step, a decoding sequence and a token of a prompt (%(default)s)",
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


if __name__ == "__main__":
    sys.exit(main())
