"""Measures first tokens of a burst of long and short prompts on two engines, by distribution.

in turn    the client sends prompts to the engines in turn, without the router
no window  the router places each prompt at once, where the least prefill work waits
balanced   the router's prefill window distributes prompts together

Each engine has a core of its own. The burst has the proportions of the requirement's example.
"""

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import psutil

from benchmarks.overload.rounds import Measured, Verdict, alternate, most_ratio, spread
from benchmarks.support.local_service import ask
from benchmarks.support.one_engine import Engine, start_engine
from benchmarks.support.router_process import listening, start_router
from ullage_common.wire.channels import open_channel

BURST = (3_000, 1_000, 3_000, 1_000, 1_000, 1_000)
"""Prompt lengths in tokens: half of the requirement's example, in its order."""
OUTPUT = 2
MODEL = "smollm2"
NEVER = {"ttft_p95": 600.0, "e2e_p95": 600.0}
LIMITS = {"request_timeout": 300.0}
MEMORY = {"device_bytes": 2 << 30, "safety_reserve": 32 << 20, "max_kv": 400 << 20}
LARGEST = {"large_request_tokens": 8192}


async def burst(
    engines: Sequence[Engine], channels: Sequence[grpc.aio.Channel], seed: int
) -> Measured:
    """Send all prompts at once, to the channels in turn, and measure their first tokens.

    The CPU time of the busiest engine is measured, too. Neighbours hardly change it.
    """
    before = [_cpu_s(engine) for engine in engines]
    chooser = random.Random(seed)
    prompts = [[chooser.randrange(100, 40_000) for _ in range(tokens)] for tokens in BURST]
    answers = await asyncio.gather(
        *(
            ask(channel, prompt, OUTPUT)
            for channel, prompt in zip(itertools.cycle(channels), prompts, strict=False)
        )
    )
    first = [answer.arrivals_s[0] for answer in answers]
    cpu_s = [_cpu_s(engine) - then for engine, then in zip(engines, before, strict=True)]
    values = {"first token": first, "CPU": [max(cpu_s)]}
    return Measured(values, Counter({"200": len(answers)}))


def _cpu_s(engine: Engine) -> float:
    pid = engine.worker_pid()
    assert pid is not None, "no worker runs"
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def measure(folder: Path, rounds: int, patience_s: float) -> list[Verdict]:
    async with contextlib.AsyncExitStack() as stack:
        engines: list[Engine] = []
        for core in range(2):
            own = folder / f"engine-{core}"
            own.mkdir()
            engine = await stack.enter_async_context(
                start_engine(
                    own,
                    str(own / "log"),
                    memory=MEMORY,
                    limits=LIMITS,
                    server={"engine_id": f"engine-{core}", "cores": [core], "owns_cores": True},
                )
            )
            engines.append(engine)
        addresses = [engine.address for engine in engines]

        async def router(name: str, window_s: float) -> grpc.aio.Channel:
            own = folder / name
            own.mkdir()
            routing = {**LARGEST, "prefill": {"window": window_s}}
            await start_router(stack, MODEL, addresses, own, NEVER, routing=routing, limits=LIMITS)
            port = (await listening(own / "router.log"))["grpc_port"]
            return await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))

        direct = [await stack.enter_async_context(open_channel(each)) for each in addresses]
        unbalanced = await router("no-window", 0.0)
        balanced = await router("balanced", 0.006)
        for channel in (*direct, unbalanced, balanced):
            await ask(channel, range(100, 400), OUTPUT)

        variants = {
            "in turn": lambda number: burst(engines, direct, 10 * number),
            "no window": lambda number: burst(engines, [unbalanced], 10 * number + 1),
            "balanced": lambda number: burst(engines, [balanced], 10 * number + 2),
        }
        comparison = await alternate(variants, rounds, patience_s)

    lengths = ", ".join(map(str, BURST))
    print(f"prefill on two engines: prompts of {lengths} tokens, {rounds} rounds")
    comparison.show("first token", 1.0, "the last first token, s")
    comparison.show("first token", 0.5, "first token, median, s")
    comparison.show("CPU", 1.0, "the busiest engine, CPU s")
    for base in ("in turn", "no window"):
        medians = comparison.ratios("balanced", base, "first token", 0.5)
        cpu = comparison.ratios("balanced", base, "CPU", 1.0)
        print(f"  balanced / {base}: median {spread(medians)}, CPU {spread(cpu)} times")
    return [
        most_ratio(
            f"SCH last first token, balanced / {base}",
            comparison.ratios("balanced", base, "first token", 1.0),
            limit,
        )
        for base, limit in (("in turn", 1.0), ("no window", 1.05))
    ]
