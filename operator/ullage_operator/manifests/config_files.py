"""The configuration files of engines and routers."""

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import yaml

from ullage_common.config import engine, router
from ullage_common.config.engine import (
    EngineConfig,
    GroupSection,
    MemoryBudget,
    MemorySection,
    ParallelismSection,
    RequestLimits,
    ServerSection,
)
from ullage_common.config.router import (
    CascadeSection,
    ConsoleSection,
    FilesLimits,
    FilesSection,
    GRPCSection,
    HTTPSection,
    MetricsSection,
    PoolSection,
    ProbesSection,
    RouterConfig,
    SLOSection,
    StepSection,
    StepTLS,
    TenantsSection,
    TLSSection,
)
from ullage_common.process.config_file import LogLevel, Strict
from ullage_operator.api import naming
from ullage_operator.api.sections import FilesSpec, PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import CascadeSpec, Service, TenantsSpec
from ullage_operator.policy.pool_sizes import may_sleep

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's fast YAML dumper if available, because writing YAML dominates the cost of a plan."""
LOG_LEVEL: LogLevel = "info"
"""Log level of pods whose service does not set a level.

Pods do not inherit the operator's own log level, because changing it would then replace all pods.
"""


def engine_config(
    service: Service, pool_name: str, pool: PoolSpec, settings: Settings
) -> EngineConfig:
    """Return the configuration that all engines of a pool share.

    The file does not contain an engine's identity, which is passed as an argument instead.
    """
    spec = service.spec
    tickets = None
    if spec.tickets:
        tickets = engine.TicketsSection(keys_dir=naming.TICKETS_DIR, required=spec.tickets.required)

    return EngineConfig(
        engine=spec.engine,
        model=spec.model,
        adapters_file=f"{naming.ADAPTERS_DIR}/{naming.ADAPTERS_FILE}"
        if pool.memory.max_loras
        else None,
        vllm=spec.vllm,
        device=device_of(spec.device, settings),
        gpus=pool.gpus,
        parallelism=ParallelismSection(
            tensor=pool.parallelism.tensor,
            pipeline=pool.parallelism.pipeline,
            micro_batches=pool.micro_batches,
            nccl=pool.nccl,
        ),
        group=GroupSection(nodes=pool.nodes),
        memory=memory_config(service, pool_name, pool),
        batching=spec.batching,
        limits=spec.limits,
        degrade=spec.degrade,
        tickets=tickets,
        server=ServerSection(
            pool=pool_name,
            grpc_port=naming.GRPC_PORT,
            metrics_port=naming.METRICS_PORT,
            run_dir=naming.RUN_DIR,
            weights_dir=f"{naming.RUN_DIR}/weights",
            probe_port=naming.PROBE_PORT,
            tls_dir=naming.ENGINE_TLS_DIR if spec.tls.engines else None,
            standby_worker=pool.standby_worker,
            allow_fault_injection=spec.allow_fault_injection,
            log_level=spec.observability.log_level or LOG_LEVEL,
        ),
        profiling=spec.observability.profiling,
        tracing=spec.observability.tracing,
    )


def adapters_file(service: Service) -> str:
    """Return the text of the file from which engines read the list of LoRA adapters."""
    return to_yaml(document(engine.AdaptersFile(adapters=service.spec.adapters)))


def memory_config(service: Service, pool_name: str, pool: PoolSpec) -> MemorySection:
    """Return the memory section of the configuration of a pool's engines.

    The peers of an engine are the other engines of its pool, which run the same model. Engines
    discover their peers through the pool's headless Service. If the spec does not set the size of
    the host tier, the configuration omits it, because only the engine can measure how much memory
    is free.
    """
    tiers = pool.memory.tiers
    remote = None
    file = None

    if tiers.remote:
        target = f"{naming.pool_name(service.name, pool_name)}:{naming.GRPC_PORT}"
        remote = engine.RemoteTierSection(
            peers=(target,),
            server_name=engines_server_name(service) if service.spec.tls.engines else None,
            deadline=tiers.remote.deadline,
            copy=tiers.remote.copy,
        )
    if tiers.file:
        file = engine.FileTierSection(path=tiers.file.folder, size=tiers.file.size)

    host = engine.HostTierSection(size=tiers.asked_host_bytes)
    section = engine.TiersSection(host=host, remote=remote, file=file)
    return MemorySection(**msgspec.structs.asdict(pool.memory) | {"tiers": section})


def device_of(device: engine.Device, settings: Settings) -> engine.Device:
    """Return the type of device on which engines run.

    On Kubernetes, `auto` means CUDA, because an engine that fell back to the CPU would leave its
    GPUs idle.
    """
    return "cuda" if device == "auto" and settings.on_kubernetes else device


