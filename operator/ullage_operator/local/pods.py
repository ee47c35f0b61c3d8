"""From the plan's manifests to processes: pure, so that it can be tested without starting any."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage_operator import naming

Manifest = Mapping[str, Any]

ENTRY_POINTS = {"ullage-engine": "ullage_engine.main", "ullage-router": "ullage_router.main"}
"""Commands of the images, run here as modules of the same interpreter."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One replica of a pod template, as a process."""

    name: str
    owner: str
    """Name of the Deployment or StatefulSet."""
    part: str
    """Where the spec speaks of it, such as pools.single or router."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, int]
    """Loopback port of every named container port."""


def workloads(objects: Iterable[Manifest]) -> list[Manifest]:
    return [item for item in objects if item["kind"] in ("Deployment", "StatefulSet")]


def pod_names(workload: Manifest) -> list[str]:
    """Stable names, as a StatefulSet gives them."""
    name = workload["metadata"]["name"]
    return [f"{name}-{index}" for index in range(workload["spec"]["replicas"])]


def pods(
    objects: Sequence[Manifest], run_dir: Path, ports: Mapping[str, Mapping[str, int]]
) -> list[Pod]:
    """The processes of a plan.

    `ports` gives the loopback port of every named container port, by pod name.
    """
    return [
        make_pod(workload, name, run_dir, ports[name])
        for workload in workloads(objects)
        for name in pod_names(workload)
    ]


def make_pod(workload: Manifest, name: str, run_dir: Path, ports: Mapping[str, int]) -> Pod:
    container = workload["spec"]["template"]["spec"]["containers"][0]
    mounts = mount_paths(container, run_dir, name)
    given = {item["name"]: env_value(item, name) for item in container.get("env", ())}
    env = {key: translate(value, {}, mounts) for key, value in given.items()}
    arguments = [translate(text, env, mounts) for text in container.get("args", ())]
    return Pod(
        name=name,
        owner=workload["metadata"]["name"],
        part=spec_part(workload),
        command=(*entry_point(container["command"]), *arguments),
        env=env,
        ports=ports,
    )


def spec_part(workload: Manifest) -> str:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    pool = labels.get(naming.POOL_LABEL)
    return f"pools.{pool}" if pool else str(labels["app.kubernetes.io/component"])


def entry_point(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", ENTRY_POINTS[command[0]], *command[1:]]


def env_value(item: Mapping[str, Any], pod_name: str) -> str:
    """A literal value, or the one downward-API field that the manifests use."""
    if "value" in item:
        return str(item["value"])
    assert item["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name", item
    return pod_name


def mount_paths(container: Mapping[str, Any], run_dir: Path, pod_name: str) -> dict[str, Path]:
    """Folder on this machine of every mount path; downloads are shared by all pods."""
    return {
        mount["mountPath"]: run_dir / mount["name"]
        if mount["mountPath"] == naming.CACHE_DIR
        else run_dir / pod_name / mount["name"]
        for mount in container.get("volumeMounts", ())
    }


def translate(text: str, env: Mapping[str, str], mounts: Mapping[str, Path]) -> str:
    """Expands $(NAME) as the kubelet does, and mount paths to folders of this machine."""
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    for path, folder in mounts.items():
        if text.startswith(f"{path}/"):
            return str(folder) + text.removeprefix(path)
    return text
