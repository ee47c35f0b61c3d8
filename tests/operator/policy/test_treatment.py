"""What healing is restarts_status of pods and nodes, and what the status remembers of it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ullage.headroom.v1.headroom_pb2 import Headroom
from ullage_operator.policy.engine_health import EngineHealth, silent_pools, stream_targets
from ullage_operator.policy.lost_nodes import doubtful_nodes, is_lost, node_wait_s
from ullage_operator.policy.restarts import (
    EnginePod,
    Restart,
    RestartEvent,
    engine_pods,
    restart_history,
    restart_note,
    restarts_status,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
REPORT = Headroom(
    ready=True,
    draining=False,
    health=1.0,
    headroom_bytes=1,
    kv_pool_bytes=1,
    kv_bytes_per_token=1,
    pressure_level=0,
)


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(ready: bool = True, since: float = 600, component: str = "engine") -> dict[str, Any]:
    labels = {"app.kubernetes.io/component": component}
    if component == "engine":
        labels["serving.ullage.dev/pool"] = "single"
    ready_condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": ago(since)}
    return {
        "metadata": {"name": "s-single-0", "uid": "u", "labels": labels},
        "spec": {"nodeName": "node-a"},
        "status": {
            "podIP": "10.0.0.7",
            "containerStatuses": [{"started": True}],
            "conditions": [ready_condition],
        },
    }


def seen(given: dict[str, Any], vitals: EngineHealth | None = None) -> EnginePod:
    [patient] = engine_pods([given], {"u": vitals} if vitals else {}, frozenset(), NOW)
    return patient


def test_started_engines_are_followed_on_the_probe_port() -> None:
    [target] = stream_targets([pod(), pod(component="router")], 0.2).values()
    assert (target.pool, target.address) == ("single", "10.0.0.7:8081")
    six = pod()
    six["status"]["podIP"] = "fd00::7"
    assert stream_targets([six], 0.2)["u"].address == "[fd00::7]:8081"


@pytest.mark.parametrize("change", ["loads", "leaves", "has no address"])
def test_others_are_not_followed(change: str) -> None:
    given = pod()
    match change:
        case "loads":
            given["status"]["containerStatuses"] = [{"started": False}]
        case "leaves":
            given["metadata"]["deletionTimestamp"] = ago(0)
        case _:
            del given["status"]["podIP"]
    assert stream_targets([given], 0.2) == {}


def test_a_pod_that_has_just_loaded_was_not_ready_only_since_it_started() -> None:
    slow = pod(ready=False, since=1800)
    assert seen(slow).not_ready_s == 0
    assert seen(slow, EngineHealth(pool="single", known_s=12)).not_ready_s == 12
    flipped = pod(ready=False, since=40)
    assert seen(flipped, EngineHealth(pool="single", known_s=900)).not_ready_s == 40
    assert seen(pod(), EngineHealth(pool="single", known_s=900)).not_ready_s == 0


def test_what_was_heard_and_when_a_pod_should_have_gone() -> None:
    heard = EngineHealth(pool="single", report=REPORT, silent_s=70, unhealthy_s=5)
    patient = seen(pod(), heard)
    assert (patient.has_reported, patient.silent_s, patient.unhealthy_s) == (True, 70, 5)
    ending = pod()
    ending["metadata"]["deletionTimestamp"] = ago(90)
    [lost] = engine_pods([ending], {}, frozenset({"node-a"}), NOW)
    assert (lost.is_terminating, lost.overdue_s, lost.is_on_lost_node) == (True, 90, True)


def test_routers_are_asked_about_pools_that_fell_silent() -> None:
    silent = EngineHealth(pool="large", report=REPORT, silent_s=60)
    never = EngineHealth(pool="third", silent_s=9999)
    heard = EngineHealth(pool="single", report=REPORT, silent_s=59)
    assert silent_pools([silent, never, heard], 60) == {"large"}


def test_a_node_is_asked_for_when_its_pod_is_overdue_or_no_longer_ready() -> None:
    assert doubtful_nodes([pod()], NOW) == frozenset()
    assert node_wait_s(pod(), NOW) is None
    assert node_wait_s(pod(ready=False, since=5), NOW) == 15
    assert doubtful_nodes([pod(ready=False, since=20)], NOW) == {"node-a"}
    loading = pod(ready=False, since=20, component="follower")
    assert doubtful_nodes([loading], NOW) == frozenset(), "its group may still load"
    ending = pod()
    ending["metadata"]["deletionTimestamp"] = ago(-30)
    assert (doubtful_nodes([ending], NOW), node_wait_s(ending, NOW)) == (frozenset(), 30)
    ending["metadata"]["deletionTimestamp"] = ago(1)
    assert doubtful_nodes([ending], NOW) == {"node-a"}


@pytest.mark.parametrize(("status", "lost"), [("True", False), ("False", True), ("Unknown", True)])
def test_a_node_is_lost_when_it_is_gone_or_not_ready(status: str, lost: bool) -> None:
    assert is_lost({"status": {"conditions": [{"type": "Ready", "status": status}]}}) is lost
    assert is_lost(None)


def test_the_status_remembers_an_hour_and_counts_nothing_that_was_forced() -> None:
    patient = seen(pod())
    restarts = [Restart(patient, "NotReady", "m"), Restart(patient, "NodeLost", "m", by_force=True)]
    old = RestartEvent("single", "s-single-1", "Silent", NOW - timedelta(seconds=3601))
    kept = RestartEvent("single", "s-single-2", "Silent", NOW - timedelta(seconds=10))
    listed = restarts_status([old, kept], restarts, NOW)
    assert [each["pod"] for each in listed] == ["s-single-2", "s-single-0"]
    again = restart_history({"healing": {"restarts": listed}})
    assert again == [kept, RestartEvent("single", "s-single-0", "NotReady", NOW)]


def test_what_was_done_is_told() -> None:
    patient = seen(pod())
    assert restart_note(Restart(patient, "NotReady", "m")).reason == "PodRestarted"
    assert restart_note(Restart(patient, "NodeLost", "m", by_force=True)).reason == "PodForgotten"
