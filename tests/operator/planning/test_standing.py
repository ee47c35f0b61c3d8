"""Whatever becomes of a declared service, what serves goes on: it wakes, scales, heals and is
reported as before, and the status names the fields that are wrong."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ullage_operator.api import naming
from ullage_operator.api.parsing import parse, parse_filled, to_spec
from ullage_operator.api.schema import complete, load_schema
from ullage_operator.api.section_reader import to_api
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.planning.standing import Declared, plan_standing, read, standing
from ullage_operator.policy.engine_health import EngineHealth
from ullage_operator.policy.pool_sizes import ScalingDecisions
from ullage_operator.policy.scaling import ScalingDecision
from ullage_operator.rollout.release import release_of
from ullage_operator.rollout.state import load

Make = Callable[..., dict[str, Any]]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETTINGS = Settings()
EXAMPLES = 60
ENV = [{"name": "HF_TOKEN", "value": "hf_secret"}]
SPEC: dict[str, Any] = {
    "model": {"source": "hf://a/b", "name": "m"},
    "tls": {"router": {"secretName": "tls"}},
    "healing": {"notReadyAfter": "2m"},
    "tenants": {"secretName": "keys", "named": [{"name": "a", "weight": 2}]},
    "cascade": {"steps": [{"service": "small"}]},
    "router": {"podTemplate": {"spec": {"containers": [{"name": "router", "env": ENV}]}}},
    "pools": {
        "single": {
            "autoscaling": {"minReplicas": 0, "maxReplicas": 4},
            "podTemplate": {"spec": {"containers": [{"name": "engine", "env": ENV}]}},
        },
        "large": {"role": "Large", "replicas": 2},
        "wide": {
            "role": "Overflow",
            "nodes": 2,
            "gpus": 2,
            "parallelism": {"pipeline": 2},
            "replicas": 2,
        },
    },
    "engine": "VLLM",
}


def make_stored() -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "models", "uid": "uid-1", "generation": 3}
    manifest = {
        "apiVersion": naming.API_VERSION,
        "kind": naming.KIND,
        "metadata": metadata,
        "spec": copy.deepcopy(SPEC),
    }
    stored, problems = complete(load_schema(), manifest)
    assert not problems, problems
    return stored


STORED = make_stored()


def planned(
    manifest: dict[str, Any], observed: Observed, with_settings: Settings = SETTINGS
) -> tuple[ServicePlan, Declared]:
    declared = read(manifest, with_settings)
    stands = standing(manifest, declared, observed, with_settings)
    assert stands is not None
    seen = dataclasses.replace(observed, refused=declared.problems, undefined=declared.filled)
    return plan_standing(stands, seen, with_settings), declared


def live_objects() -> list[dict[str, Any]]:
    """Return the service's objects in a cluster in which pool single sleeps."""
    fresh, _ = planned(STORED, Observed(now=NOW))
    return [with_status(item) for item in fresh.apply]


def with_status(item: dict[str, Any]) -> dict[str, Any]:
    if item["kind"] not in ("Deployment", "StatefulSet"):
        return item
    item = copy.deepcopy(item)
    if item["metadata"]["name"] == "demo-single":
        item["spec"]["replicas"] = 0
    count = item["spec"]["replicas"]
    names = ("replicas", "updatedReplicas", "readyReplicas")
    item["metadata"]["generation"] = 1
    item["status"] = {"observedGeneration": 1, **dict.fromkeys(names, count)}
    return item


