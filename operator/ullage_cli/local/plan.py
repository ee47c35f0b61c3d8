"""Adapts the operator's plan to one machine: pods become commands, files and ports.

Cluster addresses become loopback addresses, volumes become folders, and a Secret becomes a folder
with one file per key. This module reserves ports, but it writes no files and starts no processes.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ullage_cli.local.checks import check_service
from ullage_cli.local.config_files import adapters_of, data_folders, pod_files
from ullage_cli.local.files import File
from ullage_cli.local.pods import Pod, make_pods
from ullage_cli.local.ports import LOOPBACK, assign_ports
from ullage_cli.local.secret_folders import mount_secrets, secret_mounts
from ullage_cli.local.shares import machine_cores, share_cores, share_memory
from ullage_cli.local.workloads import Manifest
from ullage_operator.api import naming
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.sections import AutoscalingSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.engine_choice import expected_engine
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import plan
from ullage_operator.policy.pool_sizes import autoscaling_of, replicas

MAX_SOCKET_PATH = 107
"""Maximum length of a Unix socket's path in bytes (`sockaddr_un` has 108, with the final null)."""
SOCKET_NAME = "/worker-9999.ipc"
"""Longest file name, with a leading slash, that an engine gives a Unix socket in its folder."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The processes and files of a service on this machine."""

    model: str
    pods: list[Pod]
    """All pods, including those of autoscaled pools that are not running yet."""
    files: list[File]
    policies: Mapping[str, AutoscalingSpec] = field(default_factory=dict)
    """Autoscaling policy of each autoscaled pool, by the pool's name."""
    engines: Sequence[str] = ()
    """One line of text per pool: its expected engine (native or vLLM), and the reason."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Initial number of engines in each autoscaled pool, by the pool's name."""
    folders: Mapping[Path, str] = field(default_factory=dict)
    """Folders of KV file tiers and uploaded files, with the fields that set them."""


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
    host: str = LOOPBACK,
) -> LocalPlan:
    """Plan the processes and files needed to run a service on this machine.

    Args:
        service: the service to run.
        run_dir: folder of configuration, logs, sockets and downloads.
        http_port: the router's port for HTTP (0 for any free port).
        grpc_port: the router's port for gRPC (0 for any free port).
        log_level: log level for a service that does not set its own level.
        secrets: folder with one subfolder for every Secret that the service names.
        has_vllm: whether vLLM is installed on this machine.
        kept: exit stack that keeps the pods' ports reserved until it is closed.
        host: address on which the router serves its APIs.

    Raises:
        LocalFailure: a port is taken, no pool requests an engine, or the path of `run_dir` is too
            long for sockets. Also raised if the service needs an engine, another service or a
            Secret that this machine lacks.
    """
    check_service(service, has_vllm)
    observed = Observed(now=datetime.now(UTC))
    settings = Settings(on_kubernetes=False)
    decided = plan(_adapted(service, log_level), observed, settings)
    objects: Sequence[Manifest] = decided.apply

    router_ports = {naming.router_name(service.name): {"http": http_port, "grpc": grpc_port}}
    ports = assign_ports(objects, router_ports, kept)
    pods = make_pods(objects, run_dir, ports, secrets)
    _check_engines(pods)
    _check_socket_paths(pods, run_dir)

    objects = share_memory(objects)
    cores = share_cores(objects, machine_cores())
    files = pod_files(objects, run_dir, ports, cores, host)
    files = mount_secrets(files, secret_mounts(objects, secrets))
    if service.spec.serves_adapters:
        files.append(adapters_of(service, run_dir))

    policies = _policies(service)
    return LocalPlan(
        model=service.spec.model.name,
        pods=pods,
        files=files,
        policies=policies,
        engines=_engine_lines(service, has_vllm),
        sizes={name: replicas(service.spec.pools[name], None, None) for name in policies},
        folders=data_folders(files),
    )


def _adapted(service: Service, log_level: str) -> Service:
    """Return a copy of the service, adapted so that it can run on this machine.

    Every pool is planned at its maximum size, so that all of its engines have ports and files from
    the start. There is only one router, because several routers would compete for the same port. A
    service without a log level gets `log_level`. Profiling is enabled, because its ports are on
    loopback, where only this machine's user can reach them.
    """
    replace = msgspec.structs.replace
    spec = service.spec

    pools = dict(spec.pools)
    for name, scaling in _policies(service).items():
        pools[name] = replace(pools[name], replicas=scaling.max_replicas)

    observability = replace(
        spec.observability,
        log_level=spec.observability.log_level or log_level,
        profiling=replace(spec.observability.profiling, enabled=True),
    )
    router = replace(spec.router, replicas=1)
    return replace(
        service, spec=replace(spec, pools=pools, router=router, observability=observability)
    )


def _policies(service: Service) -> dict[str, AutoscalingSpec]:
    """Return the autoscaling policy of each autoscaled pool, by the pool's name.

    `ullage up` scales these pools itself, whichever autoscaling provider they name.
    """
    autoscaling = {name: autoscaling_of(pool) for name, pool in service.spec.pools.items()}
    return {name: scaling for name, scaling in autoscaling.items() if scaling}


def _engine_lines(service: Service, has_vllm: bool) -> list[str]:
    """Return one line of text per pool: its expected engine (native or vLLM), and the reason."""
    spec = service.spec
    on_cuda = {"cuda": True, "cpu": False}.get(spec.device)
    place = "this environment"
    expected = {
        name: expected_engine(spec, pool, on_cuda=on_cuda, has_vllm=has_vllm, place=place)
        for name, pool in spec.pools.items()
    }
    return [f"pool {name}: engine {line}" for name, line in expected.items()]


def _check_engines(pods: Iterable[Pod]) -> None:
    """Raise an error if the plan has routers but no engines."""
    if all("http" in pod.ports for pod in pods):
        raise LocalFailure(
            "spec.pools: no pool asks for an engine; set spec.replicas, or replicas of a pool, to 1"
        )


def _check_socket_paths(pods: Iterable[Pod], run_dir: Path) -> None:
    """Raise an error if a folder's path is too long for the engines' sockets."""
    for pod in pods:
        length = len(str(run_dir / pod.name).encode()) + len(SOCKET_NAME)
        if length > MAX_SOCKET_PATH:
            raise LocalFailure(
                f"--run-dir {run_dir}: too long for the sockets of {pod.name}, by "
                f"{length - MAX_SOCKET_PATH} bytes; choose a shorter one"
            )
