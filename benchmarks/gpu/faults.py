"""Scenario 4: greedy streams survive injected memory shortages, killed workers and a full GPU.

No stream may fail, and each stream must have the same tokens as in a run without faults. In
float32, a resumed stream may diverge only at a near-tie, where two tokens are almost equally
likely. Near-ties are counted by the log-probabilities of the run without faults.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.gpu.figures import Fact, Figure, Job, Report, at_most, count, none_of
from benchmarks.gpu.overload import missing_headroom
from benchmarks.gpu.programme import ROOT
from benchmarks.gpu.service import (
    MIB,
    PATIENT,
    Stream,
    ask,
    engine_up,
    kv_bytes,
    metrics,
    pair,
    prompt_of,
    router_up,
)
from benchmarks.gpu.ties import compare
from benchmarks.support.one_engine import Engine
from ullage.admin.v1 import admin_pb2
from ullage_common.wire.channels import open_channel

STREAMS = 6
PROMPT_TOKENS = 50
NUM_OOMS = 3
MOST_RECOVERY_S = 30.0
LEFT_FREE = 64 * MIB
RESERVE = LEFT_FREE // 2
"""The engine's safety reserve in bytes. The ballast leaves more bytes free, so that a full device
does not make the engine withhold KV from requests."""
HELD_S = 10.0
POLL_S = 0.02
WAIT_S = 60.0

Fault = Callable[[list[Stream]], Awaitable[None]]


@dataclass
class Scene:
    """Streams during which faults are injected, and the same streams without faults."""

    job: Job
    engine: Engine
    target: str
    output_tokens: int
    wanted: list[Stream] = field(default_factory=list)
    near_ties: int = 0
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each kill to the next token of any stream."""


def run(job: Job, report: Report) -> None:
    asyncio.run(_run(job, report))


async def _run(job: Job, report: Report) -> None:
    output_tokens = 500 if not job.tiny else 120
    sections = {
        "model": {"dtype": "float32"},
        "memory": {"max_kv": kv_bytes(job, 16_384, itemsize=4), "safety_reserve": RESERVE},
        "batching": {"max_sequences": 8},
        "limits": {"request_timeout": MOST_RECOVERY_S},
    }
    async with (
        engine_up(job, "faults", sections) as engine,
        router_up(job, {"single": [engine]}, PATIENT) as router,
    ):
        scene = Scene(job, engine, router.target, output_tokens)
        scene.wanted = await streams(scene, gaps=True)
        broken = [each.error for each in scene.wanted if each.error]
        for error in sorted(set(broken)):
            report(Fact("undisturbed", error))
        report(none_of("undisturbed streams that failed", len(broken)))
        first_pool = (await engine.state()).kv_pool_bytes

        await judge(scene, "injected shortages", inject(scene), report)
        await judge(scene, "two kills", kill_twice(scene), report)
        hold = HELD_S if not job.tiny else 0.0
        async with contextlib.AsyncExitStack() as held:
            await judge(scene, "a device that fills", fill(scene, held, report), report)
            await judge(scene, "a kill on a full device", kill_once(scene), report, hold=hold)
        await judge(scene, "the ballast gone", None, report)

        figures = await asyncio.to_thread(metrics, engine)
        report(count("steps that ran out of memory", figures["ullage_oom_events_total"], NUM_OOMS))
        report(count("workers replaced", figures["ullage_worker_restarts_total"], 3))
        report(Figure("streams that parted at a near-tie", scene.near_ties, ""))
        # A worker that starts while a neighbour holds memory may have a smaller pool, all free.
        pool = (await engine.state()).kv_pool_bytes
        report(Figure("KV pool in the end, of the first", pool / first_pool, ""))
        missing = await missing_headroom(engine, pool)
        report(none_of("bytes of headroom that did not come back", missing))


async def streams(
    scene: Scene, *, gaps: bool = False, watched: list[Stream] | None = None
) -> list[Stream]:
    """Start all streams at once, and read them to their ends."""
    following = watched if watched is not None else [Stream() for _ in range(STREAMS)]
    async with open_channel(scene.target) as channel:
        return list(
            await asyncio.gather(
                *(
                    ask(
                        channel,
                        prompt_of(scene.job, number, PROMPT_TOKENS),
                        scene.output_tokens,
                        gaps=gaps,
                        stream=stream,
                    )
                    for number, stream in enumerate(following)
                )
            )
        )


