"""The operator's plan, with loopback in place of the cluster's addresses and volumes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ullage_operator import naming
from ullage_operator.autoscale import Policy
from ullage_operator.configs import to_yaml
from ullage_operator.errors import LocalFailure
from ullage_operator.local.pods import Manifest, Pod, pod_names, pods, workloads
from ullage_operator.local.ports import LOOPBACK, assign
from ullage_operator.local.secrets import mounted, secret_folders
from ullage_operator.plan import Observed, plan
from ullage_operator.scaling import autoscaling_of, policy, replicas
from ullage_operator.settings import Settings
from ullage_operator.spec import Service
from ullage_rpc.memory import usable_bytes

Ports = Mapping[str, Mapping[str, int]]
"""Loopback port of every named container port, by pod name."""
Document = dict[str, Any]

# sockaddr_un holds 108 bytes with the closing zero; engines name their sockets below this folder.
MAX_SOCKET_PATH = 107
SOCKET_NAME = "/worker-9999.ipc"


@dataclass(frozen=True, slots=True)
class File:
    """One configuration file of one pod."""

    path: Path
    text: str


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What `ullage up` runs."""

    model: str
    pods: list[Pod]
    """Also those of pools that scale which do not run yet."""
    files: list[File]
    policies: Mapping[str, Policy] = field(default_factory=dict)
    """Of pools that scale."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """With how many engines these begin."""


def plan_local(
    service: Service,
    run_dir: Path,
    *,
    http_port: int,
    grpc_port: int,
    log_level: str,
    secrets: Path | None = None,
) -> LocalPlan:
    """The processes and files of a service on this machine; port 0 means any free one.

    `log_level` is for services that name none. `secrets` is a folder with one folder for every
    Secret that the service names.

    Raises:
        PortBusy: a port is taken.
        LocalFailure: the service asks for no engine, names another service, a Secret has no folder,
            or the folder's path is too long.
    """
    check_cascade(service)
    check_pools(service)
    adapted = with_log_level(one_router(fully_scaled(service)), log_level)
    observed = Observed(now=datetime.now(UTC))
    decided = plan(adapted, observed, Settings(on_kubernetes=False))
    wanted = {naming.router_name(service.name): {"http": http_port, "grpc": grpc_port}}
    ports = assign(decided.apply, wanted)
    made = pods(decided.apply, run_dir, ports)
    check_engines(made)
    check_length(made, run_dir)
    objects = share_memory(decided.apply)
    files = with_secrets(pod_files(objects, run_dir, ports), secret_folders(objects, secrets))
    return LocalPlan(
        service.spec.model.name, made, files, policies_of(service), first_sizes(service)
    )


def policies_of(service: Service) -> dict[str, Policy]:
    """Of pools that scale; here there is nobody else to do it, whatever the provider."""
    found = {name: autoscaling_of(pool) for name, pool in service.spec.pools.items()}
    return {name: policy(scaling) for name, scaling in found.items() if scaling}


def first_sizes(service: Service) -> dict[str, int]:
    pools = service.spec.pools
    return {name: replicas(pools[name], None, None) for name in policies_of(service)}


def fully_scaled(service: Service) -> Service:
    """With every engine that there can ever be: each has its ports and files from the start."""
    pools = {
        name: msgspec.structs.replace(pool, replicas=scaling.max_replicas)
        if (scaling := autoscaling_of(pool))
        else pool
        for name, pool in service.spec.pools.items()
    }
    spec = msgspec.structs.replace(service.spec, pools=pools)
    return msgspec.structs.replace(service, spec=spec)


def with_secrets(files: Iterable[File], folders: Mapping[str, Mapping[str, Path]]) -> list[File]:
    """The files with this machine's folders of Secrets, which `folders` has by pod name."""
    found = [(file, folders[file.path.parent.parent.name]) for file in files]
    return [
        replace(file, text=to_yaml(mounted(yaml.safe_load(file.text), own))) if own else file
        for file, own in found
    ]


def share_memory(objects: Sequence[Manifest]) -> list[Manifest]:
    """Workers without a budget of their own get equal parts of what others leave.

    On Kubernetes an engine's share its container's limit; here each would take the whole machine.
    """
    counts = {item["metadata"]["name"]: len(pod_names(item)) for item in workloads(objects)}
    engines = {item["metadata"]["name"]: item for item in objects if is_engine(item)}
    workers = {name: counts[name] * num_workers(item) for name, item in engines.items()}
    budgets = {name: budget(item) for name, item in engines.items()}
    taken = sum(given * workers[name] for name, given in budgets.items() if given is not None)
    num_open = sum(workers[name] for name, given in budgets.items() if given is None)
    share = max(0, usable_bytes() - taken) // max(1, num_open)
    return [with_budget(item, share) if is_engine(item) else item for item in objects]


def is_engine(item: Manifest) -> bool:
    """Whether it is the ConfigMap of an engine."""
    return naming.ENGINE_CONFIG in item.get("data", {})


def num_workers(item: Manifest) -> int:
    """Workers of an engine, each with a device of its own."""
    document: Document = yaml.safe_load(item["data"][naming.ENGINE_CONFIG])
    return int(document["gpus"])


def budget(item: Manifest) -> int | None:
    """Bytes of a device as an engine's ConfigMap has them."""
    memory: Document = yaml.safe_load(item["data"][naming.ENGINE_CONFIG])["memory"]
    return memory.get("device_bytes")


