"""The operator's plan for one machine: pods become commands, files and loopback ports. Pure.

Addresses of the cluster become loopback addresses, volumes become folders, and a Secret becomes a
folder with one file a key, as the kubelet would mount it.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ullage_common.process.cores import physical_cores, usable_cores
from ullage_common.process.memory import usable_bytes
from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.sections import AutoscalingSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.local.checks import check_service
from ullage_operator.manifests.config_files import adapters_file, to_yaml
from ullage_operator.manifests.engine_choice import expected_engine
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import plan
from ullage_operator.policy.pool_sizes import autoscaling_of, replicas

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
    """Part of the spec that the pod belongs to, such as pools.single or router."""
    command: tuple[str, ...]
    env: Mapping[str, str]
    ports: Mapping[str, int]
    """Loopback port of every named container port."""
    grace_s: float
    """Time to end after SIGTERM, in which answers under way end, too."""


def workloads(objects: Iterable[Manifest]) -> list[Manifest]:
    return [item for item in objects if item["kind"] in ("Deployment", "StatefulSet")]


def pod_names(workload: Manifest) -> list[str]:
    """Stable names, as a StatefulSet gives them."""
    name = workload["metadata"]["name"]
    return [f"{name}-{index}" for index in range(workload["spec"]["replicas"])]


def pods(
    objects: Sequence[Manifest],
    run_dir: Path,
    ports: Mapping[str, Mapping[str, int]],
    secrets: Path | None = None,
) -> list[Pod]:
    """The processes of a plan.

    `ports` gives the loopback port of every named container port, by pod name.
    """
    return [
        make_pod(workload, name, run_dir, ports[name], secrets)
        for workload in workloads(objects)
        for name in pod_names(workload)
    ]


def make_pod(
    workload: Manifest,
    name: str,
    run_dir: Path,
    ports: Mapping[str, int],
    secrets: Path | None = None,
) -> Pod:
    spec = workload["spec"]["template"]["spec"]
    container = spec["containers"][0]
    mounts = mount_paths(container, run_dir, name)
    listed = container.get("env", ())
    given = {item["name"]: env_value(item, name) for item in listed if not is_of_secret(item)}
    env = {key: translate(value, {}, mounts) for key, value in given.items()}
    env |= secret_env(filter(is_of_secret, listed), secrets)
    arguments = [translate(text, env, mounts) for text in container.get("args", ())]
    return Pod(
        name=name,
        owner=workload["metadata"]["name"],
        part=spec_part(workload),
        command=(*entry_point(container["command"]), *arguments),
        env=env,
        ports=ports,
        grace_s=spec["terminationGracePeriodSeconds"],
    )


def spec_part(workload: Manifest) -> str:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    pool = labels.get(naming.POOL_LABEL)
    return f"pools.{pool}" if pool else str(labels["app.kubernetes.io/component"])


def entry_point(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", ENTRY_POINTS[command[0]], *command[1:]]


def is_of_secret(item: Mapping[str, Any]) -> bool:
    return "secretKeyRef" in item.get("valueFrom", {})


def secret_env(items: Iterable[Mapping[str, Any]], secrets: Path | None) -> dict[str, str]:
    """Return the variables that are keys of Secrets.

    Without a folder of Secrets there are none: processes inherit the environment of `ullage up`.

    Raises:
        LocalFailure: a Secret has no folder, or lacks a key.
    """
    if secrets is None:
        return {}
    env = {}
    for item in items:
        reference = item["valueFrom"]["secretKeyRef"]
        path = folder_of(reference["name"], secrets) / reference["key"]
        if path.is_file():
            env[item["name"]] = path.read_text(encoding="utf-8").removesuffix("\n")
        elif not reference.get("optional"):
            raise LocalFailure(f"--secrets {secrets}: there is no {path}; write the key to it")
    return env


def env_value(item: Mapping[str, Any], pod_name: str) -> str:
    """A literal value, empty where none is given, or the one downward-API field that the
    manifests use."""
    if "valueFrom" not in item:
        return str(item.get("value") or "")
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
    """Expand $(NAME) as the kubelet does, and mount paths to folders of this machine."""
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    for path, folder in mounts.items():
        if text.startswith(f"{path}/"):
            return str(folder) + text.removeprefix(path)
    return text


LOOPBACK = "127.0.0.1"


def assign(
    objects: Sequence[Manifest],
    fixed: Mapping[str, Mapping[str, int]],
    kept: contextlib.ExitStack | None = None,
) -> dict[str, dict[str, int]]:
    """A port for every named container port of every pod; `fixed` wins, 0 means any.

    Args:
        kept: its end lets other programs have the ports again; without it they may at once.

    Raises:
        LocalFailure: a fixed port cannot be bound, or is asked for twice; the message names flags.
    """
    given = [port for ports in fixed.values() for port in ports.values() if port]
    if twice := next((port for port in given if given.count(port) > 1), 0):
        raise LocalFailure(
            f"port {twice} is asked for twice; choose another with --http-port or --grpc-port, "
            "or 0 for any"
        )
    with_ports: dict[str, dict[str, int]] = {}
    with contextlib.ExitStack() as reserved:
        for workload in workloads(objects):
            for name in pod_names(workload):
                fixed_ports = fixed.get(workload["metadata"]["name"], {})
                with_ports[name] = {
                    port: reserve(fixed_ports.get(port, 0), port, reserved)
                    for port in container_ports(workload)
                }
        if kept is not None:
            kept.callback(reserved.pop_all().close)
    return with_ports


def container_ports(workload: Mapping[str, Any]) -> list[str]:
    container = workload["spec"]["template"]["spec"]["containers"][0]
    return [port["name"] for port in container["ports"] if "name" in port]


def reserve(port: int, name: str, reserved: contextlib.ExitStack) -> int:
    """Binds the port, so that nobody who asks for any port gets it.

    The pod's servers do, as nothing listens here and they set SO_REUSEADDR, too.
    """
    sock = socket.socket()
    # With it, a port whose old connections linger in TIME_WAIT is free.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((LOOPBACK, port))
    except OSError as error:
        sock.close()
        raise LocalFailure(
            f"port {port} on {LOOPBACK} is taken; choose another with --{name}-port, or 0 for any"
        ) from error
    reserved.enter_context(sock)
    return int(sock.getsockname()[1])


def secret_folders(objects: Iterable[Manifest], secrets: Path | None) -> dict[str, dict[str, Path]]:
    """Return by pod name the folder on this machine of every path at which a Secret is mounted.

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


