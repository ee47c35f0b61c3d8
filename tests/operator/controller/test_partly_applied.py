"""Objects that cannot be written: the rest goes on, the status says so, and tries become rarer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from aiohttp import web
from ullage_kubeapi import checks
from ullage_kubeapi.trial import converged, relist, until

from ullage_common.wire.load_report import PoolReport
from ullage_operator.api.errors import (
    ClusterConflict,
    ClusterDenied,
    ClusterPostponed,
    ClusterRefused,
    Temporary,
)
from ullage_operator.api.naming import CONFIG_MAP, OWNED, POD, SERVICE, STATEFUL_SET, WATCHED
from ullage_operator.api.settings import Settings
from ullage_operator.conditions.diagnosis import MOUNTING_S
from ullage_operator.controller.apply import Applier, ApplyResult
from ullage_operator.controller.autoscaler import Autoscaler
from ullage_operator.controller.headroom_streams import StreamTimes
from ullage_operator.controller.healer import Healer
from ullage_operator.controller.reconciler import Reconciler, ReconcileTimes
from ullage_operator.controller.rollout_queue import RolloutQueue
from ullage_operator.kube.cache import Cache, Denied, Scope, ServiceKey
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.events import EventRecorder
from ullage_operator.policy.restarts import EnginePod, Restart
from ullage_operator.rollout.stages import QUEUED, RolloutProgress, RolloutStage

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SOON = 60
KEY = ServiceKey("models", "demo")


def degraded(world: Any) -> str:
    return str(world.condition("Degraded").get("reason"))


def test_a_refused_object_costs_neither_the_others_nor_readiness(world, played, start) -> None:
    path = f"/apis/networking.k8s.io/v1/namespaces/{world.namespace}/networkpolicies"
    mine = {"metadata": {"name": "s-router"}, "spec": {"podSelector": {}}}
    assert world.client.post(path, json=mine).status_code == 201
    start()
    world.create(router={"replicas": 1})
    until(lambda: degraded(world) == "ApplyFailed", "the condition says so", SOON)
    message = world.condition("Degraded")["message"]
    assert message.startswith("NetworkPolicy s-router: it exists and is not this service's")
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
    fault = played.inject("POST", "/networkpolicies", 500, times=10_000)
    start()
    world.create()
    until(lambda: degraded(world) == "ApplyDelayed", "the condition says so", SOON)
    assert "NetworkPolicy s-router: POST" in world.condition("Degraded")["message"]
    assert ("statefulsets", "s-single") in world.owned()
    fault.times = 0
    until(lambda: degraded(world) == "AsExpected", "it is tried again", SOON)
    assert ("networkpolicies", "s-router") in world.owned()


def test_what_kubernetes_refuses_of_pods_is_told_with_the_part_of_the_manifest() -> None:
    result = ApplyResult("demo")
    labels = {"serving.ullage.dev/pool": "large-next"}
    pods = {"kind": "StatefulSet", "metadata": {"name": "demo-large-next", "labels": labels}}
    result.on_failed(pods, ClusterRefused("spec.template.spec.dnsPolicy: Unsupported value"))
    [problem] = result.problems
    assert problem.message.startswith("StatefulSet demo-large-next: spec.template.spec.dnsPolicy: ")
    assert problem.message.endswith("correct spec.pools.large, which describes its pods")


def test_a_missing_secret_is_named_by_the_pods_events(world, played, start, monkeypatch) -> None:
    start()
    world.create(router={"replicas": 1})
    owned = converged(world)
    labels = owned["statefulsets", "s-single"]["spec"]["template"]["metadata"]["labels"]
    container = {"name": "engine", "image": "x"}
    body = {
        "metadata": {
            "name": "s-single-0",
            "labels": labels,
            "ownerReferences": world.pod_owner("s-single"),
        },
        "spec": {"nodeName": "node-a", "containers": [container]},
    }
    pods = world.path("pods", "")
    # Some of the time that pods have for mounting has passed, and the operator waits for the rest.
    created = datetime.now(UTC) - timedelta(seconds=MOUNTING_S - 3)
    with monkeypatch.context() as patch:
        patch.setattr(checks, "now", lambda: created.strftime("%Y-%m-%dT%H:%M:%SZ"))
        made = world.client.post(pods, json=body).json()
    state = {"waiting": {"reason": "ContainerCreating"}}
    status = {
        "conditions": [{"type": "PodReadyToStartContainers", "status": "False"}],
        "containerStatuses": [container | {"restartCount": 0, "ready": False, "state": state}],
    }
    assert world.patch(f"{pods}/s-single-0/status", {"status": status}).status_code == 200
    note = 'MountVolume.SetUp failed for volume "keys" : secret "team-keys" not found'
    for name, written, kind in (("e1", note, "Warning"), ("e2", "Pulled", "Normal")):
        event = {
            "metadata": {"name": name},
            "reason": "FailedMount",
            "note": written,
            "type": kind,
            "regarding": {"kind": "Pod", "name": "s-single-0", "uid": made["metadata"]["uid"]},
        }
        answer = world.client.post(world.path("events", "events.k8s.io"), json=event)
        assert answer.status_code == 201, answer.text
    until(lambda: degraded(world) == "FailedMount", "the condition says so", SOON)
    assert note in world.condition("Degraded")["message"]
    assert world.condition("Progressing")["status"] == "True"


def test_pods_wait_for_their_configuration(world, played, start) -> None:
    path = f"/api/v1/namespaces/{world.namespace}/configmaps"
    assert world.client.post(path, json={"metadata": {"name": "s-single"}}).status_code == 201
    start()
    world.create()
    until(lambda: degraded(world) == "ApplyFailed", "the condition says so", SOON)
    kept = world.owned().keys()
    assert ("deployments", "s-router") in kept
    assert ("statefulsets", "s-single") not in kept
    world.client.delete(f"{path}/s-single")
    until(lambda: ("statefulsets", "s-single") in world.owned(), "they start", SOON)


def obj(kind: str, name: str, api: str = "v1") -> dict[str, Any]:
    meta = {"name": name, "namespace": "models"}
    return {"apiVersion": api, "kind": kind, "metadata": meta}


def test_what_was_not_remembered_is_not_done() -> None:
    result = ApplyResult("demo")
    engines = obj("StatefulSet", "demo-single", "apps/v1")
    router = obj("Deployment", "demo-router", "apps/v1")
    result.on_failed(obj("Service", "demo-single"), ClusterPostponed("later", 2.0))
    assert not result.must_wait(engines, None)
    result.on_failed(obj("ConfigMap", "demo-router"), ClusterDenied("no", "patch", 30.0))
    assert result.must_wait(router, None)
    assert not result.must_wait(engines, None)
    result.on_failed(obj("ConfigMap", "demo-rollout"), ClusterRefused("never"))
    assert result.must_wait(engines, None)
    assert not result.must_wait(obj("ConfigMap", "demo-single"), None)
    assert list(result.denied) == [Denied("patch", "configmaps", "models")]
    assert (result.result, result.delay_s) == ("temporary", 2.0)
    [problem] = result.problems
    assert problem.reason == "ApplyFailed"
    assert str(problem) == "ConfigMap demo-rollout: never; Service demo-single: later"


def test_pods_do_not_wait_for_a_spec_that_is_only_kept() -> None:
    before = obj("ConfigMap", "demo-rollout") | {"data": {"state.json": "a", "spec.json": "a"}}
    engines = obj("StatefulSet", "demo-single", "apps/v1")
    for data, must_wait in (({"spec.json": "b"}, False), ({"state.json": "b"}, True)):
        result = ApplyResult("demo")
        wanted = before | {"data": before["data"] | data}
        result.on_failed(wanted, ClusterDenied("no", "patch", 30.0), before)
        assert result.must_wait(engines, None) == must_wait


def test_few_of_many_are_named() -> None:
    result = ApplyResult("demo")
    for number in range(5):
        result.on_failed(obj("Service", f"s{number}"), ClusterPostponed("x" * 9999, 1.0))
    [problem] = result.problems
    assert problem.reason == "ApplyDelayed"
    assert problem.message.endswith("; and 2 more")
    assert len(problem.message) < 4096
    assert not any(result.must_wait(obj("StatefulSet", f"s{n}", "apps/v1"), None) for n in range(5))


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

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        return await self.apply(obj)

    async def apply_status(self, _: Any, status: dict[str, Any]) -> None:
        self.status = status


async def delays(manifest: dict[str, Any], tries: int) -> list[float | None]:
    """When to look again after each of so many tries in vain, and after one that succeeds."""
    broken = Broken()
    async with reconciling(cast(Cluster, broken), listed(manifest)) as made:
        waits = [(await made.reconcile(KEY))[1] for _ in range(tries)]
        [reason] = [c["reason"] for c in broken.status["conditions"] if c["type"] == "Degraded"]
        assert reason == "ApplyDelayed"
        broken.is_full = False
        waits.append((await made.reconcile(KEY))[1])
    return waits


def listed(manifest: dict[str, Any]) -> Cache:
    """A cache that sees a service and nothing else."""
    cache = Cache([Scope(kind, "") for kind in WATCHED], lambda _: None)
    for kind in WATCHED:
        relist(cache, Scope(kind, ""), [manifest] if kind is SERVICE else [], 1)
    return cache


@contextlib.asynccontextmanager
async def reconciling(
    cluster: Cluster,
    cache: Cache,
    queue: RolloutQueue | None = None,
    on_sizes: Callable[[ServiceKey], None] = lambda _: None,
) -> AsyncIterator[Reconciler]:
    recorder = EventRecorder(cluster)
    healer = Healer(cluster, recorder, lambda _: None, StreamTimes())
    scaler = Autoscaler[ServiceKey](on_sizes)
    applier = Applier(cluster, cache, recorder)
    queue = queue or RolloutQueue(1, lambda _: None)
    times = ReconcileTimes(resync_s=3000.0)
    made = Reconciler(
        cluster, cache, applier, healer, scaler, queue, Settings(), times, "a/operator"
    )
    try:
        yield made
    finally:
        for each in (made, healer, scaler):
            await each.close()


def test_tries_become_rarer_up_to_one_a_minute(stored) -> None:
    *tried, last = [wait or 0.0 for wait in asyncio.run(delays(stored(), 9))]
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


def test_routers_wait_while_configurations_cannot_be_seen(stored) -> None:
    """Pods that were made before their configuration would read the old one for good."""

    async def scenario() -> None:
        first = stored()
        kept = Kept()
        cache = listed(first)
        cache.denied(CONFIG_MAPS, "list")
        async with reconciling(cast(Cluster, kept), cache) as made:
            assert await applied(made, kept) == []
            assert ("Service", "demo-router") in kept.applied, "the rest goes on"
            relist(cache, CONFIG_MAPS, [], 1)
            assert await applied(made, kept) == ROUTER
            cache.denied(CONFIG_MAPS, "list")
            edit(cache, first, 4, router={"replicas": 5})
            assert await applied(made, kept) == ROUTER[1:], "which reads nothing new"
            edit(cache, first, 5, router={"replicas": 5}, routing={"largeRequestTokens": 9})
            assert await applied(made, kept) == []
            relist(cache, CONFIG_MAPS, kept.of("ConfigMap"), 1)
            assert await applied(made, kept) == ROUTER

    asyncio.run(scenario())


def test_a_service_that_became_invalid_gives_its_place_in_the_rollouts_to_the_next(stored) -> None:
    async def scenario() -> list[str]:
        first = stored()
        woken = []
        cache = listed(first)
        queue = RolloutQueue(1, lambda key: woken.append(key.name))
        async with reconciling(cast(Cluster, Kept()), cache, queue) as made:
            assert queue.may_begin(KEY, lambda: ())
            queue.on_planned(KEY, RolloutProgress("one", NOW, RolloutStage.CANARY, "two"))
            for name in ("other", "third"):
                waits = RolloutProgress("one", NOW, reason=QUEUED)
                queue.on_planned(ServiceKey("models", name), waits)
            wrong = {"requests": {"cpu": "2500m"}, "limits": {"cpu": 2}}
            edit(cache, first, 4, router={"resources": wrong})
            assert (await made.reconcile(KEY))[0] == "invalid"
        return woken

    assert asyncio.run(scenario()) == ["other"]


def edit(cache: Cache, manifest: dict[str, Any], generation: int, **spec: Any) -> None:
    """What a watch tells of an edited service."""
    meta = {"generation": generation, "resourceVersion": str(generation * 1000)}
    sections = {name: manifest["spec"][name] | fields for name, fields in spec.items()}
    edited = {"metadata": manifest["metadata"] | meta, "spec": manifest["spec"] | sections}
    cache.changed(Scope(SERVICE, ""), manifest | edited)


SETS = Scope(STATEFUL_SET, "")
ENGINES = ("StatefulSet", "demo-single")
SCALED = {"single": {"autoscaling": {"maxReplicas": 5}}}


@contextlib.asynccontextmanager
async def a_router(**load: Any) -> AsyncIterator[dict[str, Any]]:
    """The pod of a router that serves this load of pool single."""
    report = dict.fromkeys(PoolReport.__struct_fields__, 0) | load

    async def answer(_: web.Request) -> web.Response:
        return web.json_response([{"single": report}])

    app = web.Application()
    app.router.add_get("/measures", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    labels = {
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": "router",
        "pod-template-hash": "abc",
    }
    owner = {"kind": "ReplicaSet", "name": "demo-router-abc", "uid": "x", "controller": True}
    meta = {"name": "r", "namespace": "models", "uid": "uid-r", "resourceVersion": "2"}
    try:
        yield {
            "metadata": meta | {"labels": labels, "ownerReferences": [owner]},
            "spec": {
                "containers": [
                    {"name": "router", "ports": [{"name": "metrics", "containerPort": port}]}
                ]
            },
            "status": {"phase": "Running", "podIP": "127.0.0.1"},
        }
    finally:
        await runner.cleanup()


def size(kept: Kept) -> int:
    return int(kept.objects[ENGINES]["spec"]["replicas"])


def test_a_service_made_again_between_two_looks_is_sized_like_a_new_one(stored) -> None:
    """As `kubectl replace --force` leaves it: its deletion and its creation come at once."""

    async def scenario() -> None:
        first = stored(pools=SCALED)
        kept = Kept()
        cache = listed(first)
        is_sized = asyncio.Event()
        load = {"ready": 1, "capacity_bytes": 100, "engine_requests": 9, "queue_bytes": 200}
        scaling = reconciling(cast(Cluster, kept), cache, on_sizes=lambda _: is_sized.set())
        async with a_router(**load) as pod, scaling as made:
            relist(cache, Scope(POD, ""), [pod], 2)
            await made.reconcile(KEY)
            assert size(kept) == 1
            await asyncio.wait_for(is_sized.wait(), 20)
            await made.reconcile(KEY)
            assert size(kept) > 1

            meta = first["metadata"] | {"uid": "uid-2", "generation": 1, "resourceVersion": "9000"}
            cache.changed(Scope(SERVICE, ""), first | {"metadata": meta})
            for kind in OWNED:
                relist(cache, Scope(kind, ""), [], 9000)
            await made.reconcile(KEY)
            assert size(kept) == 1

    asyncio.run(scenario())


async def made_once(manifest: dict[str, Any]) -> Kept:
    """What an operator leaves that ends after one reconciliation."""
    kept = Kept()
    async with reconciling(cast(Cluster, kept), listed(manifest)) as made:
        await made.reconcile(KEY)
    return kept


def seen_without_engines(manifest: dict[str, Any], kept: Kept) -> Cache:
    """A cache that sees all that was made except StatefulSets, which cannot be listed yet."""
    cache = listed(manifest)
    for kind in OWNED:
        relist(cache, Scope(kind, ""), kept.of(kind.name), 1)
    cache.denied(SETS, "list")
    return cache


def test_a_pool_keeps_its_size_while_statefulsets_cannot_be_listed(stored) -> None:
    async def scenario() -> None:
        first = stored(pools=SCALED)
        kept = await made_once(first)
        engines = kept.objects[ENGINES]
        engines["spec"]["replicas"] = 5
        engines["metadata"]["resourceVersion"] = "2000"
        cache = seen_without_engines(first, kept)
        is_sized = asyncio.Event()
        load = {"ready": 5, "capacity_bytes": 500, "headroom_bytes": 490, "engine_requests": 1}
        scaling = reconciling(cast(Cluster, kept), cache, on_sizes=lambda _: is_sized.set())
        async with a_router(**load) as pod, scaling as made:
            relist(cache, Scope(POD, ""), [pod], 2)
            await made.reconcile(KEY)
            relist(cache, SETS, [engines], 1)
            await made.reconcile(KEY)
            await asyncio.wait_for(is_sized.wait(), 20)
            await made.reconcile(KEY)
            assert size(kept) == 5

    asyncio.run(scenario())


def test_no_rollout_begins_while_statefulsets_cannot_be_listed(stored) -> None:
    async def scenario() -> None:
        first = stored(image="one")
        kept = await made_once(first)
        cache = seen_without_engines(first, kept)
        meta = first["metadata"] | {"generation": 4, "resourceVersion": "4000"}
        edited = first | {"metadata": meta, "spec": first["spec"] | {"image": "two"}}
        cache.changed(Scope(SERVICE, ""), edited)
        kept.applied.clear()
        async with reconciling(cast(Cluster, kept), cache) as made:
            await made.reconcile(KEY)
        assert ("ConfigMap", "demo-rollout") not in kept.applied
        [reason] = [c["reason"] for c in kept.status["conditions"] if c["type"] == "RolloutHealthy"]
        assert reason == "MemoryUnseen"

    asyncio.run(scenario())


class Protected(Kept):
    """A cluster in which an admission policy protects one pod."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []
        self.notes: dict[str, str] = {}

    async def delete(self, obj: dict[str, Any], grace_s: int | None = None) -> None:
        name = obj["metadata"]["name"]
        if name == "replaced":
            raise ClusterConflict("the uid differs", 1.0)
        if name == "protected":
            raise ClusterPostponed("denied by policy keep-pods", 1.0)
        self.deleted.append(name)

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        if obj["kind"] == "Event":
            self.notes[obj["reason"]] = obj["note"]
        return obj


