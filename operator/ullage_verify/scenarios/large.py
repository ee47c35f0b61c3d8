"""Checks that large requests are routed to a pool for large requests, as reported by /stats."""

import asyncio
from collections.abc import Sequence

from ullage_verify.client import ChatAnswer, Document
from ullage_verify.criteria import Checks
from ullage_verify.quantiles import quantile
from ullage_verify.scenarios.settings import ScenarioSettings
from ullage_verify.target import Target

NUM_REQUESTS = 6
ANSWER_TOKENS = 32
P95_S = 20.0
SINGLE_ROUTE = "single"


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Send prompts above and below the threshold, and check their routes in /stats."""
    stats = await target.stats()
    large_pools = sorted(
        {engine["pool"] for engine in stats.get("engines", ()) if engine["route"] != SINGLE_ROUTE}
    )
    threshold = settings.large_tokens
    reason = ""
    if not stats:
        reason = "the server has no /stats"
    elif not large_pools:
        reason = "the service has no pool for large requests"
    elif threshold > target.usable - ANSWER_TOKENS:
        reason = f"the context has {target.context} tokens, below --large-tokens {threshold}"
    if reason:
        checks.skip("large prompts reach the large pool", reason)
        return

    settings.progress(f"{NUM_REQUESTS} prompts of {threshold} tokens")
    tokens = min(threshold * 11 // 10, target.usable - ANSWER_TOKENS)
    large = await _ask_all(target, 2_000, tokens)
    small = await _ask_all(target, 3_000, min(200, threshold // 4))

    for name, answers in (("large", large), ("small", small)):
        whole = sum(answer.is_whole for answer in answers)
        checks.holds(
            f"{name} prompts are answered", whole == NUM_REQUESTS, f"{NUM_REQUESTS}", f"{whole}"
        )
    times = [answer.seconds for answer in large]
    checks.at_most("p95 of large requests", quantile(times, 0.95), P95_S)

    latest = (await target.stats())["latest"]
    records = [record for record in latest if record["status"] == 200][: 2 * NUM_REQUESTS]
    _check_routes(checks, "large", [r for r in records if r["prompt_tokens"] >= threshold])
    _check_routes(checks, "small", [r for r in records if r["prompt_tokens"] < threshold])
    explained = sum(bool(record["predicted_bytes"] and record["timeline"]) for record in records)
    checks.holds(
        "/stats has the predicted bytes and the steps of each",
        explained == 2 * NUM_REQUESTS,
        f"{2 * NUM_REQUESTS}",
        f"{explained}",
    )


def _check_routes(checks: Checks, kind: str, records: Sequence[Document]) -> None:
    """Check that /stats shows the right route for every request of one kind, large or small."""
    right = sum((record["route"] != SINGLE_ROUTE) == (kind == "large") for record in records)
    routes = ", ".join(sorted({record["route"] or record["action"] for record in records}))
    checks.holds(
        f"/stats shows the route of {kind} prompts",
        len(records) == right == NUM_REQUESTS,
        f"{NUM_REQUESTS}",
        f"{right} ({routes})",
    )


async def _ask_all(target: Target, first: int, tokens: int) -> Sequence[ChatAnswer]:
    """Send several different prompts at once, and return the final response to each."""
    tries = await asyncio.gather(
        *(
            target.client.obey(target.model, target.prompt(first + number, tokens), ANSWER_TOKENS)
            for number in range(NUM_REQUESTS)
        )
    )
    return [answers[-1] for answers in tries]
