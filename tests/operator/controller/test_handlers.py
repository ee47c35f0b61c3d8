"""The real operator process against an API server over HTTP.

With KUBECONFIG set it is that API server, in a namespace of its own; the tests that play the
workload controllers or inject faults run on the test server only.
"""

import json

import httpx
import pytest
from ullage_kubeapi.trial import CRDS, converged, quiet, read_crd, until

from ullage_operator.api.naming import JOB, OWNED

POOL = {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}}


def test_a_service_becomes_objects_that_it_owns(world, operator):
    assert world.create(pools={"large": POOL}).status_code == 201
    owned = converged(world)
    names = set(owned)
    assert {("statefulsets", "s-single"), ("statefulsets", "s-large")} <= names
    assert {("deployments", "s-router"), ("services", "s-router")} <= names
    # A Job is made only where a cache is to be warmed.
    always = {kind.plural for kind in OWNED if not kind.optional and kind != JOB}
    assert {plural for plural, _ in names} == always
    uid = world.service()["metadata"]["uid"]
    for obj in owned.values():
        (owner,) = obj["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (uid, True)
    assert world.service()["metadata"].get("finalizers", []) == []
    health = httpx.get(f"http://127.0.0.1:{operator.probes}/healthz")
    assert health.status_code == 200
    until(lambda: operator.reconciled(), "a reconciliation is counted")


def test_its_metrics_follow_prometheus_conventions(operator, check_exposition):
    until(lambda: "ullage_operator_objects{" in operator.exposition(), "objects are counted")
    text = operator.exposition()
    assert "process_cpu_seconds_total" in text
    check_exposition(text)


def test_an_edited_spec_changes_the_objects_and_a_removed_pool_goes(world, operator):
    world.create(pools={"large": POOL})
    converged(world)
    change = {"spec": {"pools": {"single": {"replicas": 3}, "large": None}}}
    assert world.patch(f"{world.services}/s", change).status_code == 200
    single = f"{world.path('statefulsets')}/s-single"
    until(lambda: world.get(single)["spec"]["replicas"] == 3, "replicas follow")
    until(lambda: not any("large" in name for _, name in world.owned()), "the pool is gone")


def test_drift_is_repaired(world, operator):
    world.create()
    converged(world)
    path = f"{world.path('statefulsets')}/s-single"
    before = world.get(path)
    edit = [{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": "evil"}]
    headers = {"Content-Type": "application/json-patch+json"}
    assert world.client.patch(path, json=edit, headers=headers).status_code == 200
    image = before["spec"]["template"]["spec"]["containers"][0]["image"]

    def repaired() -> bool:
        containers = world.get(path)["spec"]["template"]["spec"]["containers"]
        return containers[0]["image"] == image

    until(repaired, "the image is put back", 30)
    world.client.delete(path)
    until(lambda: world.get(path).get("metadata", {}).get("uid") not in
          (None, before["metadata"]["uid"]), "the StatefulSet is made anew", 30)  # fmt: skip


def test_what_others_add_stays(world, operator):
    world.create()
    converged(world)
    path = f"{world.path('services', '')}/s-router"
    note = {"metadata": {"annotations": {"example.dev/note": "kept"}}}
    world.patch(path, note)
    world.patch(f"{world.services}/s", {"spec": {"limits": {"maxOutputTokens": 64}}})
    converged(world)
    assert world.get(path)["metadata"]["annotations"]["example.dev/note"] == "kept"


def test_conditions_follow_the_workloads(world, operator, played):
    world.create(router={"replicas": 1})
    owned = converged(world)
    assert world.condition("Ready")["status"] == "False"
    for plural, name in [k for k in owned if k[0] in ("statefulsets", "deployments")]:
        generation = owned[plural, name]["metadata"]["generation"]
        status = {
            "observedGeneration": generation,
            "replicas": 1,
            "readyReplicas": 1,
            "availableReplicas": 1,
            "updatedReplicas": 1,
            "currentRevision": "r1",
            "updateRevision": "r1",
        }
        world.patch(f"{world.path(plural)}/{name}/status", {"status": status})
    until(lambda: world.condition("Ready").get("status") == "True", "Ready")
    since = world.condition("Ready")["lastTransitionTime"]
    assert world.service()["status"]["pools"]["single"]["readyReplicas"] == 1
    broken = {"status": {"readyReplicas": 0, "availableReplicas": 0}}
    world.patch(f"{world.path('statefulsets')}/s-single/status", broken)
    until(lambda: world.condition("Ready").get("status") == "False", "no longer Ready")
    assert world.condition("Ready")["lastTransitionTime"] >= since


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        ({"image": "registry.example/engine:2"}, "strategy is rolling"),
        ({"routing": {"largeRequestTokens": 9}}, "rolling out router"),
    ],
)
def test_the_status_never_calls_an_edit_settled_that_has_only_just_been_applied(
    world, operator, played, edit, what
):
    world.create(router={"replicas": 1}, rollout={"strategy": "Rolling"})
    counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas"), 1)
    for (plural, name), obj in converged(world).items():
        if plural in ("statefulsets", "deployments"):
            status = counts | {"observedGeneration": obj["metadata"]["generation"]}
            world.patch(f"{world.path(plural)}/{name}/status", {"status": status})
    until(lambda: world.condition("Progressing").get("reason") == "Settled", "it has settled")
    before = world.service()["metadata"]
    world.patch(f"{world.services}/s", {"spec": edit})
    converged(world)
    query = f"watch=true&timeoutSeconds=1&resourceVersion={before['resourceVersion']}"
    told = [json.loads(line) for line in world.client.get(f"{world.services}?{query}").iter_lines()]
    statuses = [event["object"]["status"] for event in told if event["type"] == "MODIFIED"]
    first = next(s for s in statuses if s["observedGeneration"] > before["generation"])
    [progressing] = [c for c in first["conditions"] if c["type"] == "Progressing"]
    assert (progressing["status"], progressing["reason"]) == ("True", "RollingOut")
    assert what in progressing["message"]


def test_deletion_leaves_nothing_and_needs_no_operator(world, start):
    operator = start()
    world.create()
    converged(world)
    assert operator.stop() == 0
    assert world.client.delete(f"{world.services}/s").status_code == 200
    until(lambda: world.service() == {} and world.owned() == {}, "all is collected")


def test_a_service_that_breaks_a_rule_is_refused_by_the_api(world):
    refused = world.create(pools={"single": {"gpus": 3}})
    assert refused.status_code == 422
    assert "parallelism" in refused.json()["message"]


def test_a_stored_service_that_became_invalid_says_so(world, start, played):
    loose = read_crd()
    schema = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del schema["properties"]["memory"]["properties"]["maxKV"]["pattern"]
    world.patch(f"{CRDS}/{loose['metadata']['name']}", {"spec": loose["spec"]})
    assert world.create(memory={"maxKV": "plenty"}).status_code == 201
    operator = start()
    until(lambda: world.condition("Ready").get("reason") == "InvalidSpec", "InvalidSpec")
    found = world.condition("Ready")
    assert found["status"] == "False"
    assert "not 'plenty'" in found["message"]
    assert world.owned() == {}
    assert operator.is_running


def test_a_restart_resumes_and_writes_nothing_needless(world, start, played):
    first = start()
    world.create()
    before = converged(world)
    until(lambda: quiet(played), "the operator settles")
    assert first.stop() == 0
    count = len(played.writes())
    second = start()
    until(lambda: second.reconciled(), "the new operator looks at the service")
    until(lambda: quiet(played), "the new operator settles")
    assert played.writes()[count:] == []
    assert world.owned() == before


def test_changes_made_while_the_operator_was_away_are_caught_up(world, start):
    first = start()
    world.create()
    converged(world)
    assert first.stop() == 0
    world.patch(f"{world.services}/s", {"spec": {"pools": {"single": {"replicas": 2}}}})
    start()
    single = f"{world.path('statefulsets')}/s-single"
    until(lambda: world.get(single)["spec"]["replicas"] == 2, "replicas follow")


@pytest.mark.parametrize(
    ("status", "paths"),
    [
        (0, {"POST": "/statefulsets|/configmaps", "PATCH": "/status"}),
        (409, {"POST": "/statefulsets", "PATCH": "/status"}),
        (500, {"POST": "/statefulsets|/configmaps", "PATCH": "/status"}),
    ],
)
def test_faults_of_the_api_server_are_lived_through(world, operator, played, status, paths):
    faults = [played.inject(method, path, status, times=2) for method, path in paths.items()]
    world.create()
    converged(world)
    until(lambda: ("statefulsets", "s-single") in world.owned(), "it is tried again")
    assert operator.is_running
    assert all(fault.times == 0 for fault in faults)


def test_a_service_that_replaces_a_deleted_one_gets_its_own_objects(world, operator):
    world.create()
    converged(world)
    before = world.service()["metadata"]["uid"]
    world.client.delete(f"{world.services}/s")
    world.create()
    after = world.service()["metadata"]["uid"]
    assert after != before

    def all_anew() -> bool:
        owners = [o["metadata"]["ownerReferences"][0]["uid"] for o in world.owned().values()]
        return set(owners) == {after} and len(owners) > 10

    until(all_anew, "every object belongs to the new service")


def test_one_operator_serves_all_namespaces_and_a_definition_that_comes_later(world, start, played):
    world.client.delete(f"{CRDS}/llmservices.serving.ullage.dev")
    start(everywhere=True)
    asked = "/apis/serving.ullage.dev/v1alpha1/llmservices"
    until(lambda: any(r[1].startswith(asked) for r in list(played.requests)), "it is asked for")
    world.client.post(CRDS, json=read_crd())
    assert world.create().status_code == 201
    assert ("statefulsets", "s-single") in converged(world)
    # What the chart's ClusterRole leaves out.
    assert not any(path.startswith("/api/v1/namespaces?") for _, path, _ in played.requests)


def loosen(world, section: str, field: str, what: str) -> None:
    """Put a definition in place that says less of a field than the operator's own."""
    crd = read_crd()
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del schema["properties"][section]["properties"][field][what]
    world.patch(f"{CRDS}/{crd['metadata']['name']}", {"spec": crd["spec"]})


def test_an_invalid_edit_keeps_what_runs_and_a_valid_one_goes_on(world, start, played):
    first = start()
    world.create()
    before = converged(world)
    loosen(world, "memory", "maxKV", "pattern")
    world.patch(f"{world.services}/s", {"spec": {"memory": {"maxKV": "plenty"}}})
    until(lambda: world.condition("Degraded").get("reason") == "InvalidSpec", "InvalidSpec")
    assert world.condition("Degraded")["message"].startswith("spec.memory.maxKV: must be a")
    assert world.owned().keys() == before.keys()
    path = f"{world.path('statefulsets')}/s-single"
    lost = world.get(path)
    world.client.delete(path)
    until(lambda: world.get(path).get("metadata", {}).get("uid") not in
          (None, lost["metadata"]["uid"]), "the StatefulSet is made anew", 30)  # fmt: skip
    assert world.get(path)["spec"]["template"] == lost["spec"]["template"]
    # Another operator knows the spec from before, too.
    assert first.stop() == 0
    world.client.delete(f"{world.path('deployments')}/s-router")
    start()
    until(lambda: ("deployments", "s-router") in world.owned(), "the router is made anew", 30)
    assert world.condition("Degraded")["reason"] == "InvalidSpec"
    world.patch(f"{world.services}/s", {"spec": {"memory": {"maxKV": "1Gi"}}})
    until(lambda: world.condition("Degraded").get("reason") != "InvalidSpec", "valid again")


def test_a_service_that_declares_fields_of_0_1_0_is_held_until_it_is_applied_anew(world, operator):
    def apply(slo: dict[str, object]) -> None:
        note = json.dumps({"spec": {"slo": slo}})
        name = "kubectl.kubernetes.io/last-applied-configuration"
        change = {"metadata": {"annotations": {name: note}}, "spec": {"memory": {"maxKV": "1Gi"}}}
        assert world.patch(f"{world.services}/s", change).status_code == 200

    def template() -> object:
        return world.get(f"{world.path('statefulsets')}/s-single")["spec"]["template"]

    world.create()
    converged(world)
    before = template()
    apply({"errorRate": 0.02})
    until(lambda: world.condition("Degraded").get("reason") == "InvalidSpec", "InvalidSpec")
    message = world.condition("Degraded")["message"]
    assert message.startswith("spec.slo.errorRate: was dropped by the API server; write error")
    assert "errorPercent: 2 instead, and apply the manifest again" in message
    assert template() == before
    apply({"errorPercent": 2})
    until(lambda: world.condition("Degraded").get("reason") != "InvalidSpec", "it is carried out")


def test_a_definition_older_than_the_operator_is_filled_and_told_of(world, start, played):
    loosen(world, "memory", "hostKV", "default")
    assert world.create().status_code == 201
    assert "hostKV" not in world.service()["spec"]["memory"]
    start()
    assert ("statefulsets", "s-single") in converged(world)
    until(lambda: world.condition("DefinitionOutdated"), "it says so")
    found = world.condition("DefinitionOutdated")
    assert found["status"] == "True"
    assert "spec.memory.hostKV; apply the crds/" in found["message"]
    loosen(world, "memory", "maxKV", "description")
    world.patch(f"{world.services}/s", {"spec": {"routing": {"largeRequestTokens": 9}}})
    until(lambda: not world.condition("DefinitionOutdated"), "the definition is the operator's")


def test_a_watch_whose_history_is_gone_starts_anew(world, operator, played):
    world.create()
    converged(world)
    played.compact()
    played.drop_watches()
    path = f"{world.path('statefulsets')}/s-single"
    lost = world.get(path)["metadata"]["uid"]
    world.client.delete(path)
    until(lambda: world.get(path), "the StatefulSet is made anew")
    assert world.get(path)["metadata"]["uid"] != lost


def test_another_owners_object_is_not_taken_over(world, operator):
    mine = {"metadata": {"name": "s-router"}, "data": {"a": "b"}}
    world.client.post(world.path("configmaps", ""), json=mine)
    world.create()
    until(lambda: "s-router" in world.condition("Ready").get("message", ""), "it says whose")
    assert world.get(f"{world.path('configmaps', '')}/s-router")["data"] == {"a": "b"}
    world.client.delete(f"{world.path('configmaps', '')}/s-router")
    until(lambda: ("configmaps", "s-router") in world.owned(), "it goes on once the name is free")
