"""Which Secrets pods mount, and where."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ullage_operator import naming
from ullage_operator.spec import Service

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MountedSecret:
    """A Secret as a folder; never mounted by file, or the kubelet would not follow its changes."""

    volume: str
    secret: str
    path: str


def router_secrets(service: Service) -> list[MountedSecret]:
    tenants, tls = service.spec.tenants, service.spec.tls
    found = []
    if tenants:
        found.append(MountedSecret("keys", tenants.secret_name, naming.KEYS_DIR))
    if tls.router:
        found.append(MountedSecret("tls", tls.router.secret_name, naming.TLS_DIR))
        if ca := tls.router.client_ca_secret_name:
            found.append(MountedSecret("client-ca", ca, naming.CLIENT_CA_DIR))
    if tls.engines:
        name = tls.engines.router_secret_name or tls.engines.secret_name
        found.append(MountedSecret("engine-tls", name, naming.ENGINE_TLS_DIR))
    return [*found, *ticket_secrets(service)]


def engine_secrets(service: Service) -> list[MountedSecret]:
    tls = service.spec.tls.engines
    found = [MountedSecret("tls", tls.secret_name, naming.ENGINE_TLS_DIR)] if tls else []
    return [*found, *ticket_secrets(service)]


def ticket_secrets(service: Service) -> list[MountedSecret]:
    """What routers sign with and engines verify by."""
    tickets = service.spec.tickets
    return [MountedSecret("tickets", tickets.secret_name, naming.TICKETS_DIR)] if tickets else []


def secret_volumes(secrets: Iterable[MountedSecret]) -> list[Manifest]:
    # Readable by the pod's own group, fsGroup, and by nobody else.
    return [
        {"name": s.volume, "secret": {"secretName": s.secret, "defaultMode": 0o440}}
        for s in secrets
    ]


def secret_mounts(secrets: Iterable[MountedSecret]) -> list[Manifest]:
    return [{"name": s.volume, "mountPath": s.path, "readOnly": True} for s in secrets]
