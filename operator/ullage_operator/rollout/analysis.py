"""Decides from the routers' metrics whether a canary is worse than the stable engines.

All limits are relative to the stable engines over the same period, so a problem that affects all
engines does not fail a canary.

A limit on requests counts as exceeded only if a canary that is just within the limit would produce
the observed count with a probability below `SIGNIFICANCE`. This is the false-alarm rate of a single
test. It is small, because a canary is tested repeatedly.

The limits on answers apply to the measured values themselves. Both sides get the same prompts and
the same preceding tokens, so that hardly anything is left to chance. Perplexity counts more than
agreement: better weights choose other tokens, but the stable ones hardly surprise them.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client.parser import text_string_to_metric_families

from ullage_common.canary_answers import MIN_PROMPTS, MIN_TOKENS, Unjudged
from ullage_operator.api.sections import RolloutSpec

SIGNIFICANCE = 0.002
Z = 1.645
"""Quantile of the normal distribution for the one-sided 95 % interval of the stable error rate."""
UNKNOWN_RATE = 0.5
"""Assumed error rate of stable engines that have served nothing."""
PERCENTILE = 0.95
MIN_TIMES = 20
"""Minimum number of responses, for the canary and stable engines each, to compare latencies."""
NEAR_TIES_PERCENT = 110
"""Perplexity, as a percentage of the stable one, up to which low agreement does not fail a canary.

With so little surprise, the two sides differ where two tokens are nearly as likely. With calibrated
int4 as the stable weights, SmolLM2's int8 weights reach 104.5 % with 83 % agreement. The least
damage that was tried, a fifth of one matrix's rows in another order, reaches 110.3 % with 84 %.
"""
NO_TRAFFIC = "NoTraffic"
"""Reason that an analysis gives for a step without requests. Later steps would get none either."""
METRIC = "ullage_router_trial"
ANSWERS_METRIC = "ullage_router_answers"
UNJUDGED_METRIC = "ullage_router_answers_unjudged"
_PREFIXES = tuple(
    f"{start}{metric}"
    for metric in (METRIC, ANSWERS_METRIC)
    for start in ("", "# HELP ", "# TYPE ")
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Request counts and latencies of either the stable engines or the canary."""

    succeeded: int = 0
    failed: int = 0
    declined: int = 0
    """Number of requests that the canary could not admit immediately for lack of capacity."""
    restarts: int = 0
    """Number of worker and pod crashes, whether out of memory or for another reason."""
    ttft: Mapping[float, int] = field(default_factory=dict)
    """TTFT histogram: counts by each bucket's upper bound in seconds, the last one infinite."""
    e2e: Mapping[float, int] = field(default_factory=dict)
    """Histogram of the end-to-end latency, in the same format as `ttft`."""

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed

    @property
    def error_rate(self) -> float:
        return self.failed / self.ended if self.ended else 0.0


@dataclass(frozen=True, slots=True)
class Answers:
    """How well the canary's next tokens match the greedy answers of stable engines."""

    prompts: int = 0
    """Number of prompts whose answers were compared."""
    tokens: int = 0
    agreed: int = 0
    """Number of tokens that are the likeliest ones of both sides."""
    canary_nll: float = 0.0
    """Sum of the tokens' negative log-probabilities on the canary, in nats."""
    stable_nll: float = 0.0
    unjudged: tuple[str, ...] = ()
    """Why routers are not comparing answers at the moment (`Unjudged`)."""

    @property
    def are_enough(self) -> bool:
        return self.prompts >= MIN_PROMPTS and self.tokens >= MIN_TOKENS

    @property
    def agreement_percent(self) -> float:
        return 100 * self.agreed / self.tokens

    @property
    def canary_perplexity(self) -> float:
        return math.exp(self.canary_nll / self.tokens)

    @property
    def stable_perplexity(self) -> float:
        return math.exp(self.stable_nll / self.tokens)

    @property
    def perplexity_percent(self) -> float:
        """The canary's perplexity as a percentage of the stable engines'."""
        return 100 * self.canary_perplexity / self.stable_perplexity

    @property
    def differ_by_near_ties(self) -> bool:
        """Whether the canary finds the stable tokens nearly as likely as stable engines do."""
        return self.perplexity_percent <= NEAR_TIES_PERCENT

    @property
    def may_come(self) -> bool:
        """Whether waiting may bring more answers to compare."""
        return Unjudged.OTHER_TOKENIZER not in self.unjudged


NO_ANSWERS = Answers()


class Outcome(StrEnum):
    PASS = "Pass"
    FAIL = "Fail"
    WAIT = "Wait"
    """There are too few requests to decide."""