def with_budget(item: Manifest, device_bytes: int) -> Manifest:
    """An engine's ConfigMap with a budget, its own if it has one."""
    document: Document = yaml.safe_load(item["data"][naming.ENGINE_CONFIG])
    memory = {"device_bytes": device_bytes} | document["memory"]
    data = item["data"] | {naming.ENGINE_CONFIG: to_yaml(document | {"memory": memory})}
    return {**item, "data": data}


def one_router(service: Service) -> Service:
    """Routers of one machine would share one port, so there is one."""
    router = msgspec.structs.replace(service.spec.router, replicas=1)
    spec = msgspec.structs.replace(service.spec, router=router)
    return msgspec.structs.replace(service, spec=spec)


def with_log_level(service: Service, level: str) -> Service:
    """A service that names no level has this one."""
    own = service.spec.observability
    told = msgspec.structs.replace(own, log_level=own.log_level or level)
    spec = msgspec.structs.replace(service.spec, observability=told)
    return msgspec.structs.replace(service, spec=spec)


def check_cascade(service: Service) -> None:
    """Services by their names are found by the cluster's name server, which is not here."""
    cascade = service.spec.cascade
    names = [step.service for step in cascade.steps if step.service] if cascade else []
    if names:
        raise LocalFailure(
            f"spec.cascade.steps: {names[0]} is found by that name in a cluster only; serve it "
            "with ullage up as well and write address: 127.0.0.1:PORT with its gRPC port"
        )


def check_pools(service: Service) -> None:
    """What only a cluster can give; a process of this machine sees its files and environment."""
    for name, pool in service.spec.pools.items():
        path = f"spec.pools.{name}"
        if pool.volumes:
            raise LocalFailure(
                f"{path}.volumes: ullage up mounts nothing; leave them out here, its processes see "
                "the files of this machine"
            )
        if pool.env_from or any("valueFrom" in variable for variable in pool.env):
            raise LocalFailure(
                f"{path}.env: only a cluster can look values up; set them in the environment of "
                "ullage up, which engines inherit, and leave valueFrom and envFrom out"
            )


def check_engines(made: Iterable[Pod]) -> None:
    if all("http" in pod.ports for pod in made):
        raise LocalFailure(
            "spec.pools: no pool asks for an engine; set spec.pools.single.replicas to 1"
        )


def check_length(made: Iterable[Pod], run_dir: Path) -> None:
    for pod in made:
        length = len(str(run_dir / pod.name).encode()) + len(SOCKET_NAME)
        if length > MAX_SOCKET_PATH:
            raise LocalFailure(
                f"--run-dir {run_dir}: too long for the sockets of {pod.name}, by "
                f"{length - MAX_SOCKET_PATH} bytes; choose a shorter one"
            )


def pod_files(objects: Sequence[Manifest], run_dir: Path, ports: Ports) -> list[File]:
    """The configuration of every pod, in its own copy."""
    texts = {item["metadata"]["name"]: item["data"] for item in objects if "data" in item}
    targets = {
        workload["metadata"]["name"]: [
            f"{LOOPBACK}:{ports[name]['grpc']}" for name in pod_names(workload)
        ]
        for workload in workloads(objects)
    }
    return [
        File(run_dir / name / "config" / key, localise(key, text, name, run_dir, ports, targets))
        for workload in workloads(objects)
        for name in pod_names(workload)
        for key, text in texts[workload["metadata"]["name"]].items()
        if key != naming.ROLLOUT_FILE  # there is nothing beside which a canary could run
    ]


def localise(
    key: str,
    text: str,
    pod_name: str,
    run_dir: Path,
    ports: Ports,
    targets: Mapping[str, Sequence[str]],
) -> str:
    """A configuration file with this machine's addresses and folders."""
    document: Document = yaml.safe_load(text)
    if key == naming.ENGINE_CONFIG:
        return to_yaml(local_engine(document, pod_name, run_dir, ports[pod_name]))
    return to_yaml(local_router(document, ports[pod_name], targets))


def local_engine(
    document: Document, pod_name: str, run_dir: Path, ports: Mapping[str, int]
) -> Document:
    """Engines of one machine share the prepared weights."""
    server = document["server"] | {
        "engine_id": pod_name,
        "host": LOOPBACK,
        "grpc_port": ports["grpc"],
        "metrics_port": ports["metrics"],
        **({"probe_port": ports["probe"]} if "probe" in ports else {}),
        "run_dir": str(run_dir / pod_name),
        "weights_dir": str(run_dir / "weights"),
    }
    return document | {"server": server}


def local_router(
    document: Document, ports: Mapping[str, int], targets: Mapping[str, Sequence[str]]
) -> Document:
    """A pool's Service name becomes the addresses of its engines; a pool without any is left out.

    The name of a Service is the name of the StatefulSet behind it.
    """
    pools = [
        {
            **pool,
            "targets": [
                address for name in pool["targets"] for address in targets[name.split(":")[0]]
            ],
        }
        for pool in document["pools"]
    ]
    names = {"http": "http", "grpc": "grpc", "metrics": "metrics", "probe": "probes"}
    listen = {
        section: {"host": LOOPBACK, "port": ports[name]}
        for name, section in names.items()
        if name in ports
    }
    made = document | listen | {"pools": [pool for pool in pools if pool["targets"]]}
    return {name: section for name, section in made.items() if name != "rollout_file"}