def broken_pod() -> dict[str, Any]:
    """Return the pod of an engine that has been unhealthy for long."""
    labels = naming.selector("demo", naming.ENGINE, "large")
    since = (NOW - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
    return {
        "metadata": {"name": "demo-large-0", "uid": "pod-0", "namespace": "models"}
        | {"labels": labels},
        "spec": {"nodeName": "n"},
        "status": {
            "podIP": "10.0.0.1",
            "phase": "Running",
            "conditions": [ready],
            "containerStatuses": [{"name": "engine", "started": True, "state": {"running": {}}}],
        },
    }


def observed_of(objects: list[dict[str, Any]]) -> Observed:
    """Return a service of which a request wants pool single awake, and an engine is ill."""
    wake = ScalingDecision(1, "Wanted", "a request waits")
    return Observed(
        now=NOW,
        objects={key_of(item): item for item in objects},
        pods=[broken_pod()],
        engine_health={
            "pod-0": EngineHealth(pool="large", known_s=3600.0, silent_s=0.0, unhealthy_s=3600.0)
        },
        scaling=ScalingDecisions({"single": wake}),
    )


LIVE = live_objects()
OBSERVED = observed_of(LIVE)
GOES_ON, _ = planned(STORED, OBSERVED)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a document but the document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for name, item in items:
        yield from places(item, (*path, name))


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 10**9, 10**30, 1e300, 0.5]),
    st.sampled_from(["", "x", "9" * 30 + "h", "-1s", "9" * 30 + "Ei", "CUDA", "\x00"]),
    st.sampled_from([[], {}, ["x"], [{}], [[]], {"x": {"y": []}}, {"name": 1}]),
)
PLACES = sorted(places(STORED["spec"]), key=repr)


@st.composite
def mutations(draw: st.DrawFn, left_alone: str = "") -> dict[str, Any]:
    """Draw a stored service of which fields are gone, of other types, unknown or huge."""
    manifest = copy.deepcopy(STORED)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(PLACES))
        where = ".".join(map(str, path))
        if left_alone and (where.startswith(left_alone) or left_alone.startswith(where)):
            continue
        *parents, last = path
        section: Any = manifest["spec"]
        try:
            for name in parents:
                section = section[name]
            match draw(st.sampled_from(["remove", "replace", "replace", "add"])):
                case "remove":
                    del section[last]
                case "replace":
                    section[last] = draw(WRONG)
                case _ if isinstance(section, dict):
                    section["unheardOf"] = draw(WRONG)
        except (IndexError, KeyError, TypeError):
            continue  # an earlier one took it away
    return manifest


def conditions(plan: ServicePlan) -> dict[str, dict[str, Any]]:
    return {each["type"]: each for each in plan.status["conditions"]}


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutations())
def test_an_edit_that_cannot_be_carried_out_changes_nothing(manifest: dict[str, Any]) -> None:
    plan, declared = planned(manifest, OBSERVED)
    assume(declared.service is None)
    assert plan.apply == GOES_ON.apply
    assert plan.delete == GOES_ON.delete
    assert plan.healing == GOES_ON.healing
    for field in ("engines", "pools", "router", "rollout", "healing", "endpoint"):
        assert plan.status.get(field) == GOES_ON.status.get(field), field
    degraded = conditions(plan)["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "InvalidSpec")
    assert all(str(problem) in degraded["message"] for problem in declared.problems)
    assert all(problem.path.startswith("spec") for problem in declared.problems)
    others = {"Ready", "Available", "Progressing", "RolloutHealthy"}
    for kind in others:
        assert conditions(plan)[kind]["status"] == conditions(GOES_ON)[kind]["status"], kind


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutations("pools.single.autoscaling"))
def test_without_a_kept_spec_objects_stay_and_pools_wake(manifest: dict[str, Any]) -> None:
    declared = read(manifest, SETTINGS)
    assume(declared.service is None)
    plan, _ = planned(manifest, observed_of([without_kept_spec(item) for item in LIVE]))
    [woken] = plan.apply
    [asleep] = [item for item in LIVE if key_of(item) == ("StatefulSet", "demo-single")]
    assert key_of(woken) == key_of(asleep)
    assert woken["spec"] == asleep["spec"] | {"replicas": 1}
    assert plan.delete == ()
    assert [each.pod for each in plan.healing.restarts] == [
        each.pod for each in GOES_ON.healing.restarts
    ]
    assert plan.status["engines"] == GOES_ON.status["engines"]
    assert conditions(plan)["Degraded"]["reason"] == "InvalidSpec"


