"""Checks that large requests are routed to a pool for large requests, as reported by /stats.

Each request has a trace context, so that a server that exports traces states the trace in /stats.
"""

import asyncio
import secrets
from collections.abc import Sequence

from ullage_verify.client import ChatAnswer, Document
from ullage_verify.criteria import Checks
from ullage_verify.quantiles import quantile
from ullage_verify.scenarios.settings import DEFAULT_E2E_S, DEFAULT_LARGE_TOKENS, ScenarioSettings
from ullage_verify.target import Target

NUM_REQUESTS = 6
ANSWER_TOKENS = 32
SINGLE_ROUTE = "single"


async def run(target: Target, settings: ScenarioSettings, checks: Checks) -> None:
    """Send prompts above and below the threshold, and check their routes in /stats."""
    stats = await target.stats()
    large_pools = sorted(
        {engine["pool"] for engine in stats.get("engines", ()) if engine["route"] != SINGLE_ROUTE}
    )
    threshold = settings.large_tokens or _threshold(stats)
    reason = ""
    if not stats:
        reason = target.unreported("the routes of requests (/stats)")
    elif not large_pools:
        reason = "the service has no pool for large requests"
    elif threshold >= target.usable - ANSWER_TOKENS:
        reason = f"the context of {target.context} tokens has no room for more than {threshold}"
    if reason:
        checks.skip("large prompts reach the large pool", reason)
        return

    settings.progress(f"{NUM_REQUESTS} prompts of {threshold} tokens")
    tokens = min(threshold * 11 // 10, target.usable - ANSWER_TOKENS)
    objective = await target.objective(settings.e2e_s, "e2e_p95_s", DEFAULT_E2E_S)
    trace_ids = [secrets.token_hex(16) for _ in range(NUM_REQUESTS)]
    large = await _ask_in_turn(target, tokens, trace_ids)
    small_tokens = min(200, threshold // 4)
    small = await asyncio.gather(
        *(_ask(target, 3_000 + number, small_tokens) for number in range(NUM_REQUESTS))
    )

    for name, answers in (("large", large), ("small", small)):
        whole = sum(answer.is_whole for answer in answers)
        checks.holds(
            f"{name} prompts are answered", whole == NUM_REQUESTS, f"{NUM_REQUESTS}", f"{whole}"
        )
    times = [answer.seconds for answer in large]
    p95 = quantile(times, 0.95)
    checks.at_most(f"p95 of large requests ({objective})", p95, objective.seconds)

    latest = (await target.stats())["latest"]
    records = [record for record in latest if record["status"] == 200][: 2 * NUM_REQUESTS]
    large_records = [r for r in records if r["prompt_tokens"] > threshold]
    _check_routes(checks, "large", large_records)
    _check_routes(checks, "small", [r for r in records if r["prompt_tokens"] <= threshold])
    explained = sum(bool(record["predicted_bytes"] and record["timeline"]) for record in records)
    checks.holds(
        "/stats has the predicted bytes and the steps of each",
        explained == 2 * NUM_REQUESTS,
        f"{2 * NUM_REQUESTS}",
        f"{explained}",
    )
    _check_traces(checks, large_records, trace_ids)


def _threshold(stats: Document) -> int:
    """Return the prompt size above which the server routes a request to the large pool."""
    own = stats.get("large_requests") or {}
    return int(own.get("prompt_tokens") or DEFAULT_LARGE_TOKENS)


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


def _check_traces(checks: Checks, records: Sequence[Document], trace_ids: Sequence[str]) -> None:
    """Check that /stats names the trace of every large request, if the server exports traces."""
    name = "/stats names the trace of each large prompt"
    seen = {record.get("trace_id") or "" for record in records}
    if not any(seen):
        checks.skip(name, "the service exports no traces; name a collector in its tracing.endpoint")
        return
    num_named = len(seen & set(trace_ids))
    checks.holds(name, num_named == NUM_REQUESTS, f"{NUM_REQUESTS}", f"{num_named}")


async def _ask_in_turn(
    target: Target, tokens: int, trace_ids: Sequence[str]
) -> Sequence[ChatAnswer]:
    """Send prompts one after the other, because a full pool sends large requests elsewhere.

    The first one that is not answered is the last one that is sent.
    """
    answers: list[ChatAnswer] = []
    for number, trace_id in enumerate(trace_ids):
        traceparent = f"00-{trace_id}-{secrets.token_hex(8)}-01"
        answers.append(await _ask(target, 2_000 + number, tokens, traceparent))
        if not answers[-1].is_whole:
            break
    return answers


async def _ask(target: Target, number: int, tokens: int, traceparent: str = "") -> ChatAnswer:
    """Send a prompt, retry it after each refusal, and return the final response."""
    prompt = target.prompt(number, tokens)
    answers = await target.client.obey(target.model, prompt, ANSWER_TOKENS, traceparent=traceparent)
    return answers[-1]
