"""Summarises a replay, as a table for people and as JSON for programs."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ullage_replay.simulation import EngineOutcome, Replay, ReplayOutcome

MIB = 1 << 20
ACTIONS = {
    "accept": "accepted",
    "shrink": "shrunk",
    "queue": "queued",
    "route4": "other pool",
    "reject": "refused",
}
"""The router's actions, with the words for them in the table."""
_TIMEOUT = "timeout"


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and quantiles of a time in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


class EngineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's memory in bytes, and its work."""

    name: str
    pool: str
    peak_kv_bytes: int
    """Most KV bytes in block tables in any step."""
    peak_promised_bytes: int
    """Most KV bytes in block tables or reserved for admitted requests."""
    kv_pool_bytes: int
    memory_bytes: int
    """Bytes of all allocations on the device, with the whole KV pool."""
    budget_bytes: int
    steps: int
    busy_percent: float
    preemptions: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay in figures."""

    requests: int
    seconds: float
    """Seconds from the beginning of the trace to the end of the last request."""
    actions: Mapping[str, Mapping[str, int]]
    """Number of requests by the router's action, and then by its reason."""
    timeouts: int
    """Number of requests that ran out of time before their answer's end."""
    ttft_s: Quantiles | None
    """Time to first token, or None if no request was served."""
    inter_token_s: Quantiles | None
    """Time between tokens, or None if no answer has two."""
    output_tokens: int
    output_tokens_per_second: float
    preemptions: int
    engines: Sequence[EngineSummary]
    engines_needed: Mapping[str, int] | None = None
    """Engines of each pool that meet the objectives, or None if there are none, or none meet them.
    """
    objectives: Mapping[str, float] | None = None
    """The objectives in seconds (95th percentiles), or None without objectives."""

    @property
    def refused(self) -> int:
        """Return the number of refused requests."""
        return sum(self.actions.get("reject", {}).values())


def summarize(replay: Replay) -> Summary:
    """Return a replay's figures."""
    outcomes = replay.outcomes
    actions: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        if outcome.ending != _TIMEOUT:
            name = "reject" if outcome.ending == "refused" else outcome.action
            actions.setdefault(name, Counter())[outcome.reason] += 1

    output_tokens = sum(outcome.output_tokens for outcome in outcomes)
    return Summary(
        requests=len(outcomes),
        seconds=round(replay.duration_s, 3),
        actions={name: dict(sorted(counts.items())) for name, counts in sorted(actions.items())},
        timeouts=sum(outcome.ending == _TIMEOUT for outcome in outcomes),
        ttft_s=quantiles(o.ttft_s for o in outcomes if o.ttft_s is not None),
        inter_token_s=quantiles(all_gaps(outcomes)),
        output_tokens=output_tokens,
        output_tokens_per_second=(
            round(output_tokens / replay.duration_s, 2) if replay.duration_s else 0.0
        ),
        preemptions=sum(engine.num_preemptions for engine in replay.engines),
        engines=[_engine(each) for each in replay.engines],
    )


def _engine(engine: EngineOutcome) -> EngineSummary:
    return EngineSummary(
        name=engine.name,
        pool=engine.pool,
        peak_kv_bytes=engine.peak_kv_bytes,
        peak_promised_bytes=engine.peak_promised_bytes,
        kv_pool_bytes=engine.kv_pool_bytes,
        memory_bytes=engine.memory_bytes,
        budget_bytes=engine.budget_bytes,
        steps=engine.num_steps,
        busy_percent=round(100 * engine.busy_share, 1),
        preemptions=engine.num_preemptions,
    )


def all_gaps(outcomes: Iterable[ReplayOutcome]) -> "array[float]":
    """Return the seconds between tokens of all answers."""
    gaps = array("d")
    for outcome in outcomes:
        gaps.extend(outcome.token_gaps_s)
    return gaps


def quantiles(values: Iterable[float]) -> Quantiles | None:
    """Return the mean, and the quantiles by nearest rank, or None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    mean = round(sum(ordered) / len(ordered), 6)
    at = {
        name: round(ordered[math.ceil(share * len(ordered)) - 1], 6)
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }
    return Quantiles(mean=mean, **at)


def as_json(summary: Summary) -> str:
    """Return the summary as JSON."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"


def as_table(summary: Summary) -> str:
    """Return the summary as text for people."""
    lines = [
        f"{summary.requests} requests in {summary.seconds:.0f} s, "
        f"{summary.output_tokens} tokens out, {summary.output_tokens_per_second:.1f} tokens/s",
        "",
        "requests",
    ]
    for action, word in ACTIONS.items():
        reasons = summary.actions.get(action, {})
        why = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        lines.append(f"  {word:<12}{sum(reasons.values()):>8}   {why}".rstrip())
    lines.append(f"  {'timed out':<12}{summary.timeouts:>8}")
    lines.append(f"  {'preemptions':<12}{summary.preemptions:>8}")

    lines += ["", f"{'milliseconds':<22}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}"]
    for name, values in (
        ("time to first token", summary.ttft_s),
        ("between tokens", summary.inter_token_s),
    ):
        lines.append(f"  {name:<20}{_milliseconds(values)}")

    head = f"{'engine, MiB':<20}{'peak KV':>9}{'promised':>10}{'KV pool':>9}{'memory':>9}"
    lines += ["", f"{head}{'budget':>9}{'steps':>9}{'busy %':>8}"]
    for engine in summary.engines:
        lines.append(
            f"  {engine.name:<18}{_mib(engine.peak_kv_bytes):>9}"
            f"{_mib(engine.peak_promised_bytes):>10}{_mib(engine.kv_pool_bytes):>9}"
            f"{_mib(engine.memory_bytes):>9}{_mib(engine.budget_bytes):>9}"
            f"{engine.steps:>9}{engine.busy_percent:>8.1f}"
        )
    if summary.objectives is not None:
        lines += ["", _needed(summary)]
    return "\n".join(lines) + "\n"


def _needed(summary: Summary) -> str:
    wanted = " and ".join(
        f"{name} p95 of {1000 * seconds:g} ms"
        for name, seconds in (summary.objectives or {}).items()
    )
    if summary.engines_needed is None:
        return f"no number of engines that was tried meets {wanted} without a refusal"
    engines = ", ".join(f"{pool} {count}" for pool, count in summary.engines_needed.items())
    return f"engines for {wanted} without a refusal: {engines}"


def _milliseconds(values: Quantiles | None) -> str:
    if values is None:
        return f"{'-':>10}" * 4
    return "".join(f"{1000 * each:>10.1f}" for each in msgspec.structs.astuple(values))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"
