"""Rollouts on a node whose devices are all in use: they end, and take away no more than they may.

The scheduler and the controllers of workloads are played: a pod has its devices until it is gone,
and one without a free device waits.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from ullage_operator.api import naming
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import timestamp
from ullage_operator.controller.rollout_queue import RolloutQueue
from ullage_operator.kube.cache import ServiceKey
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import plan
from ullage_operator.policy.pool_sizes import live_replicas
from ullage_operator.rollout.analysis import CanarySample, Variant, sample_name

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STEP_S = 30
STARTING_STEPS = 2
GPU = "nvidia.com/gpu"
MAX_ROLLOUTS = 3


@dataclass
class FakePod:
    name: str
    service: str
    pool: str
    spec: dict[str, Any]
    revision: str
    created: datetime
    gpus: int
    age: int = 0
    is_placed: bool = False
    is_ending: bool = False
    is_missing: bool = False
    """Whether its image cannot be pulled."""
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        is_up = self.age >= STARTING_STEPS and not self.is_missing
        return self.is_placed and is_up and not self.is_ending

    @property
    def image(self) -> str:
        return str(self.spec["containers"][0]["image"])

    def manifest(self) -> dict[str, Any]:
        conditions = [
            {"type": "Ready", "status": str(self.is_ready), "lastTransitionTime": None},
            {
                "type": "PodScheduled",
                "status": str(self.is_placed),
                "reason": "" if self.is_placed else "Unschedulable",
                "message": f"0/1 nodes are available: 1 Insufficient {GPU}.",
                "lastTransitionTime": timestamp(self.created),
            },
        ]
        meta = {"name": self.name, "uid": f"{self.name} {self.created}", "namespace": "models"}
        meta["labels"] = self.labels | {naming.STATEFUL_SET_REVISION: self.revision}
        if self.is_ending:
            meta["deletionTimestamp"] = timestamp(self.created)
        state = {"waiting": {"reason": "ImagePullBackOff"}} if self.is_missing else {}
        started = [{"name": "engine", "restartCount": 0, "started": self.is_ready, "state": state}]
        status = {"conditions": conditions, "containerStatuses": started if self.is_placed else []}
        spec = self.spec | ({"nodeName": "node"} if self.is_placed else {})
        return {"metadata": meta, "spec": spec, "status": status}


class Node:
    """Services on one node, of which every reconciliation is one after the other."""

    def __init__(
        self, manifest: Any, gpus: int, services: dict[str, dict[str, Any]], size: int | None = None
    ) -> None:
        self._manifest = manifest
        self._gpus = gpus
        self.spec = services
        self.settings = Settings(cuda_engine_image="one", router_image="router-one")
        self.now = NOW
        self.objects: dict[str, dict[Any, Any]] = {name: {} for name in services}
        self.status: dict[str, dict[str, Any]] = {name: {} for name in services}
        self.pods: list[FakePod] = []
        self.generation = dict.fromkeys(services, 1)
        self.queue = RolloutQueue(MAX_ROLLOUTS, lambda _: None)
        self._parsed: dict[str, tuple[str, Service]] = {}
        self.least_ready: dict[str, int] = {}
        self.most_rolling_routers = 0
        self.missing_images: set[str] = set()
        self.order = random.Random(0)
        """Of the pods that wait for a device, Kubernetes promises none."""
        self.down_s: dict[str, int] = dict.fromkeys(services, 0)
        self.longest_down_s: dict[str, int] = dict.fromkeys(services, 0)
        for _ in range(8):
            self.step()
        assert all(len(self.ready(name)) == (size or self.size(name)) for name in services)
        self.longest_down_s = dict.fromkeys(services, 0)
        self.least_ready = {name: len(self.ready(name)) for name in services}

    def step(self) -> None:
        self.now += timedelta(seconds=STEP_S)
        for name in self.spec:
            self._reconcile(name)
        self._play_controllers()
        self._play_scheduler()
        rolling = sum(self._is_router_rolling(name) for name in self.spec)
        self.most_rolling_routers = max(self.most_rolling_routers, rolling)
        for name in self.spec:
            self.down_s[name] = 0 if self.ready(name) else self.down_s[name] + STEP_S
            self.longest_down_s[name] = max(self.longest_down_s[name], self.down_s[name])
        for name in self.least_ready:
            self.least_ready[name] = min(self.least_ready[name], len(self.ready(name)))

    def ready(self, service: str) -> list[FakePod]:
        return [pod for pod in self.pods if pod.service == service and pod.is_ready]

    def size(self, service: str) -> int:
        pools = self.spec[service].get("pools", {"single": {}})
        return sum(pool.get("replicas", 1) for pool in pools.values())

    def until(self, is_over: Any, minutes: int) -> None:
        for _ in range(minutes * 60 // STEP_S):
            if is_over():
                return
            self.step()
        raise AssertionError({name: status["rollout"] for name, status in self.status.items()})

    def is_upgraded(self, image: str) -> bool:
        full = all(len(self.ready(name)) == self.size(name) for name in self.spec)
        return full and {pod.image for pod in self.pods} == {image}

    def _statuses(self) -> Iterator[tuple[ServiceKey, dict[str, Any]]]:
        for name, status in self.status.items():
            yield ServiceKey("models", name), status

    def _service(self, name: str) -> Service:
        """Returns a service, which is read once for each spec that it had."""
        text = f"{self.generation[name]} {self.spec[name]}"
        if self._parsed.get(name, ("",))[0] != text:
            manifest = self._manifest(**{"engine": "Native", "device": "CUDA"} | self.spec[name])
            manifest["metadata"] |= {"name": name, "generation": self.generation[name]}
            self._parsed[name] = (text, parse(manifest))
        return self._parsed[name][1]

    def _reconcile(self, name: str) -> None:
        key = ServiceKey("models", name)
        objects = self.objects[name]
        observed = Observed(
            now=self.now,
            objects=objects,
            status=self.status[name],
            pods=[pod.manifest() for pod in self.pods if pod.service == name],
            may_begin_rollout=self.queue.may_begin(key, self._statuses),
            may_yield=self.queue.may_yield(key),
            canary_samples=self._samples(name),
        )
        planned = plan(self._service(name), observed, self.settings)
        rollout = planned.rollout
        self.queue.on_planned(
            key, rollout.progress,
            router_waits=rollout.router_waits, router_rolls=rollout.router_rolls,
            seeks_room=rollout.seeks_room, lacks_room=rollout.lacks_room,
        )  # fmt: skip
        for item in planned.delete:
            if item["kind"] == "Pod":
                self._end(item["metadata"]["name"])
            else:
                del objects[key_of(item)]
        for item in planned.apply:
            before = objects.get(key_of(item), {})
            status = {name: before[name] for name in ("status",) if name in before}
            generation = before.get("metadata", {}).get("generation", 0)
            generation += before.get("spec") != item.get("spec")
            meta = item["metadata"] | {"generation": generation}
            objects[key_of(item)] = item | {"metadata": meta} | status
        self.status[name] = planned.status

    def _samples(self, name: str) -> list[CanarySample]:
        router = self.objects[name].get(("ConfigMap", f"{name}-router"))
        told = yaml.safe_load(router["data"][naming.ROLLOUT_FILE]) if router else {}
        if not (canary := told.get("canary")) or not canary["weight"]:
            return []
        counts = Variant(succeeded=100)
        return [CanarySample(sample_name(canary["revision"], canary["step"]), counts, counts)]

    def _end(self, name: str) -> None:
        for pod in self.pods:
            if pod.name == name:
                pod.is_ending = True

    def _play_controllers(self) -> None:
        self.pods = [pod for pod in self.pods if not pod.is_ending]
        owned = set()
        for service, objects in self.objects.items():
            for (kind, name), item in objects.items():
                if kind == "StatefulSet":
                    owned.add(name)
                    self._roll(service, name, item)
                if kind == "Deployment":
                    self._roll_router(item)
        for pod in self.pods:
            if pod.name.rpartition("-")[0] not in owned:
                pod.is_ending = True

    def _roll(self, service: str, name: str, item: dict[str, Any]) -> None:
        """Plays the controller: the last outdated pod ends when all others are ready."""
        revision = str(hash(str(item["spec"]["template"])))
        count = item["spec"]["replicas"]
        own = {pod.name: pod for pod in self.pods if pod.name.rpartition("-")[0] == name}
        for index in range(count):
            if f"{name}-{index}" not in own:
                self.pods.append(self._new_pod(service, f"{name}-{index}", item, revision))
        for pod in own.values():
            if int(pod.name.rpartition("-")[2]) >= count:
                pod.is_ending = True
        present = [pod for pod in self.pods if pod.name.rpartition("-")[0] == name]
        kept = sorted((p for p in present if not p.is_ending), key=lambda pod: pod.name)
        outdated = [pod for pod in kept if pod.revision != revision]
        if outdated and all(pod.is_ready for pod in kept if pod is not outdated[-1]):
            outdated[-1].is_ending = True
        item["status"] = {
            "observedGeneration": item["metadata"]["generation"],
            "updateRevision": revision,
            "replicas": len(present),
            "updatedReplicas": sum(pod.revision == revision for pod in kept),
            "readyReplicas": sum(pod.is_ready for pod in kept),
        }

    def _new_pod(self, service: str, name: str, item: dict[str, Any], revision: str) -> FakePod:
        template = item["spec"]["template"]
        limits = template["spec"]["containers"][0]["resources"]["limits"]
        labels = template["metadata"]["labels"]
        pool = labels[naming.POOL_LABEL]
        gpus = int(limits[GPU])
        made = FakePod(
            name, service, pool, template["spec"], revision, self.now, gpus, labels=labels
        )
        made.is_missing = made.image in self.missing_images
        return made

    def _roll_router(self, item: dict[str, Any]) -> None:
        """Plays the controller: routers of another template are all there after one step."""
        image = item["spec"]["template"]["spec"]["containers"][0]["image"]
        count = item["spec"]["replicas"]
        status = item.setdefault("status", {})
        updated = count if status.get("image") == image else 0
        item["status"] = {
            "observedGeneration": item["metadata"]["generation"],
            "image": image,
            "replicas": count,
            "updatedReplicas": updated,
            "readyReplicas": count,
        }

    def _is_router_rolling(self, name: str) -> bool:
        status = self.objects[name]["Deployment", f"{name}-router"]["status"]
        return bool(status["updatedReplicas"] < status["replicas"])

    def _play_scheduler(self) -> None:
        free = self._gpus - sum(pod.gpus for pod in self.pods if pod.is_placed)
        waiting = [pod for pod in self.pods if not pod.is_placed and not pod.is_ending]
        self.order.shuffle(waiting)
        for pod in waiting:
            if pod.gpus <= free:
                pod.is_placed = True
                free -= pod.gpus
        for pod in self.pods:
            pod.age += pod.is_placed
        assert free >= 0


QUICK = {"weightSteps": [50], "stepDuration": "30s"}
ONE_GPU = {"gpus": 1, "parallelism": {"tensor": 1, "pipeline": 1}}


def services(count: int, replicas: int, **rollout: Any) -> dict[str, dict[str, Any]]:
    pools = {"single": ONE_GPU | {"replicas": replicas}}
    return {f"s{n}": {"pools": pools, "rollout": QUICK | rollout} for n in range(count)}


@pytest.mark.parametrize(("count", "surge"), [(10, "Auto"), (2, "Never")])
def test_an_upgrade_of_services_on_a_full_node_ends(manifest, count, surge):
    node = Node(manifest, 2 * count, services(count, 2, surge=surge))
    node.settings = Settings(cuda_engine_image="two", router_image="router-two")
    node.until(lambda: node.is_upgraded("two"), 120)
    assert min(node.least_ready.values()) == 1, "one engine of two at a time"
    told = {status["rollout"]["message"] for status in node.status.values()}
    assert not any("rolled back" in message for message in told)


@pytest.mark.parametrize("seed", range(12))
def test_no_service_loses_its_only_place_to_anothers_canary(manifest, seed):
    """An engine that gives its place is missed until its own canary is ready, and no longer."""
    node = Node(manifest, 6, services(6, 1))
    node.order = random.Random(seed)
    node.settings = Settings(cuda_engine_image="two")
    node.until(lambda: node.is_upgraded("two"), 120)
    assert max(node.longest_down_s.values()) <= (STARTING_STEPS + 1) * STEP_S


def test_a_pool_that_follows_demand_keeps_its_size(manifest):
    """Its size is that of its StatefulSet, which lacks an engine meanwhile."""
    pool = ONE_GPU | {"replicas": 3, "autoscaling": {"maxReplicas": 5, "minReplicas": 1}}
    node = Node(manifest, 3, {"s": {"pools": {"single": pool}, "rollout": QUICK}})
    sizes = set()

    def is_over() -> bool:
        sizes.add(live_replicas(node.objects["s"]["StatefulSet", "s-single"]))
        return len(node.ready("s")) == 3 and {pod.image for pod in node.pods} == {"two"}

    node.settings = Settings(cuda_engine_image="two")
    node.until(is_over, 60)
    assert sizes == {3}


def test_an_engine_of_two_pods_gives_its_place_with_all_of_them(manifest):
    wide = {"gpus": 2, "nodes": 2, "parallelism": {"tensor": 1, "pipeline": 2}, "replicas": 2}
    pools = {"single": ONE_GPU, "large": wide}
    spec = {"engine": "VLLM", "pools": pools, "rollout": QUICK}
    node = Node(manifest, 5, {"s": spec}, size=5)
    node.settings = Settings(vllm_engine_image="two")
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "Promoting", 60)
    sizes = {
        name: live["spec"]["replicas"]
        for (kind, name), live in node.objects["s"].items()
        if kind == "StatefulSet"
    }
    assert sizes == {
        "s-single": 0, "s-single-next": 1, "s-large": 1, "s-large-group": 1,
        "s-large-next": 1, "s-large-next-group": 1,
    }  # fmt: skip
    node.until(lambda: len(node.pods) == 5 and {pod.image for pod in node.pods} == {"two"}, 60)


def test_a_canary_waits_for_room_where_the_spec_says_so(manifest):
    node = Node(manifest, 2, {"s": {"pools": {"single": ONE_GPU | {"replicas": 2}},
                                    "rollout": {"surge": "Always"}}})  # fmt: skip
    node.settings = Settings(cuda_engine_image="two")
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "RolledBack", 40)
    assert node.least_ready == {"s": 2}


def test_with_a_free_device_no_engine_gives_its_place(manifest):
    node = Node(manifest, 3, {"s": {"pools": {"single": ONE_GPU | {"replicas": 2}}}})
    node.settings = Settings(cuda_engine_image="two")
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "Promoting", 40)
    assert node.least_ready == {"s": 2}


def test_a_canary_that_no_engine_has_the_devices_for_takes_no_place(manifest):
    node = Node(manifest, 2, {"s": {"pools": {"single": ONE_GPU | {"replicas": 2}}}})
    wider = ONE_GPU | {"replicas": 2, "gpus": 2, "parallelism": {"tensor": 2, "pipeline": 1}}
    node.spec["s"] = {"pools": {"single": wider}}
    node.generation["s"] += 1
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "RolledBack", 40)
    assert node.least_ready == {"s": 2}


def test_a_canary_that_took_a_place_and_fails_gives_it_back(manifest):
    node = Node(manifest, 2, {"s": {"pools": {"single": ONE_GPU | {"replicas": 2}}}})
    node.settings = Settings(cuda_engine_image="two")
    node.until(lambda: len(node.ready("s")) == 1, 10)
    assert live_replicas(node.objects["s"]["StatefulSet", "s-single"]) == 2
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "Canary", 10)
    for pod in node.pods:
        pod.age = -1000 if pod.pool == "single-next" else pod.age
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "RolledBack", 40)
    node.until(lambda: node.is_upgraded("one"), 10)


def test_large_pools_roll_a_quarter_at_a_time(manifest):
    pools = {"single": ONE_GPU | {"replicas": 20}}
    node = Node(manifest, 20, {"s": {"pools": pools, "rollout": {"strategy": "Rolling"}}})
    node.settings = Settings(cuda_engine_image="two")
    node.until(lambda: node.is_upgraded("two"), 15)
    assert node.least_ready == {"s": 15}
    node.spec["s"]["rollout"] = {"strategy": "Rolling", "maxUnavailable": 2}
    node.settings = Settings(cuda_engine_image="three")
    node.least_ready = {"s": 20}
    node.until(lambda: node.is_upgraded("three"), 40)
    assert node.least_ready == {"s": 18}


def test_an_operators_routers_take_turns_and_an_edit_needs_none(manifest):
    node = Node(manifest, 10, services(10, 1))
    for name in node.spec:  # an edit that was seen before gives no turn
        node.generation[name] += 1
    node.step()
    node.settings = Settings(cuda_engine_image="one", router_image="router-two")
    node.most_rolling_routers = 0
    node.step()
    waiting = [n for n, status in node.status.items() if "routers wait" in str(status)]
    assert len(waiting) == 10 - MAX_ROLLOUTS

    edited = waiting[-1]
    node.generation[edited] += 1
    node.spec[edited] = node.spec[edited] | {"routing": {"largeRequestTokens": 9}}
    node.step()
    assert node.objects[edited]["Deployment", f"{edited}-router"]["status"]["image"] == "router-two"

    def is_over() -> bool:
        deployments = [node.objects[n]["Deployment", f"{n}-router"] for n in node.spec]
        return {item["status"]["image"] for item in deployments} == {"router-two"}

    node.until(is_over, 20)
    assert node.most_rolling_routers <= MAX_ROLLOUTS + 1, "and the edited one"


def test_routers_that_wait_keep_their_configuration_and_hear_of_canaries(manifest):
    node = Node(manifest, 1, services(1, 1))
    before = node.objects["s0"]["ConfigMap", "s0-router"]["data"]
    node.settings = Settings(cuda_engine_image="two", router_image="router-two", dns_lag_s=1.0)
    node.queue = RolloutQueue(0, lambda _: None)
    node.step()
    after = node.objects["s0"]["ConfigMap", "s0-router"]["data"]
    assert after == before
    deployment = node.objects["s0"]["Deployment", "s0-router"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "router-one"


def test_an_image_that_is_not_there_gives_the_only_place_back_at_once(manifest):
    node = Node(manifest, 1, {"s": {"pools": {"single": ONE_GPU}, "rollout": QUICK}})
    node.missing_images.add("two")
    node.settings = Settings(cuda_engine_image="two")
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "RolledBack", 6)
    assert "has the place of the last engine" in node.status["s"]["rollout"]["message"]
    node.until(lambda: node.is_upgraded("one"), 5)


def test_a_newer_edit_is_tried_in_the_place_that_an_older_canary_has(manifest):
    node = Node(manifest, 1, {"s": {"pools": {"single": ONE_GPU}, "rollout": QUICK}})
    node.settings = Settings(cuda_engine_image="two")
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "Canary", 20)
    node.settings = Settings(cuda_engine_image="three")
    node.step()
    assert node.status["s"]["rollout"]["stage"] == "Starting"
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "Canary", 10)
    node.until(lambda: node.status["s"]["rollout"]["stage"] == "Stable", 30)
    node.until(lambda: node.is_upgraded("three"), 5)
