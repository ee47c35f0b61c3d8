"""Which LoRA adapters engines serve, and why not all: status.adapters and AdaptersReady."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ullage.headroom.v1.headroom_pb2 import AdapterState, Headroom
from ullage_operator.api.naming import POOL_LABEL
from ullage_operator.conditions.adapters import adapters_condition, adapters_status
from ullage_operator.conditions.conditions import Condition
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.policy.engine_health import EngineHealth

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SQL = {"name": "sql", "source": "file:///sql", "rank": 8}


def served(name: str, digest: str = "d") -> AdapterState:
    return AdapterState(name=name, served=True, digest=digest)


def failed(name: str, error: str, before: str = "") -> AdapterState:
    return AdapterState(name=name, served=bool(before), digest=before, error=error)


def condition(**reports: list[AdapterState]) -> Condition:
    [found] = adapters_condition(
        ["sql", "law"], {k.replace("_", "-"): v for k, v in reports.items()}
    )
    return found


def test_a_service_without_adapters_or_with_engines_that_sleep_has_no_condition() -> None:
    assert adapters_condition([], {"s-0": []}) == []
    assert adapters_condition(["sql"], {}) == []


def test_all_on_all_engines_is_ready() -> None:
    both = [served("sql"), served("law")]
    found = condition(s_0=both, s_1=both)
    assert (found.type, found.holds, found.reason) == ("AdaptersReady", True, "Loaded")


def test_one_that_is_on_its_way_is_named_with_its_engines() -> None:
    found = condition(s_0=[served("sql"), served("law")], s_1=[served("law")])
    assert (found.holds, found.reason) == (False, "AdaptersLoading")
    assert found.message == "sql is on 1 of 2 engines"


def test_one_that_cannot_be_served_is_named_with_why_and_where() -> None:
    wrong = failed("sql", "has r 32, but slots have room for 16")
    found = condition(s_0=[wrong, served("law")], s_1=[wrong])
    assert (found.holds, found.reason) == (False, "AdapterFailed")
    assert found.message == "sql: has r 32, but slots have room for 16 (pod s-0 and 1 more)"
    found = condition(s_0=[failed("sql", "gone", before="d"), served("law")])
    assert found.message == "sql: gone (pod s-0); the engine still serves the previous files"


def test_other_files_under_one_name_are_told() -> None:
    found = condition(s_0=[served("sql"), served("law")], s_1=[served("sql", "e"), served("law")])
    assert (found.holds, found.reason) == (False, "AdaptersDiffer")
    assert found.message == "sql has different files on s-0 and s-1"


states = st.lists(
    st.builds(
        AdapterState,
        name=st.sampled_from(["sql", "law", "old"]),
        served=st.booleans(),
        digest=st.sampled_from(["d", "e"]),
        error=st.sampled_from(["", "gone"]),
    ),
    max_size=3,
    unique_by=lambda state: state.name,
)


@given(st.dictionaries(st.sampled_from(["s-0", "s-1", "s-2"]), states, min_size=1))
def test_ready_is_every_adapter_alike_on_every_engine(reports: dict[str, Any]) -> None:
    [found] = adapters_condition(["sql", "law"], reports)
    named = {
        name: [s for each in reports.values() for s in each if s.name == name]
        for name in ("sql", "law")
    }
    assert found.holds == all(
        len(each) == len(reports)
        and all(state.served and not state.error for state in each)
        and len({state.digest for state in each}) == 1
        for each in named.values()
    )
    counts = {each["name"]: each["engines"] for each in adapters_status(["sql", "law"], reports)}
    assert not found.holds or set(counts.values()) == {f"{len(reports)}/{len(reports)}"}


def test_the_status_has_it_from_engines_that_are_ready(
    make_plan: Callable[..., ServicePlan],
) -> None:
    def pod(name: str) -> dict[str, Any]:
        labels = {POOL_LABEL: "single", "controller-revision-hash": "r"}
        return {"metadata": {"name": name, "uid": name, "labels": labels}, "status": {}}

    def health(*adapters: AdapterState, ready: bool = True) -> EngineHealth:
        return EngineHealth(pool="single", report=Headroom(ready=ready, adapters=adapters))

    reports = {"demo-0": health(served("sql")), "demo-1": health(), "demo-2": health(ready=False)}
    observed = Observed(now=NOW, pods=[pod(name) for name in reports], engine_health=reports)
    status = make_plan(observed, engine="VLLM", adapters=[SQL]).status
    assert status["adapters"] == [{"name": "sql", "engines": "1/2"}]
    [found] = [c for c in status["conditions"] if c["type"] == "AdaptersReady"]
    assert (found["status"], found["reason"]) == ("False", "AdaptersLoading")
    assert "adapters" not in make_plan(observed).status
