"""The operator process and an API server: followers of an engine that spans several pods.

Pods are made by hand, as their StatefulSets' controller would.
"""

from typing import TYPE_CHECKING, Any

from ullage_kubeapi.trial import converged, until

from ullage_operator.api.naming import GROUP_REVISION

if TYPE_CHECKING:
    World = Any

WIDE = {"gpus": 4, "nodes": 2}
LONG_S = 60


def make_pod(world: "World", workload: str, index: int, revision: str = "") -> str:
    """Makes a pod of a StatefulSet's template, or of another revision of it."""
    template = world.get(f"{world.path('statefulsets')}/{workload}")["spec"]["template"]
    name = f"{workload}-{index}"
    annotations = template["metadata"]["annotations"]
    if revision:
        annotations[GROUP_REVISION] = revision
    meta = {"name": name, "labels": template["metadata"]["labels"], "annotations": annotations}
    meta["ownerReferences"] = world.pod_owner(workload)
    spec = {"containers": [{"name": "engine", "image": "i"}]}
    made = world.client.post(world.path("pods", ""), json={"metadata": meta, "spec": spec})
    assert made.status_code == 201, made.text
    return name


def test_old_followers_end_once_their_leader_is_renewed(world, played, operator) -> None:
    created = world.create(engine="VLLM", pools={"large": WIDE | {"replicas": 2}})
    assert created.status_code == 201, created.text
    converged(world)
    kept = make_pod(world, "s-large-group", 0, "old")
    ended = make_pod(world, "s-large-group", 1, "old")
    make_pod(world, "s-large", 0, "old")
    make_pod(world, "s-large", 1)
    pod = f"{world.path('pods', '')}/"
    until(lambda: not world.get(pod + ended), "the renewed leader's follower ends", LONG_S)
    assert world.get(pod + kept)
    scaled = {"spec": {"pools": {"large": {"replicas": 3}}}}
    assert world.patch(f"{world.services}/s", scaled).status_code == 200
    group = f"{world.path('statefulsets')}/s-large-group"
    until(lambda: world.get(group)["spec"]["replicas"] == 3, "a third follower comes", LONG_S)
    other = world.patch(f"{world.services}/s", {"spec": {"pools": {"large": {"nodes": 1}}}})
    assert other.status_code == 422
    assert "nodes cannot change" in other.text


def test_the_disks_of_a_pool_stay_and_what_becomes_of_them_may_change(world) -> None:
    disk = {"claimTemplate": {"size": "1Gi"}}
    assert world.create(pools={"single": {"modelCache": disk}}).status_code == 201

    def edited(**pool: Any) -> Any:
        return world.patch(f"{world.services}/s", {"spec": {"pools": {"single": pool}}})

    for cache in (
        {"claimTemplate": {"size": "2Gi"}},
        {"claimTemplate": {"storageClassName": "fast"}},
        {"claimTemplate": None},
        {"claimTemplate": None, "claimName": "c"},
    ):
        refused = edited(modelCache=cache)
        assert refused.status_code == 422, cache
        assert "claimTemplate cannot change" in refused.text, cache
        assert "spec.pools.single.modelCache" in refused.text or "spec.pools[" in refused.text
    kept = edited(persistentVolumeClaimRetentionPolicy={"whenDeleted": "Retain"}, replicas=2)
    assert kept.status_code == 200, kept.text
    more = {"spec": {"pools": {"other": {"role": "Overflow", "modelCache": disk | {}}}}}
    assert world.patch(f"{world.services}/s", more).status_code == 200
    gone = {"spec": {"pools": {"other": None}}}
    assert world.patch(f"{world.services}/s", gone).status_code == 200
