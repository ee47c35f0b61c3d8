"""Computes throughput and latency at each load level, and finds the knee among several levels.

The knee is the load above which latency grows faster than throughput. This module has no I/O and no
clock.
"""

import math
from collections.abc import Sequence

import msgspec

from ullage_verify.client import ChatAnswer
from ullage_verify.quantiles import quantile

MIN_STEADY = 4
"""Minimum number of responses under full load from which rates are computed."""
MIN_PERIODS = 2.0
"""Minimum length of the period under full load, in median durations of a response."""
MIN_S = 0.001


class Level(msgspec.Struct, frozen=True):
    """Throughput and latency measured at one load level. Times are in seconds."""

    load: float
    """Number of concurrent clients, or requests per second in an open loop."""
    requests: int
    """Number of requests that received a complete response."""
    refused: int
    """Number of requests that were refused with status 429 or 503."""
    failed: int
    """Number of requests that failed in any other way."""
    requests_per_s: float
    tokens_per_s: float
    """Output tokens per second, counting only complete responses."""
    ttft_p50: float
    ttft_p95: float
    token_p50: float
    """Median of the responses' mean time per output token, excluding the first token."""
    e2e_p50: float
    e2e_p95: float
    engines: Sequence[str] = ()
    """Names of the engines that completed responses (empty if the server does not state them)."""

    @property
    def power(self) -> float:
        """Throughput divided by median latency, which is largest at the knee.

        See L. Kleinrock, "Power and deterministic rules of thumb for probabilistic problems in
        computer communications", ICC 1979.
        """
        return self.requests_per_s / self.e2e_p50 if self.e2e_p50 else 0.0


class Objectives(msgspec.Struct, frozen=True):
    """Limits that an acceptable load level must not exceed. Times are in seconds."""

    ttft_p95: float = math.inf
    e2e_p95: float = math.inf
    max_refused_share: float = 0.01
    """Maximum fraction of requests that may be refused or fail."""

    def hold(self, level: Level) -> bool:
        """Return whether a load level stays within all limits."""
        total = level.requests + level.refused + level.failed
        lost = (level.refused + level.failed) / total if total else 1.0
        return (
            level.ttft_p95 <= self.ttft_p95
            and level.e2e_p95 <= self.e2e_p95
            and lost <= self.max_refused_share
        )


def measure(load: float, answers: Sequence[ChatAnswer], ends_at: float) -> Level:
    """Compute the throughput and latency of a load level from its responses.

    Rates only count responses that ended after the first response and before `ends_at`, because
    the load is lower outside this period.

    Args:
        load: number of concurrent clients, or requests per second.
        answers: all responses at this load level.
        ends_at: time after which no more requests were sent, on the monotonic clock.
    """
    whole = [answer for answer in answers if answer.is_whole]
    refused = sum(answer.is_refused for answer in answers)
    token_s = [
        (answer.seconds - answer.ttft_s) / (answer.output_tokens - 1)
        for answer in whole
        if answer.output_tokens > 1
    ]
    counted, seconds = _steady(whole, ends_at)
    return Level(
        load=load,
        requests=len(whole),
        refused=refused,
        failed=len(answers) - len(whole) - refused,
        requests_per_s=len(counted) / seconds,
        tokens_per_s=sum(answer.output_tokens for answer in counted) / seconds,
        ttft_p50=quantile([answer.ttft_s for answer in whole], 0.5),
        ttft_p95=quantile([answer.ttft_s for answer in whole], 0.95),
        token_p50=quantile(token_s, 0.5),
        e2e_p50=quantile([answer.seconds for answer in whole], 0.5),
        e2e_p95=quantile([answer.seconds for answer in whole], 0.95),
        engines=sorted({answer.engine for answer in whole if answer.engine}),
    )


def _steady(whole: Sequence[ChatAnswer], ends_at: float) -> tuple[Sequence[ChatAnswer], float]:
    """Return the responses that ended under full load, and the length of this period in seconds.

    If there are too few of them, or if the period is short for them, return all responses and the
    time from the start of the first to the end of the last. In a short period the responses of
    clients that began together end together, which looks like a high rate.
    """
    starts_at = min((answer.ended_at for answer in whole), default=0.0)
    period_s = ends_at - starts_at
    counted = [answer for answer in whole if starts_at < answer.ended_at <= ends_at]
    median_s = quantile([answer.seconds for answer in whole], 0.5) or 0.0
    if len(counted) >= MIN_STEADY and period_s >= MIN_PERIODS * median_s:
        return counted, period_s
    began_at = min((answer.began_at for answer in whole), default=0.0)
    last_at = max((answer.ended_at for answer in whole), default=1.0)
    return whole, max(last_at - began_at, MIN_S)


def knee(levels: Sequence[Level], objectives: Objectives) -> Level | None:
    """Return the knee among the levels that meet the objectives, or None.

    This is the level with the highest power, which is throughput divided by median latency. If the
    objectives limit a latency, the level with the most requests per second is returned instead,
    because users with a latency limit want the maximum throughput within it.

    Returns:
        The level, or None if no level meets the objectives.
    """
    kept = [level for level in levels if level.requests and objectives.hold(level)]
    if not kept:
        return None
    if math.isinf(objectives.ttft_p95) and math.isinf(objectives.e2e_p95):
        return max(kept, key=lambda level: level.power)
    return max(kept, key=lambda level: level.requests_per_s)


def engines_for(rate: float, level: Level, num_engines: int) -> int:
    """Return how many engines a request rate needs, if each serves as much as it did at `level`.

    Args:
        rate: requests per second.
        level: the measured level of a service.
        num_engines: number of engines that served this level.
    """
    per_engine = level.requests_per_s / num_engines
    # A rate that is an exact multiple must not need one engine more because of rounding.
    return max(1, math.ceil(rate / per_engine - 1e-9))


class ServingCost(msgspec.Struct, frozen=True):
    """Cost of serving at one load level, in the currency of the engine price."""

    per_request: float
    per_million_tokens: float
    """Cost per million output tokens."""


def cost_of(level: Level, price_per_hour: float, num_engines: int) -> ServingCost:
    """Return the cost per request and per million output tokens at a load level.

    Args:
        level: the measured level of a service.
        price_per_hour: price per hour of one engine, including its devices.
        num_engines: number of engines that served this level.
    """
    per_s = price_per_hour * num_engines / 3600
    return ServingCost(
        per_request=per_s / level.requests_per_s,
        per_million_tokens=per_s / level.tokens_per_s * 1e6 if level.tokens_per_s else math.inf,
    )


def regressions(level: Level, baseline: Level, tolerance: float) -> Sequence[str]:
    """Describe each rate or latency that is worse than in an earlier run.

    Args:
        level: the knee of this run.
        baseline: the knee of the earlier run.
        tolerance: fraction by which a value may be worse, for example 0.1.
    """
    worse: list[str] = []
    for name in ("requests_per_s", "tokens_per_s"):
        now = getattr(level, name)
        before = getattr(baseline, name)
        if now < before * (1 - tolerance):
            worse.append(f"{name} fell from {before:.4g} to {now:.4g}")
    for name in ("ttft_p95", "e2e_p95"):
        now = getattr(level, name)
        before = getattr(baseline, name)
        if now > before * (1 + tolerance):
            worse.append(f"{name} rose from {before:.4g} s to {now:.4g} s")
    return worse
