"""Services' lives amid faults: the real operator process against the test API server."""

import json
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from ullage_kubeapi.server import ApiServer
from ullage_kubeapi.trial import CRDS, converged, quiet, until

from ullage_operator.api.naming import OWNED

SOON = 45  # seconds; processes share few cores

ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def monitoring_kind(kind: str) -> dict[str, Any]:
    """The definition of one of the Prometheus operator's kinds, which takes any spec."""
    singular = kind.lower()
    group = "monitoring.coreos.com"
    schema = ANYTHING | {"properties": {"spec": ANYTHING}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{singular}s.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": f"{singular}s", "singular": singular, "kind": kind},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def scale(world, replicas: int) -> None:
    change = {"spec": {"pools": {"single": {"replicas": replicas}}}}
    assert world.patch(f"{world.services}/s", change).status_code == 200


def replicas(world) -> int:
    found = world.get(f"{world.path('statefulsets')}/s-single")
    return int(found.get("spec", {}).get("replicas", -1))


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
def test_a_second_operator_takes_over_and_the_first_writes_no_more(world, start, end):
    first = start("--lease-duration=8")
    until(lambda: first.leads, "the first leads", SOON)
    world.create()
    converged(world)
    second = start("--lease-duration=8")
    until(lambda: second.metric('objects{kind="LLMService"}') == 1, "the second watches", SOON)
    assert first.leads
    assert not second.leads
    assert second.reconciled() == 0
    first.signal(end)
    scale(world, 3)
    until(lambda: second.leads, "the second leads", SOON)
    until(lambda: replicas(world) == 3, "the edit is applied", SOON)
    if end == signal.SIGSTOP:
        first.signal(signal.SIGCONT)
        until(lambda: first.metric('objects{kind="Pod"}') == 0 and not first.leads, "steps back")
        scale(world, 2)
        until(lambda: replicas(world) == 2, "the edit is applied", SOON)
        until(lambda: second.leads and not first.leads, "only the second leads", SOON)


def test_a_lead_that_cannot_be_renewed_ends_and_comes_back(world, start, played):
    operator = start("--lease-duration=3")
    until(lambda: operator.leads, "it leads", SOON)
    world.create()
    converged(world)
    played.deny("update", "leases")
    until(lambda: not operator.leads, "it no longer leads", SOON)
    until(lambda: quiet(played), "nothing is written any more", SOON)
    scale(world, 2)
    assert quiet(played, 3.0)
    assert replicas(world) == 1
    played.grant("update", "leases")
    until(lambda: replicas(world) == 2, "the edit is applied once it leads again", SOON)


def test_without_election_no_lease_is_asked_for(world, start, played):
    operator = start("--no-leader-election")
    world.create()
    converged(world)
    assert operator.leads
    assert not any("/leases" in path for _, path, _ in played.requests)


@pytest.mark.parametrize("verb", ["create", "list"])
def test_a_missing_right_is_named_and_the_rest_goes_on(world, start, played, verb):
    played.deny(verb, "networkpolicies")
    start()
    world.create()
    until(lambda: world.condition("MissingPermission"), "the condition says so", SOON)
    message = world.condition("MissingPermission")["message"]
    assert f"{verb} networkpolicies.networking.k8s.io in namespace {world.namespace}" in message
    plurals = {plural for plural, _ in world.owned()}
    assert "statefulsets" in plurals
    assert "networkpolicies" not in plurals
    played.grant(verb, "networkpolicies")
    until(lambda: not world.condition("MissingPermission"), "the condition is gone", SOON)
    until(lambda: ("networkpolicies", "s-router") in world.owned(), "the rest is made", SOON)


def test_a_kind_that_cannot_be_listed_costs_itself_alone(world, start, played):
    for kind in ("PodMonitor", "PrometheusRule"):
        assert world.client.post(CRDS, json=monitoring_kind(kind)).status_code == 201
    fault = played.inject("GET", "/podmonitors", 500, times=10**6)
    operator = start()
    world.create()
    until(lambda: world.condition("KindsUnlisted"), "the condition says so", SOON)
    assert "podmonitors.monitoring.coreos.com: GET" in world.condition("KindsUnlisted")["message"]
    assert ("statefulsets", "s-single") in world.owned()
    assert httpx.get(f"http://127.0.0.1:{operator.metrics}/readyz").status_code == 200
    assert not [r for r in played.writes() if "/podmonitors" in r[1] and r[0] in ("POST", "PATCH")]
    fault.times = 0
    until(lambda: not world.condition("KindsUnlisted"), "the condition is gone", SOON)
    until(lambda: any(k == "podmonitors" for k, _ in world.owned()), "they are made", SOON)


def test_without_the_right_to_see_what_was_decided_engines_stay(world, start, played):
    first = start()
    world.create(image="one")
    converged(world)
    first.stop()
    played.deny("list", "configmaps")
    start()

    def image() -> str:
        found = world.get(f"{world.path('statefulsets')}/s-single")
        return str(found["spec"]["template"]["spec"]["containers"][0]["image"])

    change = {"spec": {"image": "two", "router": {"replicas": 3}}}
    assert world.patch(f"{world.services}/s", change).status_code == 200
    told = until(
        lambda: (found := world.condition("RolloutHealthy"))["status"] == "False" and found,
        "it says that it cannot know what was decided",
        SOON,
    )
    assert told["reason"] == "MemoryUnseen"
    routers = f"{world.path('deployments')}/s-router"
    until(lambda: world.get(routers)["spec"]["replicas"] == 3, "the rest goes on", SOON)
    assert image() == "one"
    played.grant("list", "configmaps")
    until(lambda: world.condition("RolloutHealthy")["status"] == "True", "it knows again", SOON)


def test_without_the_right_to_see_services_the_log_says_so(world, start, played, tmp_path):
    played.deny("list", "llmservices")
    operator = start()
    log = tmp_path / "operator-0.log"
    wanted = "missing permission: list llmservices.serving.ullage.dev"
    until(lambda: wanted in log.read_text(), "the log says so", SOON)
    assert log.read_text().count(wanted) == 1
    world.create()
    played.grant("list", "llmservices")
    converged(world)
    assert operator.is_running


def test_kinds_that_come_and_go_are_noticed(world, start, played):
    start()
    world.create()
    converged(world)
    assert world.condition("MonitoringAvailable")["status"] == "False"
    for kind in ("PodMonitor", "PrometheusRule"):
        assert world.client.post(CRDS, json=monitoring_kind(kind)).status_code == 201
    monitors = f"/apis/monitoring.coreos.com/v1/namespaces/{world.namespace}/podmonitors"
    until(lambda: len(world.get(monitors).get("items", ())) == 2, "monitors are made", SOON)
    until(lambda: world.condition("MonitoringAvailable")["status"] == "True", "it says so", SOON)
    world.client.delete(f"{CRDS}/podmonitors.monitoring.coreos.com")
    played.drop_watches()
    until(lambda: world.condition("MonitoringAvailable")["status"] == "False", "it is gone", SOON)


def drop(played: ApiServer) -> None:
    played.drop_watches()


def lose_connections(played: ApiServer) -> None:
    played.inject("GET", WATCH, 0, times=2)
    played.drop_watches()


def fail_with(status: int) -> Callable[[ApiServer], None]:
    def fail(played: ApiServer) -> None:
        played.inject("GET", WATCH, status, times=2, retry_after=1)
        played.fail_watches(status)

    return fail


def refuse_lists(played: ApiServer) -> None:
    for status in (500, 410):
        played.inject("GET", r"/statefulsets\?(?!.*watch=)", status)
    played.compact()
    played.drop_watches()


WATCH = r"/statefulsets\?.*watch="
HARMS = (drop, lose_connections, fail_with(500), fail_with(410), fail_with(429), refuse_lists)


def test_lost_watches_are_made_good(world, operator, played):
    world.create()
    converged(world)
    for number, harm in enumerate(HARMS, 2):
        harm(played)
        world.client.delete(f"{world.path('statefulsets')}/s-single")
        until(lambda: ("statefulsets", "s-single") in world.owned(), "it is made anew", SOON)
        scale(world, number)
        until(lambda number=number: replicas(world) == number, "edits are seen", SOON)
    assert operator.is_running


def test_a_service_deleted_in_a_watch_gap_is_not_made_again(world, operator, played):
    world.create()
    converged(world)
    played.inject("GET", r"watch=", 500, times=30)
    played.drop_watches()
    world.client.delete(f"{world.services}/s")
    played.compact()
    until(lambda: world.owned() == {}, "all is collected", SOON)
    until(lambda: operator.metric('objects{kind="LLMService"}') == 0, "it is forgotten", SOON)
    until(lambda: quiet(played, 3.0), "nothing is written")
    assert world.owned() == {}


def test_a_service_deleted_while_it_is_being_made_leaves_nothing(world, operator, played):
    slow = played.inject("POST", "/deployments|/statefulsets", 200, times=2, delay_s=1.0)
    world.create()
    until(lambda: slow.times < 2, "it is being made", SOON)
    world.client.delete(f"{world.services}/s")
    until(lambda: slow.times == 0 or world.owned() == {}, "the run ends", SOON)
    until(lambda: quiet(played, 3.0), "nothing more is written", SOON)
    assert world.owned() == {}
    assert world.service() == {}


def test_an_operator_killed_amid_its_writes_leaves_work_that_the_next_ends(world, start, played):
    first = start("--lease-duration=2")
    slow = played.inject("POST", r"/services\?", 200, times=1, delay_s=10.0)
    world.create()
    until(lambda: slow.times == 0, "it is in the middle", SOON)
    first.signal(signal.SIGKILL)
    assert ("deployments", "s-router") not in world.owned()
    second = start("--lease-duration=2")
    until(lambda: ("deployments", "s-router") in world.owned(), "the rest is made", SOON)
    converged(world)
    assert second.is_running


def test_a_conflict_over_an_object_is_tried_again(world, operator, played):
    fault = played.inject("POST", "/configmaps", 409, times=3)
    world.create()
    until(lambda: ("statefulsets", "s-single") in world.owned(), "it goes on", SOON)
    assert fault.times == 0


def test_a_reconciliation_lists_nothing(world, operator, played):
    world.create()
    converged(world)
    until(lambda: quiet(played), "the operator settles", SOON)
    mark = len(played.requests)
    scale(world, 2)
    until(lambda: replicas(world) == 2, "the edit is applied", SOON)
    until(lambda: quiet(played), "the operator settles", SOON)
    asked = played.requests[mark:]
    lists = [path for _, path, _ in asked if "labelSelector" in path and "watch=" not in path]
    absent = [f"/{kind.plural}?" for kind in OWNED if kind.optional]  # asked for now and then
    assert not [path for path in lists if not any(plural in path for plural in absent)]
    patched = [path for method, path, _ in asked if method == "PATCH" and "/events/" not in path]
    assert [path.split("?")[0].rpartition("/")[2] for path in patched] == [
        "s",
        "s-rollout",  # once: what was created is from now on applied
        "s-rollout",
        "s-single",
        "s-single",
        "status",
    ]


def test_its_health_says_what_it_sees(world, operator):
    world.create()
    converged(world)
    found: dict[str, Any] = json.loads(
        httpx.get(f"http://127.0.0.1:{operator.probes}/healthz").text
    )
    assert (found["services"], found["complete"], found["leads"]) == (1, True, True)
