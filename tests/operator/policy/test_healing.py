"""Healing decides: what is made anew, what is spared and what waits; and hours of it simulated."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.api.spec import BackoffSpec, HealingSpec
from ullage_operator.policy.restarts import (
    HOUR,
    HUNG_GRACE_S,
    EnginePod,
    Restart,
    RestartDecision,
    RestartEvent,
    decide_restarts,
    restarts_status,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
POLICY = HealingSpec(
    enabled=True,
    not_ready_after=300,
    silent_after=60,
    min_health_percent=20,
    restarts_per_hour=3,
    backoff=BackoffSpec(first=30, max=600),
)


def pod(name: str = "a", **parts: Any) -> EnginePod:
    base = EnginePod(name=name, uid=name, pool="single", has_started=True, is_ready=True)
    return replace(base, has_reported=True, **parts)


def stuck(name: str = "a", seconds: float = 300) -> EnginePod:
    return pod(name, is_ready=False, not_ready_s=seconds)


def verdict(
    *pods: EnginePod, history: tuple[RestartEvent, ...] = (), cut_off: bool = False
) -> RestartDecision:
    return decide_restarts(POLICY, pods, history, NOW, frozenset({"single"} if cut_off else ()))


def reasons(found: RestartDecision) -> list[str]:
    return [restart.reason for restart in found.restarts]


def deferred(found: RestartDecision) -> list[str]:
    return [each.reason for each in found.deferred]


def done(*seconds_ago: float) -> tuple[RestartEvent, ...]:
    return tuple(
        RestartEvent("single", "a", "NotReady", NOW - timedelta(seconds=s)) for s in seconds_ago
    )


def test_a_pool_that_serves_is_left_alone_and_nothing_is_planned() -> None:
    assert verdict(pod("a"), pod("b", silent_s=11)) == RestartDecision()


def test_a_pod_that_stays_not_ready_is_made_anew_and_not_before() -> None:
    early = verdict(stuck(seconds=299))
    assert early == RestartDecision(recheck_s=1)
    found = verdict(stuck())
    assert reasons(found) == ["NotReady"]
    assert found.restarts[0].message == "not ready for more than 300 s"
    out = verdict(replace(stuck(), not_ready_reason="3 starts in a row failed their proof"))
    assert out.restarts[0].message == (
        "not ready for more than 300 s: 3 starts in a row failed their proof"
    )


@pytest.mark.parametrize(
    "spared",
    [
        {"has_started": False},
        {"is_terminating": True},
        {"is_on_lost_node": True},
    ],
    ids=["still loads", "ends already", "its node is lost"],
)
def test_a_restart_would_not_help(spared: dict[str, Any]) -> None:
    assert verdict(replace(stuck(seconds=9999), **spared)) == RestartDecision()


def test_one_pod_of_a_pool_at_a_time_and_each_pool_by_itself() -> None:
    large = replace(stuck("c"), pool="large")
    found = verdict(stuck("a"), stuck("b"), large)
    assert [restart.pod.name for restart in found.restarts] == ["c", "a"]


def test_the_next_restart_waits_twice_as_long_as_the_one_before() -> None:
    assert reasons(verdict(stuck(), history=done(29))) == []
    assert reasons(verdict(stuck(), history=done(30))) == ["NotReady"]
    waiting = verdict(stuck(), history=done(59, 300))
    assert (deferred(waiting), waiting.recheck_s) == (["RestartBackoff"], 1)
    assert reasons(verdict(stuck(), history=done(60, 300))) == ["NotReady"]


def test_a_spent_budget_says_so_until_an_hour_has_passed() -> None:
    found = verdict(stuck(), history=done(3000, 2000, 1000))
    assert (deferred(found), found.recheck_s) == (["RestartBudgetSpent"], 600)
    assert "spec.healing.restartsPerHour" in found.deferred[0].message
    assert reasons(verdict(stuck(), history=done(3601, 2000, 1000))) == ["NotReady"]


def test_thousands_of_restarts_an_hour_wait_for_the_longest_backoff() -> None:
    policy = msgspec.structs.replace(POLICY, restarts_per_hour=5000)
    waiting = decide_restarts(policy, [stuck()], done(*[100.0] * 2000), NOW, frozenset())
    assert (deferred(waiting), waiting.recheck_s) == (["RestartBackoff"], 500)


def test_restarts_from_before_the_clock_was_set_back_delay_nothing() -> None:
    assert reasons(verdict(stuck(), history=done(-7200, -7300, -7400))) == ["NotReady"]
    assert verdict(stuck(), history=done(-7200, 10)).recheck_s == 20
    ahead = done(-5)  # recorded by an operator whose clock is ahead
    assert deferred(verdict(stuck(), history=ahead)) == ["RestartBackoff"]
    assert [each["time"] for each in restarts_status(done(-7200, 10), (), NOW)] == [
        "2026-01-02T03:03:55Z"
    ]


def test_silence_is_the_engines_when_others_are_heard() -> None:
    silent = pod("a", silent_s=60)
    assert reasons(verdict(silent, pod("b"))) == ["Silent"]
    assert deferred(verdict(silent, pod("b", silent_s=70))) == ["LastServing"]
    assert deferred(verdict(silent, replace(pod("b"), has_reported=False))) == ["LastServing"]
    assert deferred(verdict(silent)) == ["LastServing"]


def test_silence_of_the_only_engine_counts_when_the_routers_lost_it_too() -> None:
    assert reasons(verdict(pod(silent_s=60), cut_off=True)) == ["Silent"]
    assert verdict(pod(silent_s=59), cut_off=True).recheck_s == 1


def test_silence_of_one_pools_only_engine_counts_while_another_pool_works() -> None:
    silent = replace(pod("c", silent_s=60), pool="large")
    well = pod("a")
    both = decide_restarts(POLICY, [well, silent], (), NOW, frozenset({"large"}))
    assert [restart.pod.name for restart in both.restarts] == ["c"]
    assert deferred(decide_restarts(POLICY, [well, silent], (), NOW, frozenset())) == [
        "LastServing"
    ]


def test_silence_of_a_pod_that_was_never_heard_is_no_reason() -> None:
    never = replace(pod(silent_s=9999), has_reported=False)
    assert verdict(never, pod("b"), cut_off=True) == RestartDecision()


def test_low_health_never_costs_the_last_that_serves() -> None:
    ill = pod("a", unhealthy_s=300)
    assert reasons(verdict(ill, pod("b"))) == ["Unhealthy"]
    assert deferred(verdict(ill, cut_off=True)) == ["LastServing"]
    assert deferred(verdict(ill, pod("b", unhealthy_s=400))) == ["LastServing"]


def test_a_pod_that_serves_waits_for_others_to_come_back() -> None:
    ill = pod("a", unhealthy_s=300)
    loading = replace(pod("c"), has_started=False, is_ready=False)
    assert deferred(verdict(ill, pod("b"), loading)) == ["OthersNotBack"]


def test_what_does_not_serve_goes_first() -> None:
    found = verdict(pod("a", unhealthy_s=300), stuck("z"), pod("b"))
    assert [restart.pod.name for restart in found.restarts] == ["z"]


def test_a_pod_of_a_lost_node_is_forgotten_once_kubernetes_gave_it_up() -> None:
    lost = pod("a", is_terminating=True, is_on_lost_node=True, overdue_s=59)
    assert verdict(lost) == RestartDecision(recheck_s=1)
    late = replace(lost, overdue_s=60)
    spent = done(3, 2, 1)
    for policy in (POLICY, msgspec.structs.replace(POLICY, enabled=False)):
        [restart] = decide_restarts(policy, [late], spent, NOW, frozenset()).restarts
        assert (restart.reason, restart.by_force) == ("NodeLost", True)
    assert verdict(replace(late, is_on_lost_node=False)) == RestartDecision()


def test_what_ends_no_request_has_seconds_to_end_and_what_serves_its_whole_drain() -> None:
    others = (pod("b"), pod("c"))
    hung = (stuck(), pod(silent_s=60))
    ill = pod(unhealthy_s=300)
    assert [verdict(each, *others).restarts[0].grace_s for each in hung] == [HUNG_GRACE_S] * 2
    assert verdict(ill, *others).restarts[0].grace_s is None


def test_followers_are_left_to_their_probes_and_forgotten_with_their_node() -> None:
    follower = replace(stuck(), is_follower=True, has_reported=False)
    assert verdict(follower).restarts == ()
    assert verdict(follower).recheck_s is None
    lost = replace(follower, is_terminating=True, is_on_lost_node=True, overdue_s=61)
    assert reasons(verdict(lost)) == ["NodeLost"]


def test_disabled_nothing_is_made_anew() -> None:
    assert (
        decide_restarts(
            msgspec.structs.replace(POLICY, enabled=False),
            [stuck()],
            (),
            NOW,
            frozenset({"single"}),
        )
        == RestartDecision()
    )


STEP_S = 15.0


@dataclass
class Simulated:
    """One pod, and since when something ails it."""

    name: str
    uid: int
    loads_until: float
    stuck_at: float | None = None
    silent_at: float | None = None
    ill_at: float | None = None
    gone_at: float | None = None

    def patient(self, now: float) -> EnginePod:
        def since(at: float | None) -> float:
            return 0.0 if at is None else max(0.0, now - at)

        return EnginePod(
            name=self.name,
            uid=str(self.uid),
            pool="single",
            has_started=now >= self.loads_until,
            is_ready=now >= self.loads_until and self.stuck_at is None,
            not_ready_s=since(self.stuck_at),
            has_reported=now > self.loads_until + STEP_S,
            silent_s=since(self.silent_at),
            unhealthy_s=since(self.ill_at),
            is_terminating=self.gone_at is not None,
        )

    @property
    def is_well(self) -> bool:
        return self.stuck_at is self.silent_at is self.ill_at is None


class Pool:
    """A StatefulSet that makes pods anew, whose pods fall ill."""

    def __init__(self, size: int, load_s: float) -> None:
        self.load_s = load_s
        self.uids = size
        self.pods = [Simulated(f"p-{i}", i, 0.0) for i in range(size)]
        self.history: list[RestartEvent] = []

    def step(self, now: float, cut_off: bool) -> list[Restart]:
        for index, each in enumerate(self.pods):
            if each.gone_at is not None and now >= each.gone_at:
                self.pods[index] = Simulated(each.name, self.uids, now + self.load_s)
                self.uids += 1
        time = NOW + timedelta(seconds=now)
        patients = [each.patient(now) for each in self.pods]
        lost = frozenset({"single"} if cut_off else ())
        restarts = list(decide_restarts(POLICY, patients, self.history, time, lost).restarts)
        for restart in restarts:
            sick = next(p for p in self.pods if p.name == restart.pod.name)
            self.check(sick, patients, restart, cut_off)
            sick.gone_at = now + 60
            self.history.append(RestartEvent("single", restart.pod.name, restart.reason, time))
        return restarts

    def check(
        self, sick: Simulated, seen: list[EnginePod], restart: Restart, cut_off: bool
    ) -> None:
        assert not sick.is_well
        assert restart.pod.has_started
        assert not restart.pod.is_terminating
        others = [p for p in seen if p.name != sick.name and p.is_ready and not p.is_terminating]
        assert not restart.pod.is_ready or others or (restart.reason == "Silent" and cut_off)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 4),
    load_s=st.sampled_from([0.0, 45.0, 400.0]),
    falls=st.lists(
        st.tuples(
            st.integers(0, 700), st.integers(0, 3), st.sampled_from(["stuck", "silent", "ill"])
        ),
        max_size=25,
    ),
    cut_off=st.booleans(),
)
def test_three_hours_of_trouble_keep_the_budget_and_spare_the_well(
    size: int, load_s: float, falls: list[tuple[int, int, str]], cut_off: bool
) -> None:
    pool = Pool(size, load_s)
    for step in range(720):
        now = step * STEP_S
        for at, which, ailment in falls:
            target = pool.pods[which % size]
            if at == step and now >= target.loads_until and target.gone_at is None:
                setattr(target, f"{ailment}_at", now)
        assert len(pool.step(now, cut_off)) <= 1
    times = [history.at for history in pool.history]
    for at in times:
        assert sum(at <= other < at + HOUR for other in times) <= POLICY.restarts_per_hour


@pytest.mark.parametrize("load_s", [0.0, 45.0, 400.0])
def test_a_pod_that_is_stuck_at_every_start_is_tried_again_for_ever(load_s: float) -> None:
    pool = Pool(1, load_s)
    restarts = 0
    for step in range(1440):
        now = step * STEP_S
        [only] = pool.pods
        if now >= only.loads_until and only.stuck_at is None and only.gone_at is None:
            only.stuck_at = now
        restarts += len(pool.step(now, False))
    assert 12 <= restarts <= 18  # six hours of at most three
