"""Whether all engines of a service give the same answers, and why not."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ullage.headroom.v1.headroom_pb2 import Headroom
from ullage_common.wire.fingerprint import UNKNOWN, fingerprint_of
from ullage_operator.api.naming import POOL_LABEL
from ullage_operator.conditions.conditions import Condition
from ullage_operator.conditions.consistency import EngineNumerics, consistency_condition
from ullage_operator.conditions.events import transitions
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.policy.engine_health import EngineHealth

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def engine(pool: str = "single", revision: str = "1", **facts: str) -> EngineNumerics:
    return EngineNumerics(pool, revision, fingerprint_of(facts) if facts else UNKNOWN)


def condition(**engines: EngineNumerics) -> Condition:
    [found] = consistency_condition({name.replace("_", "-"): e for name, e in engines.items()})
    return found


def test_before_an_engine_has_reported_there_is_no_condition() -> None:
    assert consistency_condition({}) == []
    assert consistency_condition({"s-0": engine(), "s-1": engine(revision="2")}) == []


def test_engines_alike_are_consistent() -> None:
    same = engine(weights="1", processor="p")
    found = condition(s_0=same, s_1=same)
    assert (found.type, found.holds, found.reason) == ("EnginesConsistent", True, "Alike")
    assert found.message == f"2 engines have the fingerprint {same.fingerprint.digest}"
    assert condition(s_0=same).message.startswith("1 engine has")


def test_the_message_names_pods_and_facts() -> None:
    found = condition(
        s_0=engine(weights="1", processor="p"), s_1=engine(weights="2", processor="p")
    )
    assert (found.holds, found.reason) == (False, "EnginesDiffer")
    assert found.message == (
        "engines of one pool and revision differ, and so may their answers: "
        "weights differ: 1 (s-0), 2 (s-1)"
    )


def test_two_revisions_on_purpose_are_said_to_be_that() -> None:
    old = engine(weights="1")
    new = engine(revision="2", weights="2")
    found = condition(s_0=new, s_1=old, s_2=old)
    assert (found.holds, found.reason) == (False, "TwoRevisions")
    assert "on purpose while a change is rolled out" in found.message
    # A difference within a revision is worse, and told first.
    odd = engine(revision="2", weights="3")
    assert condition(s_0=new, s_1=old, s_2=odd).reason == "EnginesDiffer"


def test_pools_may_differ_by_their_spec() -> None:
    small = engine(ranks="tensor 1")
    large = engine("large", ranks="tensor 2")
    found = condition(s_0=small, l_0=large)
    assert (found.holds, found.reason) == (False, "PoolsDiffer")
    assert "ranks differ: tensor 1 (s-0), tensor 2 (l-0)" in found.message


def test_an_engine_of_an_earlier_release_is_named() -> None:
    found = condition(s_0=engine(weights="1"), s_1=engine())
    assert found.reason == "EnginesDiffer"
    assert "fingerprint differs: none (s-1), reported (s-0)" in found.message


engines = st.lists(
    st.builds(
        engine,
        st.sampled_from(["single", "large"]),
        st.sampled_from("12"),
        weights=st.sampled_from("ab"),
    ),
    min_size=1,
    max_size=6,
)


@given(engines)
def test_it_holds_exactly_where_there_is_one_fingerprint(found: list[EngineNumerics]) -> None:
    [told] = consistency_condition({f"s-{n}": each for n, each in enumerate(found)})
    assert told.holds == (len({each.fingerprint.digest for each in found}) == 1)
    kinds: dict[tuple[str, str], set[str]] = {}
    for each in found:
        kinds.setdefault((each.pool, each.revision), set()).add(each.fingerprint.digest)
    is_mixed = any(len(digests) > 1 for digests in kinds.values())
    assert (told.reason == "EnginesDiffer") == is_mixed


def pod(name: str, pool: str = "single", revision: str = "r1") -> dict[str, Any]:
    labels = {POOL_LABEL: pool, "controller-revision-hash": revision}
    return {"metadata": {"name": name, "uid": name, "labels": labels}, "status": {}}


def report(**facts: str) -> EngineHealth:
    digest = fingerprint_of(facts).digest if facts else ""
    headroom = Headroom(fingerprint=digest, fingerprint_facts=facts, ready=True)
    return EngineHealth(pool="single", report=headroom)


def reported(plan: ServicePlan) -> dict[str, Any] | None:
    found = [c for c in plan.status["conditions"] if c["type"] == "EnginesConsistent"]
    return found[0] if found else None


def test_the_status_has_it_from_the_engines_reports(make_plan: Callable[..., ServicePlan]) -> None:
    pods = [pod("demo-single-0"), pod("demo-single-1"), pod("demo-single-next-0", "single-next")]
    unheard = {name: EngineHealth(pool="single") for name in ("demo-single-0", "demo-single-1")}
    assert reported(make_plan(Observed(now=NOW, pods=pods, engine_health=unheard))) is None

    alike = dict.fromkeys(unheard, report(weights="1"))
    found = reported(make_plan(Observed(now=NOW, pods=pods, engine_health=alike)))
    assert found is not None
    assert (found["status"], found["reason"]) == ("True", "Alike")

    canary = {**alike, "demo-single-next-0": report(weights="2")}
    found = reported(make_plan(Observed(now=NOW, pods=pods, engine_health=canary)))
    assert found is not None
    assert (found["status"], found["reason"]) == ("False", "TwoRevisions")
    assert "demo-single-next-0" in found["message"]

    differing = {**alike, "demo-single-1": report(weights="2")}
    found = reported(make_plan(Observed(now=NOW, pods=pods, engine_health=differing)))
    assert found is not None
    assert (found["status"], found["reason"]) == ("False", "EnginesDiffer")
    assert found["message"].endswith("weights differ: 1 (demo-single-0), 2 (demo-single-1)")


def test_a_difference_is_a_warning_and_a_rollout_is_none() -> None:
    def stored(status: str, reason: str) -> list[dict[str, str]]:
        return [{"type": "EnginesConsistent", "status": status, "reason": reason, "message": "m"}]

    assert transitions([], stored("True", "Alike")) == []  # of a new service
    [note] = transitions(stored("True", "Alike"), stored("False", "EnginesDiffer"))
    assert (note.reason, note.warning) == ("EnginesDiffer", True)
    [note] = transitions(stored("True", "Alike"), stored("False", "TwoRevisions"))
    assert (note.reason, note.warning) == ("TwoRevisions", False)
    [note] = transitions(stored("False", "TwoRevisions"), stored("True", "Alike"))
    assert (note.reason, note.warning) == ("Alike", False)
