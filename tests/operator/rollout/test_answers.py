"""Judging a canary by its answers, beside its errors and times."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.canary_answers import MIN_PROMPTS, MIN_TOKENS, Unjudged
from ullage_operator.api.parsing import parse
from ullage_operator.api.sections import AnswersSpec, RolloutSpec, Thresholds
from ullage_operator.api.settings import Settings
from ullage_operator.manifests.router_pod import own_router
from ullage_operator.rollout.analysis import (
    Answers,
    CanarySample,
    Outcome,
    Variant,
    analyze,
    parse_samples,
    sum_answers,
    sum_samples,
)

ROLLOUT = RolloutSpec(
    strategy="canary",
    weight_steps=(10,),
    step_duration=300,
    min_requests=50,
    max_wait=1800,
    start_deadline=900,
    canary_replicas=1,
    thresholds=Thresholds(
        error_percent=1,
        ttft_percent=150,
        e2e_percent=150,
        restarts=0,
        agreement_percent=85,
        perplexity_percent=120,
    ),
    auto_rollback=True,
    paused=False,
    answers=AnswersSpec(prompts="sampled"),
)
GOOD = Variant(100)
TOKENS = 256


def short_answers(prompts: int, tokens: int, agreed: int) -> Answers:
    return Answers(prompts, tokens, agreed, 9.0 * tokens, 0.7 * tokens)


def answers(
    agreed: int = TOKENS, ratio: float = 1.0, prompts: int = 16, *unjudged: str, stable: float = 0.7
) -> Answers:
    """Answers in which the canary's perplexity is `ratio` times that of stable engines."""
    canary = stable + math.log(ratio)
    return Answers(prompts, TOKENS, agreed, TOKENS * canary, TOKENS * stable, unjudged)


FEW = MIN_PROMPTS - 1
OTHER = str(Unjudged.OTHER_TOKENIZER)
NO_STABLE = str(Unjudged.NO_STABLE_ENGINE)
CASES = {
    "equal": (answers(), False, "Pass", "Healthy"),
    "a quantisation": (answers(245, 1.02), False, "Pass", "Healthy"),
    "better": (answers(245, 0.9), False, "Pass", "Healthy"),
    "just enough": (answers(218, 1.19), False, "Pass", "Healthy"),
    "better weights choose other tokens": (answers(200, 1.05), False, "Pass", "Healthy"),
    "near ties": (answers(175, 1.09), False, "Pass", "Healthy"),
    "damaged a little": (answers(215, 1.11), False, "Fail", "Agreement"),
    "damaged": (answers(175, 1.7), False, "Fail", "Agreement"),
    "less sure": (answers(245, 1.21), False, "Fail", "Perplexity"),
    "damaged, few prompts": (answers(0, 9.0, FEW), False, "Wait", "FewAnswers"),
    "damaged, few prompts, no time left": (answers(0, 9.0, FEW), True, "Pass", "Healthy"),
    "damaged, few tokens": (short_answers(16, MIN_TOKENS - 1, 0), False, "Wait", "FewAnswers"),
    "damaged, few tokens, no time left": (
        short_answers(16, MIN_TOKENS - 1, 0),
        True,
        "Pass",
        "Healthy",
    ),
    "damaged, just enough tokens": (
        short_answers(MIN_PROMPTS, MIN_TOKENS, 0),
        False,
        "Fail",
        "Agreement",
    ),
    "nothing yet": (Answers(), False, "Wait", "FewAnswers"),
    "nothing, no time left": (Answers(), True, "Pass", "Healthy"),
    "no stable engine": (Answers(unjudged=(NO_STABLE,)), False, "Wait", "FewAnswers"),
    "another tokenizer": (Answers(unjudged=(OTHER,)), False, "Pass", "Healthy"),
}


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name: str) -> None:
    told, is_last, outcome, reason = CASES[name]
    found = analyze(GOOD, GOOD, ROLLOUT, is_last, told)
    assert (found.outcome, found.reason) == (outcome, reason), found.message


def test_answers_are_judged_even_if_no_request_came() -> None:
    found = analyze(Variant(), Variant(), ROLLOUT, False, answers(100, 3.0))
    assert found.reason == "Agreement"
    found = analyze(Variant(), Variant(), ROLLOUT, True, answers())
    assert found.outcome is Outcome.PASS


