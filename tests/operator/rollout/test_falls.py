"""A canary that falls is never promoted, whatever order things are heard in.

The cluster is played: the kubelet hands routers their file up to a minute late, engines are back
after one look of the operator, one trial follows another, and operators take over in between.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ullage.headroom.v1 import headroom_pb2
from ullage_operator.api import naming
from ullage_operator.api.parsing import parse
from ullage_operator.api.settings import Settings
from ullage_operator.planning.observed import Observed, key_of
from ullage_operator.planning.plan import plan
from ullage_operator.policy.engine_health import EngineHealth
from ullage_operator.rollout.analysis import CanarySample, Variant
from ullage_operator.rollout.falls import EngineReport, FallCount, counted, total
from ullage_router.engines.reports import ReportSequence
from ullage_router.policy.facts import Side
from ullage_router.rollout.outcomes import Outcomes

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
STEP_S = 5
KUBELET_STEPS = 12
"""Looks of the operator between two at which the kubelet renews the router's file."""
PER_STEP = 5
"""Answers of each side between two looks."""
ROLLOUT = {
    "strategy": "Canary",
    "weightSteps": [50],
    "stepDuration": "10s",
    "minRequests": 4,
    "maxWait": "3m",
}


@dataclass(frozen=True)
class Attempt:
    """One trial of a service, in looks of the operator."""

    ready_after: int = 0
    falls_after: int | None = None
    """Looks from the first with a ready canary to its fall; None: it never falls."""
    fall: str = "worker"
    blind_from: int = 0
    blind_for: int = 0
    """Looks for which a new operator has heard no engine yet."""
    pause: int = 0
    """Looks between the end of the trial before and this one."""


class FakeEngine:
    def __init__(self, uid: str, pool: str, workers_lost: int = 0, restarts: int = 0) -> None:
        self.uid = uid
        self.pool = pool
        self.epoch = hash(uid) & 0xFFFF or 1
        self.workers_lost = workers_lost
        self.restarts = restarts
        self.revision = ""

    def fall(self, kind: str) -> None:
        if kind == "worker":
            self.workers_lost += 1
        else:
            self.epoch = self.epoch + 1
            self.workers_lost = 0
            self.restarts = self.restarts + 1

    def pod(self) -> dict[str, Any]:
        statuses = [{"name": "engine", "restartCount": self.restarts, "started": True}]
        labels = {naming.POOL_LABEL: self.pool}
        meta = {"name": f"demo-{self.pool}-0", "uid": self.uid, "labels": labels}
        return {"metadata": meta, "status": {"containerStatuses": statuses}}

    def health(self) -> EngineHealth:
        report = headroom_pb2.Headroom(epoch=self.epoch, worker_restarts=self.workers_lost)
        return EngineHealth(pool=self.pool, report=report)


class FakeRouter:
    """A router's own bookkeeping, which follows a name in DNS and reads a late file."""

    def __init__(self) -> None:
        self.orders: dict[tuple[Side, str], ReportSequence] = {}
        self.lost = dict.fromkeys(Side, 0)
        self.outcomes = Outcomes(self.falls, lambda side: self.lost[side])
        self.file: dict[str, Any] = {}
        self.answers = 0

    def falls(self, side: Side) -> int:
        present = (o.workers_lost for (own, _), o in self.orders.items() if own is side)
        return self.lost[side] + sum(present)

    def read(self, text: str) -> None:
        self.file = yaml.safe_load(text)
        canary = self.file.get("canary", {})
        before = self.outcomes.trial
        trial = f"{canary['revision']}/{canary['step']}" if canary.get("weight") else ""
        self.outcomes.follow(trial, canary.get("revision", ""))
        self.answers = self.answers if self.outcomes.trial == before else 0

    def hear(self, stable: list[FakeEngine], canary: list[FakeEngine]) -> None:
        self.answers += PER_STEP
        named = {(Side.STABLE, each.uid): each for each in stable}
        if "canary" in self.file:
            named |= {(Side.CANARY, each.uid): each for each in canary}
        for side, uid in self.orders.keys() - named.keys():
            self.lost[side] += self.orders.pop((side, uid)).workers_lost
        for (side, uid), engine in named.items():
            order = self.orders.setdefault((side, uid), ReportSequence(side is Side.CANARY))
            order.take(engine.epoch, order.sequence + 1)
            order.on_worker_restarts(engine.workers_lost)

    def samples(self) -> list[CanarySample]:
        if not self.outcomes.trial:
            return []
        canary, stable = (
            Variant(succeeded=self.answers, restarts=self.outcomes.falls(side))
            for side in (Side.CANARY, Side.STABLE)
        )
        return [CanarySample(self.outcomes.trial, canary, stable)]


