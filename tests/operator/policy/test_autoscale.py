"""How many engines a pool gets, decided by decided, and over hours of synthetic load."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ullage_operator.api.sections import AutoscalingSpec, ScalingPace, Targets
from ullage_operator.policy.pool_load import PoolLoad
from ullage_operator.policy.scaling import (
    STRAIN_KEPT_S,
    ScalingDecision,
    ScalingHistory,
    decide_replicas,
)

ENGINE = 1000
"""KV bytes of one engine."""
POLICY = AutoscalingSpec(
    enabled=True,
    provider="ullage",
    min_replicas=1,
    max_replicas=20,
    warm_spares=0,
    targets=Targets(kv_utilization_percent=70, queue_wait=2.0, ttft=True),
    scale_up=ScalingPace(window=0, pods=4, percent=100, period=15),
    scale_down=ScalingPace(window=300, pods=1, percent=50, period=60),
    idle_after=600,
)
SLEEPY = structs.replace(POLICY, min_replicas=0)
EVERY_S = 10.0


def load(engines: int, claimed: int = 0, **more: object) -> PoolLoad:
    base = PoolLoad(ready=engines, capacity=engines * ENGINE, claimed=claimed, active=1)
    return replace(base, **more)  # type: ignore[arg-type]


def first(policy: AutoscalingSpec, seen: PoolLoad, current: int) -> ScalingDecision:
    return decide_replicas(policy, ScalingHistory(), seen, current, 0.0)[0]


@pytest.mark.parametrize(
    ("seen", "current", "replicas", "reason"),
    [
        (load(2, 1400), 2, 2, "Steady"),
        (load(2, 1500), 2, 2, "Steady"),  # within the tolerance
        (load(2, 1900), 2, 3, "Memory"),
        (load(2, 2000, waiting=1500), 2, 5, "Memory"),
        (load(2, 2000, waiting=50_000), 2, 6, "Stabilizing"),  # a step is at most 4 or double
        (load(20, 20_000, waiting=5000), 20, 20, "Bounds"),
        (load(2, 0), 2, 2, "Stabilizing"),  # nothing goes before a window was seen
        (load(0), 2, 2, "NotReady"),
        (load(1, 10, is_partial=True), 1, 1, "Steady"),
        (load(3, 100), 25, 20, "Bounds"),  # bounds hold at once, whatever windows say
    ],
)
def test_one_look(seen, current, replicas, reason):
    decision = first(POLICY, seen, current)
    assert (decision.replicas, decision.reason) == (replicas, reason)
    assert decision.message


@pytest.mark.parametrize(
    ("seen", "current", "replicas", "reason"),
    [
        (PoolLoad(), 0, 0, "Idle"),
        (PoolLoad(wanted=3), 0, 1, "Wake"),
        (PoolLoad(ready=1, capacity=ENGINE, idle_s=599), 1, 1, "Steady"),
        (PoolLoad(ready=1, capacity=ENGINE, idle_s=600), 1, 0, "Idle"),
        (PoolLoad(ready=4, capacity=4 * ENGINE, idle_s=900), 4, 0, "Idle"),
        (PoolLoad(ready=1, capacity=ENGINE, idle_s=900, is_partial=True), 1, 1, "Steady"),
        (PoolLoad(ready=1, capacity=ENGINE, idle_s=900, active=1), 1, 1, "Steady"),
        (PoolLoad(idle_s=900, wanted=1), 1, 1, "NotReady"),
    ],
)
def test_a_pool_that_may_sleep(seen, current, replicas, reason):
    decision = first(SLEEPY, seen, current)
    assert (decision.replicas, decision.reason) == (replicas, reason)


def test_a_pool_that_may_not_sleep_is_never_empty():
    assert first(POLICY, PoolLoad(idle_s=1e6), 0).replicas == 1
    spared = structs.replace(SLEEPY, warm_spares=2)
    assert first(spared, PoolLoad(idle_s=1e6), 0).replicas == 2


class Pool:
    """A pool under synthetic load: engines take a while to start, and what does not fit waits."""

    def __init__(self, policy: AutoscalingSpec, replicas: int = 1, start_s: float = 60.0) -> None:
        self.policy = policy
        self.replicas = replicas
        self.start_s = start_s
        self.now = 0.0
        self.history = ScalingHistory()
        self.ready_at: list[float] = [0.0] * replicas
        self.seen: list[tuple[float, int]] = []
        self.idle_since = 0.0

    @property
    def ready(self) -> int:
        return sum(at <= self.now for at in self.ready_at)

    def measure(self, demand: int, late_above: float = math.inf) -> PoolLoad:
        """Args: bytes that requests need; the share of an engine above which answers are late."""
        if demand:
            self.idle_since = self.now
        capacity = self.ready * ENGINE
        claimed = min(demand, capacity)
        share = claimed / capacity if capacity else 0.0
        return PoolLoad(
            ready=self.ready,
            capacity=capacity,
            claimed=claimed,
            waiting=demand - claimed if capacity else 0,
            queue_s=30.0 if demand > capacity else 0.0,
            answered=100 if demand else 0,
            late=50 if share > late_above else 0,
            active=math.ceil(demand / 10),
            wanted=1 if demand and not capacity else 0,
            idle_s=self.now - self.idle_since,
        )

    def run(self, seconds: float, demand: Callable[[float], int], **more: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step(self.measure(demand(self.now), **more))

    def step(self, seen: PoolLoad) -> None:
        decision, self.history = decide_replicas(
            self.policy, self.history, seen, self.replicas, self.now
        )
        if decision.replicas != self.replicas:
            self.seen.append((self.now, decision.replicas))
        self.replicas = decision.replicas
        added = self.replicas - len(self.ready_at)
        self.ready_at += [self.now + self.start_s] * added
        del self.ready_at[self.replicas :]
        self.now += EVERY_S

    def changes(self, since: float) -> list[tuple[float, int]]:
        return [change for change in self.seen if change[0] >= since]


@settings(max_examples=25, deadline=None)
@given(
    demand=st.integers(1, 13_000),
    start=st.integers(1, 20),
    start_s=st.sampled_from([0.0, 35.0, 300.0]),
    late_above=st.sampled_from([math.inf, 0.5, 0.3]),
)
def test_a_constant_load_comes_to_rest_with_enough(demand, start, start_s, late_above):
    pool = Pool(POLICY, start, start_s)
    pool.run(2.5 * 3600, lambda now: demand, late_above=late_above)
    at = pool.now
    pool.run(0.9 * STRAIN_KEPT_S, lambda now: demand, late_above=late_above)
    assert len(pool.changes(at)) <= 2  # once an hour fewer engines are tried where many were late
    if late_above is math.inf:
        assert pool.changes(at) == []
        # As many as the wanted utilisation asks for, within the tolerance.
        assert demand <= 0.7 * 1.1 * ENGINE * pool.replicas or pool.replicas == 20
        assert pool.replicas <= math.ceil(1.1 * math.ceil(demand / (0.7 * ENGINE)))
        assert demand <= pool.replicas * ENGINE


@settings(max_examples=25, deadline=None)
@given(before=st.integers(1, 5000), after=st.integers(5000, 13_000))
def test_a_step_is_followed_within_minutes(before, after):
    pool = Pool(POLICY)
    pool.run(1800, lambda now: before)
    pool.run(300, lambda now: after)
    assert pool.replicas * ENGINE >= after
    assert pool.measure(after).queue_s == 0.0


@settings(max_examples=40, deadline=None)
@given(
    bounds=st.tuples(st.integers(0, 10), st.integers(0, 10), st.integers(0, 3)),
    demands=st.lists(st.integers(0, 30_000), min_size=1, max_size=30),
    start=st.integers(0, 12),
    partial=st.booleans(),
)
def test_bounds_steps_and_spares_hold_whatever_comes(bounds, demands, start, partial):
    low, more, spares = bounds
    policy = structs.replace(
        POLICY, min_replicas=low, max_replicas=max(1, low + more), warm_spares=spares, idle_after=60
    )
    pool = Pool(policy, start, 20.0)
    for index, demand in enumerate(demands):
        for _ in range(6):
            before = pool.replicas
            seen = replace(pool.measure(demand), is_partial=partial and index % 2 == 1)
            pool.step(seen)
            assert policy.min_replicas <= pool.replicas <= policy.max_replicas
            if policy.min_replicas <= before <= policy.max_replicas and before:
                assert pool.replicas <= before + max(4, before)
            assert pool.replicas >= min(spares, policy.max_replicas)
            assert pool.replicas or (low == 0 and spares == 0)
            assert len(pool.history.highs) <= policy.max_replicas + start + spares + 2


def test_spares_are_kept_above_the_need():
    bare = Pool(POLICY)
    spared = Pool(structs.replace(POLICY, warm_spares=2))
    for pool in (bare, spared):
        pool.run(3600, lambda now: 2000)
    assert spared.replicas == bare.replicas + 2


def test_noise_and_short_dips_take_nothing_away():
    pool = Pool(POLICY)
    pool.run(1800, lambda now: 5000)
    at = pool.now
    before = pool.replicas
    pool.run(3 * 3600, lambda now: 0 if now % 240 < 120 else 5000)  # two quiet minutes of four
    assert pool.changes(at) == []
    assert pool.replicas == before
    pool.run(3600, lambda now: 700)
    assert pool.replicas == 1


def test_a_restarted_operator_takes_nothing_away_before_a_window():
    pool = Pool(POLICY)
    pool.run(1800, lambda now: 5000)
    pool.history = ScalingHistory()
    at = pool.now
    before = pool.replicas
    pool.run(290, lambda now: 100)
    assert pool.changes(at) == []
    assert pool.replicas == before
    pool.run(1200, lambda now: 100)
    assert pool.replicas == 1


def test_late_answers_need_more_engines_than_memory_does():
    pool = Pool(POLICY)
    pool.run(3600, lambda now: 2000, late_above=0.4)
    assert pool.replicas >= 5
    assert pool.measure(2000, 0.4).late == 0
    patient = Pool(structs.replace(POLICY, targets=structs.replace(POLICY.targets, ttft=False)))
    patient.run(3600, lambda now: 2000, late_above=0.4)
    assert patient.replicas == 3


def test_lateness_that_engines_do_not_cure_does_not_take_them_all():
    pool = Pool(POLICY)
    pool.run(4 * 3600, lambda now: 1000, late_above=0.0)
    assert pool.replicas <= math.ceil(1000 / (0.25 * 0.7 * ENGINE)) + 1 < POLICY.max_replicas


def test_a_pool_sleeps_when_idle_and_wakes_with_the_first_request():
    pool = Pool(SLEEPY)
    pool.run(1200, lambda now: 0)
    assert pool.replicas == 0
    pool.run(20, lambda now: 100)
    assert pool.replicas == 1
    pool.run(120, lambda now: 100)
    assert pool.ready == 1
    pool.run(500, lambda now: 0)
    assert pool.replicas == 1
    pool.run(200, lambda now: 0)
    assert pool.replicas == 0