def test_the_message_has_both_numbers_or_says_why_there_are_none() -> None:
    good = analyze(GOOD, GOOD, ROLLOUT, False, answers(245, 1.02, stable=math.log(2.0)))
    assert "agreement 95.7 % of 256 tokens, perplexity 2.04 (stable 2)" in good.message
    bad = analyze(GOOD, GOOD, ROLLOUT, False, answers(175, 1.7, stable=math.log(2.0)))
    decided = "and its perplexity of them is 170.0 % of the stable one, above 110 %"
    assert f"(68.4 %), less than 85 %, {decided}" in bad.message
    assert "perplexity of stable answers 3.4, stable 2: above 120 %" in bad.message
    other = analyze(GOOD, GOOD, ROLLOUT, False, Answers(unjudged=(OTHER,)))
    assert other.message.endswith("answers not judged (OtherTokenizer)")
    few = analyze(GOOD, GOOD, ROLLOUT, False, answers(prompts=FEW))
    assert few.waits_for == (
        f"answers to {MIN_PROMPTS} replayed prompts with {MIN_TOKENS} tokens "
        f"({FEW} with {TOKENS} so far)"
    )
    assert f"answers not judged ({FEW} of at least {MIN_PROMPTS} prompts, " in few.message
    short = analyze(GOOD, GOOD, ROLLOUT, True, short_answers(16, 16, 16))
    assert f", 16 of at least {MIN_TOKENS} tokens)" in short.message


NLLS = st.floats(0.0, 30.0)


@given(st.integers(0, 256), st.integers(1, 256), NLLS, NLLS)
def test_a_worse_canary_never_passes_where_a_better_one_fails(
    agreed: int, more: int, canary: float, stable: float
) -> None:
    def failed(agreed: int, nll: float) -> bool:
        told = Answers(16, TOKENS, agreed, TOKENS * nll, TOKENS * stable)
        return analyze(GOOD, GOOD, ROLLOUT, False, told).outcome is Outcome.FAIL

    better = min(TOKENS, agreed + more)
    assert failed(agreed, canary) >= failed(better, canary)
    assert failed(agreed, canary + more) >= failed(agreed, canary)


@given(st.integers(0, 20), st.integers(0, 256), NLLS, NLLS, st.booleans())
def test_answers_decide_nothing_unless_asked_for(
    prompts: int, agreed: int, canary: float, stable: float, is_last: bool
) -> None:
    off = msgspec.structs.replace(ROLLOUT, answers=None)
    told = Answers(prompts, TOKENS, agreed, TOKENS * canary, TOKENS * stable)
    assert analyze(GOOD, GOOD, off, is_last, told) == analyze(GOOD, GOOD, off, is_last)


PAGE = """\
# HELP ullage_router_trial Requests of the canary's present trial
# TYPE ullage_router_trial gauge
ullage_router_trial{le="",side="canary",trial="r/0",what="succeeded"} 5.0
# HELP ullage_router_answers Replays
# TYPE ullage_router_answers gauge
ullage_router_answers{trial="r/0",what="prompts"} 9.0
ullage_router_answers{trial="r/0",what="tokens"} 144.0
ullage_router_answers{trial="r/0",what="agreed"} 140.0
ullage_router_answers{trial="r/0",what="canary_nll"} 101.5
ullage_router_answers{trial="r/0",what="stable_nll"} 100.25
# HELP ullage_router_answers_unjudged Why
# TYPE ullage_router_answers_unjudged gauge
ullage_router_answers_unjudged{reason="EnginesBusy",trial="r/0"} 1.0
"""


def test_the_reports_of_routers_are_read_and_added() -> None:
    [sample] = parse_samples(PAGE)
    told = Answers(9, 144, 140, 101.5, 100.25, ("EnginesBusy",))
    assert (sample.canary.succeeded, sample.answers) == (5, told)
    stale = CanarySample("r/1", Variant(), Variant(), answers(0))
    counts = sum_samples([sample, stale, sample], "r/0")
    assert counts.answers == Answers(18, 288, 280, 203.0, 200.5, ("EnginesBusy",))
    assert sum_answers([]) == Answers()


SPEC = {"answers": {"prompts": "ConfigMap", "configMapName": "questions"}}


def test_routers_mount_the_prompts_and_need_not_wait_for_them(manifest) -> None:
    def pod(**rollout):
        return own_router(parse(manifest(rollout=rollout)), "", Settings())["spec"]

    spec = pod(**SPEC)
    assert {"name": "prompts", "configMap": {"name": "questions", "optional": True}} in spec[
        "volumes"
    ]
    [mount] = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "prompts"]
    assert mount["mountPath"] == "/etc/ullage-prompts"
    assert pod(answers={"prompts": "Sampled"}) == pod(), "routers stay as they are"


def test_the_thresholds_have_the_defaults_of_the_definition(manifest) -> None:
    found = parse(manifest()).spec.rollout
    assert found.answers is None
    defaults = Thresholds(error_percent=1, ttft_percent=150, e2e_percent=150, restarts=0)
    assert found.thresholds == defaults
    asked = parse(manifest(rollout={"thresholds": {"agreementPercent": "97.5"}})).spec.rollout
    assert asked.thresholds == msgspec.structs.replace(defaults, agreement_percent=97.5)