def without_kept_spec(item: dict[str, Any]) -> dict[str, Any]:
    if item["metadata"]["name"] != naming.rollout_name("demo"):
        return item
    data = {name: text for name, text in item["data"].items() if name != naming.KEPT_SPEC}
    return item | {"data": data}


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutations())
def test_every_spec_that_is_taken_can_be_planned_and_kept(manifest: dict[str, Any]) -> None:
    plan, declared = planned(manifest, OBSERVED)
    assume(declared.service is not None)
    assert declared.service is not None
    # What is kept of it is the same spec.
    [kept] = [
        json.loads(item["data"][naming.KEPT_SPEC])
        for item in plan.apply
        if item["metadata"]["name"] == naming.rollout_name("demo")
    ]
    assert "hf_secret" not in json.dumps(kept)
    assert to_spec(to_api(declared.service.spec)) == declared.service.spec


def edited(**spec: Any) -> dict[str, Any]:
    manifest = copy.deepcopy(STORED)
    manifest["spec"] |= spec
    manifest["metadata"]["generation"] = 4
    return manifest


def test_the_scaler_wakes_and_the_status_names_the_field() -> None:
    plan, _ = planned(edited(memory={"maxKV": "plenty"}), OBSERVED)
    sizes = {o["metadata"]["name"]: o["spec"] for o in plan.apply if o["kind"] == "StatefulSet"}
    assert sizes["demo-single"]["replicas"] == 1
    [restart] = plan.healing.restarts
    assert restart.pod.name == "demo-large-0"
    message = conditions(plan)["Degraded"]["message"]
    assert message.startswith("spec.memory.maxKV: must be a quantity such as 512Mi")
    assert message.endswith("Until that is corrected, the operator carries out the previous spec")
    assert plan.status["observedGeneration"] == 4


def test_values_that_an_older_definition_let_in_are_told_and_change_nothing() -> None:
    plan, declared = planned(edited(rollout={"maxUnavailable": "abc"}), OBSERVED)
    [problem] = declared.problems
    assert problem.path == "spec.rollout.maxUnavailable"
    assert plan.apply == GOES_ON.apply


def test_what_is_deleted_meanwhile_is_made_anew() -> None:
    left = [item for item in LIVE if item["metadata"]["name"] != "demo-router"]
    plan, _ = planned(edited(router="none"), observed_of(left))
    assert ("Deployment", "demo-router") in {key_of(item) for item in plan.apply}


def test_a_pool_scales_by_what_it_said_before_the_edit() -> None:
    manifest = edited()
    manifest["spec"]["pools"]["single"] = {"autoscaling": {"maxReplicas": "many"}}
    plan, declared = planned(manifest, OBSERVED)
    [problem] = declared.problems
    assert problem.path == "spec.pools.single.autoscaling.maxReplicas"
    assert plan.apply == GOES_ON.apply


def test_an_operator_that_comes_to_own_a_field_holds_what_runs_and_wakes_it() -> None:
    manifest = edited()
    template = manifest["spec"]["pools"]["single"]["podTemplate"]
    template["spec"]["terminationGracePeriodSeconds"] = 5
    # Both the spec and what was kept of it are from before.
    kept = json.loads(json.dumps(to_api(parse_filled(STORED)[0].spec)))
    kept["pools"]["single"]["podTemplate"] = template
    objects = [
        item | {"data": item["data"] | {naming.KEPT_SPEC: json.dumps(kept)}}
        if item["metadata"]["name"] == naming.rollout_name("demo")
        else item
        for item in LIVE
    ]
    plan, declared = planned(manifest, observed_of(objects))
    [woken] = plan.apply
    assert (woken["metadata"]["name"], woken["spec"]["replicas"]) == ("demo-single", 1)
    assert plan.delete == ()
    assert plan.healing == GOES_ON.healing
    [problem] = declared.problems
    assert problem.path.endswith("single.podTemplate.spec.terminationGracePeriodSeconds")


