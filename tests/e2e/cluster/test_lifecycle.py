"""A service's end: everything of it goes, and its name can be used again."""

from collections.abc import Callable

from ullage_cluster.kubectl import Kubectl, until
from ullage_cluster.service import KIND, Service

EVERYTHING = "all,configmaps,serviceaccounts,networkpolicies,poddisruptionbudgets"
SMALL = {"single": {"replicas": 1, "gpus": 1, "resources": {"requests": {"cpu": "50m"}}}}


def left(kubectl: Kubectl, name: str) -> list[str]:
    found = kubectl.listed(EVERYTHING, f"app.kubernetes.io/instance={name}")
    return [f"{obj['kind']}/{obj['metadata']['name']}" for obj in found]


def test_a_deleted_service_leaves_nothing(
    kubectl: Kubectl, make_service: Callable[..., Service]
) -> None:
    made = make_service("brief", pools=SMALL)
    until(lambda: len(left(kubectl, made.name)) > 5, "its objects are there", 60)
    kubectl("delete", KIND, made.name)
    until(lambda: not left(kubectl, made.name), f"all of {made.name} is gone")
    assert not made.get()


def test_a_name_is_used_again_at_once(
    kubectl: Kubectl, make_service: Callable[..., Service]
) -> None:
    first = make_service("again", pools=SMALL)
    until(lambda: first.owned("statefulsets"), "its pool is there", 60)
    old = first.get()["metadata"]["uid"]
    kubectl("delete", KIND, first.name, "--wait=false")
    until(lambda: not first.get(), "the first is gone")
    second = make_service("again", pools=SMALL)
    new = second.get()["metadata"]["uid"]
    assert new != old
    until(lambda: second.owned("statefulsets"), "the second's pool is there")
    second.settle()
    owners = {o["uid"] for x in second.owned(EVERYTHING) for o in x["metadata"]["ownerReferences"]}
    assert owners >= {new}
    assert old not in owners
