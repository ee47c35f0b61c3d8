"""Measure the recovery from injected faults under load, while no stream may fail or differ.

The benchmark starts one engine with SmolLM2 in float32 on a small device, and sends every prompt
once without faults. Then it keeps greedy streams running and injects faults at random moments, one
at a time: a step that runs out of memory (60 %), SIGKILL (25 %) and SIGSTOP (15 %) of the worker.
Some signals are sent twice, the second time while the next worker loads. Every answer is compared
token by token with the answer without faults. The recovery is the time from a fault to the next
token of a running stream. For a step that runs out of memory, the recovery is the longest pause
around the fault.

Print one JSON object and a table.

examples:
  python -m benchmarks faults --faults 200
  python -m benchmarks faults --faults 10 --only kill --streams 40 --dtype auto
  python -m benchmarks faults --faults 200 --dtype bfloat16 --deterministic

exit status: 0 success, 1 an error, a different answer or a leak
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import grpc

from benchmarks.support.one_engine import Engine, start_engine
from benchmarks.support.options import new_parser
from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb

SHARES = {"oom": 0.6, "kill": 0.25, "stop": 0.15}
T = TypeVar("T")

RECOVERY_S = 60.0
POLL_S = 0.02
SUBJECTS = (
    *("a lighthouse", "iron", "the moon", "a harbour", "winter", "bread", "a violin", "rivers"),
    *("a clock", "the desert", "an old map", "copper"),
)


class AnswerError(Exception):
    """An answer that ended too early."""


@dataclass
class FaultRun:
    """The answers and faults so far."""

    reference: list[list[int]]
    answers: int = 0
    tokens: int = 0
    resumes: int = 0
    errors: list[str] = field(default_factory=list)
    arrivals: dict[int, list[float]] = field(default_factory=dict)
    """Times of the latest tokens of each stream."""
    recoveries: dict[str, list[float]] = field(
        default_factory=lambda: {k: [] for k in (*SHARES, "twice")}
    )
    is_over: bool = False


async def generate(
    engine: Engine, prompt: int, tokens: int, times: list[float]
) -> tuple[list[int], pb.Finished]:
    """Request one greedy answer, and append the arrival time of every token to `times`.

    Raises:
        AnswerError: the answer ended too early.
    """
    token_ids: list[int] = []
    request = pb.GenerateRequest(
        text=f"Write about {SUBJECTS[prompt]}, and then about the sea.",
        sampling=pb.SamplingParams(temperature=0.0),
        stop=pb.StopConditions(max_tokens=tokens, ignore_eos=True),
        output=pb.OutputOptions(return_token_ids=True),
    )

    finished = pb.Finished()
    async for response in engine.inference.Generate(request):
        token_ids += response.delta.token_ids
        if response.delta.token_ids:
            times.append(time.monotonic())
        if response.HasField("finished"):
            finished = response.finished

    if finished.reason != pb.FINISH_REASON_LENGTH or len(token_ids) != tokens:
        raise AnswerError(f"{len(token_ids)} of {tokens} tokens, reason {finished.reason}")
    return token_ids, finished


async def stream(engine: Engine, run: FaultRun, number: int, seed: int) -> None:
    """Send one prompt after another until the run is over."""
    chooser = random.Random(f"{seed} {number}")
    longest = len(run.reference[0])
    while not run.is_over:
        prompt = chooser.randrange(len(run.reference))
        tokens = chooser.randint(longest // 4, longest)
        times = run.arrivals[number] = [time.monotonic()]
        try:
            token_ids, finished = await generate(engine, prompt, tokens, times)
        except (grpc.aio.AioRpcError, AnswerError) as error:
            run.errors.append(f"prompt {prompt}: {_reason(error)}")
            return
        run.answers += 1
        run.tokens += tokens
        run.resumes += finished.resumes
        _compare(run, prompt, token_ids)


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


def _compare(run: FaultRun, prompt: int, token_ids: list[int]) -> None:
    wanted = run.reference[prompt][: len(token_ids)]
    if token_ids != wanted:
        place = next(
            i for i, pair in enumerate(zip(token_ids, wanted, strict=True)) if len({*pair}) > 1
        )
        run.errors.append(f"prompt {prompt} differs from token {place} of {len(token_ids)} on")


async def inject(engine: Engine, run: FaultRun, kind: str, chooser: random.Random) -> None:
    """Inject one fault, and wait until the engine has recovered."""
    if kind == "oom":
        await _inject_oom(engine, run, chooser.randrange(20))
        return
    at = time.monotonic()
    pid = await _until(engine.worker_pid)
    await _hit(engine, pid, kind)
    if chooser.random() < 0.15:  # a second one while the next worker loads
        await asyncio.sleep(chooser.uniform(0.0, 3.0))
        await _hit(engine, await _until(engine.worker_pid), "kill")
        kind = "twice"
    # Loading takes longer than a message in flight: later arrivals were computed after the fault.
    changed = time.monotonic() + 0.2
    run.recoveries[kind].append(await _until(lambda: _first_token(run, changed)) - at)


async def _hit(engine: Engine, pid: int, kind: str) -> None:
    """Send a signal to a worker, and wait until another worker has replaced it."""
    with contextlib.suppress(ProcessLookupError):  # it may be ending by itself
        os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    await _until(lambda: engine.worker_pid() not in (pid, None) or None)


async def _inject_oom(engine: Engine, run: FaultRun, after_steps: int) -> None:
    before = await engine.ooms()
    at = time.monotonic()
    request = admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_OOM, after_steps=after_steps)
    await engine.admin.InjectFault(request)
    while await engine.ooms() <= before:
        if time.monotonic() > at + RECOVERY_S:
            raise SystemExit("error: an injected fault never came to pass")
        await asyncio.sleep(POLL_S)
    await _until(lambda: _first_token(run, at))
    run.recoveries["oom"].append(_longest_pause(run, at))


def _first_token(run: FaultRun, after: float) -> float | None:
    later = [at for times in run.arrivals.values() for at in times[1:] if at > after]
    return min(later, default=None)


def _longest_pause(run: FaultRun, after: float) -> float:
    """Return the longest pause between two tokens of any stream after the time `after`."""
    pauses = [
        later - max(earlier, after)
        for times in run.arrivals.values()
        for earlier, later in pairwise(times[1:])
        if later > after
    ]
    return max(pauses, default=0.0)


async def _until(condition: "Callable[[], T | None]") -> T:
    """Poll a function, and return its first result that is not None."""
    deadline = time.monotonic() + RECOVERY_S
    while (result := condition()) is None:
        if time.monotonic() > deadline:
            raise SystemExit(f"error: no recovery within {RECOVERY_S:g} s")
        await asyncio.sleep(POLL_S)
    return result


async def references(engine: Engine, prompts: int, tokens: int) -> list[list[int]]:
    answers = [generate(engine, prompt, tokens, []) for prompt in range(prompts)]
    return [texts for texts, _ in await asyncio.gather(*answers)]


def plan(faults: int, chooser: random.Random, only: str | None = None) -> list[str]:
    """Return fault kinds in random order, each at least once, by their shares (or `only` one)."""
    if only is not None:
        return [only] * faults
    kinds: list[str] = []
    for kind in ("stop", "kill"):
        kinds += [kind] * max(1, round(SHARES[kind] * faults))
    kinds += ["oom"] * (faults - len(kinds))
    chooser.shuffle(kinds)
    return kinds


def _sections(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    return {
        "model": {
            "max_model_len": 512,
            "dtype": options.dtype,
            "deterministic": options.deterministic,
        },
        # Room for all streams at their full length, and little more.
        "memory": {
            "device_bytes": 1500 << 20,
            "safety_reserve": 32 << 20,
            "max_kv": options.streams * (10 << 20),
        },
        "batching": {"max_sequences": options.streams, "prefill_chunk_tokens": 128},
        "limits": {"request_timeout": 300.0},
        "server": {"weights_dir": options.weights_dir} if options.weights_dir else {},
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    chooser = random.Random(options.seed)
    async with start_engine(folder, options.log, **_sections(options)) as running:
        run = FaultRun(await references(running, options.prompts, options.tokens))
        await _idle(running)

        before = await running.state()
        started = time.monotonic()
        streams = [
            asyncio.create_task(stream(running, run, number, options.seed))
            for number in range(options.streams)
        ]

        kinds = plan(options.faults, chooser, options.only)
        injected = await _inject_all(running, run, kinds, chooser, started + 60 * options.minutes)

        run.is_over = True
        await asyncio.gather(*streams)
        await _idle(running)

        after = await running.state()
        if after.headroom_bytes != before.headroom_bytes:
            run.errors.append(f"headroom {before.headroom_bytes} is now {after.headroom_bytes}")
        return _result(run, injected, time.monotonic() - started)


async def _inject_all(
    engine: Engine, run: FaultRun, kinds: Sequence[str], chooser: random.Random, deadline: float
) -> int:
    """Inject the faults in order, and return how many were injected.

    Stop early at the deadline or after the first error.
    """
    for number, kind in enumerate(kinds):
        if time.monotonic() > deadline or run.errors:
            return number
        await asyncio.sleep(chooser.uniform(0.0, 0.8))
        await inject(engine, run, kind, chooser)
        line = f"{number + 1}/{len(kinds)} faults, {run.answers} answers, last {kind}"
        print(line, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)
    return len(kinds)


async def _idle(engine: Engine) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while (state := await engine.state()).requests_running or state.requests_waiting:
        if time.monotonic() > deadline:
            raise SystemExit("error: requests run that nobody waits for")
        await asyncio.sleep(0.1)
    # The last request's memory is reported a moment after its end.
    await asyncio.sleep(0.7)


def _result(run: FaultRun, injected: int, took: float) -> dict[str, Any]:
    return {
        "faults": injected,
        "answers": run.answers,
        "tokens": run.tokens,
        "resumes": run.resumes,
        "errors": run.errors,
        "seconds": round(took, 1),
        "recovery_s": {kind: _quantiles(values) for kind, values in run.recoveries.items()},
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    last = len(ordered) - 1
    picks = {"p50": ordered[last // 2], "p95": ordered[int(0.95 * last)], "max": ordered[last]}
    return {"count": len(values), **{name: round(value, 3) for name, value in picks.items()}}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'fault':8} {'count':>6} {'p50':>8} {'p95':>8} {'max':>8}  recovery, seconds"]
    for kind, row in result["recovery_s"].items():
        figures = " ".join(f"{row[name]:8.3f}" for name in ("p50", "p95", "max"))
        lines.append(f"{kind:8} {row['count']:6} {figures}")
    return "\n".join(lines)


def main() -> int:
    parser = new_parser("faults", __doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="inject no fault after this time"
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=len(SUBJECTS))
    parser.add_argument("--tokens", type=int, default=80, help="tokens of the longest answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SHARES, help="inject one kind of fault")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--weights-dir", help="folder that keeps prepared weights for the next run")
    parser.add_argument("--log", help="file for the engine's log")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="ull") as folder:
        result = asyncio.run(measure(options, Path(folder)))

    print(json.dumps(result))
    print(table(result))
    return 1 if result["errors"] else 0
