"""What a new operator asks for, a default image or other pods, reaches a bounded number of services
at a time; edits wait for nobody."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ullage_operator.api import naming
from ullage_operator.api.bases import Bases
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.controller.rollout_queue import RolloutQueue
from ullage_operator.kube.cache import ServiceKey
from ullage_operator.planning.observed import ObjectKey, Observed, key_of
from ullage_operator.planning.plan import plan
from ullage_operator.rollout.stages import QUEUED, RolloutProgress, RolloutStage

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MAX_ROLLOUTS = 2
NAMES = ("a", "b", "c", "d", "e")


KEYS = {"secretName": "keys"}


class Services:
    """Services whose plans are applied and whose engines are ready at once, unless told."""

    def __init__(self, manifest: Callable[..., dict[str, Any]]) -> None:
        self._manifest = manifest
        self.settings = Settings(engine_image="one", cuda_engine_image="")
        self.bases = Bases({"shared": {}})
        self.woken: list[str] = []
        self.spec: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
        self.objects: dict[str, dict[ObjectKey, dict[str, Any]]] = {name: {} for name in NAMES}
        self.status: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
        self.generation: dict[str, int] = dict.fromkeys(NAMES, 1)
        self.annotation: dict[str, str] = dict.fromkeys(NAMES, "")
        self.unready: set[str] = set()
        self.restart()
        for name in NAMES * 2:
            self.step(name)

    def restart(self) -> None:
        """Another operator takes over."""
        self.queue = RolloutQueue(MAX_ROLLOUTS, lambda key: self.woken.append(key.name))

    def statuses(self) -> Iterator[tuple[ServiceKey, dict[str, Any]]]:
        for name, status in self.status.items():
            yield ServiceKey("models", name), status

    def step(self, name: str) -> str:
        """One reconciliation; returns the stage or, of a service that waits, why."""
        manifest = self._manifest(**{"rollout": {"strategy": "Rolling"}} | self.spec[name])
        manifest["metadata"] |= {"name": name, "generation": self.generation[name]}
        key = ServiceKey("models", name)
        observed = Observed(
            now=NOW,
            objects=self.objects[name],
            status=self.status[name],
            may_begin_rollout=self.queue.may_begin(key, self.statuses),
            rollout_annotation=self.annotation[name],
        )
        planned = plan(parse(manifest, bases=self.bases), observed, self.settings)
        self.queue.on_planned(key, planned.rollout.progress)
        applied = {key_of(item): self.live(name, item) for item in planned.apply}
        deleted = {key_of(item) for item in planned.delete}
        before = {key: item for key, item in self.objects[name].items() if key not in deleted}
        self.objects[name] = before | applied
        self.status[name] = planned.status
        return str(planned.rollout.progress.reason)

    def live(self, name: str, item: dict[str, Any]) -> dict[str, Any]:
        if item["kind"] != "StatefulSet":
            return item
        ready = 0 if name in self.unready else 1
        status = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1}
        meta = item["metadata"] | {"generation": 1}
        return item | {"metadata": meta, "status": status | {"readyReplicas": ready}}

    def edit(self, name: str, **spec: Any) -> None:
        self.spec[name] |= spec
        self.generation[name] += 1

    def pool(self, name: str) -> dict[str, Any]:
        """The spec of the service's StatefulSet."""
        spec: dict[str, Any] = self.objects[name][ObjectKey("StatefulSet", f"{name}-single")][
            "spec"
        ]
        return spec

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        """Status and reason of one of the service's conditions."""
        [condition] = [c for c in self.status[name]["conditions"] if c["type"] == kind]
        return condition["status"], condition["reason"]

    def reads_ticket_keys(self, name: str) -> tuple[bool, bool]:
        """Whether the service's router and its engines are configured for tickets."""
        router = self.objects[name][ObjectKey("ConfigMap", f"{name}-router")]
        volumes = self.pool(name)["template"]["spec"]["volumes"]
        is_mounted = "tickets" in [each["name"] for each in volumes]
        return naming.TICKETS_DIR in str(router["data"]), is_mounted

    def container(self, name: str) -> dict[str, Any]:
        container: dict[str, Any] = self.pool(name)["template"]["spec"]["containers"][0]
        return container

    def image(self, name: str) -> str:
        return str(self.container(name)["image"])

    def cpus(self) -> list[str]:
        """The CPU that an engine of each service requests, by the services' order."""
        return [self.container(name)["resources"]["requests"]["cpu"] for name in NAMES]