ADAPTERS = "adapters"
"""Folder of the file with the adapters, which no pod is called like: theirs end with numbers."""
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
    """Every pod, also those of pools that scale which do not run yet."""
    files: list[File]
    policies: Mapping[str, AutoscalingSpec] = field(default_factory=dict)
    """Policies of pools that scale."""
    engines: Sequence[str] = ()
    """For each pool the engine that it will be here, and why."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Number of engines that these pools begin with."""
    folders: Sequence[Path] = ()
    """Folders in which engines keep KV."""


def plan_local(
    service: Service,
    run_dir: Path,
    *,
    http_port: int,
    grpc_port: int,
    log_level: str,
    secrets: Path | None = None,
    has_vllm: bool = False,
    kept: contextlib.ExitStack | None = None,
) -> LocalPlan:
    """Return the processes and files of a service on this machine; port 0 means any free one.

    `log_level` is for services that name none. `secrets` is a folder with one folder for every
    Secret that the service names. `has_vllm` is whether engines here can be vLLM. Until `kept` is
    closed, no other program is given the pods' ports.

    Raises:
        LocalFailure: a port is taken, the service asks for no engine, for one that is not here, or
            names another service, a Secret has no folder, or the folder's path is too long.
    """
    check_service(service, has_vllm)
    observed = Observed(now=datetime.now(UTC))
    decided = plan(adapted(service, log_level), observed, Settings(on_kubernetes=False))
    router_ports = {naming.router_name(service.name): {"http": http_port, "grpc": grpc_port}}
    ports = assign(decided.apply, router_ports, kept)
    planned = pods(decided.apply, run_dir, ports, secrets)
    check_engines(planned)
    check_length(planned, run_dir)
    objects = share_memory(decided.apply)
    cores = share_cores(objects, physical_cores(sorted(os.sched_getaffinity(0))[: usable_cores()]))
    planned_files = pod_files(objects, run_dir, ports, cores)
    files = with_secrets(planned_files, secret_folders(objects, secrets))
    if service.spec.serves_adapters:
        files.append(adapters_of(service, run_dir))
    return LocalPlan(
        service.spec.model.name,
        planned,
        files,
        policies_of(service),
        engine_lines(service, has_vllm),
        first_sizes(service),
        kv_folders(files),
    )


def adapters_of(service: Service, run_dir: Path) -> File:
    """Return the file from which all engines read their adapters."""
    return File(run_dir / ADAPTERS / naming.ADAPTERS_FILE, adapters_file(service))


def engine_lines(service: Service, has_vllm: bool) -> list[str]:
    spec = service.spec
    on_cuda = {"cuda": True, "cpu": False}.get(spec.device)
    place = "this environment"
    expected = {
        name: expected_engine(spec, pool, on_cuda=on_cuda, has_vllm=has_vllm, place=place)
        for name, pool in spec.pools.items()
    }
    return [f"pool {name}: engine {line}" for name, line in expected.items()]


