"""Reads the Deployments and StatefulSets of a plan: their pods, containers and ports."""

from collections.abc import Iterable, Mapping
from typing import Any

WORKLOAD_KINDS = ("Deployment", "StatefulSet")

Manifest = Mapping[str, Any]
"""A Kubernetes object as nested dicts and lists."""


def workloads(objects: Iterable[Manifest]) -> list[Manifest]:
    """Return the objects that create pods: Deployments and StatefulSets."""
    return [item for item in objects if item["kind"] in WORKLOAD_KINDS]


def pod_names(workload: Manifest) -> list[str]:
    """Return the names of a workload's pods, which are numbered like those of a StatefulSet."""
    name = workload["metadata"]["name"]
    return [f"{name}-{index}" for index in range(workload["spec"]["replicas"])]


def pod_spec(workload: Manifest) -> Manifest:
    """Return the pod spec of a workload's template."""
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def container_ports(workload: Manifest) -> list[str]:
    """Return the port names of a workload's main container."""
    container = pod_spec(workload)["containers"][0]
    return [port["name"] for port in container["ports"] if "name" in port]
