"""Fields that the pods of engines and routers share. Pure.

Both run as an ordinary user without privileges on a read-only root file system, and write to
emptyDir volumes.
"""

import math
from collections.abc import Iterator
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.overlay import over_template
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.config_files import digest
from ullage_operator.policy.restarts import HUNG_GRACE_S

Manifest = dict[str, Any]

PRE_STOP_S = 15
"""Seconds until nobody sends new work to a pod that ends, once its address is withdrawn."""
LAST_MARGIN_S = 15
"""Seconds for the last messages and the end of the process, after the drain."""
DEFAULT_SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
}
_PORTS_PAST_MESH = {
    "istio": "traffic.sidecar.istio.io/excludeInboundPorts",
    "linkerd": "config.linkerd.io/skip-inbound-ports",
}
"""Annotations by which a mesh's sidecar leaves ports of a pod alone."""


def completed(given: Manifest, own: Manifest, settings: Settings) -> Manifest:
    """Return a spec's pod template with the operator's fields merged over it.

    Its pods are spread over nodes and reachable past the cluster's mesh, unless the template says
    otherwise.
    """
    meta = own["metadata"]
    said = given.get("metadata", {}).get("annotations") or {}
    passing = {name: value for name, value in mesh_annotations(settings) if name not in said}
    own = {**own, "metadata": {**meta, "annotations": meta["annotations"] | passing}}
    spread = given.get("spec", {}).get("topologySpreadConstraints", [DEFAULT_SPREAD])
    # A constraint without a selector would count no pods.
    counted = {"labelSelector": {"matchLabels": own["metadata"]["labels"]}}
    constraints = {"topologySpreadConstraints": [counted | each for each in spread]}
    return over_template(given, {**own, "spec": own["spec"] | (constraints if spread else {})})


def mesh_annotations(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the annotations by which the operator, outside the mesh, reaches pods inside it.

    The operator connects to pod addresses in plaintext, and only to ports at which nothing can be
    changed.
    """
    if settings.mesh:
        yield _PORTS_PAST_MESH[settings.mesh], f"{naming.PROBE_PORT},{naming.METRICS_PORT}"


def metadata(match: dict[str, str], config: str) -> Manifest:
    # Without the version: an operator's update must not restart every engine by a label.
    return {"labels": match, "annotations": {naming.CONFIG_HASH: digest(config)}}


def pod_defaults(service: Service, settings: Settings, pre_stop_s: int) -> Manifest:
    """Return the fields that all pods share, as Pod Security's restricted profile asks."""
    secrets = [secret.name for secret in service.spec.image_pull_secrets]
    pulled = [{"name": name} for name in dict.fromkeys([*secrets, *settings.image_pull_secrets])]
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s(service, pre_stop_s),
        "securityContext": pod_security(service),
        **({"imagePullSecrets": pulled} if pulled else {}),
    }


def account_name(service: Service, own: str) -> str:
    """Return the ServiceAccount of pods: the spec's, or the operator's own for them."""
    return service.spec.service_account.name or own


def pod_security(service: Service) -> Manifest:
    context = service.spec.security_context
    ids = {
        "runAsUser": context.run_as_user,
        "runAsGroup": context.run_as_group,
        "fsGroup": context.fs_group,
    }
    return {
        "runAsNonRoot": True,
        **{name: number for name, number in ids.items() if number is not None},
        # Otherwise each start would change the owner of every file in a model cache.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def grace_s(service: Service, pre_stop_s: int) -> int:
    """Seconds until an ending pod is killed: engines and routers drain for one whole request."""
    return pre_stop_s + math.ceil(service.spec.limits.total_timeout) + LAST_MARGIN_S


def container_security() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def killing(probe: Manifest) -> Manifest:
    """Return a probe whose failure kills a container, with a short termination grace period."""
    return {**probe, "terminationGracePeriodSeconds": HUNG_GRACE_S}


def grpc_probe(service: str, period_s: int, failures: int, is_secure: bool) -> Manifest:
    number = naming.PROBE_PORT if is_secure else naming.GRPC_PORT
    return {
        "grpc": {"port": number, "service": service},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def http_probe(path: str, period_s: int, failures: int, port_name: str = "http") -> Manifest:
    return {
        "httpGet": {"path": path, "port": port_name},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