class World:
    def __init__(self, manifest: Any, phase: int, old_falls: int) -> None:
        self._manifest = manifest
        self._phase = phase
        self._edit("image-0")
        self.objects: dict[Any, Any] = {}
        self.status: dict[str, Any] = {}
        self.looks = 0
        self.stable = [FakeEngine(f"stable-{n}", "single", old_falls, n) for n in range(2)]
        self.canary: list[FakeEngine] = []
        self.is_canary_ready = False
        self.router = FakeRouter()
        for _ in range(3):
            self.look()

    def _edit(self, image: str) -> None:
        pools = {"single": {"replicas": 2}}
        self._service = parse(self._manifest(image=image, rollout=ROLLOUT, pools=pools))

    def look(self, is_blind: bool = False) -> None:
        self.looks += 1
        self._play_kubelet()
        engines = [*self.stable, *self.canary]
        self.router.hear(self.stable, self.canary if self.is_canary_ready else [])
        observed = Observed(
            now=NOW + timedelta(seconds=STEP_S * self.looks),
            objects=self.objects,
            status=self.status,
            pods=[engine.pod() for engine in engines],
            engine_health={} if is_blind else {each.uid: each.health() for each in engines},
            canary_samples=self.router.samples(),
        )
        planned = plan(self._service, observed, Settings(dns_lag_s=1.0))
        for item in planned.delete:
            del self.objects[key_of(item)]
        self.objects |= {key_of(item): self._live(item) for item in planned.apply}
        self.status = planned.status
        self._play_controller()

    def _play_kubelet(self) -> None:
        router = self.objects.get(("ConfigMap", "demo-router"))
        if router and self.looks % KUBELET_STEPS == self._phase:
            self.router.read(router["data"][naming.ROLLOUT_FILE])

    def _live(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["kind"] not in ("StatefulSet", "Deployment"):
            return item
        count = item["spec"]["replicas"]
        status = {"observedGeneration": 1, "replicas": count, "updatedReplicas": count}
        status["readyReplicas"] = count
        return item | {"metadata": item["metadata"] | {"generation": 1}, "status": status}

    def _play_controller(self) -> None:
        """Makes and removes the canary's pod, which has one name and address all the time."""
        made = self.objects.get(("StatefulSet", "demo-single-next"))
        if made is None:
            self.canary = []
            return
        revision = made["metadata"]["annotations"][naming.REVISION]
        if not self.canary or self.canary[0].revision != revision:
            self.canary = [FakeEngine(f"canary-{self.looks}", "single-next")]
            self.canary[0].revision = revision
        made["status"]["readyReplicas"] = int(self.is_canary_ready)

    @property
    def stage(self) -> str:
        return str(self.status["rollout"]["stage"])

    def attempt(self, number: int, attempt: Attempt) -> bool:
        """Plays one trial to its end; returns whether the canary fell in it."""
        for _ in range(attempt.pause):
            self.look()
        self._edit(f"image-{number}")
        self.is_canary_ready = False
        self.look()
        assert self.stage == "Starting", self.status["rollout"]

        has_fallen = False
        for look in range(200):
            self.is_canary_ready = look >= attempt.ready_after
            self._play_controller()
            is_due = look - attempt.ready_after == attempt.falls_after
            if is_due and self.stage in ("Starting", "Canary"):
                self.canary[0].fall(attempt.fall)
                has_fallen = True
            blind = range(attempt.blind_from, attempt.blind_from + attempt.blind_for)
            self.look(look in blind)
            if self.stage in ("Stable", "RolledBack"):
                return has_fallen
        raise AssertionError(self.status["rollout"])


@pytest.fixture
def read_manifest(manifest):
    """What makes manifests, after one was read: the first reading imports what later ones use."""
    parse(manifest())
    return manifest


attempts = st.builds(
    Attempt,
    ready_after=st.integers(0, 3),
    falls_after=st.none() | st.integers(0, 25),
    fall=st.sampled_from(["worker", "container"]),
    blind_from=st.integers(0, 20),
    blind_for=st.sampled_from([0, 0, 3, 8]),
    pause=st.integers(0, 15),
)
GOOD = Attempt()


@given(
    st.lists(attempts, min_size=1, max_size=3), st.integers(0, KUBELET_STEPS - 1), st.integers(0, 3)
)
@example([GOOD, Attempt(falls_after=1)], 0, 0)
@example([GOOD, Attempt(falls_after=1), GOOD, Attempt(falls_after=4, blind_for=8)], 3, 2)
@example([Attempt(falls_after=1), GOOD], 0, 1)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_canary_is_promoted_if_it_did_not_fall(read_manifest, trials, phase, old_falls):
    world = World(read_manifest, phase, old_falls)
    for number, attempt in enumerate(trials, 1):
        has_fallen = world.attempt(number, attempt)
        told = world.status["rollout"]
        assert world.stage == ("RolledBack" if has_fallen else "Stable"), (attempt, told)
        assert not has_fallen or "restart" in told["message"], told


REPORT = EngineReport("a", "single-next", "", restarts=0, epoch=1)


def test_a_canary_counts_its_whole_life_and_a_stable_engine_the_trial():
    earlier = replace(REPORT, restarts=2, workers_lost=3)
    falls = counted({}, [earlier], [replace(earlier, uid="b")])
    assert (total(falls, is_canary=True), total(falls, is_canary=False)) == (5, 0)
    later = replace(earlier, uid="b", restarts=3, epoch=2, workers_lost=1)
    assert total(counted(falls, [], [later]), is_canary=False) == 2
    assert total(counted(falls, [], []), is_canary=True) == 5, "a pod that is gone still fell"


lives = st.lists(st.sampled_from(["worker", "container", "report", "kubelet"]), max_size=30)


@given(lives)
def test_each_fall_counts_once_in_whatever_order_both_counts_arrive(life):
    engine = FakeEngine("a", "single-next")
    seen = REPORT
    falls: dict[str, FallCount] = {}
    expected = 0
    for event in [*life, "report", "kubelet"]:
        match event:
            case "report":
                seen = replace(seen, epoch=engine.epoch, workers_lost=engine.workers_lost)
            case "kubelet":
                seen = replace(seen, restarts=engine.restarts)
            case "container" if seen.workers_lost != engine.workers_lost:
                continue  # nobody heard of the workers that this server lost
            case _:
                engine.fall(event)
                expected += 1
                continue
        falls = dict(counted(falls, [seen], []))
    assert total(falls, is_canary=True) == expected
