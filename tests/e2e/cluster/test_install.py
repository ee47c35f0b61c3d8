"""The chart in a cluster: the operator runs, knows its API and has the rights that it needs."""

from ullage_cluster.kubectl import Kubectl, until
from ullage_cluster.release import CRD, NAME, Release


def test_the_operator_is_available(kubectl: Kubectl, release: Release) -> None:
    status = kubectl.get("deployment", release.operator)["status"]
    assert status["availableReplicas"] >= 1
    kubectl("wait", "--for=condition=Established", f"customresourcedefinition/{CRD}")


def test_the_api_explains_itself(kubectl: Kubectl, release: Release) -> None:
    told = kubectl("explain", "llmservice.spec.routing.queue")
    assert "FIELDS:" in told
    assert "timeout" in told
    assert "llms" in kubectl("api-resources", "--api-group=serving.ullage.dev")


def test_helm_test_passes(kubectl: Kubectl, release: Release) -> None:
    assert "Succeeded" in release.run("test", NAME, "--timeout", "170s")


def test_people_with_the_clusters_roles_may_have_services(
    kubectl: Kubectl, release: Release
) -> None:
    """Kubernetes adds the chart's roles to its own within seconds."""
    for role, verb in (("view", "get"), ("edit", "create")):
        user = f"e2e-{role}"
        kubectl("create", "rolebinding", user, f"--clusterrole={role}", f"--user={user}")

        def may(verb: str, user: str = user) -> bool:
            kind = "llmservices.serving.ullage.dev"
            return kubectl.run("auth", "can-i", verb, kind, f"--as={user}").stdout.strip() == "yes"

        until(lambda verb=verb, may=may: may(verb), f"{user} may {verb}", 60)
        assert may("delete") is (role == "edit")


def test_the_operator_may_do_what_it_does_and_nothing_else(
    kubectl: Kubectl, release: Release
) -> None:
    user = f"--as=system:serviceaccount:{kubectl.namespace}:{release.operator}"

    def may(verb: str, kind: str, *more: str) -> bool:
        return kubectl.run("auth", "can-i", verb, kind, user, *more).stdout.strip() == "yes"

    for kind in ("statefulsets.apps", "deployments.apps", "services", "configmaps"):
        assert may("patch", kind), kind
        assert may("watch", kind), kind
        assert not may("patch", kind, "--namespace=kube-system"), kind
    assert may("patch", "llmservices.serving.ullage.dev", "--subresource=status")
    assert not may("get", "secrets")
    assert not may("create", "pods")
    assert not may("create", "clusterroles")
