"""Memory pressure in the status: a pool's highest level, and no bytes."""

from collections.abc import Callable
from datetime import UTC, datetime

from ullage.headroom.v1.headroom_pb2 import Headroom
from ullage_operator.controller.plan import Observed, ServicePlan
from ullage_operator.healing import pressure_by_pool

MILD, WILD = Headroom(pressure_level=0), Headroom(pressure_level=2, headroom_bytes=95)


def test_a_pools_pressure_is_the_highest_of_its_engines() -> None:
    reports = [("single", MILD), ("single", WILD), ("single", MILD), ("large", MILD)]
    assert pressure_by_pool(reports) == {"single": 2, "large": 0}


def test_the_status_names_the_level_alone(make_plan: Callable[..., ServicePlan]) -> None:
    observed = Observed(now=datetime(2026, 1, 2, tzinfo=UTC), pressure_levels={"single": 2})
    pools = make_plan(observed, pools={"large": {}}).status["pools"]
    assert pools["single"]["pressureLevel"] == 2
    assert "headroom" not in pools["single"] and "pressureLevel" not in pools["large"]
