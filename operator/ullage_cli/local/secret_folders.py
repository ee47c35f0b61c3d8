"""Replaces each Secret with a folder that has one file per key, as the kubelet would mount it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ullage_cli.local.files import File
from ullage_cli.local.workloads import Manifest, pod_names, pod_spec, workloads
from ullage_operator.api.errors import LocalFailure
from ullage_operator.manifests.config_files import to_yaml


def is_secret_variable(variable: Manifest) -> bool:
    """Return whether an environment variable takes its value from a Secret."""
    return "secretKeyRef" in variable.get("valueFrom", {})


def secret_env(variables: Iterable[Manifest], secrets: Path | None) -> dict[str, str]:
    """Return the environment variables that take their values from Secrets.

    If no folder of Secrets is given, the result is empty, and processes inherit the environment of
    `ullage up`.

    Raises:
        LocalFailure: a Secret's folder or key is missing.
    """
    if secrets is None:
        return {}

    env = {}
    for variable in variables:
        reference = variable["valueFrom"]["secretKeyRef"]
        path = _secret_folder(reference["name"], secrets) / reference["key"]
        if path.is_file():
            env[variable["name"]] = path.read_text(encoding="utf-8").removesuffix("\n")
        elif not reference.get("optional"):
            raise LocalFailure(f"--secrets {secrets}: there is no {path}; write the key to it")

    return env


def secret_mounts(objects: Iterable[Manifest], secrets: Path | None) -> dict[str, dict[str, Path]]:
    """Return the folder of each Secret that a pod mounts, by pod name and mount path.

    Args:
        objects: the operator's plan.
        secrets: folder with one subfolder per Secret, named after the Secret.

    Raises:
        LocalFailure: a Secret has no folder.
    """
    return {
        name: _mounts_of_pod(pod_spec(workload), secrets)
        for workload in workloads(objects)
        for name in pod_names(workload)
    }


def _mounts_of_pod(pod: Manifest, secrets: Path | None) -> dict[str, Path]:
    names = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    return {
        mount["mountPath"]: _secret_folder(names[mount["name"]], secrets)
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] in names
    }


def _secret_folder(name: str, secrets: Path | None) -> Path:
    if secrets is None:
        raise LocalFailure(
            f"the service names the Secret {name}; pass --secrets DIR with a folder {name} in it"
        )
    folder = (secrets / name).resolve()
    if not folder.is_dir():
        raise LocalFailure(f"--secrets {secrets}: has no folder {name}; add it, one file per key")
    return folder


def mount_secrets(files: Iterable[File], mounts: Mapping[str, Mapping[str, Path]]) -> list[File]:
    """Return the configuration files with the Secrets' mount paths replaced by local folders.

    Args:
        files: configuration files, each in `RUN_DIR/POD/config`.
        mounts: the result of `secret_mounts`.
    """
    mounted = []
    for file in files:
        pod_name = file.path.parent.parent.name
        folders = mounts[pod_name]
        if folders:
            document = _with_folders(yaml.safe_load(file.text), folders)
            file = replace(file, text=to_yaml(document))
        mounted.append(file)
    return mounted


def _with_folders(document: Any, folders: Mapping[str, Path]) -> Any:
    """Return a configuration with its mount paths replaced by local folders."""
    match document:
        case dict():
            return {name: _with_folders(value, folders) for name, value in document.items()}
        case list():
            return [_with_folders(value, folders) for value in document]
        case str() if document in folders:
            return str(folders[document])
        case _:
            return document
