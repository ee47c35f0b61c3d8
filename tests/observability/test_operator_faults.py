"""Alerts about the operator fire when an API server treats a real operator badly."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ullage_kubeapi.faults import Fault
from ullage_kubeapi.trial import Operator, World, until
from ullage_testing.alerts import firing, make

Observe = Callable[..., Any]
SYSTEM = {"namespace": "ullage-system", "pod": "ullage-operator-0"}


@pytest.fixture
def start_operator(world: World, tmp_path: Path) -> Iterator[Callable[[], Operator]]:
    started: list[Operator] = []

    def start() -> Operator:
        started.append(Operator(world, tmp_path / "log", False))
        return started[-1]

    yield start
    for operator in started:
        operator.stop()


@pytest.fixture
def watch(observe: Observe, rules_of_operator: list[dict[str, Any]]) -> Callable[..., Any]:
    """watch(operator): a Prometheus that reads this operator."""

    def start(operator: Operator) -> Any:
        target = {"targets": [f"127.0.0.1:{operator.metrics}"], "labels": SYSTEM}
        job = {"job_name": "operator", "static_configs": [target], "honor_labels": True}
        return observe([job], rules_of_operator)

    return start


def test_an_operator_that_may_not_lead(
    world: World, start_operator: Callable[[], Operator], watch: Callable[..., Any]
) -> None:
    assert world.api is not None
    for verb in ("create", "update"):
        world.api.deny(verb, "leases")
    world.create().raise_for_status()
    operator = start_operator()
    with watch(operator) as prometheus:
        expected = {"UllageNobodyLeads", "UllageOperatorIdle"}
        until(lambda: firing(prometheus) == expected, f"{expected} fire")
        for verb in ("create", "update"):
            world.api.grant(verb, "leases")
        until(lambda: not firing(prometheus), "nothing fires")


def test_an_api_server_that_refuses_forbids_and_lingers(
    world: World, start_operator: Callable[[], Operator], watch: Callable[..., Any]
) -> None:
    api = world.api
    assert api is not None
    world.create().raise_for_status()
    operator = start_operator()
    until(operator.reconciled, "the service is reconciled")
    with watch(operator) as prometheus:
        leader = "ullage_operator_leader == 1"
        until(lambda: prometheus.query(leader) and not firing(prometheus), "nothing fires")

        def forbid() -> None:
            api.deny("watch", "pods")
            api.drop_watches()

        def refuse() -> None:
            faults.append(api.inject("PATCH", "statefulsets", 500, times=1_000_000))
            resize(world, 2)

        def linger() -> None:
            kinds = "deployments|statefulsets|configmaps"
            faults.append(api.inject("PATCH", kinds, 200, times=20, delay_s=3.0))
            resize(world, 3)

        faults: list[Fault] = []
        make(forbid, prometheus, "UllageWatchFails")
        api.grant("watch", "pods")
        make(refuse, prometheus, "UllageReconcileFails")
        faults[0].times = 0
        make(linger, prometheus, "UllageReconcileSlow")
        faults[1].times = 0
        told = operator.reconciled()
        until(lambda: operator.reconciled() > told + 2, "the operator waits for nothing")
        make(operator.stop, prometheus, "UllageOperatorAbsent")


def resize(world: World, replicas: int) -> None:
    pools = {"single": {"role": "Standard", "replicas": replicas}}
    world.patch(f"{world.services}/s", {"spec": {"pools": pools}}).raise_for_status()