@pytest.fixture
def services(manifest: Callable[..., dict[str, Any]]) -> Services:
    services = Services(manifest)
    services.settings = Settings(engine_image="two", cuda_engine_image="")
    return services


def test_a_new_default_image_rolls_few_services_at_a_time(services: Services) -> None:
    reasons = {name: services.step(name) for name in NAMES}
    assert [reasons[name] for name in "ab"] == ["RollingOut"] * 2
    assert [reasons[name] for name in "cde"] == ["RolloutQueued"] * 3
    assert [services.image(name) for name in NAMES] == ["two", "two", "one", "one", "one"]
    [condition] = [c for c in services.status["c"]["conditions"] if c["type"] == "Progressing"]
    assert condition["reason"] == "RolloutQueued"
    assert services.woken == []
    for ended, begun in (("b", "c"), ("a", "d"), ("c", "e")):
        assert services.step(ended) == "Promoted"
        assert services.woken.pop() == begun
        assert not services.woken
        assert services.step(begun) == "RollingOut"
    assert services.step("d") == services.step("e") == "Promoted"
    assert services.woken == []
    assert {services.image(name) for name in NAMES} == {"two"}


def test_an_edit_of_a_base_rolls_few_services_at_a_time(services: Services) -> None:
    services.settings = Settings(engine_image="one", cuda_engine_image="")
    for name in NAMES:
        services.edit(name, baseRefs=[{"name": "shared"}])
        services.step(name)
    services.bases = Bases({"shared": {"batching": {"maxSequences": 8}}})
    reasons = [services.step(name) for name in NAMES]
    assert reasons == ["RollingOut"] * 2 + ["RolloutQueued"] * 3
    assert services.step("a") == "Promoted"
    assert services.step("c") == "RollingOut"

    # Who edits the service itself waits for nobody, whatever else comes with the edit.
    services.edit("e", limits={"maxOutputTokens": 64})
    assert services.step("e") == "RollingOut"


def test_edits_and_engines_that_do_not_serve_wait_for_nobody(services: Services) -> None:
    services.step("a")
    services.step("b")
    services.spec["c"] = {"image": "mine"}
    services.spec["d"] = {"memory": {"maxKV": "1Gi"}}
    services.unready.add("e")
    for name in "cde":
        services.objects[name] = {
            key: services.live(name, item) for key, item in services.objects[name].items()
        }
        assert services.step(name) != "RolloutQueued"
    assert services.image("c") == "mine"
    assert services.image("d") == "two"


def test_a_successor_counts_what_is_under_way(services: Services) -> None:
    services.step("d")
    services.step("e")
    services.restart()
    assert services.step("a") == "RolloutQueued"
    services.queue.forget(ServiceKey("models", "e"))
    assert services.woken == ["a"]
    assert services.step("a") == "RollingOut"


def test_an_image_that_is_taken_back_keeps_nobody_waiting(services: Services) -> None:
    for name in "abc":
        services.step(name)
    services.settings = Settings(engine_image="one", cuda_engine_image="")
    assert services.step("c") == "Stable"
    assert services.woken == []
    assert services.image("c") == "one"
    services.settings = Settings(engine_image="two", cuda_engine_image="")
    services.step("a")
    assert services.woken == [], "nobody waits"