def policies_of(service: Service) -> dict[str, AutoscalingSpec]:
    """Return the policies of pools that scale; a local run scales for every provider."""
    autoscaling = {name: autoscaling_of(pool) for name, pool in service.spec.pools.items()}
    return {name: scaling for name, scaling in autoscaling.items() if scaling}


def first_sizes(service: Service) -> dict[str, int]:
    pools = service.spec.pools
    return {name: replicas(pools[name], None, None) for name in policies_of(service)}


def adapted(service: Service, log_level: str) -> Service:
    """Return the service as this machine runs it.

    Every engine that there can ever be has its ports and files from the start; routers would share
    one port, so there is one; and a service that names no log level has this one.
    """
    spec = service.spec
    replaced = msgspec.structs.replace
    pools = {
        name: replaced(pool, replicas=scaling.max_replicas)
        if (scaling := autoscaling_of(pool))
        else pool
        for name, pool in spec.pools.items()
    }
    level = spec.observability.log_level or log_level
    spec = replaced(
        spec,
        pools=pools,
        router=replaced(spec.router, replicas=1),
        observability=replaced(
            spec.observability,
            log_level=level,
            # Its ports are on loopback, for whoever serves here.
            profiling=replaced(spec.observability.profiling, enabled=True),
        ),
    )
    return replaced(service, spec=spec)


def kv_folders(files: Iterable[File]) -> list[Path]:
    """Return the folders of all engines' file tiers, each once."""
    engines = [yaml.safe_load(f.text) for f in files if f.path.name == naming.ENGINE_CONFIG]
    tiers = [engine["memory"]["tiers"]["file"] for engine in engines if has_file_tier(engine)]
    return [Path(path) for path in dict.fromkeys(tier["path"] for tier in tiers)]


def has_file_tier(engine: Document) -> bool:
    return "file" in engine["memory"]["tiers"]


def with_secrets(files: Iterable[File], folders: Mapping[str, Mapping[str, Path]]) -> list[File]:
    """The files with this machine's folders of Secrets, which `folders` has by pod name."""
    with_folders = [(file, folders[file.path.parent.parent.name]) for file in files]
    return [
        replace(file, text=to_yaml(mounted(yaml.safe_load(file.text), own))) if own else file
        for file, own in with_folders
    ]


def share_memory(objects: Sequence[Manifest]) -> list[Manifest]:
    """Workers without a budget of their own get equal parts of what others leave, and host tiers
    that were asked for.

    On Kubernetes an engine's share is its container's limit; here each would take the whole
    machine.
    """
    num_pods = {item["metadata"]["name"]: len(pod_names(item)) for item in workloads(objects)}
    engines: dict[str, Document] = {
        item["metadata"]["name"]: yaml.safe_load(item["data"][naming.ENGINE_CONFIG])
        for item in objects
        if naming.ENGINE_CONFIG in item.get("data", {})
    }
    num_workers = {name: num_pods[name] * engine["gpus"] for name, engine in engines.items()}
    budgets = {name: engine["memory"].get("device_bytes") for name, engine in engines.items()}
    taken = sum((budgets[name] or 0) * num_workers[name] for name in engines)
    taken += sum(
        engine["memory"]["tiers"]["host"].get("size", 0) * num_pods[name]
        for name, engine in engines.items()
        if engine["memory"]["prefix_cache"]
    )
    num_open = sum(num_workers[name] for name in engines if budgets[name] is None)
    share = max(0, usable_bytes() - taken) // max(1, num_open)
    for engine in engines.values():
        engine["memory"].setdefault("device_bytes", share)
    return [
        {**item, "data": item["data"] | {naming.ENGINE_CONFIG: to_yaml(engines[name])}}
        if naming.ENGINE_CONFIG in item.get("data", {})
        else item
        for item in objects
        for name in [item["metadata"]["name"]]
    ]


MIN_OWN_CORES = 2
"""Physical cores for each worker from which on an engine gets its own: with fewer of them, one that
is busy alone would leave most of the machine idle."""


def share_cores(objects: Sequence[Manifest], cores: Sequence[Sequence[int]]) -> dict[str, Document]:
    """The settings of cores in each engine's section `server`, by pod name; `cores` are physical
    ones, each as its threads. Threads of one core are never parted: they compute in turns.

    The lone engine of this machine owns its cores. Several get their own, as many for each worker,
    where these suffice; otherwise they share all, and their threads sleep rather than spin for one
    another. Engines of pools that scale count, whether they run or not.
    """
    num_workers: dict[str, int] = {}
    configs = {item["metadata"]["name"]: item["data"] for item in objects if "data" in item}
    for workload in workloads(objects):
        if text := configs[workload["metadata"]["name"]].get(naming.ENGINE_CONFIG):
            num_workers |= dict.fromkeys(pod_names(workload), yaml.safe_load(text)["gpus"])
    if len(num_workers) == 1:
        return {name: {"owns_cores": True} for name in num_workers}
    each = len(cores) // max(1, sum(num_workers.values()))
    if each < MIN_OWN_CORES:
        return {name: {"owns_cores": False} for name in num_workers}
    remaining = list(cores)
    servers: dict[str, Document] = {}
    for name, count in num_workers.items():
        own = remaining[: count * each]
        remaining = remaining[count * each :]
        servers[name] = {"owns_cores": True, "cores": [thread for core in own for thread in core]}
    return servers


