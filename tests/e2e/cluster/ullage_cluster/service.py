"""A service in the cluster: its manifest, its status and its pods, all by kubectl."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ullage_cluster.kubectl import Kubectl, Object, is_ready, until

ROOT = Path(__file__).parents[4]
PROFILE = Path("tests", "e2e", "cluster", "service.yaml")
KIND = "llmservices"


def manifest(name: str, root: Path = ROOT, **spec: Any) -> Object:
    """The profile's service under a name; keywords replace fields of its spec.

    Args:
        root: the checkout whose profile it is.
    """
    made: Object = yaml.safe_load((root / PROFILE).read_text())
    made["metadata"]["name"] = name
    made["spec"] |= spec
    return made


@dataclass(frozen=True)
class Service:
    """An LLMService."""

    kubectl: Kubectl
    name: str

    @property
    def url(self) -> str:
        """As pods of its namespace reach it."""
        return f"http://{self.name}-router:8000"

    def get(self) -> Object:
        return self.kubectl.get(KIND, self.name)

    def status(self) -> Object:
        found: Object = self.get().get("status", {})
        return found

    def condition(self, kind: str) -> Object:
        listed = self.status().get("conditions", ())
        return next((c for c in listed if c["type"] == kind), {})

    def edit(self, **spec: Any) -> None:
        self.kubectl.patch(KIND, self.name, {"spec": spec})

    def selector(self, component: str = "engine", pool: str = "") -> str:
        parts = [f"app.kubernetes.io/instance={self.name}"]
        parts.append(f"app.kubernetes.io/component={component}")
        return ",".join([*parts, *([f"serving.ullage.dev/pool={pool}"] if pool else [])])

    def pods(self, component: str = "engine") -> list[Object]:
        return self.kubectl.listed("pods", self.selector(component))

    def everything(self, kinds: str) -> list[Object]:
        """What has its label, whoever owns it."""
        return self.kubectl.listed(kinds, f"app.kubernetes.io/instance={self.name}")

    def owned(self, kinds: str) -> list[Object]:
        return [obj for obj in self.everything(kinds) if obj["metadata"].get("ownerReferences")]

    def is_settled(self) -> bool:
        """Whether the present spec is served, and every workload is as it should be."""
        service = self.get()
        status = service.get("status", {})
        if status.get("observedGeneration") != service["metadata"]["generation"]:
            return False
        ready = {c["type"]: c["status"] for c in status.get("conditions", ())}.get("Ready")
        return ready == "True" and self.is_rolled()

    def is_rolled(self) -> bool:
        """Whether every workload runs its newest template in as many pods as it should."""
        listed = self.everything("statefulsets,deployments,pods")
        pods = [obj for obj in listed if obj["kind"] == "Pod" and not _is_of_job(obj)]
        workloads = [obj for obj in listed if obj["kind"] != "Pod"]
        wanted = sum(w["spec"]["replicas"] for w in workloads)
        return (
            bool(workloads)
            and all(_is_rolled(workload) for workload in workloads)
            and len(pods) == wanted
            and all(is_ready(pod) for pod in pods)
        )

    def settle(self) -> None:
        until(self.is_settled, f"{self.name} is settled; it has {self.status()}")


def _is_of_job(pod: Object) -> bool:
    """Whether a pod is a Job's, and so no replica of a workload."""
    owners = pod["metadata"].get("ownerReferences", ())
    return any(owner["kind"] == "Job" for owner in owners)


def _is_rolled(workload: Object) -> bool:
    status = workload["status"]
    wanted = workload["spec"]["replicas"]
    if status.get("observedGeneration") != workload["metadata"]["generation"]:
        return False
    return bool(status.get("updatedReplicas", 0) == status.get("readyReplicas", 0) == wanted)
