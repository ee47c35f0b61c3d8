"""The operator's own settings, which come from its environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ullage_common import version
from ullage_common.process.tracing import TracingSection

VERSION = version()
MAX_ROLLOUTS = 3
DNS_LAG_S = 30.0
"""CoreDNS's `cache`, as Kubernetes sets it up."""
METRICS_NAMESPACE = "monitoring"
IMAGES = "localhost/ullage"
"""Where images are called what `make images` calls them: no registry serves them, so a node that
does not have them finds none of somebody else's."""
ENGINE_IMAGE = f"{IMAGES}/engine:{VERSION}"
"""The image for CPUs, without vLLM."""
CUDA_ENGINE_IMAGE = f"{IMAGES}/engine-cuda:{VERSION}"
"""The image for NVIDIA GPUs, without vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the operator's own Deployment, which hold for every service."""

    engine_image: str = ENGINE_IMAGE
    """ULLAGE_ENGINE_IMAGE: image of engine pods whose service names none."""
    cuda_engine_image: str = CUDA_ENGINE_IMAGE
    """ULLAGE_CUDA_ENGINE_IMAGE: image of those of them that have GPUs; empty: `engine_image`."""
    vllm_engine_image: str = ""
    """ULLAGE_VLLM_ENGINE_IMAGE: image of those that are to be vLLM; empty: `engine_image`."""
    router_image: str = f"{IMAGES}/operator:{VERSION}"
    """ULLAGE_ROUTER_IMAGE: image of router pods."""
    image_pull_policy: str = "IfNotPresent"
    """ULLAGE_IMAGE_PULL_POLICY: Always, IfNotPresent or Never."""
    image_pull_secrets: tuple[str, ...] = ()
    """ULLAGE_IMAGE_PULL_SECRETS: names, with commas between them, of Secrets in the services'
    namespaces with which their pods' images are fetched, besides those that a service names."""
    dns_lag_s: float = DNS_LAG_S
    """ULLAGE_DNS_LAG: seconds for which the cluster's DNS may go on answering what it knew. Routers
    find engines by it, so engines that end go on serving for longer, and a canary stays for twice
    as long once the stable engines are ready."""
    max_rollouts: int = MAX_ROLLOUTS
    """ULLAGE_MAX_ROLLOUTS: number of services that may be in a rollout when another one begins to
    try a new `engine_image`, which nobody's edit asks for."""
    log_level: str = "info"
    """ULLAGE_LOG_LEVEL: debug, info, warning or error, of the operator itself."""
    tracing: TracingSection | None = None
    """ULLAGE_TRACING_ENDPOINT, ULLAGE_TRACING_PROTOCOL (grpc or http; grpc): where spans of the
    operator's own reconciliations go; without an endpoint there are none."""
    namespace: str = ""
    """ULLAGE_OPERATOR_NAMESPACE: where the operator's own pods are, which alone may ask for
    headroom and measures; empty: in any namespace."""
    metrics_namespace: str = METRICS_NAMESPACE
    """ULLAGE_METRICS_NAMESPACE: namespace whose pods may read the metrics of services that do not
    say who may; empty: no pod may."""
    mesh: Literal["", "istio", "linkerd"] = ""
    """ULLAGE_MESH: istio or linkerd, whose sidecars are to leave the ports alone at which the
    operator asks pods for headroom and measures; empty: there is no mesh."""
    runbooks: str = "docs/runbooks"
    """ULLAGE_RUNBOOKS: where people read docs/runbooks, for the alerts of services: a URL, or the
    path in these sources."""
    on_kubernetes: bool = True
    """Whether pods have the devices that they ask for, and not all of the machine's."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
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
        if "engine_image" in given:  # which is for all engines where no other is named
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
            raise SystemExit(f"ULLAGE_MESH={other!r} is no known mesh; give istio, linkerd or none")


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
        raise SystemExit(f"{name}={given!r} is no number of seconds; give one such as {default:g}")
    return float(given)


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    given = environ.get(name) or str(default)
    if not given.isdecimal() or int(given) < 1:
        raise SystemExit(f"{name}={given!r} is no number of services; give one such as {default}")
    return int(given)
