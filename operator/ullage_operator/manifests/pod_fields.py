"""Builds the pod fields that engines and routers share.

Engines and routers run as an unprivileged user. Their root file system is read-only, so they write
to emptyDir volumes.
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
"""Seconds for which a terminating pod may still get new requests after its endpoint is removed."""
LAST_MARGIN_S = 15
"""Seconds that a drained process has to send its last messages and exit."""
DEFAULT_SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
}
_PORTS_PAST_MESH = {
    "istio": "traffic.sidecar.istio.io/excludeInboundPorts",
    "linkerd": "config.linkerd.io/skip-inbound-ports",
}
"""Names of the annotations that list the ports that a sidecar must not intercept, by mesh."""


def completed(given: Manifest, own: Manifest, settings: Settings) -> Manifest:
    """Return a spec's pod template with the operator's fields merged over it.

    By default, pods are spread across nodes, and the cluster's mesh does not intercept the ports
    that the operator connects to. The template can override both.

    Args:
        given: the pod template of the spec.
        own: the operator's fields.
        settings: the operator's own settings.
    """
    meta = own["metadata"]
    given_annotations = given.get("metadata", {}).get("annotations") or {}
    added = {
        name: value for name, value in mesh_annotations(settings) if name not in given_annotations
    }
    merged = {**meta, "annotations": meta["annotations"] | added}

    spread = given.get("spec", {}).get("topologySpreadConstraints", [DEFAULT_SPREAD])
    # A constraint without a selector would count no pods.
    selector = {"labelSelector": {"matchLabels": meta["labels"]}}
    constraints = {"topologySpreadConstraints": [selector | each for each in spread]}
    spec = own["spec"] | (constraints if spread else {})

    return over_template(given, {**own, "metadata": merged, "spec": spec})


def mesh_annotations(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the annotations that let the operator connect from outside to pods in a mesh.

    The operator connects to pods in plaintext, and only to read-only ports.
    """
    if settings.mesh:
        yield _PORTS_PAST_MESH[settings.mesh], f"{naming.PROBE_PORT},{naming.METRICS_PORT}"


def metadata(match: dict[str, str], config: str) -> Manifest:
    # The labels have no version, so that an update of the operator does not restart every engine.
    return {"labels": match, "annotations": {naming.CONFIG_HASH: digest(config)}}


def pod_defaults(service: Service, settings: Settings, pre_stop_s: int) -> Manifest:
    """Return the fields that all pods share, as the restricted Pod Security profile requires."""
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
    """Return the name of the pods' ServiceAccount.

    If the spec does not name one, this is the account that the operator creates.
    """
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
        # Otherwise each start of a pod would change the owner of every file in a model cache.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def grace_s(service: Service, pre_stop_s: int) -> int:
    """Return a termination grace period, in seconds, long enough to finish the longest request."""
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
    """Return a liveness or startup probe that makes the kubelet kill a hung container quickly.

    The probe has its own, short grace period. Otherwise the kubelet would use the pod's, which is
    long enough to finish the longest request.
    """
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