def router_config(service: Service, accepts_plaintext: bool = False) -> RouterConfig:
    """Return the configuration that all routers of a service share.

    Each pool's target is a DNS name that resolves to the addresses of the pool's ready engines.

    Args:
        service: the service.
        accepts_plaintext: whether routers must support both TLS and plaintext, because some engines
            use one and some the other.
    """
    spec = service.spec
    pools = [
        PoolSection(
            name=name,
            role=pool.role,
            targets=(f"{naming.pool_name(service.name, name)}:{naming.GRPC_PORT}",),
            sleeps=may_sleep(pool),
        )
        for name, pool in spec.pools.items()
    ]
    tickets = None
    if spec.tickets:
        tickets = router.RouterTickets(
            keys_dir=naming.TICKETS_DIR, ttl=spec.tickets.ttl, required=spec.tickets.required
        )

    return RouterConfig(
        model=spec.model.name,
        rollout_file=f"{naming.CONFIG_DIR}/{naming.ROLLOUT_FILE}",
        http=HTTPSection(port=naming.HTTP_PORT, public_stats=spec.router.public_stats),
        cors=spec.router.cors,
        files=files_config(spec.router.files) if spec.router.files else None,
        grpc=GRPCSection(port=naming.GRPC_PORT),
        metrics=MetricsSection(port=naming.METRICS_PORT),
        console=ConsoleSection() if spec.observability.console.enabled else None,
        # The kubelet's probes do not support the TLS of the serving ports.
        probes=ProbesSection(port=naming.PROBE_PORT) if spec.tls.router else None,
        tls=tls_config(service, accepts_plaintext),
        pools=tuple(pools),
        routing=spec.routing,
        prompts=spec.prompts,
        # Only the fields that routers read, so that a change of others does not replace routers.
        limits=RequestLimits(
            max_output_tokens=spec.limits.max_output_tokens,
            request_timeout=spec.limits.request_timeout,
            total_timeout=spec.limits.total_timeout,
        ),
        memory=MemoryBudget(
            threshold_percent=spec.memory.threshold_percent,
            safety_reserve=spec.memory.safety_reserve,
        ),
        slo=SLOSection(ttft_p95=spec.slo.ttft_p95, e2e_p95=spec.slo.e2e_p95),
        streaming=spec.streaming,
        tenants=tenants_config(spec.tenants, spec.router.most_replicas) if spec.tenants else None,
        cascade=cascade_config(service, spec.cascade) if spec.cascade else None,
        tickets=tickets,
        tracing=spec.observability.tracing,
        log_level=spec.observability.log_level or LOG_LEVEL,
    )


def files_config(files: FilesSpec) -> FilesSection:
    """Return the router's section of uploaded files, with their folder."""
    limits = {name: getattr(files, name) for name in FilesLimits.__struct_fields__}
    return FilesSection(dir=files.folder, **limits)


def tls_config(service: Service, accepts_plaintext: bool) -> TLSSection:
    """Return the router's TLS section, with the folders of its certificates."""
    tls = service.spec.tls
    server = None
    engines = None

    if tls.router:
        has_clients = tls.router.client_ca_secret_name
        server = router.ServerTLS(
            dir=naming.TLS_DIR, client_ca_dir=naming.CLIENT_CA_DIR if has_clients else None
        )
    if tls.engines:
        engines = router.EngineTLS(
            dir=naming.ENGINE_TLS_DIR,
            server_name=engines_server_name(service),
            accept_plaintext=accepts_plaintext,
        )

    return TLSSection(router=server, engines=engines)


def engines_server_name(service: Service) -> str:
    """Return the server name in the certificate of a service's engines.

    Routers need this name to verify certificates, because they connect to engines by IP address.
    """
    engines = service.spec.tls.engines
    default = f"{naming.engine_name(service.name)}.{service.namespace}.svc"
    return (engines.server_name if engines else None) or default


def tenants_config(tenants: TenantsSpec, routers: int) -> TenantsSection:
    """Return the tenant rules of the router's configuration.

    Args:
        tenants: the tenants of the spec.
        routers: the maximum number of routers across which a quota may be split.
    """
    return TenantsSection(
        keys_dir=naming.KEYS_DIR,
        anonymous=tenants.anonymous,
        protect_stats=tenants.protect_stats,
        share=1 / routers if tenants.across_routers == "split" else 1.0,
        defaults=tenants.defaults,
        tenants=tenants.named,
    )


def cascade_config(service: Service, cascade: CascadeSpec) -> CascadeSection:
    """Return the router's cascade section: the service's name and the address of each step."""
    return CascadeSection(
        name=f"{service.namespace}/{service.name}",
        steps=tuple(
            StepSection(
                name=step.name(service.name),
                target=step.target,
                tls=StepTLS(
                    dir=f"{naming.STEPS_DIR}/{index}-tls",
                    server_name=step.server_name(service.namespace),
                )
                if step.tls
                else None,
                key_dir=f"{naming.STEPS_DIR}/{index}-key" if step.key_secret_name else None,
            )
            for index, step in enumerate(cascade.complete_steps)
        ),
        confidence=cascade.confidence,
        heuristics=cascade.heuristics,
        parallel=cascade.parallel,
        fallback=cascade.fallback,
    )


def document(config: Strict) -> dict[str, Any]:
    """Convert a configuration to plain data. Unset fields are omitted, so that defaults apply."""
    return cast(dict[str, Any], _without_none(msgspec.to_builtins(config)))


def _without_none(value: Any) -> Any:
    match value:
        case dict():
            return {name: _without_none(each) for name, each in value.items() if each is not None}
        case list() | tuple():
            return [_without_none(each) for each in value]
        case _:
            return value


def to_yaml(document: Mapping[str, Any]) -> str:
    return yaml.dump(dict(document), Dumper=_DUMPER, sort_keys=False)


def digest(text: str) -> str:
    """Return a short hash of a configuration, for the annotation that triggers a rolling update."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