def test_a_kept_spec_whose_secret_values_are_gone_still_says_how_pools_scale() -> None:
    objects = []
    for item in LIVE:
        changed = copy.deepcopy(item)
        if item["kind"] in ("Deployment", "StatefulSet"):
            for container in changed["spec"]["template"]["spec"]["containers"]:
                container.pop("env", None)
        objects.append(changed)
    manifest = edited(memory=7, router={}, pools={})
    plan, _ = planned(manifest, observed_of(objects))
    [woken] = plan.apply
    assert (woken["metadata"]["name"], woken["spec"]["replicas"]) == ("demo-single", 1)


def test_followers_keep_their_number_whatever_is_declared() -> None:
    objects = [without_kept_spec(item) for item in LIVE]
    manifest = edited(memory=7)
    manifest["spec"]["pools"]["wide"] = {"nodes": "two"}
    plan, _ = planned(manifest, observed_of(objects))
    assert [item["metadata"]["name"] for item in plan.apply] == ["demo-single"]


def test_nothing_is_made_of_a_service_that_never_could_be() -> None:
    manifest = edited(memory=7)
    declared = read(manifest, SETTINGS)
    assert standing(manifest, declared, Observed(now=NOW), SETTINGS) is None


LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def of_0_1_0() -> dict[str, Any]:
    """Return the service as 0.1.0 stored it, as an API server with today's definition reads it: a
    field that was renamed has its default, and every pool the role Standard."""
    manifest = edited()
    declared = manifest["spec"] | {"memory": {"threshold": 0.5}, "healing": {"minHealth": 0.9}}
    note = json.dumps({"spec": declared})
    manifest["metadata"]["annotations"] = {LAST_APPLIED: note}
    for pool in manifest["spec"]["pools"].values():
        pool["role"] = "Standard"
    return manifest


def test_a_service_of_0_1_0_goes_on_and_its_fields_are_named() -> None:
    plan, declared = planned(of_0_1_0(), OBSERVED)
    assert [problem.path for problem in declared.problems] == [
        "spec.memory.threshold",
        "spec.healing.minHealth",
    ]
    assert plan.apply == GOES_ON.apply
    assert plan.delete == GOES_ON.delete
    degraded = conditions(plan)["Degraded"]
    assert degraded["reason"] == "InvalidSpec"
    assert "spec.memory.threshold: was dropped by the API server" in degraded["message"]
    assert "write thresholdPercent: 50 instead, and apply the manifest" in degraded["message"]


def test_a_service_of_0_1_0_with_several_pools_waits_for_their_roles() -> None:
    manifest = edited()
    for pool in manifest["spec"]["pools"].values():
        pool["role"] = "Standard"
    plan, declared = planned(manifest, OBSERVED)
    assert declared.service is None
    assert plan.apply == GOES_ON.apply
    assert "role" in conditions(plan)["Degraded"]["message"]


def test_a_service_of_0_1_0_whose_note_is_taken_away_is_carried_out() -> None:
    manifest = of_0_1_0()
    roles = {name: pool["role"] for name, pool in STORED["spec"]["pools"].items()}
    for name, pool in manifest["spec"]["pools"].items():
        pool["role"] = roles[name]
    assert planned(manifest, OBSERVED)[1].service is None
    del manifest["metadata"]["annotations"][LAST_APPLIED]
    assert planned(manifest, OBSERVED)[1].service is not None


def test_a_service_that_0_1_0_left_behind_keeps_its_objects_and_wakes() -> None:
    plan, _ = planned(of_0_1_0(), observed_of([without_kept_spec(item) for item in LIVE]))
    [woken] = plan.apply
    assert (woken["metadata"]["name"], woken["spec"]["replicas"]) == ("demo-single", 1)
    assert plan.delete == ()
    assert plan.status["engines"] == GOES_ON.status["engines"]


def test_pools_without_roles_of_their_own_are_named() -> None:
    manifest = of_0_1_0()
    del manifest["metadata"]["annotations"]
    plan, declared = planned(manifest, OBSERVED)
    [problem] = declared.problems
    assert str(problem).startswith("spec.pools: pools large and single and wide have role Standard")
    assert plan.apply == GOES_ON.apply