def engine_pod(name: str) -> EnginePod:
    return EnginePod(name=name, uid=name, pool=name, has_started=True, is_ready=False)


def test_a_pod_that_may_not_be_deleted_holds_up_no_other(stored) -> None:
    async def scenario() -> None:
        cluster = Protected()
        recorder = EventRecorder(cast(Cluster, cluster))
        healer = Healer(cast(Cluster, cluster), recorder, lambda _: None, StreamTimes())
        names = ("protected", "replaced", "stuck")
        restarts = [Restart(engine_pod(name), "NotReady", "not ready") for name in names]
        with pytest.raises(Temporary, match="pod protected cannot be deleted: denied by policy"):
            await healer.restart_pods(KEY, stored(), restarts, NOW)
        await recorder.close()
        await healer.close()
        assert cluster.deleted == ["stuck"]
        assert cluster.notes["PodRestarted"].startswith("pod stuck: ")
        assert "denied by policy keep-pods" in cluster.notes["PodNotRestarted"]

    asyncio.run(scenario())


class Leaving(Kept):
    """A cluster in which a load balancer of a deleted service of the same name still ends."""

    async def create(self, obj: dict[str, Any]) -> dict[str, Any]:
        if (obj["kind"], obj["metadata"]["name"]) == ("Service", "demo-router"):
            raise ClusterConflict("already exists", 1.0)
        return await super().create(obj)

    async def get(self, *_: Any) -> Any:
        owner = {"kind": "LLMService", "name": "demo", "uid": "uid-0"}
        meta = {
            "name": "demo-router",
            "namespace": "models",
            "ownerReferences": [owner],
            "deletionTimestamp": "2026-01-02T03:04:05Z",
            "finalizers": ["service.kubernetes.io/load-balancer-cleanup"],
        }
        return {"kind": "Service", "metadata": meta}


