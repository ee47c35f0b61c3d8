"""What others change or delete of a service's objects is put right."""

import pytest
from ullage_cluster.kubectl import Kubectl, until
from ullage_cluster.service import Service


@pytest.mark.parametrize("kind", ["service", "networkpolicy", "serviceaccount", "configmap"])
def test_a_deleted_object_comes_back(kubectl: Kubectl, service: Service, kind: str) -> None:
    name = f"{service.name}-router"
    was = kubectl.uid(kind, name)
    kubectl("delete", kind, name)
    until(lambda: kubectl.uid(kind, name) not in ("", was), f"{kind} {name} is made anew", 60)
    service.settle()


def test_a_changed_field_is_changed_back(kubectl: Kubectl, service: Service) -> None:
    name = f"{service.name}-router"
    kubectl.patch("deployment", name, {"spec": {"replicas": 3}})
    until(lambda: kubectl.get("deployment", name)["spec"]["replicas"] == 1, "one replica", 60)
    was = kubectl.get("configmap", name)["data"]
    kubectl.patch("configmap", name, {"data": dict.fromkeys(was, "nonsense")})
    until(lambda: kubectl.get("configmap", name)["data"] == was, "the old configuration", 60)
    service.settle()


def test_what_others_add_stays(kubectl: Kubectl, service: Service) -> None:
    """Also an object with all labels of the service's own, but not owned by it."""
    name = f"{service.name}-router"
    theirs = {"name": f"{service.name}-theirs"}
    theirs["labels"] = kubectl.get("configmap", name)["metadata"]["labels"]
    kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": theirs})
    kubectl("annotate", "service", name, "example.com/team=a", "--overwrite")
    before = kubectl.get("deployment", name)["metadata"]["generation"]
    kubectl("annotate", "llmservice", service.name, "example.com/look=again", "--overwrite")
    service.settle()
    assert kubectl.get("service", name)["metadata"]["annotations"]["example.com/team"] == "a"
    assert kubectl.get("deployment", name)["metadata"]["generation"] == before
    kubectl("delete", "configmap", theirs["name"])  # it is still there
