"""Secrets of a local run: folders with one file a key, as the kubelet would mount them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ullage_operator.errors import LocalFailure
from ullage_operator.local.pods import Manifest, pod_names, workloads


def secret_folders(objects: Iterable[Manifest], secrets: Path | None) -> dict[str, dict[str, Path]]:
    """By pod name, the folder on this machine of every path at which a Secret is mounted.

    Args:
        secrets: folder with one folder a Secret, by its name.

    Raises:
        LocalFailure: a Secret is named and has no folder.
    """
    return {
        name: pod_folders(workload["spec"]["template"]["spec"], secrets)
        for workload in workloads(objects)
        for name in pod_names(workload)
    }


def pod_folders(pod: Manifest, secrets: Path | None) -> dict[str, Path]:
    names = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    return {
        mount["mountPath"]: folder_of(names[mount["name"]], secrets)
        for mount in pod["containers"][0]["volumeMounts"]
        if mount["name"] in names
    }


def folder_of(name: str, secrets: Path | None) -> Path:
    if secrets is None:
        raise LocalFailure(
            f"the service names the Secret {name}; pass --secrets DIR with a folder {name} in it"
        )
    folder = (secrets / name).resolve()
    if not folder.is_dir():
        raise LocalFailure(f"--secrets {secrets}: has no folder {name}; make it, one file a key")
    return folder


def mounted(document: Any, folders: Mapping[str, Path]) -> Any:
    """A configuration with the folders of this machine in place of mount paths."""
    match document:
        case dict():
            return {name: mounted(value, folders) for name, value in document.items()}
        case list():
            return [mounted(value, folders) for value in document]
        case str() if document in folders:
            return str(folders[document])
        case _:
            return document