def check_engines(planned: Iterable[Pod]) -> None:
    if all("http" in pod.ports for pod in planned):
        raise LocalFailure(
            "spec.pools: no pool asks for an engine; set spec.replicas, or replicas of a pool, to 1"
        )


def check_length(planned: Iterable[Pod], run_dir: Path) -> None:
    for pod in planned:
        length = len(str(run_dir / pod.name).encode()) + len(SOCKET_NAME)
        if length > MAX_SOCKET_PATH:
            raise LocalFailure(
                f"--run-dir {run_dir}: too long for the sockets of {pod.name}, by "
                f"{length - MAX_SOCKET_PATH} bytes; choose a shorter one"
            )


def pod_files(
    objects: Sequence[Manifest], run_dir: Path, ports: Ports, cores: Mapping[str, Document]
) -> list[File]:
    """The configuration of every pod, in its own copy; `cores` are those of engines."""
    texts = {item["metadata"]["name"]: item["data"] for item in objects if "data" in item}
    targets = {
        workload["metadata"]["name"]: [
            f"{LOOPBACK}:{ports[name]['grpc']}" for name in pod_names(workload)
        ]
        for workload in workloads(objects)
    }
    files = []
    for workload in workloads(objects):
        for name in pod_names(workload):
            folder = run_dir / name / "config"
            data = {
                key: yaml.safe_load(text)
                for key, text in texts[workload["metadata"]["name"]].items()
            }
            if engine := data.get(naming.ENGINE_CONFIG):
                peers = targets[workload["metadata"]["name"]]
                engine = local_engine(engine, name, run_dir, ports[name], cores[name], peers)
                documents = {naming.ENGINE_CONFIG: engine}
            else:
                documents = local_router(data, folder, ports[name], targets)
            files += [File(folder / key, to_yaml(item)) for key, item in documents.items()]
    return files


def local_engine(
    document: Document,
    pod_name: str,
    run_dir: Path,
    ports: Mapping[str, int],
    cores: Document,
    pool: Sequence[str],
) -> Document:
    """Return an engine's file; engines of one machine share the prepared weights.

    Args:
        pool: gRPC addresses of the engines of its pool.
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
        peers = [address for address in pool if address != f"{LOOPBACK}:{ports['grpc']}"]
        tiers["remote"] = tiers["remote"] | {"peers": peers}
    if has_file_tier(document) and tiers["file"]["path"] == naming.KV_DIR:
        tiers["file"] = tiers["file"] | {"path": str(run_dir / pod_name / "kv")}

    local = document | {"server": server, "memory": document["memory"] | {"tiers": tiers}}
    if "adapters_file" in document:
        local["adapters_file"] = str(run_dir / ADAPTERS / naming.ADAPTERS_FILE)
    return local


def local_router(
    data: Mapping[str, Document],
    folder: Path,
    ports: Mapping[str, int],
    targets: Mapping[str, Sequence[str]],
) -> dict[str, Document]:
    """Return the router's files by name, of those that it has in a cluster.

    A pool's Service name becomes the addresses of its engines; a pool without any is left out. The
    name of a Service is the name of the StatefulSet behind it. There is nothing beside which a
    canary could run, so the rollout file says the adapters of engines that sleep, or is left out.
    """
    document = data[naming.ROUTER_CONFIG]
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
    listen: dict[str, dict[str, Any]] = {
        section: {"host": LOOPBACK, "port": ports[name]}
        for name, section in names.items()
        if name in ports
    }
    listen["http"]["public_stats"] = True  # loopback is as public as the port of the metrics
    listen["console"] = {"local": True}
    sections = document | listen | {"pools": [pool for pool in pools if pool["targets"]]}
    del sections["rollout_file"]
    if not (adapters := data[naming.ROLLOUT_FILE].get("adapters")):
        return {naming.ROUTER_CONFIG: sections}
    sections["rollout_file"] = str(folder / naming.ROLLOUT_FILE)
    return {naming.ROUTER_CONFIG: sections, naming.ROLLOUT_FILE: {"adapters": adapters}}
