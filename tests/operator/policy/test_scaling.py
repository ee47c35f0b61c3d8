"""Who says how many engines a pool has, and what is made and told of it."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import yaml
from aiohttp import web

from ullage_common.wire.load_report import PoolReport
from ullage_operator.api.errors import InvalidManifest
from ullage_operator.api.parsing import parse as parse_service
from ullage_operator.api.sections import AutoscalingSpec
from ullage_operator.controller.autoscaler import Autoscaler, ScaledService
from ullage_operator.controller.router_client import router_addresses
from ullage_operator.planning.observed import ObjectKey, Observed
from ullage_operator.planning.plan import ServicePlan
from ullage_operator.policy.pool_load import PoolLoad, parse_reports, pool_load
from ullage_operator.policy.pool_sizes import ScalingChange, ScalingDecisions
from ullage_operator.policy.scaling import ScalingDecision
from ullage_operator.policy.scaling_status import scaling_notes

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SET = ObjectKey("StatefulSet", "demo-single")
ALL = frozenset({"ScaledObject"})
URL = "http://prometheus:9090"

MakePlan = Callable[..., ServicePlan]


def seen(replicas: int | None = None, **more: Any) -> Observed:
    live = {
        "kind": "StatefulSet",
        "metadata": {"name": "demo-single"},
        "spec": {"replicas": replicas},
    }
    objects = {} if replicas is None else {SET: live}
    return Observed(now=NOW, objects=objects, **({"serves": ALL} | more))


def single(replicas: int = 1, **autoscaling: Any) -> dict[str, Any]:
    scaling = {"maxReplicas": 5} | autoscaling
    return {"single": {"replicas": replicas, "autoscaling": scaling}}


def found(plan: ServicePlan, kind: str) -> dict[str, Any]:
    return next((o for o in plan.apply if o["kind"] == kind), {})


def decided(count: int) -> ScalingDecisions:
    decision = ScalingDecision(count, "Memory", "predictions claim 90 % of it")
    return ScalingDecisions({"single": decision}, changes={"single": ScalingChange(NOW, decision)})


@pytest.mark.parametrize(
    ("pools", "live", "decision", "replicas"),
    [
        ({"single": {"replicas": 3}}, 7, None, 3),
        (single(2), None, None, 2),  # where it begins
        (single(9), None, None, 5),
        (single(0), None, None, 1),
        (single(0, minReplicas=0), None, None, 0),
        (single(1), 4, None, 4),  # a new operator goes on from what there is
        (single(1), 4, 3, 3),
        (single(1, minReplicas=2), 4, 0, 2),
        (single(3, enabled=False), 5, None, 3),
        (single(2, provider="KEDA", prometheusURL=URL), None, None, 2),
    ],
)
def test_how_many_engines(make_plan: MakePlan, pools, live, decision, replicas):
    known = ScalingDecisions({}) if decision is None else decided(decision)
    made = make_plan(seen(live, scaling=known), pools=pools)
    assert found(made, "StatefulSet")["spec"]["replicas"] == replicas
    assert made.status["pools"]["single"]["desiredReplicas"] == replicas


def test_keda_scales_the_statefulset_once_it_exists(make_plan: MakePlan):
    pools = single(2, provider="KEDA", prometheusURL=URL)
    made = make_plan(seen(4), pools=pools)
    assert "replicas" not in found(made, "StatefulSet")["spec"]
    assert made.status["pools"]["single"]["desiredReplicas"] == 4
    scaler = found(made, "ScaledObject")["spec"]
    assert scaler["scaleTargetRef"]["name"] == "demo-single"
    assert scaler["maxReplicaCount"] == 5
    absent = make_plan(seen(4, serves=frozenset()), pools=pools)
    assert found(absent, "ScaledObject") == {}
    active = next(c for c in absent.status["conditions"] if c["type"] == "ScalingActive")
    assert (active["status"], active["reason"]) == ("False", "ProviderMissing")
    assert "ScaledObject" in active["message"]


def test_keda_follows_the_same_rules(make_plan: MakePlan):
    pools = single(
        provider="KEDA", prometheusURL=URL, minReplicas=2, targets={"kvUtilizationPercent": 65}
    )
    spec = found(make_plan(seen(), pools=pools), "ScaledObject")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 5)
    memory = spec["triggers"][0]
    assert "ullage_kv_used_ratio" in memory["metadata"]["query"]
    assert (memory["metricType"], memory["metadata"]["threshold"]) == ("AverageValue", "0.65")
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"] == {
        "stabilizationWindowSeconds": 300,
        "selectPolicy": "Max",
        "policies": [
            {"type": "Pods", "value": 1, "periodSeconds": 60},
            {"type": "Percent", "value": 50, "periodSeconds": 60},
        ],
    }


def test_keda_wakes_by_the_requests_that_routers_hold(make_plan: MakePlan):
    pools = single(provider="KEDA", prometheusURL=URL, minReplicas=0, idleAfter="90s")
    made = make_plan(seen(), pools=pools)
    spec = found(made, "ScaledObject")["spec"]
    assert (spec["minReplicaCount"], spec["cooldownPeriod"]) == (0, 90)
    memory, activity = (trigger["metadata"] for trigger in spec["triggers"])
    assert memory["serverAddress"] == URL
    assert memory["threshold"] == "0.7"
    assert 'pool="single"' in activity["query"]
    assert activity["activationThreshold"] == "0"
    assert "ullage_router_wanted_requests" in activity["query"]
    assert all(isinstance(value, str) for value in (*memory.values(), *activity.values()))


def test_keda_has_the_triggers_and_the_login_that_the_spec_names(make_plan: MakePlan):
    login = {"name": "prometheus", "kind": "ClusterTriggerAuthentication"}
    hours = {"timezone": "Europe/Berlin", "start": "0 8 * * *", "desiredReplicas": "3"}
    queue = {"type": "kafka", "metadata": {"topic": "prompts"}, "metricType": "AverageValue"}
    queue |= {"authenticationRef": {"name": "kafka", "kind": "TriggerAuthentication"}}
    triggers = [{"type": "cron", "name": "day", "metadata": hours}, queue]
    keda = {"authenticationRef": login, "triggers": triggers}
    pools = single(provider="KEDA", prometheusURL=URL, keda=keda)
    spec = found(make_plan(seen(), pools=pools), "ScaledObject")["spec"]
    memory, activity, *own = spec["triggers"]
    assert own == triggers
    assert memory["authenticationRef"] == activity["authenticationRef"] == login


def test_keda_logs_in_nowhere_unless_it_is_asked_to(make_plan: MakePlan):
    pools = single(provider="KEDA", prometheusURL=URL)
    triggers = found(make_plan(seen(), pools=pools), "ScaledObject")["spec"]["triggers"]
    assert len(triggers) == 2
    assert not any("authenticationRef" in trigger for trigger in triggers)


def test_routers_are_told_which_pools_sleep(make_plan: MakePlan):
    pools = single(minReplicas=0) | {"large": {"gpus": 1}}
    made = make_plan(seen(), pools=pools, routing={"wake": {"timeout": "2m"}})
    name = ("ConfigMap", "demo-router")
    config = next(o for o in made.apply if (o["kind"], o["metadata"]["name"]) == name)
    router = yaml.safe_load(config["data"]["router.yaml"])
    assert {pool["name"]: pool["sleeps"] for pool in router["pools"]} == {
        "single": True,
        "large": False,
    }
    assert router["routing"]["wake"]["timeout"] == 120
    assert router["slo"] == {"ttft_p95": 7.0, "e2e_p95": 20.0}


def test_the_last_change_stays_in_the_status(make_plan: MakePlan):
    told = make_plan(seen(1, scaling=decided(3)), pools=single()).status
    scaling = told["pools"]["single"]["scaling"]
    assert (scaling["reason"], scaling["time"]) == ("Memory", "2026-01-02T03:04:05Z")
    later = make_plan(seen(3, status=told), pools=single()).status
    assert later["pools"]["single"]["scaling"] == scaling
    assert "scaling" not in make_plan(seen(3, status=told), pools={}).status["pools"]["single"]


def test_the_operator_may_ask_routers_for_their_measures(make_plan: MakePlan):
    policies = [o for o in make_plan(seen()).apply if o["kind"] == "NetworkPolicy"]
    router = next(p for p in policies if p["metadata"]["name"] == "demo-router")
    (rule,) = [
        rule
        for rule in router["spec"]["ingress"]
        if any("operator" in str(peer) for peer in rule.get("from", ()))
    ]
    assert [port["port"] for port in rule["ports"]] == [9090]


def test_every_change_of_size_is_an_event(make_plan: MakePlan):
    told = make_plan(seen(1, scaling=decided(3)), pools=single()).status
    (note,) = scaling_notes({}, told)
    assert (note.reason, note.action) == ("ScaledMemory", "Scale")
    assert note.message == "pool single is to have 3 engines: predictions claim 90 % of it"
    assert scaling_notes(told, told) == []
    assert scaling_notes({}, make_plan(seen(1), pools=single()).status) == []


@pytest.mark.parametrize(
    ("known", "status", "reason"),
    [
        (ScalingDecisions({}), "False", "Measuring"),
        (decided(2), "True", "Scaling"),
        (ScalingDecisions({}, "no router runs"), "False", "NoMeasures"),
    ],
)
def test_the_condition_says_whether_it_scales(make_plan: MakePlan, known, status, reason):
    conditions = make_plan(seen(2, scaling=known), pools=single()).status["conditions"]
    active = next(c for c in conditions if c["type"] == "ScalingActive")
    assert (active["status"], active["reason"]) == (status, reason)
    plain = make_plan(seen(2)).status["conditions"]
    assert "ScalingActive" not in {c["type"] for c in plain}


def test_a_service_that_sleeps_is_ready_while_a_router_is(make_plan: MakePlan):
    router = {
        "kind": "Deployment",
        "metadata": {"name": "demo-router", "generation": 1},
        "spec": {"replicas": 2},
        "status": {"observedGeneration": 1, "replicas": 2, "readyReplicas": 2},
    }
    for ready, status in ((2, "True"), (0, "False")):
        live = {**router, "status": {**router["status"], "readyReplicas": ready}}
        observed = seen(0)
        objects = {**observed.objects, ObjectKey("Deployment", "demo-router"): live}
        made = make_plan(Observed(now=NOW, objects=objects), pools=single(minReplicas=0))
        found = {c["type"]: c for c in made.status["conditions"]}
        assert found["Ready"]["status"] == found["Available"]["status"] == status


@pytest.mark.parametrize(
    ("autoscaling", "field"),
    [
        ({"minReplicas": 6}, "minReplicas"),
        ({"warmSpares": 6}, "warmSpares"),
        ({"warmSpares": 1, "minReplicas": 0}, "warmSpares"),
        ({"provider": "KEDA", "prometheusURL": URL, "warmSpares": 1}, "warmSpares"),
        ({"provider": "hpa"}, "provider"),
        ({"provider": "KEDA"}, "prometheusURL"),
        ({"prometheusURL": URL}, "prometheusURL"),
        ({"idleAfter": "0s"}, "idleAfter"),
        ({"scaleDown": {"window": "2h"}}, "scaleDown.window"),
        ({"targets": {"kvUtilizationPercent": 1}}, "targets.kvUtilizationPercent"),
        ({"maxReplicas": 0}, "maxReplicas"),
    ],
)
def test_what_cannot_be_meant_is_refused(manifest, autoscaling, field):
    with pytest.raises(InvalidManifest) as caught:
        parse_service(manifest(pools=single(**autoscaling)))
    paths = [problem.path for problem in caught.value.problems]
    assert paths == [f"spec.pools.single.autoscaling.{field}"]


def report(**more: Any) -> PoolReport:
    base = dict.fromkeys(PoolReport.__struct_fields__, 0)
    return PoolReport(**(base | more))


def test_what_routers_tell_adds_up():
    one = report(
        ready=2, capacity_bytes=200, headroom_bytes=120, engine_requests=5, credit_bytes=10,
        queued=1, queue_bytes=30, queue_s=1.5, answered=10, late=1, idle_s=7,
    )  # fmt: skip
    other = report(
        ready=1, capacity_bytes=100, headroom_bytes=90, engine_requests=2, credit_bytes=5,
        held=2, wanted=2, answered=4, late=3, idle_s=9,
    )  # fmt: skip
    body = msgspec.json.encode([{"single": one}, {"single": other}])
    assert pool_load("single", parse_reports(body), False) == PoolLoad(
        ready=2, capacity=200, claimed=95, waiting=30, queue_s=1.5, answered=14, late=4,
        active=8, wanted=2, idle_s=7,
    )  # fmt: skip
    assert pool_load("large", parse_reports(body), False).is_partial


def test_routers_are_found_by_their_pods():
    def pod(name: str, component: str = "router", **status: Any) -> dict[str, Any]:
        ports = [{"name": "metrics", "containerPort": 9090}]
        return {
            "metadata": {"name": name, "labels": {"app.kubernetes.io/component": component}},
            "spec": {"containers": [{"ports": ports}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1"} | status,
        }

    leaving = pod("c", podIP="10.0.0.9")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    pods = [
        pod("a"), pod("b", podIP="fd00::1"), leaving, pod("d", podIP=""), pod("e", "engine"),
        pod("f", phase="Pending"),
    ]  # fmt: skip
    running = ("http://10.0.0.1:9090", "http://[fd00::1]:9090")
    assert router_addresses(pods) == (running, ("http://10.0.0.9:9090",))


class Router:
    """Answers /measures with what the test says."""

    def __init__(self) -> None:
        self.report = report(idle_s=1)
        self.status = 200
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path == "/measures/wait" and not self.report.wanted:
            await asyncio.sleep(0.2)
        body = msgspec.json.encode([{"single": self.report}])
        return web.Response(body=body, status=self.status)

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/{tail:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


async def scaled(make_policy: Callable[[], AutoscalingSpec]) -> None:
    router = Router()
    changed = asyncio.Event()
    runner = await router.start()
    scaler: Autoscaler[str] = Autoscaler(lambda _: changed.set(), interval_s=0.05)
    followed = ScaledService({"single": make_policy()}, (router.url,))

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - the condition belongs to others
                await asyncio.sleep(0.01)

    def size() -> int | None:
        known = scaler.follow("s", followed, {"single": 0}).pools.get("single")
        return known.replicas if known else None

    try:
        assert size() is None
        await until(lambda: size() == 0)
        await until(lambda: "/measures/wait" in router.asked)
        router.report = report(wanted=1)
        await until(lambda: size() == 1)
        assert changed.is_set()
        router.report = report(ready=1, capacity_bytes=100, headroom_bytes=100, idle_s=1e6)
        await until(lambda: size() == 0)
        router.status = 500
        await until(lambda: "500" in scaler.follow("s", followed, {"single": 0}).problem)
        assert size() == 0
        scaler.forget("s")
        assert scaler.follow("s", ScaledService({}, ()), {}) == ScalingDecisions({})
    finally:
        await scaler.close()
        await runner.cleanup()


def test_the_scaler_wakes_puts_to_sleep_and_says_what_is_wrong(manifest):
    pools = single(0, minReplicas=0, idleAfter="1s")

    def make_policy() -> AutoscalingSpec:
        scaling = parse_service(manifest(pools=pools)).spec.pools["single"].autoscaling
        assert scaling is not None
        return scaling

    asyncio.run(scaled(make_policy))


async def ending(make_policy: Callable[[], AutoscalingSpec]) -> None:
    """A service of one router that runs and one that ends."""
    stays = Router()
    ends = Router()
    runners = [await stays.start(), await ends.start()]
    ends.report = report(wanted=1, held=1)  # sent to it before its clients knew
    scaler: Autoscaler[str] = Autoscaler(lambda _: None, interval_s=0.05)
    followed = ScaledService({"single": make_policy()}, (stays.url,), (ends.url,))

    async def until(condition: Callable[[ScalingDecisions], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition(scaler.follow("s", followed, {"single": 0})):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    try:
        await until(lambda decisions: sizes(decisions) == {"single": 1})
        loaded = report(ready=1, capacity_bytes=100, headroom_bytes=100, idle_s=1e6)
        stays.report = loaded
        ends.status = 500
        await until(lambda decisions: sizes(decisions) == {"single": 0} and not decisions.problem)
    finally:
        await scaler.close()
        for runner in runners:
            await runner.cleanup()


def sizes(decisions: ScalingDecisions) -> dict[str, int]:
    return {pool: each.replicas for pool, each in decisions.pools.items()}


def test_routers_that_end_are_heard_and_need_not_answer(manifest):
    scaling = (
        parse_service(manifest(pools=single(0, minReplicas=0, idleAfter="1s")))
        .spec.pools["single"]
        .autoscaling
    )
    assert scaling is not None
    asyncio.run(ending(lambda: scaling))


def test_measures_that_are_none_are_refused():
    for body in (b"", b"{}", json.dumps([{"single": {"ready": 1}}]).encode()):
        with pytest.raises(ValueError):
            parse_reports(body)
