"""A pool's size is handed over to another scaler, and taken back, without a jump."""

import pytest
from ullage_kubeapi.trial import MERGE, converged, until


@pytest.fixture
def operator(start):
    return start()


def test_the_number_of_engines_is_handed_over_and_taken_back(world, operator):
    # No engine is ever ready here: a canary of the edit would first be waited with for a minute.
    world.create(pools={"single": {"replicas": 3}}, rollout={"strategy": "Rolling"})
    converged(world)
    path = f"{world.path('statefulsets')}/s-single"

    def owners() -> set[str]:
        fields = world.get(path)["metadata"]["managedFields"]
        return {f["manager"] for f in fields if "f:replicas" in f["fieldsV1"].get("f:spec", {})}

    assert world.get(path)["spec"]["replicas"] == 3
    assert owners() == {"ullage-operator"}
    scaling = {"provider": "KEDA", "prometheusURL": "http://p:9090", "maxReplicas": 9}
    change = {"spec": {"pools": {"single": {"autoscaling": scaling}}}}
    assert world.patch(f"{world.services}/s", change).status_code == 200
    until(lambda: owners() == {"ullage-operator-scale"}, "the operator leaves replicas alone")
    assert world.get(path)["spec"]["replicas"] == 3
    scaled = world.client.patch(f"{path}/scale", json={"spec": {"replicas": 5}}, headers=MERGE)
    assert scaled.status_code == 200
    edit = {"spec": {"limits": {"maxOutputTokens": 64}}}  # makes the operator apply it anew
    before = world.get(path)["spec"]["template"]
    assert world.patch(f"{world.services}/s", edit).status_code == 200
    until(lambda: world.get(path)["spec"]["template"] != before, "the template follows")
    assert world.get(path)["spec"]["replicas"] == 5
    until(lambda: sizes(world) == 5, "the status follows")
    off = {"spec": {"pools": {"single": {"autoscaling": None, "replicas": 2}}}}
    assert world.patch(f"{world.services}/s", off).status_code == 200
    until(lambda: world.get(path)["spec"]["replicas"] == 2, "the spec decides again")


def sizes(world) -> int:
    pool = world.service().get("status", {}).get("pools", {}).get("single", {})
    return int(pool.get("desiredReplicas", 0))
