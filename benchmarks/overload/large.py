"""Measures requests that take the large pool, alone and beside ordinary requests."""

import asyncio
import itertools
import statistics
from collections import Counter
from pathlib import Path

from benchmarks.overload.clients import Ask, closed_loop
from benchmarks.overload.rounds import Measured, Verdict, alternate, only
from benchmarks.support.local_service import example_up
from ullage_verify.client import OpenAIClient
from ullage_verify.quantiles import quantile
from ullage_verify.target import describe

LARGE_TOKENS = 2_000
LARGE = [Ask(prompt=tokens, output=64) for tokens in (2_200, 3_000, 4_000)] * 3
"""Prompts of 1.1 to 2 times `largeRequestTokens`."""
ORDINARY = [Ask(prompt=180, output=64)] * 24
LARGE_CLIENTS = 2
ORDINARY_CLIENTS = 2
MOST_P95_S = 20.0
OBJECTIVES = {"ttftP95": f"{MOST_P95_S:g}s", "e2eP95": f"{MOST_P95_S:g}s"}
"""The requirement as the service's `slo`: the router refuses requests that would be later."""
SPILLED = "route=SPILL"
"""Step of a request that ran in another pool, because its own had no room in time."""


async def measure(folder: Path, rounds: int, patience_s: float) -> list[Verdict]:
    routes: dict[str, str] = {}
    async with (
        example_up(folder / "large", {"slo": OBJECTIVES}) as service,
        OpenAIClient(service.url) as client,
    ):
        target = await describe(client)

        async def alone(number: int) -> Measured:
            answers = await closed_loop(target, LARGE, LARGE_CLIENTS, 10 * number)
            records = (await target.stats())["latest"]
            is_large = [record["prompt_tokens"] > LARGE_TOKENS for record in records]
            for record in itertools.compress(records, is_large):
                is_spilled = SPILLED in record["trail"]
                routes[record["request_id"]] = "spilled" if is_spilled else record["route"]
            return answers

        async def beside(number: int) -> Measured:
            large, _ = await asyncio.gather(
                closed_loop(target, LARGE, LARGE_CLIENTS, 10 * number + 1),
                closed_loop(target, ORDINARY, ORDINARY_CLIENTS, 10 * number + 2),
            )
            return large

        variants = {"large alone": alone, "large beside ordinary": beside}
        comparison = await alternate(variants, rounds, patience_s)
        engines = range(len(service.state["engines"]))
        ooms = int(sum(service.figures(n)["ullage_oom_events_total"] for n in engines))

    print(f"large path: {LARGE_CLIENTS} clients, {rounds} rounds of {len(LARGE)} large requests")
    comparison.show("end", 0.95, "end of large requests, p95, s")
    verdicts = [
        only("answers to large requests", comparison.outcomes(), {"200", "429"}),
        Verdict("MG01 steps out of memory", f"{ooms}", "0", ooms == 0),
        only("routes of large requests", Counter(routes.values()), {"large", "spilled", ""}),
    ]
    for name in variants:
        ends = [end for each in comparison.rounds[name] for end in each.values["end"]]
        seen = f"{quantile(ends, 0.95):.1f} s, median {statistics.median(ends):.1f} s"
        is_met = quantile(ends, 0.95) <= MOST_P95_S
        verdicts.append(Verdict(f"MG01 p95, {name}", seen, f"at most {MOST_P95_S:g} s", is_met))
    return verdicts
