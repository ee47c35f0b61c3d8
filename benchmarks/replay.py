"""Compare a replay in virtual time with the same trace on a real service on this machine.

The benchmark starts `ullage up`, plays a made-up trace in real time, measures the engines, and
replays the same trace with the measured hardware file. It prints what clients saw and what was
predicted: time to first token, time between tokens, memory, and what became of the requests. The
machine should have nothing else to do, as the measurement holds for the machine at that time.

Bytes may differ by 1 %, times to the first token and between tokens by 5 %.

examples:
  python -m benchmarks replay
  python -m benchmarks replay --seconds 60 --rate 1.5 --json replay.json
  python -m benchmarks replay --hardware here.json --keep-hardware
  python -m benchmarks replay --hardware here.json --only-replay --seconds 3600 --rate 2

exit status: 0 all figures are within their goals, 1 one is not, 2 an option is wrong, or nothing
could be measured or replayed
"""

import argparse
import asyncio
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.support.local_service import start
from benchmarks.support.options import new_parser
from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire.channels import open_channel
from ullage_replay.play import Played, Player, WatchedEngine, WatchError, watching
from ullage_replay.report import MIB, quantiles
from ullage_replay.trace import TraceRequest, read_trace

Row = dict[str, float | None]
"""A figure, measured and predicted, with its relative error and its goal."""

STOP_S = 60.0
PREFIXES = ("system", "tools")
BYTES_GOAL = 0.01
"""Largest relative error of a predicted number of bytes."""
TIMES_GOAL = 0.05
"""Largest relative error of a predicted time to the first token or between tokens."""
FAILED = 2


class ReplayError(Exception):
    """Raised if there is nothing to compare. The message says why."""


