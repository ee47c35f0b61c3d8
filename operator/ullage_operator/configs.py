"""The configuration files of engines and routers, in bytes and seconds, as plain data.

Their readers are `ullage_engine.config` and `ullage_router.config`; the operator imports neither.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import yaml

from ullage_operator import naming
from ullage_operator.pools import Pool
from ullage_operator.scaling import may_sleep
from ullage_operator.sections import Bytes, Seconds, Section
from ullage_operator.settings import Settings
from ullage_operator.spec import Service, Tenants, Tickets

_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's, where it is: writing is most of what a plan costs."""
LOG_LEVEL = "info"
"""Of pods whose service names none: not the operator's own, whose change would make all pods anew.
"""


def engine_config(
    service: Service, pool_name: str, pool: Pool, settings: Settings
) -> dict[str, Any]:
    """What every engine of a pool reads; its identity comes as an argument."""
    spec = service.spec
    return {
        "model": plain(spec.model),
        "device": device_of(spec.device, settings),
        "gpus": pool.gpus,
        "parallelism": {
            **plain(pool.parallelism),
            "micro_batches": pool.micro_batches,
            "nccl": pool.nccl,
        },
        "memory": plain(pool.memory),
        "batching": plain(spec.batching),
        "limits": plain(spec.limits),
        "degrade": plain(spec.degrade),
        **engine_tickets(spec.tickets),
        "server": {
            "pool": pool_name,
            "host": "0.0.0.0",
            "grpc_port": naming.GRPC_PORT,
            "metrics_port": naming.METRICS_PORT,
            "run_dir": naming.RUN_DIR,
            "weights_dir": f"{naming.RUN_DIR}/weights",
            "probe_port": naming.PROBE_PORT,
            **({"tls_dir": naming.ENGINE_TLS_DIR} if spec.tls.engines else {}),
            "allow_fault_injection": spec.allow_fault_injection,
            "log_level": spec.observability.log_level or LOG_LEVEL,
        },
    }


def device_of(wanted: str, settings: Settings) -> str:
    """A pod that got GPUs must find them: computing on the CPU would hold them for nothing."""
    return "cuda" if wanted == "auto" and settings.on_kubernetes else wanted


def router_config(service: Service) -> dict[str, Any]:
    """What every router of a service reads; a target's A records are the ready engines."""
    spec = service.spec
    pools = [
        {
            "name": name,
            "targets": [f"{naming.pool_name(service.name, name)}:{naming.GRPC_PORT}"],
            "sleeps": may_sleep(pool),
        }
        for name, pool in spec.pools.items()
    ]
    return {
        "model": spec.model.name,
        "rollout_file": f"{naming.CONFIG_DIR}/{naming.ROLLOUT_FILE}",
        "http": {"host": "0.0.0.0", "port": naming.HTTP_PORT},
        "grpc": {"host": "0.0.0.0", "port": naming.GRPC_PORT},
        "metrics": {"host": "0.0.0.0", "port": naming.METRICS_PORT},
        "pools": pools,
        "routing": plain(spec.routing),
        "prompts": plain(spec.prompts),
        "limits": {
            "max_output_tokens": spec.limits.max_output_tokens,
            "request_timeout": float(spec.limits.request_timeout),
        },
        "streaming": plain(spec.streaming),
        "processes": spec.router.processes,
        "memory": {
            "threshold": spec.memory.threshold,
            "safety_reserve": int(spec.memory.safety_reserve),
        },
        "slo": {"ttft_p95": float(spec.slo.ttft_p95)},
        **tls_config(service),
        **({"tenants": tenants_config(spec.tenants, spec.router.replicas)} if spec.tenants else {}),
        **cascade_config(service),
        **router_tickets(spec.tickets),
        "log_level": spec.observability.log_level or LOG_LEVEL,
    }


def router_tickets(tickets: Tickets | None) -> dict[str, Any]:
    if tickets is None:
        return {}
    made = {"keys_dir": naming.TICKETS_DIR, "ttl": float(tickets.ttl)}
    return {"tickets": made | {"required": tickets.required}}


def engine_tickets(tickets: Tickets | None) -> dict[str, Any]:
    if tickets is None:
        return {}
    return {"tickets": {"keys_dir": naming.TICKETS_DIR, "required": tickets.required}}


def tls_config(service: Service) -> dict[str, Any]:
    """The router's certificates and, where its ports speak TLS, one for probes that does not."""
    tls, made, probes = service.spec.tls, {}, {}
    if tls.router:
        made["router"] = {"dir": naming.TLS_DIR}
        if tls.router.client_ca_secret_name:
            made["router"]["client_ca_dir"] = naming.CLIENT_CA_DIR
        probes = {"probes": {"host": "0.0.0.0", "port": naming.PROBE_PORT}}
    if tls.engines:
        default = f"{naming.engine_name(service.name)}.{service.namespace}.svc"
        name = tls.engines.server_name or default
        made["engines"] = {"dir": naming.ENGINE_TLS_DIR, "server_name": name}
    return probes | ({"tls": made} if made else {})


def tenants_config(tenants: Tenants, routers: int) -> dict[str, Any]:
    """Every tenant's rules, complete."""
    defaults = plain(tenants.defaults)
    return {
        "keys_dir": naming.KEYS_DIR,
        "anonymous": tenants.anonymous,
        "protect_stats": tenants.protect_stats,
        "share": 1 / routers if tenants.across_routers == "split" else 1.0,
        "defaults": defaults,
        "tenants": [defaults | plain(tenant) for tenant in tenants.named],
    }


def cascade_config(service: Service) -> dict[str, Any]:
    """The section `cascade`, if the service has one."""
    cascade = service.spec.cascade
    if cascade is None:
        return {}
    named = {
        "name": f"{service.namespace}/{service.name}",
        "steps": [
            {"name": step.name(service.name), "target": step.target}
            for step in cascade.complete_steps
        ],
    }
    return {"cascade": plain(cascade) | named}


def plain(section: Section) -> dict[str, Any]:
    """A section in snake case; what is unset is left out, so that the reader's default holds."""
    return {
        name: simplify(value)
        for name, value in msgspec.structs.asdict(section).items()
        if value is not None
    }


def simplify(value: Any) -> Any:
    match value:
        case Section():
            return plain(value)
        case Bytes():
            return int(value)
        case Seconds():
            return float(value)
        case tuple():
            return [simplify(item) for item in value]
        case _:
            return value


def to_yaml(document: Mapping[str, Any]) -> str:
    return yaml.dump(dict(document), Dumper=_DUMPER, sort_keys=False)


def digest(text: str) -> str:
    """Short fingerprint of a configuration, for the annotation that makes a change roll pods."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
