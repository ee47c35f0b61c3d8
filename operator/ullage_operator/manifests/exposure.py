"""Exposes routers through an HTTPRoute and scales them with a HorizontalPodAutoscaler."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.sections import RouterAutoscaling
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import Condition
from ullage_operator.manifests.builder import Builder, as_asked

Manifest = dict[str, Any]

ROUTE_ACCEPTED = "RouteAccepted"
_NO_TIMEOUT = "0s"
"""Value that disables a gateway's timeout (often 15 s). Routers limit requests themselves."""


def exposure_objects(service: Service, serves: Collection[str]) -> list[Manifest]:
    """Return the HTTPRoute and the HorizontalPodAutoscaler of a service's routers.

    Each object is included only if the spec requests it and the cluster serves its kind.
    """
    router = service.spec.router
    objects = []
    if router.gateway and naming.HTTP_ROUTE in serves:
        objects.append(http_route(service))
    if router.autoscaling and naming.ROUTER_SCALER in serves:
        objects.append(router_scaler(service, router.autoscaling))
    return objects


def http_route(service: Service) -> Manifest:
    """Return the HTTPRoute that connects the Gateways to the routers' HTTP port."""
    gateway = service.spec.router.gateway
    assert gateway is not None
    name = naming.router_name(service.name)
    rule = {
        "backendRefs": [{"name": name, "port": naming.HTTP_PORT}],
        "timeouts": {"request": _NO_TIMEOUT},
    }
    spec = {
        "parentRefs": [as_asked(each) for each in gateway.parent_refs],
        **({"hostnames": list(gateway.hostnames)} if gateway.hostnames else {}),
        "rules": [rule],
    }
    build = Builder(service, naming.ROUTER)
    return build.object(naming.GATEWAY_API, naming.HTTP_ROUTE, name, spec)


def router_scaler(service: Service, scaling: RouterAutoscaling) -> Manifest:
    name = naming.router_name(service.name)
    target = {
        "type": "Utilization",
        "averageUtilization": scaling.target_cpu_utilization_percentage,
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }
    return Builder(service, naming.ROUTER).object(
        naming.AUTOSCALING_API, naming.ROUTER_SCALER, name, spec
    )


def route_condition(
    service: Service, serves: Collection[str], route: Mapping[str, Any] | None
) -> list[Condition]:
    """Return the RouteAccepted condition (empty for a service without Gateways).

    Args:
        route: the live HTTPRoute, or None if it does not exist yet.
    """
    if service.spec.router.gateway is None:
        return []
    if naming.HTTP_ROUTE not in serves:
        message = (
            f"the cluster does not serve {naming.HTTP_ROUTE} of {naming.GATEWAY_API}: install "
            "Gateway API 1.2 or newer, or leave spec.router.gateway out"
        )
        return [Condition(ROUTE_ACCEPTED, False, "KindsAbsent", message)]

    parents = ((route or {}).get("status") or {}).get("parents") or []
    refused = [problem for parent in parents for problem in _refusals(parent)]
    if refused:
        reason, message = refused[0]
        return [Condition(ROUTE_ACCEPTED, False, reason, message)]

    wanted = [ref.name for ref in service.spec.router.gateway.parent_refs]
    answered = {_gateway_of(parent) for parent in parents}
    if silent := [name for name in wanted if name not in answered]:
        message = (
            f"no controller has accepted the route for Gateway {', '.join(silent)} yet: there is "
            "no such Gateway, or no controller for its class"
        )
        return [Condition(ROUTE_ACCEPTED, False, "Pending", message)]
    message = f"clients reach the routers by Gateway {', '.join(dict.fromkeys(wanted))}"
    return [Condition(ROUTE_ACCEPTED, True, "Accepted", message)]


def _refusals(parent: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the reason and message of each condition in which a Gateway rejects a route."""
    for condition in parent.get("conditions") or ():
        is_asked = condition.get("type") in ("Accepted", "ResolvedRefs")
        if is_asked and condition.get("status") == "False":
            text = condition.get("message") or condition.get("reason", "")
            reason = str(condition.get("reason") or "Refused")
            yield reason, f"Gateway {_gateway_of(parent)} does not accept the route: {text}"


def _gateway_of(parent: Mapping[str, Any]) -> str:
    return str((parent.get("parentRef") or {}).get("name", ""))
