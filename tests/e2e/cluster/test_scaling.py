"""A pool that sleeps when nobody asks, and wakes for the request that does."""

from collections.abc import Callable

from ullage_cluster.client import Client
from ullage_cluster.kubectl import until
from ullage_cluster.service import Service, manifest

AUTOSCALING = {
    "minReplicas": 0,
    "maxReplicas": 1,
    "idleAfter": "10s",
    "scaleDown": {"window": "0s"},
}


def test_a_pool_sleeps_and_the_next_request_wakes_it(
    make_service: Callable[..., Service], client: Client
) -> None:
    pool = manifest("sleeper")["spec"]["pools"]["single"]
    sleeper = make_service("sleeper", pools={"single": {**pool, "autoscaling": AUTOSCALING}})
    until(sleeper.is_settled, "it serves")
    until(lambda: not sleeper.pods(), "the pool sleeps")
    assert sleeper.condition("Ready")["status"] == "True", sleeper.status()
    (answer,) = client.ask(sleeper, ["Name a colour."], max_tokens=8)
    assert answer.is_whole, answer
    until(lambda: not sleeper.pods(), "the pool sleeps again")


def test_a_sleeping_pool_wakes_though_its_service_is_invalid(
    make_service: Callable[..., Service], client: Client
) -> None:
    pool = manifest("drowsy")["spec"]["pools"]["single"]
    drowsy = make_service("drowsy", pools={"single": {**pool, "autoscaling": AUTOSCALING}})
    until(drowsy.is_settled, "it serves")
    until(lambda: not drowsy.pods(), "the pool sleeps")

    refused = {"podTemplate": {"spec": {"serviceAccountName": "root"}}}
    drowsy.edit(pools={"single": refused})
    until(lambda: drowsy.condition("Degraded").get("reason") == "InvalidSpec", "it says so", 60)

    (answer,) = client.ask(drowsy, ["Name a colour."], max_tokens=8)
    assert answer.is_whole, answer
