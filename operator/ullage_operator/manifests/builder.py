"""Builds Kubernetes objects with the names and labels of one component of a service."""

from typing import Any

from ullage_common.process.config_file import Strict
from ullage_operator.api import naming
from ullage_operator.api.section_reader import to_api
from ullage_operator.api.settings import VERSION
from ullage_operator.api.spec import Service

Manifest = dict[str, Any]


class Builder:
    """Builds Kubernetes objects with the metadata of one component."""

    def __init__(self, service: Service, component: str, pool: str | None = None) -> None:
        self._service = service
        self._labels = naming.labels(service.name, component, VERSION, pool)

    def metadata(self, name: str) -> Manifest:
        owners = owner_references(self._service)
        return {
            "name": name,
            "namespace": self._service.namespace,
            "labels": self._labels,
            **({"ownerReferences": owners} if owners else {}),
        }

    def object(self, api_version: str, kind: str, name: str, spec: Manifest) -> Manifest:
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": self.metadata(name),
            "spec": spec,
        }

    def service(self, name: str, spec: Manifest) -> Manifest:
        """Return a Service, which is dual-stack if the cluster has both IPv4 and IPv6."""
        return self.object("v1", "Service", name, {"ipFamilyPolicy": "PreferDualStack", **spec})

    def config_map(
        self, name: str, key: str, text: str, more: dict[str, str] | None = None
    ) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self.metadata(name),
            "data": {key: text, **(more or {})},
        }

    def account(self, name: str) -> Manifest:
        annotations = self._service.spec.service_account.annotations
        return {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": self.metadata(name) | ({"annotations": annotations} if annotations else {}),
            "automountServiceAccountToken": False,
        }

    def disruption_budget(self, name: str, selector: Manifest, most: int) -> list[Manifest]:
        """Return the PodDisruptionBudget that keeps a drain from evicting several pods at once.

        The result is empty if there are fewer than two engines or routers to protect.

        Args:
            name: the name of the object.
            selector: the selector of the pods.
            most: the maximum number of engines or routers.
        """
        if most < 2:
            return []
        # With minAvailable, the last replica would block the drain of its node.
        spec = {
            "maxUnavailable": 1,
            "selector": selector,
            # The eviction of a pod that does not serve costs nothing and must not block a drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        return [self.object("policy/v1", "PodDisruptionBudget", name, spec)]

    def network_policy(self, name: str, match: dict[str, str], rules: Manifest) -> Manifest:
        spec = {"podSelector": {"matchLabels": match}, "policyTypes": ["Ingress"], **rules}
        return self.object("networking.k8s.io/v1", "NetworkPolicy", name, spec)


def owner_references(service: Service) -> list[Manifest]:
    """Return the owner reference that makes Kubernetes delete an object along with its service.

    Outside Kubernetes the list is empty.
    """
    owner = {
        "apiVersion": naming.API_VERSION,
        "kind": naming.KIND,
        "name": service.name,
        "uid": service.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return [owner] if service.uid else []


def as_asked(section: Strict) -> Manifest:
    """Convert a section with Kubernetes' own field names to a manifest, omitting unset fields."""
    asked = to_api(section).items()
    return {name: value for name, value in asked if value is not None}
