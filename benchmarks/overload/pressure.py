"""Measures what memory pressure costs the clients of a service, with and without pressure levels.

Two services run in one control group, which they see as the memory of their container, like
containers of a pod. A process beside them takes memory, until most of the safety reserve is gone.
The engines then withhold as much of their KV pools, and their pressure levels apply.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.overload.clients import Ask, closed_loop
from benchmarks.overload.rounds import Measured, Verdict, alternate, most_ratio, only, spread
from benchmarks.support.local_service import Service, example_up
from ullage_verify.client import OpenAIClient
from ullage_verify.memory_limit import ROOTS, MemoryLimit, memory_limit
from ullage_verify.target import Target, describe

MIB = 1 << 20
RESERVE_MIB = 256
"""Safety reserve of each engine."""
TAKEN_MIB = 100
"""Part of the reserve that the other process takes. A single engine's KV pool has 130 MiB."""
SLACK_MIB = 64
"""Memory that is free beside the reserve, so that processes may grow without pressure."""
HOG_OWN_MIB = 8
"""Memory of the other process itself."""
START_BYTES = 8 << 30
CLIENTS = 8
ASKS = [Ask(prompt=180, output=output) for output in (32, 64, 128)] * 8
LEVELS = [
    {"belowPercent": 30, "maxOutputTokens": 128, "maxTopP": "0.9"},
    {"belowPercent": 15, "maxOutputTokens": 64, "maxTopP": "0.8", "batchPercent": 75},
    {
        "belowPercent": 5,
        "maxOutputTokens": 32,
        "maxTemperature": 0,
        "maxTopP": "0.7",
        "batchPercent": 50,
    },
]
"""The default levels, with a sixteenth of their output tokens, as of the answers here."""
MOST_RATIO = 1.1
PRESSURE_S = 20.0
_HOG = """
import sys, time
block = b"1" * int(sys.argv[1])
print("taken", flush=True)
time.sleep(3600)
"""


def in_container(name: str) -> Any:
    """Return a function that makes a command see a control group's limit as its container's."""
    root = next(each for each in ROOTS if (each / "cgroup.procs").exists())
    own = root / name
    script = f'echo $$ > {own}/cgroup.procs && mount --bind {own} {root} && exec "$@"'

    def within(command: Sequence[str]) -> list[str]:
        return ["unshare", "--mount", "sh", "-c", script, "sh", *command]

    return within


@contextlib.contextmanager
def memory_taken(group: MemoryLimit) -> Iterator[None]:
    """Let another process of the group hold memory until the block ends."""
    size = (SLACK_MIB + TAKEN_MIB - HOG_OWN_MIB) * MIB
    command = group.inside([sys.executable, "-c", _HOG, str(size)])
    hog = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert hog.stdout
        hog.stdout.readline()
        yield
    finally:
        hog.kill()
        hog.wait()


async def until_pressure(target: Target, *, is_there: bool) -> None:
    """Wait until all engines report a pressure level, or none of them.

    Raises:
        SystemExit: they do not in time.
    """
    deadline = time.monotonic() + PRESSURE_S
    while time.monotonic() < deadline:
        levels = [each["pressure_level"] for each in (await target.stats())["engines"]]
        if any(levels) == is_there:
            return
        await asyncio.sleep(0.2)
    raise SystemExit(f"error: the engines' pressure levels are {levels} after {PRESSURE_S:g} s")


async def _target(stack: contextlib.AsyncExitStack, service: Service) -> Target:
    return await describe(await stack.enter_async_context(OpenAIClient(service.url)))


async def measure(folder: Path, rounds: int, patience_s: float) -> list[Verdict]:
    name = f"ullage-pressure-{os.getpid()}"
    sizes = {"safetyReserve": f"{RESERVE_MIB}Mi", "deviceBytes": "2Gi", "tiers": None}
    changes = {"memory": sizes, "degrade": {"pressureLevels": LEVELS}}
    without = {"memory": sizes, "degrade": {"pressureLevels": []}}

    with memory_limit(name) as group:
        group.allow(START_BYTES)
        async with contextlib.AsyncExitStack() as stack:
            within = in_container(name)
            own = await stack.enter_async_context(example_up(folder / "levels", changes, within))
            off = await stack.enter_async_context(example_up(folder / "off", without, within))
            with_levels = await _target(stack, own)
            without_levels = await _target(stack, off)

            async def calm(number: int) -> Measured:
                group.allow((RESERVE_MIB + SLACK_MIB) * MIB)
                await until_pressure(with_levels, is_there=False)
                return await closed_loop(with_levels, ASKS, CLIENTS, 10 * number)

            async def pressed(number: int) -> Measured:
                group.allow((RESERVE_MIB + SLACK_MIB) * MIB)
                with memory_taken(group):
                    await until_pressure(with_levels, is_there=True)
                    return await closed_loop(with_levels, ASKS, CLIENTS, 10 * number + 1)

            async def pressed_off(number: int) -> Measured:
                group.allow((RESERVE_MIB + SLACK_MIB) * MIB)
                with memory_taken(group):
                    await until_pressure(with_levels, is_there=True)
                    return await closed_loop(without_levels, ASKS, CLIENTS, 10 * number + 2)

            for number, target in enumerate((with_levels, without_levels)):
                await closed_loop(target, ASKS[:CLIENTS], CLIENTS, 998 + number)
            variants = {"calm": calm, "pressure": pressed, "pressure, no levels": pressed_off}
            comparison = await alternate(variants, rounds, patience_s)
            latest = (await with_levels.stats())["latest"]
            lowered = {change for record in latest for change in record["degraded"]}
            group.lift()

    print(f"memory pressure: {CLIENTS} clients, {rounds} rounds of {len(ASKS)} requests each")
    comparison.show("end", 0.95, "end, p95, s")
    comparison.show("first token", 0.95, "first token, p95, s")
    print(f"    changes that clients were told: {', '.join(sorted(lowered))}")
    ends = comparison.ratios("pressure", "calm", "end", 0.95)
    without_ends = comparison.ratios("pressure, no levels", "calm", "end", 0.95)
    print(f"  without levels, p95 under pressure is {spread(without_ends)} times that of calm")
    return [
        only("answers under pressure", comparison.outcomes(), {"200", "429"}),
        most_ratio("MEM03 p95 under pressure / calm", ends, MOST_RATIO),
    ]
