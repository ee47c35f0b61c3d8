"""Objects that cannot be written: the rest goes on, the status says so, and tries become rarer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from copy import deepcopy
from typing import Any, cast

from prometheus_client import CollectorRegistry
from ullage_kubeapi.trial import converged, until

from ullage_operator.act import Acted
from ullage_operator.cluster import Cluster
from ullage_operator.errors import ClusterDenied, ClusterPostponed, ClusterRefused
from ullage_operator.healer import Healer
from ullage_operator.kinds import CONFIG_MAP, SERVICE, WATCHED
from ullage_operator.metrics import ReconcileMetrics
from ullage_operator.publisher import Publisher
from ullage_operator.reconcile import Reconciler
from ullage_operator.scaler import Scaler
from ullage_operator.settings import Settings
from ullage_operator.store import Denied, Scope, ServiceKey, Store

SOON = 60
KEY = ServiceKey("models", "demo")


def degraded(world: Any) -> str:
    return str(world.condition("Degraded").get("reason"))


def test_a_refused_object_costs_neither_the_others_nor_readiness(world, played, start) -> None:
    path = f"/apis/policy/v1/namespaces/{world.namespace}/poddisruptionbudgets"
    mine = {"metadata": {"name": "s-router"}, "spec": {"maxUnavailable": 1}}
    assert world.client.post(path, json=mine).status_code == 201
    start()
    world.create(router={"replicas": 1})
    until(lambda: degraded(world) == "ApplyFailed", "the condition says so", SOON)
    message = world.condition("Degraded")["message"]
    assert message.startswith("PodDisruptionBudget s-router: it exists and is not this service's")
    owned = converged(world)
    assert {("deployments", "s-router"), ("statefulsets", "s-single")} <= owned.keys()
    assert world.condition("Ready")["reason"] == "ApplyFailed"  # nothing serves yet
    for plural, name in [k for k in owned if k[0] in ("statefulsets", "deployments")]:
        generation = owned[plural, name]["metadata"]["generation"]
        counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas"), 1)
        status = counts | {"observedGeneration": generation}
        world.patch(f"{world.path(plural)}/{name}/status", {"status": status})
    until(lambda: world.condition("Ready").get("status") == "True", "it serves", SOON)
    assert degraded(world) == "ApplyFailed"
    world.client.delete(f"{path}/s-router")
    until(lambda: degraded(world) == "AsExpected", "it goes on once the name is free", SOON)


def test_a_quota_or_webhook_is_told_and_waits_for_nothing_else(world, played, start) -> None:
    fault = played.inject("PATCH", "/poddisruptionbudgets/", 500, times=10_000)
    start()
    world.create()
    until(lambda: degraded(world) == "ApplyDelayed", "the condition says so", SOON)
    assert "PodDisruptionBudget s-single: PATCH" in world.condition("Degraded")["message"]
    assert ("statefulsets", "s-single") in world.owned()
    fault.times = 0
    until(lambda: degraded(world) == "AsExpected", "it is tried again", SOON)
    assert ("poddisruptionbudgets", "s-single") in world.owned()


def test_pods_wait_for_their_configuration(world, played, start) -> None:
    fault = played.inject("PATCH", "/configmaps/s-single", 500, times=10_000)
    start()
    world.create()
    until(lambda: degraded(world) == "ApplyDelayed", "the condition says so", SOON)
    kept = world.owned().keys()
    assert ("deployments", "s-router") in kept and ("statefulsets", "s-single") not in kept
    fault.times = 0
    until(lambda: ("statefulsets", "s-single") in world.owned(), "they start", SOON)


def obj(kind: str, name: str, api: str = "v1") -> dict[str, Any]:
    meta = {"name": name, "namespace": "models"}
    return {"apiVersion": api, "kind": kind, "metadata": meta}


def test_what_was_not_remembered_is_not_done() -> None:
    acted = Acted("demo")
    engines = obj("StatefulSet", "demo-single", "apps/v1")
    router = obj("Deployment", "demo-router", "apps/v1")
    acted.failed(obj("Service", "demo-single"), ClusterPostponed("later", 2.0))
    assert not acted.holds(engines, None)
    acted.failed(obj("ConfigMap", "demo-router"), ClusterDenied("no", "patch", 30.0))
    assert acted.holds(router, None) and not acted.holds(engines, None)
    acted.failed(obj("ConfigMap", "demo-rollout"), ClusterRefused("never"))
    assert acted.holds(engines, None) and not acted.holds(obj("ConfigMap", "demo-single"), None)
    assert list(acted.denied) == [Denied("patch", "configmaps", "models")]
    assert (acted.result, acted.delay_s) == ("temporary", 2.0)
    [trouble] = acted.troubles
    assert trouble.reason == "ApplyFailed"
    assert str(trouble) == "ConfigMap demo-rollout: never; Service demo-single: later"


def test_few_of_many_are_named() -> None:
    acted = Acted("demo")
    for number in range(5):
        acted.failed(obj("Service", f"s{number}"), ClusterPostponed("x" * 9999, 1.0))
    [trouble] = acted.troubles
    assert trouble.reason == "ApplyDelayed"
    assert trouble.message.endswith("; and 2 more") and len(trouble.message) < 4096
    assert not any(acted.holds(obj("StatefulSet", f"s{n}", "apps/v1"), None) for n in range(5))


class Broken:
    """A cluster whose quota is spent, until it is raised."""

    def __init__(self) -> None:
        self.is_full = True
        self.status: dict[str, Any] = {}

    async def get(self, *_: Any) -> None:
        return None

    async def apply(self, obj: dict[str, Any]) -> dict[str, Any]:
        if self.is_full:
            raise ClusterPostponed("exceeded quota", 1.0)
        return obj

    async def apply_status(self, _: Any, status: dict[str, Any]) -> None:
        self.status = status


async def delays(manifest: dict[str, Any], tries: int) -> list[float | None]:
    """When to look again after each of so many tries in vain, and after one that succeeds."""
    broken = Broken()
    async with reconciling(cast(Cluster, broken), listed(manifest)) as made:
        waits = [await made.reconcile(KEY) for _ in range(tries)]
        [reason] = [c["reason"] for c in broken.status["conditions"] if c["type"] == "Degraded"]
        assert reason == "ApplyDelayed"
        broken.is_full = False
        waits.append(await made.reconcile(KEY))
    return waits


def listed(manifest: dict[str, Any]) -> Store:
    """A store that sees a service and nothing else."""
    store = Store([Scope(kind, "") for kind in WATCHED], lambda _: None)
    for kind in WATCHED:
        store.listed(Scope(kind, ""), [manifest] if kind is SERVICE else [], "1")
    return store


@contextlib.asynccontextmanager
async def reconciling(cluster: Cluster, store: Store) -> AsyncIterator[Reconciler]:
    publisher = Publisher(cluster)
    healer, scaler = Healer(cluster, publisher, lambda _: None), Scaler[ServiceKey](lambda _: None)
    metrics = ReconcileMetrics(CollectorRegistry())
    made = Reconciler(cluster, store, Settings(), metrics, 3000.0, publisher, healer, scaler)
    try:
        yield made
    finally:
        for each in (made, healer, scaler):
            await each.close()


def test_tries_become_rarer_up_to_one_a_minute(manifest) -> None:
    *tried, last = [wait or 0.0 for wait in asyncio.run(delays(manifest(), 9))]
    for number, wait in enumerate(tried):
        longest = 2 ** min(number, 6)
        assert 0.8 * longest <= wait <= longest
    assert last > 2000  # as rarely as any other


class Kept(Broken):
    """A cluster that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.applied: list[tuple[str, str]] = []

    async def apply(self, obj: dict[str, Any]) -> dict[str, Any]:
        named = obj["kind"], obj["metadata"]["name"]
        self.applied.append(named)
        version = str(1000 + len(self.applied))
        kept = deepcopy(obj)
        kept["metadata"] |= {"resourceVersion": version, "generation": 1}
        self.objects[named] = kept
        return kept

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [obj for (name, _), obj in self.objects.items() if name == kind]


