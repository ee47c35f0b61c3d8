"""Converts pods to local commands: arguments, environment, folders for volumes, and ports."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ullage_cli.local.ports import PodPorts
from ullage_cli.local.secret_folders import is_secret_variable, secret_env
from ullage_cli.local.workloads import Manifest, pod_names, pod_spec, workloads
from ullage_operator.api import naming

ENTRY_POINTS = {"ullage-engine": "ullage_engine.main", "ullage-router": "ullage_router.main"}
"""Maps each container command to the Python module that this interpreter runs instead."""

CACHES = ("HF_HOME", "ULLAGE_S3_CACHE")
"""Variables for folders of fetched models. Pods keep the user's own folders if these are set."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A replica of a pod template that runs as a local process."""

    name: str
    owner: str
    """Name of the Deployment or StatefulSet that owns the pod."""
    part: str
    """Section of the service's spec that describes the pod, for example pools.single or router."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, int]
    """Loopback port of every named container port."""
    grace_s: float
    """Seconds between SIGTERM and SIGKILL, during which running requests can finish."""


def make_pods(
    objects: Sequence[Manifest], run_dir: Path, ports: PodPorts, secrets: Path | None = None
) -> list[Pod]:
    """Convert all of a plan's pods to local processes.

    Args:
        objects: the operator's plan.
        run_dir: folder in which each pod volume becomes a folder.
        ports: loopback ports by pod name.
        secrets: folder with one subfolder per Secret.

    Raises:
        LocalFailure: an environment variable refers to a Secret whose folder or key is missing.
    """
    return [
        _make_pod(workload, name, run_dir, ports[name], secrets)
        for workload in workloads(objects)
        for name in pod_names(workload)
    ]


def _make_pod(
    workload: Manifest,
    name: str,
    run_dir: Path,
    ports: Mapping[str, int],
    secrets: Path | None,
) -> Pod:
    spec = pod_spec(workload)
    container = spec["containers"][0]
    mounts = _mounts(container, run_dir, name)

    variables = container.get("env", ())
    env = {
        variable["name"]: _translate(_variable_value(variable, name), {}, mounts)
        for variable in variables
        if not is_secret_variable(variable)
    }
    env |= {name: os.environ[name] for name in CACHES if name in env and name in os.environ}
    env |= secret_env(filter(is_secret_variable, variables), secrets)

    arguments = [_translate(text, env, mounts) for text in container.get("args", ())]
    return Pod(
        name=name,
        owner=workload["metadata"]["name"],
        part=_spec_part(workload),
        command=(*_entry_point(container["command"]), *arguments),
        env=env,
        ports=ports,
        grace_s=spec["terminationGracePeriodSeconds"],
    )


def _spec_part(workload: Manifest) -> str:
    """Return the spec section that describes a workload, for example pools.single or router."""
    labels = workload["spec"]["template"]["metadata"]["labels"]
    pool = labels.get(naming.POOL_LABEL)
    return f"pools.{pool}" if pool else str(labels["app.kubernetes.io/component"])


def _entry_point(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", ENTRY_POINTS[command[0]], *command[1:]]


def _variable_value(variable: Manifest, pod_name: str) -> str:
    """Return the value of a container's environment variable in the given pod.

    This is the literal value (empty if the variable has none), or the pod's name if the variable
    refers to `metadata.name`. The manifests use no other field of the downward API.
    """
    if "valueFrom" not in variable:
        return str(variable.get("value") or "")
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name", variable
    return pod_name


def _mounts(container: Manifest, run_dir: Path, pod_name: str) -> dict[str, Path]:
    """Map each mount path of a container to the local folder that stands in for its volume.

    All pods share one download folder. Every other volume is a folder of the pod's own.
    """
    return {
        mount["mountPath"]: run_dir / mount["name"]
        if mount["mountPath"] == naming.CACHE_DIR
        else run_dir / pod_name / mount["name"]
        for mount in container.get("volumeMounts", ())
    }


def _translate(text: str, env: Mapping[str, str], mounts: Mapping[str, Path]) -> str:
    """Translate an argument or variable of a container so that it works in a local process.

    References of the form $(NAME) are expanded as the kubelet does. If the text starts with a mount
    path, that path is replaced with a local folder.
    """
    for name, value in env.items():
        text = text.replace(f"$({name})", value)

    for path, folder in mounts.items():
        if text.startswith(f"{path}/"):
            return str(folder) + text.removeprefix(path)

    return text