def test_what_a_deleted_service_leaves_holds_up_nothing_else_and_is_named(stored) -> None:
    async def scenario() -> None:
        cluster = Leaving()
        async with reconciling(cast(Cluster, cluster), listed(stored())) as made:
            assert (await made.reconcile(KEY))[0] == "temporary"
        assert ("Deployment", "demo-router") in cluster.objects
        [told] = [c for c in cluster.status["conditions"] if c["type"] == "Degraded"]
        assert told["reason"] == "ApplyDelayed"
        assert "Service demo-router: the one of the deleted service still exists" in told["message"]
        assert "service.kubernetes.io/load-balancer-cleanup" in told["message"]

    asyncio.run(scenario())


class Choosy(Kept):
    """A cluster that refuses the StatefulSet of a canary."""

    async def apply(self, obj: dict[str, Any]) -> dict[str, Any]:
        if (obj["kind"], obj["metadata"]["name"]) == ("StatefulSet", "demo-single-next"):
            raise ClusterRefused("spec.template.spec.dnsPolicy: Unsupported value")
        return await super().apply(obj)


def test_a_canary_that_is_refused_says_why_and_takes_no_engines_place(stored) -> None:
    async def scenario() -> None:
        first = stored(image="one", rollout={"surge": "Never"})
        before = await made_once(first)
        choosy = Choosy()
        choosy.objects = before.objects
        choosy.applied = before.applied
        counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas"), 1)
        choosy.objects[ENGINES]["status"] = counts | {"observedGeneration": 1}
        meta = first["metadata"] | {"generation": 4, "resourceVersion": "4000"}
        edited = first | {"metadata": meta, "spec": first["spec"] | {"image": "two"}}
        cache = listed(edited)
        for kind in OWNED:
            relist(cache, Scope(kind, ""), choosy.of(kind.name), 1)
        async with reconciling(cast(Cluster, choosy), cache) as made:
            for _ in range(3):
                await made.reconcile(KEY)
        rollout = choosy.status["rollout"]
        assert rollout["stage"] == "Starting"
        assert "demo-single-next: spec.template.spec.dnsPolicy: Unsupported" in rollout["message"]
        assert size(choosy) == 1

    asyncio.run(scenario())