def main() -> int:
    parser = new_parser("replay", __doc__)
    parser.add_argument("-f", "--file", type=Path, default=Path("examples/smollm2.yaml"))
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the trace (300)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the trace (0)")
    parser.add_argument("--hardware", type=Path, help="file to write, or to use")
    parser.add_argument("--keep-hardware", action="store_true", help="use --hardware as it is")
    parser.add_argument(
        "--only-replay", action="store_true", help="replay with --hardware, without a service"
    )
    parser.add_argument("--trace", type=Path, help="file to write the trace to")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    if (arguments.keep_hardware or arguments.only_replay) and not arguments.hardware:
        parser.error("--keep-hardware and --only-replay: give the file with --hardware")

    try:
        with tempfile.TemporaryDirectory(prefix="replay-") as folder:
            if arguments.only_replay:
                print(time_replay(arguments, Path(folder)))
                return 0
            report = compare(arguments, Path(folder))
    except (ReplayError, WatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED

    print(as_table(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2))
    return int(bool(report["missed"]))


def compare(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Play, measure and replay, and return all figures.

    Raises:
        ReplayError: the service does not start or cannot be measured, no request is answered, or
            the replay fails.
    """
    trace_path = write_trace(arguments, folder)
    trace = read_trace(trace_path)
    hardware = arguments.hardware or folder / "hardware.json"

    try:
        process, _ = start(arguments.file, folder / "state.json")
    except SystemExit as error:
        raise ReplayError(str(error).removeprefix("error: ")) from None
    try:
        state = json.loads((folder / "state.json").read_text())
        note(f"playing {len(trace)} requests in {arguments.seconds:.0f} s")
        # As in a replay, the engines are new: their peaks are of the trace alone, and they have
        # learned nothing from other requests.
        played, watched = asyncio.run(play(state, trace))
        if not arguments.keep_hardware:
            measure(state, hardware)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)

    began = time.perf_counter()
    predicted = replay(arguments.file, trace_path, hardware)
    seconds = time.perf_counter() - began
    return report_of(played, watched, predicted, seconds)


def time_replay(arguments: argparse.Namespace, folder: Path) -> str:
    """Replay a trace without a service, and return how long that took."""
    trace_path = write_trace(arguments, folder)
    began = time.perf_counter()
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    predicted = replay(arguments.file, trace_path, arguments.hardware)
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
    steps = sum(engine["steps"] for engine in predicted["engines"])
    return (
        f"{predicted['requests']} requests, {predicted['output_tokens']} tokens and {steps} steps "
        f"of {predicted['seconds']:.0f} s were replayed in {seconds:.1f} s ({used:.1f} s of CPU "
        "time), with the start of the processes"
    )


def write_trace(arguments: argparse.Namespace, folder: Path) -> Path:
    """Write the made-up trace to a file, and return its path."""
    path: Path = arguments.trace or folder / "trace.jsonl"
    trace = make_trace(arguments.seconds, arguments.rate, arguments.seed)
    path.write_text("".join(f"{json.dumps(row_of(each))}\n" for each in trace))
    return path


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_trace(seconds: float, rate: float, seed: int) -> list[TraceRequest]:
    """Return requests at random times. Half of them share one of two prefixes."""
    draw = random.Random(seed)
    trace = []
    at = draw.expovariate(rate)
    while at < seconds:
        prefix = draw.choice(["", "", *PREFIXES])
        prefix_tokens = {"": 0, "system": 160, "tools": 320}[prefix]
        own = min(900, 8 + int(draw.lognormvariate(4.4, 0.8)))
        output = min(160, 4 + int(draw.lognormvariate(3.6, 0.7)))
        trace.append(
            TraceRequest(
                at=round(at, 4),
                prompt_tokens=prefix_tokens + own,
                output_tokens=output,
                max_tokens=output,
                prefix=prefix,
                prefix_tokens=prefix_tokens,
            )
        )
        at += draw.expovariate(rate)
    return trace


def row_of(request: TraceRequest) -> dict[str, Any]:
    """Return a request as a row of a trace file."""
    row: dict[str, Any] = {
        "at": request.at,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "max_tokens": request.max_tokens,
    }
    if request.prefix:
        row["prefix"] = {"id": request.prefix, "tokens": request.prefix_tokens}
    return row


def pools_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the gRPC address of one engine of each pool, by pool."""
    return {each["workload"].rpartition("-")[2]: each["grpc_target"] for each in state["engines"]}


def measure(state: Mapping[str, Any], hardware: Path) -> None:
    """Make the hardware file, as `ullage plan --measure` does.

    Raises:
        ReplayError: the service cannot be measured. The program has printed why.
    """
    command = [sys.executable, "-m", "ullage_replay.main", "measure"]
    command += ["--router", state["grpc_target"], "--hardware", str(hardware)]
    for pool, target in pools_of(state).items():
        command += ["--engine", f"{pool}={target}"]
    if status := subprocess.run(command, check=False).returncode:
        raise ReplayError(f"the measurement ended with status {status}")


async def play(
    state: Mapping[str, Any], trace: Sequence[TraceRequest]
) -> tuple[list[Played], Mapping[str, WatchedEngine]]:
    """Play the trace in real time, and follow the engines' memory."""
    channel = open_channel(state["grpc_target"])
    try:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        model = await stub.GetModel(pb.GetModelRequest())
    finally:
        await channel.close()
    player = Player(state["grpc_target"], model.vocab_size)
    try:
        async with watching(pools_of(state)) as watched:
            played = await player.play(trace)
            await asyncio.sleep(1.0)
        return played, watched
    finally:
        await player.close()


def replay(manifest: Path, trace: Path, hardware: Path) -> dict[str, Any]:
    """Replay the trace with `ullage plan`, and return its JSON.

    Raises:
        ReplayError: the replay fails.
    """
    command = [sys.executable, "-m", "ullage_cli.main", "plan", "-f", str(manifest)]
    command += ["--trace", str(trace), "--hardware", str(hardware), "--json"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ReplayError(f"the replay ended with status {done.returncode}")
    predicted: dict[str, Any] = json.loads(done.stdout)
    return predicted


def report_of(
    played: Sequence[Played],
    watched: Mapping[str, WatchedEngine],
    predicted: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Return measured and predicted figures side by side, with relative errors.

    Raises:
        ReplayError: no request was answered, so that no time was measured or predicted.
    """
    gaps = [gap for each in played for gap in each.token_gaps_s]
    served = [each for each in played if not each.error]
    last = max(each.request.at + each.end_s for each in played)
    tokens = sum(each.output_tokens for each in played)
    rows: dict[str, Row] = {}
    for name, values in (
        ("ttft_s", quantiles(each.ttft_s for each in played if each.ttft_s is not None)),
        ("inter_token_s", quantiles(gaps)),
    ):
        if values is None or predicted[name] is None:
            whose = "the service" if values is None else "the replay"
            errors = sorted({each.error for each in played if each.error}) or ["none"]
            raise ReplayError(f"{whose} has no {name}; errors of requests: {', '.join(errors)}")
        for quantile, value in msgspec.structs.asdict(values).items():
            rows[f"{name} {quantile}"] = row(value, predicted[name][quantile], TIMES_GOAL)
    speed = predicted["output_tokens_per_second"]
    rows["tokens_per_second"] = row(tokens / last, speed, None)
    for engine in predicted["engines"]:
        real = watched[engine["pool"]]
        for field in ("peak_kv_bytes", "peak_promised_bytes", "memory_bytes", "budget_bytes"):
            name = f"{engine['pool']} {field}"
            rows[name] = row(getattr(real, field), engine[field], BYTES_GOAL)
    return {
        "rows": rows,
        "missed": missed(rows),
        "actions": {
            "measured": dict(Counter(each.action or "reject" for each in played)),
            "errors": dict(Counter(each.error for each in played if each.error)),
            "predicted": predicted["actions"],
        },
        "served": len(served),
        "requests": len(played),
        "replay_seconds": round(seconds, 2),
        "trace_seconds": round(last, 1),
    }


def row(measured: float, predicted: float, goal: float | None) -> Row:
    """Return a figure's row. The error is relative, or None if nothing but zero was measured."""
    error = (predicted - measured) / measured if measured else None
    if measured == predicted:
        error = 0.0
    return {"measured": measured, "predicted": predicted, "error": error, "goal": goal}


def missed(rows: Mapping[str, Row]) -> list[str]:
    """Return the names of the figures that are not within their goals."""
    names = []
    for name, each in rows.items():
        goal = each["goal"]
        error = each["error"]
        if goal is not None and (error is None or abs(error) > goal):
            names.append(name)
    return names


def _unit_of(name: str) -> tuple[str, float]:
    """Return the unit in which a figure is printed, and the factor to it."""
    if name.endswith("bytes"):
        return "MiB", 1 / MIB
    return ("ms", 1000.0) if name.split()[0].endswith("_s") else ("", 1.0)


def as_table(report: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    lines = [f"{'':<32}{'measured':>12}{'predicted':>12}{'error %':>10}{'goal %':>8}"]
    for name, each in report["rows"].items():
        unit, scale = _unit_of(name)
        error = "-" if each["error"] is None else f"{100 * each['error']:.1f}"
        goal = "-" if each["goal"] is None else f"{100 * each['goal']:.0f}"
        lines.append(
            f"{name:<28}{unit:>4}{each['measured'] * scale:>12.2f}"
            f"{each['predicted'] * scale:>12.2f}{error:>10}{goal:>8}"
        )
    actions = report["actions"]
    lines += [
        "",
        f"requests {report['requests']}, served {report['served']}",
        f"measured {actions['measured']}, errors {actions['errors']}",
        f"predicted {actions['predicted']}",
        f"a trace of {report['trace_seconds']} s was replayed in {report['replay_seconds']} s, "
        "with the start of the process",
        f"not within their goals: {', '.join(report['missed']) or 'none'}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
