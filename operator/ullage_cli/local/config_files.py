"""Builds each pod's configuration file: the cluster's file, adapted to this machine's addresses."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ullage_cli.local.files import File
from ullage_cli.local.ports import LOOPBACK, PodPorts
from ullage_cli.local.workloads import Manifest, pod_names, workloads
from ullage_operator.api import naming
from ullage_operator.api.spec import Service
from ullage_operator.manifests.config_files import adapters_file, to_yaml

ADAPTERS_DIR = "adapters"
"""Folder for the adapters file. No pod's folder has this name, because pod names end in numbers."""

LISTENERS = {"http": "http", "grpc": "grpc", "metrics": "metrics", "probe": "probes"}
"""Maps a container port's name to the router's configuration section for that port."""

KV_PATH = "memory.tiers.file.path"
FILES_PATH = "router.files.path"

Document = dict[str, Any]
"""A parsed configuration file."""


def pod_files(
    objects: Sequence[Manifest],
    run_dir: Path,
    ports: PodPorts,
    cores: Mapping[str, Document],
    host: str = LOOPBACK,
) -> list[File]:
    """Return all pods' configuration files, each placed in its pod's own folder.

    Args:
        objects: the operator's plan, with a memory budget for every engine.
        run_dir: folder that contains every pod's folder.
        ports: loopback ports by pod name.
        cores: CPU core settings of every engine, by pod name.
        host: address on which the router serves its APIs.
    """
    configs = {item["metadata"]["name"]: item["data"] for item in objects if "data" in item}
    targets = {
        workload["metadata"]["name"]: [_grpc_target(ports[name]) for name in pod_names(workload)]
        for workload in workloads(objects)
    }

    files = []
    for workload in workloads(objects):
        owner = workload["metadata"]["name"]
        for name in pod_names(workload):
            folder = run_dir / name / "config"
            # Parse the files again for every pod, which changes its own copy.
            data = {key: yaml.safe_load(text) for key, text in configs[owner].items()}
            if engine := data.get(naming.ENGINE_CONFIG):
                engine = _local_engine(
                    engine, name, run_dir, ports[name], cores[name], targets[owner]
                )
                documents = {naming.ENGINE_CONFIG: engine}
            else:
                documents = _local_router(data, folder, ports[name], targets, host)
            files += [File(folder / key, to_yaml(item)) for key, item in documents.items()]

    return files


def _grpc_target(ports: Mapping[str, int]) -> str:
    return f"{LOOPBACK}:{ports['grpc']}"


def _local_engine(
    document: Document,
    pod_name: str,
    run_dir: Path,
    ports: Mapping[str, int],
    cores: Document,
    pool: Sequence[str],
) -> Document:
    """Adapt an engine's cluster configuration to this machine.

    All engines on this machine share one folder of prepared weights.

    Args:
        document: the engine's configuration in a cluster.
        pod_name: the engine's id.
        run_dir: folder that contains every pod's folder.
        ports: the engine's loopback ports.
        cores: the CPU core settings of the engine.
        pool: gRPC addresses of all engines in the engine's pool.
    """
    server = (
        document["server"]
        | cores
        | {
            "engine_id": pod_name,
            "host": LOOPBACK,
            "grpc_port": ports["grpc"],
            "metrics_port": ports["metrics"],
            **({"probe_port": ports["probe"]} if "probe" in ports else {}),
            "run_dir": str(run_dir / pod_name),
            "weights_dir": str(run_dir / "weights"),
        }
    )

    tiers = dict(document["memory"]["tiers"])
    if "remote" in tiers:
        peers = [address for address in pool if address != _grpc_target(ports)]
        tiers["remote"] = tiers["remote"] | {"peers": peers}
    if _has_file_tier(document) and tiers["file"]["path"] == naming.KV_DIR:
        tiers["file"] = tiers["file"] | {"path": str(run_dir / pod_name / "kv")}

    local = document | {"server": server, "memory": document["memory"] | {"tiers": tiers}}
    if "adapters_file" in document:
        local["adapters_file"] = str(_adapters_path(run_dir))
    return local


def _local_router(
    data: Mapping[str, Document],
    folder: Path,
    ports: Mapping[str, int],
    targets: Mapping[str, Sequence[str]],
    host: str,
) -> dict[str, Document]:
    """Adapt the router's configuration files to this machine, and return them by name.

    A pool's Service name is replaced by the addresses of the pool's engines. Pools without engines
    are dropped. Canaries cannot run on this machine, so the rollout file lists only the adapters of
    sleeping engines, and is omitted if there are none.

    Args:
        data: the router's configuration files in a cluster, by name.
        folder: folder to which the files will be written.
        ports: the router's loopback ports.
        targets: gRPC addresses of engines, by the name of their StatefulSet, which is also the name
            of their Service.
        host: address on which the router serves its APIs. On another address than loopback, the
            statistics and the console are as protected as in a cluster.
    """
    document = data[naming.ROUTER_CONFIG]
    pools = [pool | {"targets": _addresses(pool["targets"], targets)} for pool in document["pools"]]

    listen: dict[str, dict[str, Any]] = {
        section: {"host": LOOPBACK, "port": ports[port_name]}
        for port_name, section in LISTENERS.items()
        if port_name in ports
    }
    if host == LOOPBACK:
        listen["http"]["public_stats"] = True  # loopback is as public as the port of the metrics
        listen["console"] = {"local": True}
    else:
        listen["http"] = document.get("http", {}) | {"host": host, "port": ports["http"]}
        listen["grpc"]["host"] = host

    if files := document.get("files"):
        is_default = files["dir"] == naming.FILES_DIR
        own = {"dir": str(folder.parent / "files")} if is_default else {}
        listen["files"] = files | own

    router = document | listen | {"pools": [pool for pool in pools if pool["targets"]]}
    del router["rollout_file"]
    adapters = data[naming.ROLLOUT_FILE].get("adapters")
    if not adapters:
        return {naming.ROUTER_CONFIG: router}

    router["rollout_file"] = str(folder / naming.ROLLOUT_FILE)
    return {naming.ROUTER_CONFIG: router, naming.ROLLOUT_FILE: {"adapters": adapters}}


def _addresses(services: Iterable[str], targets: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the gRPC addresses of all engines behind the given Services (each as NAME:PORT)."""
    return [address for service in services for address in targets[service.split(":")[0]]]


def adapters_of(service: Service, run_dir: Path) -> File:
    """Return the file that lists the service's LoRA adapters. All engines share this file."""
    return File(_adapters_path(run_dir), adapters_file(service))


def _adapters_path(run_dir: Path) -> Path:
    return run_dir / ADAPTERS_DIR / naming.ADAPTERS_FILE


def data_folders(files: Iterable[File]) -> dict[Path, str]:
    """Return the folders of KV file tiers and uploaded files, with the fields that set them."""
    folders = {}
    for file in files:
        if file.path.name == naming.ENGINE_CONFIG:
            engine = yaml.safe_load(file.text)
            if _has_file_tier(engine):
                folders[Path(engine["memory"]["tiers"]["file"]["path"])] = KV_PATH
        elif file.path.name == naming.ROUTER_CONFIG:
            router = yaml.safe_load(file.text)
            if "files" in router:
                folders[Path(router["files"]["dir"])] = FILES_PATH
    return folders


def _has_file_tier(engine: Document) -> bool:
    return "file" in engine["memory"]["tiers"]
