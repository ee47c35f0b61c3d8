"""From the plan's manifests to processes: pure, so that it can be tested without starting any."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Manifest = Mapping[str, Any]

ENTRY_POINTS = {"ullage-engine": "ullage_engine.main", "ullage-router": "ullage_router.main"}
"""Commands of the images, run here as modules of the same interpreter."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One replica of a pod template, as a process."""

    name: str
    owner: str
    """Name of the Deployment or StatefulSet."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, int]
    """Loopback port of every named container port."""


@dataclass(frozen=True, slots=True)
class File:
    """One key of a ConfigMap."""

    path: Path
    text: str


def config_files(objects: Iterable[Manifest], run_dir: Path) -> list[File]:
    """Where the keys of every ConfigMap lie on this machine."""
    return [
        File(config_path(run_dir, item["metadata"]["name"]) / key, text)
        for item in objects
        if item["kind"] == "ConfigMap"
        for key, text in item["data"].items()
    ]


def config_path(run_dir: Path, config_map: str) -> Path:
    return run_dir / "config" / config_map


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
    spec = workload["spec"]["template"]["spec"]
    container = spec["containers"][0]
    env = {item["name"]: env_value(item, name) for item in container.get("env", ())}
    mounts = mount_paths(spec, container, run_dir, name)
    arguments = [translate(text, env, mounts) for text in container.get("args", ())]
    return Pod(
        name=name,
        owner=workload["metadata"]["name"],
        command=(
            *entry_point(container["command"]),
            *arguments,
            *local_flags(container["command"][0], run_dir / name, run_dir / "weights", ports),
        ),
        env=env,
        ports=ports,
    )


def entry_point(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", ENTRY_POINTS[command[0]], *command[1:]]


def env_value(item: Mapping[str, Any], pod_name: str) -> str:
    """A literal value, or the one downward-API field that the manifests use."""
    if "value" in item:
        return str(item["value"])
    assert item["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name", item
    return pod_name


def mount_paths(
    spec: Mapping[str, Any], container: Mapping[str, Any], run_dir: Path, pod_name: str
) -> dict[str, Path]:
    """Folder on this machine of every mount path."""
    config_maps = {
        volume["name"]: volume["configMap"]["name"]
        for volume in spec.get("volumes", ())
        if "configMap" in volume
    }
    return {
        mount["mountPath"]: config_path(run_dir, config_maps[mount["name"]])
        if mount["name"] in config_maps
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


def local_flags(
    command: str, pod_dir: Path, weights_dir: Path, ports: Mapping[str, int]
) -> list[str]:
    """What differs from a pod: loopback, the assigned ports, folders instead of volumes."""
    flags = ["--host", "127.0.0.1"]
    for name, port in ports.items():
        flags += [f"--{name}-port", str(port)]
    if command == "ullage-engine":
        flags += ["--run-dir", str(pod_dir), "--weights-dir", str(weights_dir)]
    return flags