ROUTER = [("ConfigMap", "demo-router"), ("Deployment", "demo-router")]
CONFIG_MAPS = Scope(CONFIG_MAP, "")


async def applied(made: Reconciler, kept: Kept) -> list[tuple[str, str]]:
    """What one reconciliation applies of the router's configuration and pods, in order."""
    kept.applied.clear()
    await made.reconcile(KEY)
    return [named for named in kept.applied if named in ROUTER]


def test_routers_wait_while_configurations_cannot_be_seen(manifest) -> None:
    """Pods that were made before their configuration would read the old one for good."""

    async def scenario() -> None:
        first, kept = manifest(), Kept()
        store = listed(first)
        store.denied(CONFIG_MAPS, "list")
        async with reconciling(cast(Cluster, kept), store) as made:
            assert await applied(made, kept) == []
            assert ("Service", "demo-router") in kept.applied, "the rest goes on"
            store.listed(CONFIG_MAPS, [], "1")
            assert await applied(made, kept) == ROUTER
            store.denied(CONFIG_MAPS, "list")
            edit(store, first, 4, router={"replicas": 5})
            assert await applied(made, kept) == ROUTER[1:], "which reads nothing new"
            edit(store, first, 5, router={"replicas": 5}, routing={"largeRequestTokens": 9})
            assert await applied(made, kept) == []
            store.listed(CONFIG_MAPS, kept.of("ConfigMap"), "1")
            assert await applied(made, kept) == ROUTER

    asyncio.run(scenario())


def edit(store: Store, manifest: dict[str, Any], generation: int, **spec: Any) -> None:
    """What a watch tells of an edited service."""
    meta = {"generation": generation, "resourceVersion": str(generation * 1000)}
    edited = {"metadata": manifest["metadata"] | meta, "spec": manifest["spec"] | spec}
    store.changed(Scope(SERVICE, ""), manifest | edited)