class Unwilling(Kept):
    """A cluster whose admission policy refuses all ConfigMaps for now."""

    def __init__(self, before: Kept) -> None:
        super().__init__()
        self.objects = before.objects
        self.applied = before.applied
        self.is_blocked = True
        self.deleted: list[tuple[str, str]] = []

    async def apply(self, obj: dict[str, Any]) -> dict[str, Any]:
        if obj["kind"] == "ConfigMap" and self.is_blocked:
            raise ClusterPostponed("failed calling webhook", 1.0)
        return await super().apply(obj)

    async def delete(self, obj: dict[str, Any], grace_s: int | None = None) -> None:
        self.deleted.append((obj["kind"], obj["metadata"]["name"]))


def test_nothing_is_deleted_while_the_state_cannot_be_stored(stored) -> None:
    """Routers whose configuration cannot change go on to send requests to a removed pool."""

    async def scenario() -> None:
        large = {"large": {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}}}
        first = stored(pools=large)
        cluster = Unwilling(await made_once(first))
        meta = first["metadata"] | {"generation": 4, "resourceVersion": "4000"}
        cache = listed(stored() | {"metadata": meta})
        for kind in OWNED:
            relist(cache, Scope(kind, ""), cluster.of(kind.name), 1)
        async with reconciling(cast(Cluster, cluster), cache) as made:
            await made.reconcile(KEY)
            assert cluster.deleted == []
            cluster.is_blocked = False
            await made.reconcile(KEY)
        assert {("StatefulSet", "demo-large"), ("Service", "demo-large")} <= {*cluster.deleted}

    asyncio.run(scenario())
