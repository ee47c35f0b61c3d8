"""When an engine is predicted to answer, and what becomes of a request that would be late."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_common.config.router import DEFAULT_LADDER
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_router.policy.credit import CreditBook
from ullage_router.policy.decide import decide
from ullage_router.policy.facts import (
    BreakerLimit,
    EngineState,
    EngineView,
    Release,
    RequestFacts,
    RoutingPolicy,
    TimeLimits,
)
from ullage_router.policy.forecast import (
    STRETCH,
    UNMEASURED_LOAD,
    is_on_time,
    longest_wait_s,
    place_s,
    step_limit_s,
    turn_s,
)
from ullage_router.policy.next_step import NextStep, Refuse, Run, Wait

PROFILE = MemoryProfile(16, (CacheGroup(1000),))
BLOCK = PROFILE.block_bytes
POLICY = RoutingPolicy(("single", "large"), 10_000, 1 << 40, DEFAULT_LADDER, large_pool="large")
LIMITS = TimeLimits(ttft_s=7.0, e2e_s=20.0)


def engine(load: int, **more: Any) -> EngineView:
    """An engine with memory for hundreds of requests, whose steps take 0.1 s alone and 0.2 s with
    four sequences."""
    fields: dict[str, Any] = {
        "id": "a",
        "pool": "single",
        "standing": EngineState.USABLE,
        "available": 1000 * BLOCK,
        "capacity": 4000 * BLOCK,
        "profile": PROFILE,
        "expected_output": 4096,
        "max_model_len": 4096,
        "load": load,
        "prefill_speed": 1000.0,
        "decode_speed": 5.0,
        "step_seconds": (0.1, 0.15, 0.2),
        "max_sequences": 64,
    }
    return EngineView(**{**fields, **more})


def ask(output: int, prompt: int = 100, **more: Any) -> RequestFacts:
    return RequestFacts(prompt, output, output, **{"limits": LIMITS, **more})


def said(decision: NextStep) -> str:
    match decision:
        case Run():
            return f"run {decision.engine}"
        case Wait():
            return "wait"
        case Refuse():
            return f"refuse {decision.reason} {decision.retry_after_s}"
        case _:
            return "shrink"


def test_a_step_of_more_sequences_than_were_measured_takes_longer() -> None:
    steps = [engine(0).step_s(load) for load in (1, 2, 3, 4, 7, 8, 16, 64, 500)]
    assert steps == pytest.approx([0.1, 0.15, 0.15, 0.2, 0.2, 0.3, 0.45, 1.0125, 1.0125])
    assert engine(0, step_seconds=()).step_s(9) == 0.2
    assert engine(0, step_seconds=(), decode_speed=0.0).step_s(9) == 0.0


@pytest.mark.parametrize(
    ("load", "output", "is_in_time"),
    [
        (3, 79, True),  # 0.1 s for the prompt and 79 steps of 0.2 s: 15.9 of 16 s
        (3, 80, False),
        (0, 80, True),  # an idle engine may always try
        (0, 4000, True),
        (3, 160, True),  # 16.1 s even alone, so twice that is allowed: 32.1 s here
        (7, 160, False),
    ],
)
def test_the_end_is_predicted(load: int, output: int, is_in_time: bool) -> None:
    assert is_on_time(engine(load), 100, output, LIMITS) is is_in_time


def test_the_first_token_is_predicted() -> None:
    assert is_on_time(engine(3, backlog_tokens=5200), 200, 1, LIMITS)  # 5.2 + 0.2 + 0.2 s
    assert not is_on_time(engine(3, backlog_tokens=5300), 200, 1, LIMITS)
    waited = replace(LIMITS, waited_s=1.0)
    assert not is_on_time(engine(3, backlog_tokens=5200), 200, 1, waited)
    assert is_on_time(engine(3), 5600, 1, LIMITS)  # 5.7 s even alone
    assert not is_on_time(engine(3, backlog_tokens=6000), 5600, 1, LIMITS)
    assert STRETCH == 2.0


def test_a_full_batch_is_waited_for() -> None:
    full = engine(64, releases=(Release(2.0, BLOCK), Release(9.0, BLOCK)), step_seconds=(0.01,))
    assert is_on_time(full, 100, 10, LIMITS)
    assert not is_on_time(replace(full, load=65), 100, 10, LIMITS)


def test_an_engine_that_measured_nothing_takes_a_few() -> None:
    new = engine(UNMEASURED_LOAD - 1, decode_speed=0.0, step_seconds=())
    assert is_on_time(new, 100, 10, LIMITS)
    assert not is_on_time(replace(new, load=UNMEASURED_LOAD), 100, 10, LIMITS)


def test_a_clients_deadline_counts_where_it_can_be_kept() -> None:
    assert is_on_time(engine(3), 100, 49, TimeLimits(end_s=12.5))  # 9.9 of 10 s
    assert not is_on_time(engine(3), 100, 50, TimeLimits(end_s=12.5))
    assert is_on_time(engine(3), 100, 500, TimeLimits(end_s=12.5))  # 50 s alone: nothing helps


def test_what_can_be_mended_waits_as_long_as_that_is_so() -> None:
    """Beside three others or more 90 tokens take 18 s, beside two 13.5 s."""
    one_by_one = tuple(Release(float(i), 10 * BLOCK) for i in (1, 2, 3, 4))
    decision = decide(ask(90), [engine(4, releases=one_by_one)], POLICY)
    assert isinstance(decision, Wait)
    assert decision.reason == "DEADLINE"
    assert decision.longest_s == pytest.approx(5.6 - 0.2)  # of the first token
    late = tuple(Release(float(i), 10 * BLOCK) for i in (6, 7, 8, 9))
    assert said(decide(ask(90), [engine(4, releases=late)], POLICY)) == "refuse DEADLINE 7"


def test_those_ahead_take_the_first_places() -> None:
    releases = tuple(Release(0.5 * i, 10 * BLOCK) for i in range(1, 5))
    busy = engine(4, releases=releases)
    assert turn_s([busy], 100, 85, BLOCK, (0, 0), LIMITS) == 1.0
    assert turn_s([busy], 100, 85, BLOCK, (0, 1), LIMITS) == 1.5
    assert turn_s([busy], 100, 85, BLOCK, (0, 9), LIMITS) == math.inf
    assert turn_s([busy, replace(busy, id="b")], 100, 85, BLOCK, (0, 2), LIMITS) == 1.5
    assert turn_s([engine(4)], 100, 85, BLOCK, (0, 0), LIMITS) is None
    full = replace(busy, available=0)
    assert turn_s([full], 100, 10, 35 * BLOCK, (0, 0), LIMITS) == 2.0
    assert turn_s([full], 100, 10, 35 * BLOCK, (10 * BLOCK, 0), LIMITS) == 2.5


def test_a_late_request_goes_elsewhere() -> None:
    late = tuple(Release(float(i), 10 * BLOCK) for i in (6, 7, 8, 9))
    busy = engine(4, releases=late)
    free = engine(1, id="b", pool="large")
    assert said(decide(ask(100), [busy, free], POLICY)) == "run b"


def test_waiting_ends_when_the_request_would_be_late_anywhere() -> None:
    assert longest_wait_s(engine(9), 100, 100, LIMITS) == pytest.approx(5.4)
    assert longest_wait_s(engine(9), 100, 150, LIMITS) == pytest.approx(16 - 15.1)
    waited = replace(LIMITS, waited_s=3.0)
    assert longest_wait_s(engine(9), 100, 100, waited) == pytest.approx(2.4)
    assert longest_wait_s(engine(9), 100, 100, TimeLimits()) == math.inf


def test_nobody_is_made_late_by_others() -> None:
    """90 tokens bear steps of 0.177 s, which four sequences exceed, however short the fourth is."""
    limit_s = step_limit_s(engine(0), 100, 90, LIMITS)
    assert limit_s == pytest.approx((16 - 0.1) / 90)
    assert is_on_time(engine(2, step_limit_s=limit_s), 10, 5, LIMITS)
    crowded = engine(3, step_limit_s=limit_s, releases=(Release(1.0, BLOCK), Release(2.0, BLOCK)))
    assert not is_on_time(crowded, 10, 5, LIMITS)
    assert turn_s([crowded], 10, 5, BLOCK, (0, 0), LIMITS) == 1.0
    assert step_limit_s(engine(0), 100, 400, LIMITS) == pytest.approx((2 * 40.1 - 0.1) / 400)
    assert step_limit_s(engine(0), 100, 90, TimeLimits()) == math.inf


def test_an_answer_that_lost_its_engine_does_not_stand_still_for_others() -> None:
    lost = TimeLimits(may_delay_others=True)
    crowded = engine(3, step_limit_s=0.1, releases=(Release(1.0, BLOCK),))
    assert is_on_time(crowded, 10, 5, lost)
    full = replace(crowded, max_sequences=3)
    assert turn_s([full], 10, 5, BLOCK, (0, 0), lost) == 1.0
    assert turn_s([full], 10, 5, BLOCK, (0, 0), TimeLimits()) == math.inf


def test_the_strictest_request_in_flight_counts() -> None:
    book = CreditBook()
    strict = book.reserve(1, 1, 0.1)
    mild = book.reserve(1, 1, 0.3)
    assert book.step_limit_s == 0.1
    book.on_accepted(strict)
    book.on_report()
    book.on_report()
    book.check_integrity()
    for _ in range(2):  # twice is harmless
        book.release(strict)
    assert book.step_limit_s == 0.3
    book.release(mild)
    assert book.step_limit_s == math.inf
    book.check_integrity()


def test_a_request_behind_others_waits_for_more_than_the_known_releases() -> None:
    """The known releases are for those ahead, and more will follow in time."""
    releases = (Release(0.5, 20 * BLOCK), Release(1.0, 20 * BLOCK))
    full = engine(2, releases=releases, available=0)
    behind = replace(ask(10), ahead={"single": 60 * BLOCK}, waiting={"single": 3})
    assert isinstance(decide(behind, [full], POLICY), Wait)
    far_behind = replace(ask(10), ahead={"single": 900 * BLOCK}, waiting={"single": 45})
    assert isinstance(decide(far_behind, [full], POLICY), Refuse)


@given(known=st.integers(1, 48), most=st.sampled_from([0, 4, 64]))
def test_more_requests_ahead_never_bring_a_turn_sooner(known: int, most: int) -> None:
    """Each release is one request of twenty blocks, every half second."""
    releases = tuple(Release(0.5 * number, 20 * BLOCK) for number in range(1, known + 1))
    full = engine(known, releases=releases, available=0, max_sequences=most)
    waits = []
    for count in range(2 * known + 2):
        ahead = {"single": 20 * BLOCK * count}
        facts = replace(
            ask(10, prompt=300), ahead=ahead, waiting={"single": count}, limits=TimeLimits()
        )
        waits.append(isinstance(decide(facts, [full], POLICY), Wait))
    assert all(waits), "without a time limit everybody may wait"


# Engines at the limits of their circuit breakers


@pytest.mark.parametrize(
    ("breaker", "ahead", "expected"),
    [
        (BreakerLimit(1, 1, 1, 3.0), 0, 0.1),  # the running request's first token
        (BreakerLimit(1, 1, 1, 3.0), 1, 0.2),  # and that of the one ahead
        (BreakerLimit(1, 1, 1, 3.0), 2, 0.2),  # which made two places
        (BreakerLimit(1, 1, 1, 3.0), 255, 0.4),  # at most a few doublings
        (BreakerLimit(4, 4, 4, 3.0), 20, 0.1),
        (BreakerLimit(1, 1, 1, 3.0, pause_s=7.0), 0, 7.1),
        (BreakerLimit(2, 2, 1, 3.0, pause_s=7.0), 0, 0.1),  # an answer has begun since
        (BreakerLimit(1, 1, 0, 0.0), 0, 5.0),  # an answer ends
        (BreakerLimit(1, 2, 0, 0.0), 0, 9.0),
        (BreakerLimit(1, 1, 0, 0.0), 1, 5.1),
        (BreakerLimit(1, 1, 1, 0.0), 0, math.inf),  # the first token is late
        (BreakerLimit(4, 4, 2, -1.0), 0, math.inf),
    ],
)
def test_the_wait_for_an_engine_at_its_breakers_limit(
    breaker: BreakerLimit, ahead: int, expected: float
) -> None:
    releases = (Release(5.0, BLOCK), Release(9.0, BLOCK))
    assert place_s(engine(1, breaker=breaker, releases=releases), ahead) == pytest.approx(expected)


def at_limit(**more: Any) -> EngineView:
    breaker = BreakerLimit(1, 1, 1, 3.0, **more)
    return engine(1, standing=EngineState.RECOVERING, breaker=breaker)


def test_a_request_waits_for_a_trial_that_may_end_in_time() -> None:
    step = decide(ask(32, patience_s=10.0), [at_limit()], POLICY)
    assert isinstance(step, Wait)
    assert step.reason == "BREAKER_LIMIT"
    assert step.review_s == 0.5
    step = decide(ask(32, patience_s=10.0), [at_limit(pause_s=4.0)], POLICY)
    assert isinstance(step, Wait)
    assert step.review_s == pytest.approx(4.1)


@pytest.mark.parametrize(
    "limits", [{"patience_s": 2.0}, {"patience_s": 60.0, "limits": TimeLimits(ttft_s=5.0)}]
)
def test_a_request_that_a_trial_would_make_late_is_refused_at_once(limits: dict[str, Any]) -> None:
    step = decide(ask(32, **limits), [at_limit(pause_s=7.0)], POLICY)
    assert isinstance(step, Refuse)
    assert (step.kind, step.reason) == ("busy", "BREAKER_LIMIT")
    assert step.retry_after_s in (8, 9)


def test_the_rest_of_an_answer_waits_for_a_trial_all_the_same() -> None:
    step = decide(ask(32), [at_limit(pause_s=7.0)], POLICY)
    assert isinstance(step, Wait)
    assert (step.reason, step.review_s) == ("BREAKER_LIMIT", math.inf)


def test_an_engine_that_loads_may_take_what_a_trial_does_not() -> None:
    loading = engine(0, id="b", standing=EngineState.RECOVERING)
    step = decide(ask(32, patience_s=2.0), [at_limit(pause_s=7.0), loading], POLICY)
    assert isinstance(step, Wait)
    assert step.reason == "NOT_READY"


def test_another_pool_takes_what_waits_for_a_trial() -> None:
    other = engine(0, id="b", pool="large")
    step = decide(ask(32, patience_s=10.0), [at_limit(), other], POLICY)
    assert isinstance(step, Run)
    assert step.pool == "large"