def test_what_waits_for_people_keeps_nobody_waiting() -> None:
    woken: list[str] = []
    queue = RolloutQueue(1, lambda key: woken.append(key.name))
    first = ServiceKey("models", "a")
    second = ServiceKey("models", "b")
    assert queue.may_begin(first, lambda: ())
    rolling = RolloutProgress("one", NOW, RolloutStage.CANARY, "two")
    queue.on_planned(first, rolling)
    assert queue.may_begin(first, lambda: ())
    assert not queue.may_begin(second, lambda: ())
    queue.on_planned(second, RolloutProgress("one", NOW, reason=QUEUED))
    queue.on_planned(first, replace(rolling, is_held=True))
    assert woken == ["b"]
    assert queue.may_begin(second, lambda: ())


def test_a_service_that_never_answers_its_turn_keeps_one_place_only() -> None:
    woken: list[str] = []
    queue = RolloutQueue(2, lambda key: woken.append(key.name))
    first, second, *waiting = (ServiceKey("models", name) for name in NAMES)
    assert queue.may_begin(first, lambda: ())
    for each in (first, second):
        queue.on_planned(each, RolloutProgress("one", NOW, RolloutStage.CANARY, "two"))
    for each in waiting:
        queue.on_planned(each, RolloutProgress("one", NOW, reason=QUEUED))
    queue.on_planned(first, RolloutProgress("two", NOW))
    assert woken == ["c"]
    woken.clear()
    queue.on_planned(second, RolloutProgress("two", NOW))
    assert woken == ["c", "d"]
    woken.clear()
    queue.forget(waiting[0])
    assert woken == ["d", "e"]


OLD = "250m"
NEW = "750m"


@pytest.fixture
def renewed(services: Services, monkeypatch: pytest.MonkeyPatch) -> Services:
    """The operator's image is the same, and it requests more CPU for engines."""
    services.settings = Settings(engine_image="one", cuda_engine_image="")
    assert services.cpus() == [OLD] * len(NAMES)
    monkeypatch.setattr("ullage_operator.manifests.resources._WORKER_MILLICPU", 750)
    return services


def test_new_default_requests_roll_few_services_at_a_time(renewed: Services) -> None:
    assert [renewed.step(name) for name in NAMES] == ["RollingOut"] * 2 + ["RolloutQueued"] * 3
    assert renewed.cpus() == [NEW] * 2 + [OLD] * 3
    assert [renewed.step(name) for name in "cde"] == ["RolloutQueued"] * 3
    for ended, begun in (("b", "c"), ("a", "d"), ("c", "e")):
        assert renewed.step(ended) == "Promoted"
        assert renewed.woken.pop() == begun
        assert not renewed.woken
        assert renewed.step(begun) == "RollingOut"
    assert renewed.step("d") == renewed.step("e") == "Promoted"
    assert renewed.cpus() == [NEW] * 5
    assert [renewed.step(name) for name in NAMES] == ["Promoted"] * 5


def test_a_renewal_takes_its_place_until_the_new_pods_are_ready(renewed: Services) -> None:
    renewed.unready.add("a")  # as soon as its pods are others
    renewed.step("a")
    renewed.step("b")
    assert [renewed.step(name) for name in "abc"] == ["RollingOut", "Promoted", "RollingOut"]
    assert renewed.step("a") == "RollingOut"
    assert renewed.step("d") == "RolloutQueued"
    renewed.restart()
    assert renewed.step("e") == "RolloutQueued", "a successor counts both"


