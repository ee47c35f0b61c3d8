"""The operator's settings, read once from the environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

VERSION = version("ullage")
DNS_LAG_S = 30.0
"""CoreDNS's `cache`, as Kubernetes sets it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator's own Deployment decides, the same for every service."""

    engine_image: str = f"ullage/engine:{VERSION}"
    """ULLAGE_ENGINE_IMAGE: image of engine pods whose service names none."""
    router_image: str = f"ullage/operator:{VERSION}"
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
    log_level: str = "info"
    """ULLAGE_LOG_LEVEL: debug, info, warning or error, of the operator itself."""
    namespace: str = ""
    """ULLAGE_OPERATOR_NAMESPACE: where the operator's own pods are, which alone may ask for
    headroom and measures; empty: in any namespace."""
    on_kubernetes: bool = True
    """Whether pods have the devices that they ask for, and not all of the machine's."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
        names = {
            "engine_image": "ULLAGE_ENGINE_IMAGE",
            "router_image": "ULLAGE_ROUTER_IMAGE",
            "image_pull_policy": "ULLAGE_IMAGE_PULL_POLICY",
            "log_level": "ULLAGE_LOG_LEVEL",
            "namespace": "ULLAGE_OPERATOR_NAMESPACE",
        }
        given: dict[str, Any] = {
            field: environ[name] for field, name in names.items() if environ.get(name)
        }
        secrets = environ.get("ULLAGE_IMAGE_PULL_SECRETS", "").split(",")
        return cls(
            **given,
            dns_lag_s=_seconds(environ, "ULLAGE_DNS_LAG", DNS_LAG_S),
            image_pull_secrets=tuple(name for name in secrets if name),
        )


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    given = environ.get(name) or str(default)
    if not given.replace(".", "", 1).isdecimal():
        raise SystemExit(f"{name}={given!r} is no number of seconds; give one such as {default:g}")
    return float(given)