@dataclass(frozen=True, slots=True)
class Analysis:
    outcome: Outcome
    reason: str
    message: str
    waits_for: str = ""
    """What data is still missing, if the outcome is WAIT."""


def analyze(
    canary: Variant,
    stable: Variant,
    rollout: RolloutSpec,
    is_last: bool = False,
    answers: Answers = NO_ANSWERS,
) -> Analysis:
    """Compare the canary's counts in the current rollout step with those of the stable engines.

    Args:
        canary: the counts of the canary.
        stable: the counts of the stable engines.
        rollout: the service's `rollout`, with the thresholds.
        is_last: whether the time limit for collecting enough requests has passed, so that the
            analysis must not wait for more.
        answers: the comparison of answers, which matters only if `rollout` asks for one.
    """
    failed = [
        fault
        for fault in (
            restarts(canary, stable, rollout),
            errors(canary, stable, rollout, is_last),
            slowness("TTFT", canary.ttft, stable.ttft, rollout.thresholds.ttft_ratio),
            slowness("E2E", canary.e2e, stable.e2e, rollout.thresholds.e2e_ratio),
            disagreement(answers, rollout),
            perplexity(answers, rollout),
        )
        if fault
    ]
    if failed:
        message = "; ".join(each.message for each in failed)
        return Analysis(Outcome.FAIL, failed[0].reason, message)

    measured = ", ".join(filter(None, (summary(canary, stable), summary_of(answers, rollout))))
    is_enough = canary.ended >= rollout.min_requests
    if is_enough and canary.error_rate <= stable.error_rate + rollout.thresholds.error_rate:
        if rollout.answers is None or answers.are_enough or is_last or not answers.may_come:
            return Analysis(Outcome.PASS, "Healthy", measured)
        waits_for = (
            f"answers to {MIN_PROMPTS} replayed prompts with {MIN_TOKENS} tokens "
            f"({answers.prompts} with {answers.tokens} so far)"
        )
        return Analysis(Outcome.WAIT, "FewAnswers", measured, waits_for)

    if is_last and not canary.succeeded and canary.declined >= rollout.min_requests:
        message = f"the canary accepted none of {canary.declined} requests"
        return Analysis(Outcome.FAIL, "TakesNothing", message)
    if is_last:
        is_idle = not canary.ended and not canary.declined and not stable.ended
        reason = NO_TRAFFIC if is_idle else "LittleTraffic"
        return Analysis(Outcome.PASS, reason, f"{measured}; judged by readiness")

    waits_for = f"{rollout.min_requests} answers of the canary ({canary.ended} so far)"
    if is_enough:
        waits_for = "more answers, because the canary's higher error rate may be chance"
    return Analysis(Outcome.WAIT, "LittleTraffic", measured, waits_for)


def restarts(canary: Variant, stable: Variant, rollout: RolloutSpec) -> Analysis | None:
    if canary.restarts <= stable.restarts + rollout.thresholds.restarts:
        return None
    message = f"{canary.restarts} restarts, the stable engines {stable.restarts}"
    return Analysis(Outcome.FAIL, "Restarts", message)


def errors(
    canary: Variant, stable: Variant, rollout: RolloutSpec, is_last: bool
) -> Analysis | None:
    upper = wilson_upper_bound(stable.failed, stable.ended) if stable.ended else UNKNOWN_RATE
    allowed = min(1.0, upper + rollout.thresholds.error_rate)
    is_sure = binomial_tail(canary.failed, canary.ended, allowed) < SIGNIFICANCE
    is_above = canary.error_rate > stable.error_rate + rollout.thresholds.error_rate
    if not is_sure and not (is_last and is_above):
        return None
    message = (
        f"{canary.failed} of {canary.ended} requests failed, "
        f"{stable.failed} of {stable.ended} on stable engines"
    )
    return Analysis(Outcome.FAIL, "Errors", message)


def slowness(
    name: str, canary: Mapping[float, int], stable: Mapping[float, int], ratio: float
) -> Analysis | None:
    """Return a failed analysis if the canary is significantly slower, or else None.

    The test is whether more than 5 % of the canary's latencies exceed `ratio` times the stable p95.
    """
    total = sum(canary.values())
    if min(total, sum(stable.values())) < MIN_TIMES:
        return None
    above = num_above(canary, percentile(stable) * ratio)
    if binomial_tail(above, total, 1 - PERCENTILE) >= SIGNIFICANCE:
        return None
    message = (
        f"{name} p95 {percentile(canary):.3g} s, stable {percentile(stable):.3g} s: "
        f"above {ratio:g} times as long"
    )
    return Analysis(Outcome.FAIL, name, message)