def test_the_configuration_of_pods_that_wait_stays(
    renewed: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text(name: str) -> str:
        return str(renewed.objects[name][ObjectKey("ConfigMap", f"{name}-single")]["data"])

    to_yaml = "ullage_operator.manifests.manifests.to_yaml"
    monkeypatch.setattr(to_yaml, lambda document: f"otherwise: {document}")
    for name in NAMES:
        renewed.step(name)
    assert [text(name).count("otherwise") for name in NAMES] == [1, 1, 0, 0, 0]


def test_an_edit_of_a_service_that_waits_changes_what_was_edited(renewed: Services) -> None:
    for name in NAMES:
        renewed.step(name)
    renewed.edit("c", pools={"single": {"replicas": 3}})
    renewed.edit("d", rollout={"strategy": "Rolling", "paused": True})
    renewed.edit("e", memory={"maxKV": "1Gi"})
    assert [renewed.step(name) for name in "cde"] == ["RolloutQueued", "Paused", "RollingOut"]
    assert renewed.pool("c")["replicas"] == 3
    assert renewed.cpus() == [NEW, NEW, OLD, OLD, NEW]


def test_what_does_not_serve_or_was_edited_by_hand_waits_for_nobody(renewed: Services) -> None:
    renewed.step("a")
    renewed.step("b")
    renewed.unready.add("c")
    workload = ObjectKey("StatefulSet", "c-single")
    renewed.objects["c"][workload] = renewed.live("c", renewed.objects["c"][workload])
    assert renewed.step("c") == "RollingOut"
    renewed.edit("d", tickets=KEYS)
    assert renewed.step("d") == "Stable"
    assert renewed.cpus() == [NEW] * 4 + [OLD]


def test_what_routers_and_engines_share_reaches_both_while_a_service_waits(
    renewed: Services,
) -> None:
    for name in NAMES:
        renewed.step(name)
    renewed.edit("c", tickets=KEYS)
    renewed.step("c")
    assert renewed.reads_ticket_keys("c") == (True, True)
    assert renewed.reads_ticket_keys("d") == (False, False)
    renewed.edit("d", rollout={"strategy": "Rolling", "paused": True})
    renewed.edit("d", image="mine")
    assert renewed.step("d") == "Paused"
    renewed.edit("d", tickets=KEYS)
    assert renewed.step("d") == "Paused"
    assert renewed.reads_ticket_keys("d") == (True, True)
    assert renewed.image("d") == "one"


def test_an_edit_that_could_not_be_written_does_not_wait_either(renewed: Services) -> None:
    workload = ObjectKey("StatefulSet", "c-single")
    before = renewed.objects["c"][workload]
    for name in "ab":
        renewed.step(name)
    renewed.edit("c", tickets=KEYS)
    renewed.step("c")
    renewed.objects["c"][workload] = before
    assert renewed.step("c") == "Stable"
    assert renewed.reads_ticket_keys("c") == (True, True)


def test_services_that_were_rolled_back_are_renewed_in_turn(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.settings = Settings(engine_image="one", cuda_engine_image="")
    for name in NAMES:
        services.edit(name, image="bad", rollout={"strategy": "Canary"})
        assert services.step(name) == "CanaryStarting"
        services.annotation[name] = "abort"
        assert services.step(name) == "Aborted"
    services.edit("e", rollout={"strategy": "Canary", "paused": True})
    services.step("e")
    services.woken.clear()
    monkeypatch.setattr("ullage_operator.manifests.resources._WORKER_MILLICPU", 750)
    for name in NAMES:
        services.step(name)
    assert services.cpus() == [NEW] * 2 + [OLD] * 3
    reasons = [services.condition(name, "Progressing") for name in "ac"]
    assert reasons == [("True", "RollingOut"), ("True", "RolloutQueued")]
    stages = [services.status[name]["rollout"] for name in "ac"]
    assert [each["stage"] for each in stages] == ["Promoting", "RolledBack"]
    assert stages[0]["message"] == "the operator's template of engine pods has changed"
    assert "it was aborted" in stages[1]["message"]
    services.restart()
    services.step("d")
    assert services.cpus() == [NEW] * 2 + [OLD] * 3, "a successor counts both"
    services.step("c")
    for ended, begun in (("b", "c"), ("a", "d")):
        services.step(ended)
        assert services.woken.pop() == begun
        assert not services.woken
        services.step(begun)
    for name in "cd":
        services.step(name)
    assert services.cpus() == [NEW] * 4 + [OLD]
    for name in NAMES:
        assert services.condition(name, "RolloutHealthy") == ("False", "Aborted")
        assert services.status[name]["rollout"]["stage"] == "RolledBack"
        assert services.image(name) == "one"


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_no_number_of_services_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="ULLAGE_MAX_ROLLOUTS"):
        Settings.from_env({"ULLAGE_MAX_ROLLOUTS": text})
    assert Settings.from_env({"ULLAGE_MAX_ROLLOUTS": "7"}).max_rollouts == 7