def test_a_spec_that_was_kept_in_the_form_of_0_1_0_is_read() -> None:
    kept = json.loads(json.dumps(to_api(parse_filled(STORED)[0].spec)))
    kept["memory"]["threshold"] = kept["memory"].pop("thresholdPercent") / 100
    kept["healing"]["minHealth"] = kept["healing"].pop("minHealthPercent") / 100
    for pool in kept["pools"].values():
        pool["memory"]["threshold"] = pool["memory"].pop("thresholdPercent") / 100
        del pool["role"]
    objects = [
        item | {"data": item["data"] | {naming.KEPT_SPEC: json.dumps(kept)}}
        if item["metadata"]["name"] == naming.rollout_name("demo")
        else item
        for item in LIVE
    ]
    observed = observed_of(objects)
    stands = standing(of_0_1_0(), read(of_0_1_0(), SETTINGS), observed, SETTINGS)
    assert stands is not None
    pools = {name: pool.role for name, pool in stands.service.spec.pools.items()}
    assert pools == {"single": "standard", "large": "large", "wide": "overflow"}
    assert stands.service.spec.memory.threshold == 0.85


def test_a_release_that_was_kept_in_the_form_of_0_1_0_is_no_change() -> None:
    def in_old_form(item: dict[str, Any]) -> dict[str, Any]:
        if item["metadata"]["name"] != naming.rollout_name("demo"):
            return item
        state = json.loads(item["data"][naming.ROLLOUT_STATE])
        release = state["release"]
        for memory in (release["memory"], *(pool["memory"] for pool in release["pools"].values())):
            memory["threshold"] = memory.pop("thresholdPercent") / 100
            memory["adapterShare"] = memory.pop("adapterPercent") / 100
        degrade = release["degrade"]
        degrade["hysteresis"] = degrade.pop("hysteresisPercent") / 100
        degrade["levels"] = degrade.pop("pressureLevels")
        for level in degrade["levels"]:
            level["below"] = level.pop("belowPercent") / 100
            percent = level.pop("batchPercent")
            level["batchShare"] = percent and percent / 100
        throttling = degrade["throttling"]
        throttling["batchStep"] = throttling.pop("batchStepPercent") / 100
        throttling["minBatchShare"] = throttling.pop("minBatchPercent") / 100
        return item | {"data": item["data"] | {naming.ROLLOUT_STATE: json.dumps(state)}}

    objects = [in_old_form(item) for item in copy.deepcopy(LIVE)]
    plan, _ = planned(STORED, observed_of(objects))
    assert plan.apply == GOES_ON.apply
    [state] = [
        item["data"][naming.ROLLOUT_STATE]
        for item in objects
        if naming.KEPT_SPEC in item.get("data", {})
    ]
    target = release_of(parse_filled(STORED)[0], SETTINGS)
    recalled = load(state, target, LIVE)
    assert recalled is not None
    assert recalled.release == target


@pytest.mark.parametrize("field", ["memory.hostKV", "healing", "slo.ttftP95", "rollout.thresholds"])
def test_an_older_definition_is_filled_by_the_operator(field: str) -> None:
    manifest = edited()
    section: Any = manifest["spec"]
    *parents, last = field.split(".")
    for name in parents:
        section = section[name]
    del section[last]
    plan, declared = planned(manifest, OBSERVED)
    assert declared.filled == (f"spec.{field}",)
    said = conditions(plan)
    assert said["DefinitionOutdated"]["status"] == "True"
    assert f"spec.{field}; apply the crds/" in said["DefinitionOutdated"]["message"]
    assert said["Degraded"]["reason"] != "InvalidSpec"
    assert "DefinitionOutdated" not in conditions(GOES_ON)
    if field != "healing":  # of which the service says something itself
        assert plan.apply == GOES_ON.apply


def test_a_minimal_stored_service_is_what_the_command_line_makes_of_it(manifest: Make) -> None:
    made = manifest(pools={"large": {}})
    service, filled = parse_filled(made)
    assert service == parse(made)
    assert "spec.memory" in filled
    assert made == manifest(pools={"large": {}})