def disagreement(answers: Answers, rollout: RolloutSpec) -> Analysis | None:
    least = rollout.thresholds.agreement_percent
    is_judged = rollout.answers is not None and answers.are_enough
    if not is_judged or answers.agreement_percent >= least or answers.differ_by_near_ties:
        return None
    message = (
        f"{answers.agreed} of {answers.tokens} tokens of stable answers are the canary's likeliest "
        f"({answers.agreement_percent:.1f} %), less than {least:g} %, and its perplexity of "
        f"them is {answers.perplexity_percent:.1f} % of the stable one, above {NEAR_TIES_PERCENT} %"
    )
    return Analysis(Outcome.FAIL, "Agreement", message)


def perplexity(answers: Answers, rollout: RolloutSpec) -> Analysis | None:
    most = rollout.thresholds.perplexity_percent
    is_judged = rollout.answers is not None and answers.are_enough
    if not is_judged or answers.perplexity_percent <= most:
        return None
    message = (
        f"perplexity of stable answers {answers.canary_perplexity:.3g}, stable "
        f"{answers.stable_perplexity:.3g}: above {most} %"
    )
    return Analysis(Outcome.FAIL, "Perplexity", message)


def summary_of(answers: Answers, rollout: RolloutSpec) -> str:
    """Summarise the comparison of answers (empty if the rollout does not ask for one)."""
    if rollout.answers is None:
        return ""
    if not answers.are_enough:
        few = (
            f"{answers.prompts} of at least {MIN_PROMPTS} prompts, "
            f"{answers.tokens} of at least {MIN_TOKENS} tokens"
        )
        why = " and ".join(answers.unjudged) or few
        return f"answers not judged ({why})"
    return (
        f"agreement {answers.agreement_percent:.1f} % of {answers.tokens} tokens, "
        f"perplexity {answers.canary_perplexity:.3g} (stable {answers.stable_perplexity:.3g})"
    )


def summary(canary: Variant, stable: Variant) -> str:
    """Summarise the counts and latencies of the canary and the stable engines in one line."""
    parts = [
        f"{canary.failed} of {canary.ended} requests failed (stable {stable.failed} of "
        f"{stable.ended})"
    ]
    for name, own, other in (("TTFT", canary.ttft, stable.ttft), ("E2E", canary.e2e, stable.e2e)):
        if sum(own.values()) and sum(other.values()):
            parts.append(f"{name} p95 {percentile(own):.3g} s (stable {percentile(other):.3g} s)")
    parts.append(f"{canary.restarts} restarts (stable {stable.restarts})")
    return ", ".join(parts)


def percentile(counts: Mapping[float, int], share: float = PERCENTILE) -> float:
    """Return a percentile of a histogram in seconds, interpolated linearly within a bucket."""
    remaining = share * sum(counts.values())
    for low, end, count in buckets(counts):
        if count and remaining <= count:
            return low + (end - low) * remaining / count
        remaining -= count
    return 0.0


def num_above(counts: Mapping[float, int], limit_s: float) -> int:
    """Return how many latencies exceed a limit, interpolated within a bucket and rounded down."""
    above = 0.0
    for low, end, count in buckets(counts):
        if end > limit_s:
            above += count if low >= limit_s else count * (end - limit_s) / (end - low)
    return int(above)


def buckets(counts: Mapping[float, int]) -> Iterable[tuple[float, float, int]]:
    """Yield the lower bound, upper bound and count of each bucket.

    The last bucket has no finite upper bound, so its lower bound is also used as the upper one.
    """
    low = 0.0
    for end in sorted(counts):
        yield low, (low if math.isinf(end) else end), counts[end]
        low = end


def wilson_upper_bound(failed: int, total: int, z: float = Z) -> float:
    """Return the upper bound of Wilson's score interval of a proportion (Wilson 1927)."""
    share = failed / total
    square = z * z
    middle = share + square / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    return (middle + spread) / (1 + square / total)


