"""Memory pressure in the status: a pool's highest level, and no bytes."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from ullage.headroom.v1.headroom_pb2 import Headroom
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.policy.engine_health import (
    EngineHealth,
    boost_notes,
    boost_off_engines,
    pressure_by_pool,
    worker_restart_notes,
    worker_restarts,
)

MILD = Headroom(pressure_level=0)
WILD = Headroom(pressure_level=2, headroom_bytes=95)


def test_a_pools_pressure_is_the_highest_of_its_engines() -> None:
    reports = [("single", MILD), ("single", WILD), ("single", MILD), ("large", MILD)]
    assert pressure_by_pool(reports) == {"single": 2, "large": 0}


def test_worker_restarts_are_counted_once_every_engine_has_reported() -> None:
    engines = [EngineHealth(pool="single", report=Headroom(worker_restarts=n)) for n in (1, 2)]
    assert worker_restarts(engines, before=7) == 3
    assert worker_restarts([*engines, EngineHealth(pool="single")], before=7) == 7
    assert worker_restarts([], before=7) == 0


def test_only_another_restart_is_an_event() -> None:
    def status(**counts: int) -> dict[str, Any]:
        return {"pools": {name: {"workerRestarts": count} for name, count in counts.items()}}

    assert worker_restart_notes({}, status(single=4)) == []  # nobody knows since when
    assert worker_restart_notes(status(single=4), status(single=4, large=1)) == []
    assert worker_restart_notes(status(single=4), status(single=0)) == []  # of another pod
    [note] = worker_restart_notes(status(single=4, large=0), status(single=6, large=0))
    assert note.reason == "WorkerRestarted"
    assert note.warning
    assert note.message.startswith("pool single: 2 workers")


def test_engines_without_boost_are_counted_and_each_more_of_them_is_an_event() -> None:
    hot = Headroom(throttle_reasons=["hw_thermal"])
    cool = Headroom()
    engines = [EngineHealth(pool="single", report=report) for report in (hot, cool, None)]
    assert boost_off_engines(engines, before=2) == 2  # one has not reported yet
    assert boost_off_engines(engines[:2], before=7) == 1
    assert boost_off_engines([EngineHealth(pool="single")], before=7) == 7

    def notes(before: int, after: int) -> list[tuple[str, bool]]:
        old, new = ({"pools": {"single": {"boostOff": count}}} for count in (before, after))
        return [(note.reason, note.warning) for note in boost_notes(old, new)]

    assert notes(0, 1) == notes(1, 2) == [("BoostOff", True)]
    assert notes(2, 0) == [("BoostOn", False)]
    assert notes(2, 1) == notes(1, 1) == notes(0, 0) == []
    [note] = boost_notes({}, {"pools": {"large": {"boostOff": 2}}})
    assert note.message.startswith("pool large: 2 engines run smaller batches")


def test_the_status_names_the_level_alone(make_plan: Callable[..., ServicePlan]) -> None:
    observed = Observed(now=datetime(2026, 1, 2, tzinfo=UTC), pressure_levels={"single": 2})
    pools = make_plan(observed, pools={"large": {}}).status["pools"]
    assert pools["single"]["pressureLevel"] == 2
    assert "headroom" not in pools["single"]
    assert "pressureLevel" not in pools["large"]


def test_a_pool_that_sleeps_has_no_hot_engines_any_more(
    make_plan: Callable[..., ServicePlan],
) -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    hot = {"pools": {"single": {"boostOff": 1}}}
    asleep = make_plan(Observed(now=now, status=hot)).status["pools"]
    assert asleep["single"]["boostOff"] == 0
    unheard = {"single-0": EngineHealth(pool="single")}
    awake = make_plan(Observed(now=now, status=hot, engine_health=unheard)).status["pools"]
    assert awake["single"]["boostOff"] == 1