async def judge(
    scene: Scene, name: str, fault: Fault | None, report: Report, hold: float = 0.0
) -> None:
    """Run the streams with a fault for at least `hold` seconds, and compare their tokens."""
    watched = [Stream() for _ in range(STREAMS)]
    began = time.monotonic()
    asking = asyncio.create_task(streams(scene, watched=watched))
    if fault is not None:
        # Streams and later scenes continue after a fault without effect.
        try:
            await fault(watched)
        except RuntimeError as error:
            report(Fact(name, str(error)))
            report(none_of(f"{name}: faults without effect", 1))
    given = await asking
    for number, seconds in enumerate(scene.recoveries, 1):
        report(at_most(f"{name}: next token after kill {number}", seconds, "s", MOST_RECOVERY_S))
    scene.recoveries.clear()
    await asyncio.sleep(max(0.0, hold - (time.monotonic() - began)))

    failed = [stream.error for stream in given if stream.error]
    for error in sorted(set(failed)):
        report(Fact(name, error))
    report(none_of(f"{name}: failed streams", len(failed)))
    parted = compare(map(pair, scene.wanted, given))
    scene.near_ties += parted.at_near_ties
    report(none_of(f"{name}: streams with other tokens", parted.elsewhere))
    if fault is not None:
        report(Figure(f"{name}: resumed streams", sum(each.resumes > 0 for each in given), ""))


def inject(scene: Scene) -> Fault:
    """Return a fault that makes steps run out of memory while the streams continue."""

    async def fault(watched: list[Stream]) -> None:
        await shared(scene, watched, 0.1)
        for after_steps in range(5, 5 + 10 * NUM_OOMS, 10):
            await scene.engine.admin.InjectFault(
                admin_pb2.InjectFaultRequest(kind=admin_pb2.FAULT_KIND_OOM, after_steps=after_steps)
            )

    return fault


def fill(scene: Scene, held: contextlib.AsyncExitStack, report: Report) -> Fault:
    """Return a fault in which another process takes and keeps all memory except LEFT_FREE."""

    async def fault(watched: list[Stream]) -> None:
        await shared(scene, watched, 0.1)
        taken = await held.enter_async_context(ballast(scene.job))
        report(Figure("held by the ballast", taken / MIB, "MiB"))

    return fault


def kill_once(scene: Scene) -> Fault:
    async def fault(watched: list[Stream]) -> None:
        await kill_at(scene, watched, 0.25)

    return fault


def kill_twice(scene: Scene) -> Fault:
    async def fault(watched: list[Stream]) -> None:
        await kill_at(scene, watched, 0.25)
        await kill_at(scene, watched, 0.75)

    return fault


async def kill_at(scene: Scene, watched: list[Stream], share: float) -> None:
    """Kill the worker once the streams have a share of their tokens, and wait for a new worker."""
    await shared(scene, watched, share)
    pid = scene.engine.worker_pid()
    if pid is None:
        raise RuntimeError("there is no worker to kill")
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    # Tokens that were computed before the kill may arrive a moment after it.
    await until(lambda: scene.engine.worker_pid() not in (pid, None), "another worker")
    respawned = time.monotonic()
    await until(
        lambda: any(stream.times[-1] > respawned for stream in watched), "a token after the kill"
    )
    scene.recoveries.append(min(s.times[-1] for s in watched if s.times[-1] > respawned) - at)


async def shared(scene: Scene, watched: list[Stream], share: float) -> None:
    """Wait until every stream has a share of its tokens."""
    wanted = int(share * scene.output_tokens)
    await until(
        lambda: all(len(stream.token_ids) >= wanted for stream in watched),
        f"token {wanted} of every stream",
    )


async def until(condition: Callable[[], bool], awaited: str) -> None:
    """Wait until a condition is true.

    Raises:
        RuntimeError: the condition did not become true within WAIT_S seconds.
    """
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{awaited} did not come within {WAIT_S:g} s")
        await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def ballast(job: Job) -> AsyncIterator[int]:
    """Fill the device except for LEFT_FREE bytes during the block, and yield the bytes taken."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.gpu.ballast",
        job.device,
        str(LEFT_FREE),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        if not line:
            raise RuntimeError(f"the ballast ended with status {await process.wait()}")
        yield int(line)
    finally:
        process.stdin.close()
        await process.wait()