def binomial_tail(count: int, total: int, share: float) -> float:
    """Return the probability of `count` or more successes in `total` independent trials.

    Args:
        count: the number of successes.
        total: the number of trials.
        share: the probability of success in each trial.
    """
    if count <= 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    logs = (
        math.lgamma(total + 1)
        - math.lgamma(k + 1)
        - math.lgamma(total - k + 1)
        + k * math.log(share)
        + (total - k) * math.log1p(-share)
        for k in range(count, total + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def sum_variants(variants: Iterable[Variant]) -> Variant:
    """Sum the counts of several routers.

    Restarts are not summed, because each router sees the restarts of all engines. The highest
    count is used instead.
    """
    total = Variant()
    for variant in variants:
        total = Variant(
            total.succeeded + variant.succeeded,
            total.failed + variant.failed,
            total.declined + variant.declined,
            max(total.restarts, variant.restarts),
            _summed(total.ttft, variant.ttft),
            _summed(total.e2e, variant.e2e),
        )
    return total


def _summed(one: Mapping[float, int], other: Mapping[float, int]) -> dict[float, int]:
    return {end: one.get(end, 0) + other.get(end, 0) for end in {*one, *other}}


@dataclass(frozen=True, slots=True)
class CanarySample:
    """One router's counts for a canary and for the stable engines as its baseline."""

    name: str
    """Name of the trial that the counts belong to: its revision and step."""
    canary: Variant
    stable: Variant
    answers: Answers = NO_ANSWERS


def sample_name(revision: str, step: int) -> str:
    """Return the name that identifies a trial in router reports: its revision and step.

    The canary's percentage of requests is not part of the name, because it changes whenever a pool
    is resized. With a new name each time, a trial in an autoscaled pool would never collect enough
    counts. The analysis compares rates, so it may add counts collected at different percentages.
    """
    return f"{revision}/{step}"


def parse_samples(text: str) -> list[CanarySample]:
    """Parse the request counts that a router reports (none without a canary)."""
    own = "\n".join(line for line in text.splitlines() if line.startswith(_PREFIXES))
    counts: dict[str, dict[str, dict[tuple[str, str], float]]] = {}
    answers: dict[str, dict[str, float]] = defaultdict(dict)
    unjudged: dict[str, list[str]] = defaultdict(list)
    for family in text_string_to_metric_families(f"{own}\n"):
        for sample in family.samples:
            labels = sample.labels
            name = labels["trial"]
            if family.name == ANSWERS_METRIC:
                answers[name][labels["what"]] = sample.value
            elif family.name == UNJUDGED_METRIC:
                unjudged[name].append(labels["reason"])
            elif family.name == METRIC:
                variant = counts.setdefault(name, {}).setdefault(labels["side"], defaultdict(float))
                variant[labels["what"], labels["le"]] += sample.value
    return [
        CanarySample(
            name,
            _variant(variants.get("canary", {})),
            _variant(variants.get("stable", {})),
            _answers(answers[name], unjudged[name]),
        )
        for name, variants in counts.items()
    ]


def _answers(counts: Mapping[str, float], unjudged: Iterable[str]) -> Answers:
    return Answers(
        int(counts.get("prompts", 0)),
        int(counts.get("tokens", 0)),
        int(counts.get("agreed", 0)),
        counts.get("canary_nll", 0.0),
        counts.get("stable_nll", 0.0),
        tuple(unjudged),
    )


def _variant(counts: dict[tuple[str, str], float]) -> Variant:
    def times(what: str) -> dict[float, int]:
        return {_end(le): int(count) for (name, le), count in counts.items() if name == what}

    def number(what: str) -> int:
        return int(counts.get((what, ""), 0))

    return Variant(
        number("succeeded"),
        number("failed"),
        number("declined"),
        number("restarts"),
        times("ttft"),
        times("e2e"),
    )


def _end(le: str) -> float:
    return math.inf if le == "+Inf" else float(le)


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What routers counted in one rollout step."""

    canary: Variant
    stable: Variant
    answers: Answers
    routers: int
    """Number of routers that have switched to the step."""


def sum_samples(samples: Iterable[CanarySample], name: str) -> StepCounts:
    """Sum the counts of the routers that have already switched to a rollout step."""
    # Older routers, which a pinned image keeps, append the weight: `name/weight`.
    current = [sample for sample in samples if f"{sample.name}/".startswith(f"{name}/")]
    return StepCounts(
        sum_variants(t.canary for t in current),
        sum_variants(t.stable for t in current),
        sum_answers(t.answers for t in current),
        len(current),
    )


def sum_answers(answers: Iterable[Answers]) -> Answers:
    """Sum the comparisons of several routers, and list each reason once."""
    total = Answers()
    for each in answers:
        total = Answers(
            total.prompts + each.prompts,
            total.tokens + each.tokens,
            total.agreed + each.agreed,
            total.canary_nll + each.canary_nll,
            total.stable_nll + each.stable_nll,
            tuple(sorted({*total.unjudged, *each.unjudged})),
        )
    return total
