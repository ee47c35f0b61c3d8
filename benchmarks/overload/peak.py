"""Measures first tokens at peak, with and without a bound on the sequences that a step decodes.

The peak is a mix of ordinary requests, long contexts and long answers. With the bound, a step
decodes a third of the sequences that run, in turn.
"""

import contextlib
from pathlib import Path
from typing import Any

from benchmarks.overload.clients import Ask, closed_loop
from benchmarks.overload.rounds import Comparison, Measured, Verdict, alternate, most_ratio, only
from benchmarks.support.local_service import Service, example_up
from ullage_verify.client import OpenAIClient
from ullage_verify.target import Target, describe

CLIENTS = 24
BOUND = 8
DEFAULT = 8192
ORDINARY = Ask(prompt=60, output=48)
LONG_CONTEXT = Ask(prompt=1_000, output=32)
LONG_ANSWER = Ask(prompt=60, output=192)
ASKS = [ORDINARY, ORDINARY, LONG_CONTEXT, ORDINARY, ORDINARY, LONG_ANSWER] * 10
MOST_RATIO = 1.05


def changes(most_decodes: int) -> dict[str, Any]:
    """Return the changes of the example's service: one engine with room for all clients."""
    return {
        "pools": {"large": None, "single": {"memory": {"maxKV": "400Mi"}}},
        "memory": {"deviceBytes": "2Gi"},
        "routing": {"queue": {"maxRequests": 64, "timeout": "60s"}},
        "batching": {"maxSequences": CLIENTS, "decodeMaxBatchTokens": most_decodes},
    }


async def measure(folder: Path, rounds: int, patience_s: float) -> list[Verdict]:
    services: list[Service] = []
    async with contextlib.AsyncExitStack() as stack:
        targets: dict[int, Target] = {}
        for bound in (DEFAULT, BOUND):
            path = folder / f"bound-{bound}"
            service = await stack.enter_async_context(example_up(path, changes(bound)))
            client = await stack.enter_async_context(OpenAIClient(service.url))
            targets[bound] = await describe(client)
            services.append(service)

        async def loose(number: int) -> Measured:
            return await closed_loop(targets[DEFAULT], ASKS, CLIENTS, 10 * number)

        async def bounded(number: int) -> Measured:
            return await closed_loop(targets[BOUND], ASKS, CLIENTS, 10 * number + 1)

        variants = {f"at most {DEFAULT:,} decodes": loose, f"at most {BOUND} decodes": bounded}
        comparison = await alternate(variants, rounds, patience_s)
        ooms = sum(service.figures(0)["ullage_oom_events_total"] for service in services)
    return _judge(comparison, list(variants), rounds, int(ooms))


def _judge(comparison: Comparison, names: list[str], rounds: int, ooms: int) -> list[Verdict]:
    base, bounded = names
    print(f"peak: {CLIENTS} clients, {rounds} rounds of {len(ASKS)} requests each")
    comparison.show("first token", 0.95, "first token, p95, s")
    comparison.show("end", 0.95, "end, p95, s")
    ratios = comparison.ratios(bounded, base, "first token", 0.95)
    return [
        only("answers at peak", comparison.outcomes(), {"200"}),
        Verdict("OPT01 steps out of memory", f"{ooms}", "0", ooms == 0),
        most_ratio("OPT01 first token p95, bounded / not bounded", ratios, MOST_RATIO),
    ]
