"""The operator's own settings, from its environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ullage_common import version
from ullage_common.process.tracing import TracingSection

VERSION = version()
MAX_ROLLOUTS = 3
DNS_LAG_S = 30.0
"""Seconds for which CoreDNS caches responses with its default configuration."""
METRICS_NAMESPACE = "monitoring"
IMAGES = "localhost/ullage"
"""Repository of the images that `make images` builds.

No registry serves this repository. A node without the images therefore fails to pull them, instead
of pulling an unrelated image.
"""
ENGINE_IMAGE = f"{IMAGES}/engine:{VERSION}"
"""Default engine image for CPUs, without vLLM."""
CUDA_ENGINE_IMAGE = f"{IMAGES}/engine-cuda:{VERSION}"
"""Default engine image for NVIDIA GPUs, without vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the operator's own Deployment, which apply to every service."""

    engine_image: str = ENGINE_IMAGE
    """ULLAGE_ENGINE_IMAGE: image of engine pods whose service does not set an image."""
    cuda_engine_image: str = CUDA_ENGINE_IMAGE
    """ULLAGE_CUDA_ENGINE_IMAGE: image of engine pods with GPUs (by default `engine_image`)."""
    vllm_engine_image: str = ""
    """ULLAGE_VLLM_ENGINE_IMAGE: image of engine pods that run vLLM (by default `engine_image`)."""
    router_image: str = f"{IMAGES}/operator:{VERSION}"
    """ULLAGE_ROUTER_IMAGE: image of router pods."""
    image_pull_policy: str = "IfNotPresent"
    """ULLAGE_IMAGE_PULL_POLICY: Always, IfNotPresent or Never."""
    image_pull_secrets: tuple[str, ...] = ()
    """ULLAGE_IMAGE_PULL_SECRETS: comma-separated names of pull secrets.

    Each service's namespace must contain these Secrets. Pods use them in addition to the service's
    own pull secrets.
    """
    dns_lag_s: float = DNS_LAG_S
    """ULLAGE_DNS_LAG: seconds for which the cluster's DNS may return outdated addresses.

    Routers discover engines through DNS. A terminating engine therefore keeps serving for this
    long. A canary is kept for twice as long after the stable engines are ready.
    """
    max_rollouts: int = MAX_ROLLOUTS
    """ULLAGE_MAX_ROLLOUTS: maximum number of services that may be in a rollout at once.

    The limit applies to rollouts that start without an edit of the service, for example because
    `engine_image` changed.
    """
    log_level: str = "info"
    """ULLAGE_LOG_LEVEL: log level of the operator itself (debug, info, warning or error)."""
    tracing: TracingSection | None = None
    """ULLAGE_TRACING_ENDPOINT, ULLAGE_TRACING_PROTOCOL: the collector of the operator's own spans.

    The protocol is grpc (the default) or http. Without an endpoint the operator records no spans.
    """
    namespace: str = ""
    """ULLAGE_OPERATOR_NAMESPACE: namespace of the operator's own pods (empty for any namespace).

    Only these pods may read headroom and load reports.
    """
    metrics_namespace: str = METRICS_NAMESPACE
    """ULLAGE_METRICS_NAMESPACE: namespace whose pods may read metrics (empty for none).

    The setting applies to services that do not specify who may read their metrics.
    """
    mesh: Literal["", "istio", "linkerd"] = ""
    """ULLAGE_MESH: the cluster's service mesh, istio or linkerd (empty without one).

    The operator configures the mesh's sidecars to bypass the ports from which it reads headroom and
    load reports.
    """
    runbooks: str = "docs/runbooks"
    """ULLAGE_RUNBOOKS: URL of docs/runbooks for the alerts of services, or its path in the sources.
    """
    on_kubernetes: bool = True
    """Whether pods run on Kubernetes, where they get only the devices that they request."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the settings from environment variables.

        Raises:
            SystemExit: a variable is invalid.
        """
        names = {
            "engine_image": "ULLAGE_ENGINE_IMAGE",
            "cuda_engine_image": "ULLAGE_CUDA_ENGINE_IMAGE",
            "vllm_engine_image": "ULLAGE_VLLM_ENGINE_IMAGE",
            "router_image": "ULLAGE_ROUTER_IMAGE",
            "image_pull_policy": "ULLAGE_IMAGE_PULL_POLICY",
            "log_level": "ULLAGE_LOG_LEVEL",
            "namespace": "ULLAGE_OPERATOR_NAMESPACE",
            "runbooks": "ULLAGE_RUNBOOKS",
        }
        given: dict[str, Any] = {
            field: environ[name] for field, name in names.items() if environ.get(name)
        }
        if "engine_image" in given:  # the image of all engines, unless another one is set
            given.setdefault("cuda_engine_image", "")

        secrets = environ.get("ULLAGE_IMAGE_PULL_SECRETS", "").split(",")
        return cls(
            **given,
            metrics_namespace=environ.get("ULLAGE_METRICS_NAMESPACE", METRICS_NAMESPACE),
            max_rollouts=_count(environ, "ULLAGE_MAX_ROLLOUTS", MAX_ROLLOUTS),
            dns_lag_s=_seconds(environ, "ULLAGE_DNS_LAG", DNS_LAG_S),
            mesh=_mesh(environ),
            tracing=_tracing(environ),
            image_pull_secrets=tuple(name for name in secrets if name),
        )


def _mesh(environ: Mapping[str, str]) -> Literal["", "istio", "linkerd"]:
    match environ.get("ULLAGE_MESH", ""):
        case ("" | "istio" | "linkerd") as mesh:
            return mesh
        case other:
            raise SystemExit(f"ULLAGE_MESH={other!r} is not a known mesh; set istio or linkerd")


def _tracing(environ: Mapping[str, str]) -> TracingSection | None:
    endpoint = environ.get("ULLAGE_TRACING_ENDPOINT")
    if not endpoint:
        return None
    protocol = environ.get("ULLAGE_TRACING_PROTOCOL") or "grpc"
    try:
        return msgspec.convert({"endpoint": endpoint, "protocol": protocol}, TracingSection)
    except msgspec.ValidationError as error:
        raise SystemExit(f"ULLAGE_TRACING_ENDPOINT, ULLAGE_TRACING_PROTOCOL: {error}") from error


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    given = environ.get(name) or str(default)
    if not given.replace(".", "", 1).isdecimal():
        raise SystemExit(f"{name}={given!r} is not a number of seconds; set one like {default:g}")
    return float(given)


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    given = environ.get(name) or str(default)
    if not given.isdecimal() or int(given) < 1:
        raise SystemExit(f"{name}={given!r} is not a number of services; set one like {default}")
    return int(given)
