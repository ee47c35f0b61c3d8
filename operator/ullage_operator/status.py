"""What exists of a service, gathered for the plan; and the status of one that cannot be served."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ullage_operator import naming
from ullage_operator.cluster import Cluster
from ullage_operator.conditions import DEGRADED, READY, Finding, render
from ullage_operator.manifests import PODMONITOR_API
from ullage_operator.plan import Observed, key_of

Object = dict[str, Any]

OWNED_KINDS = (
    ("v1", "ConfigMap"),
    ("v1", "Service"),
    ("v1", "ServiceAccount"),
    ("apps/v1", "Deployment"),
    ("apps/v1", "StatefulSet"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("policy/v1", "PodDisruptionBudget"),
    (PODMONITOR_API, "PodMonitor"),
)
"""Every kind that a plan may hold."""


async def gather(cluster: Cluster, service: Object) -> Observed:
    """Asks the cluster for all that the plan of `service` depends on."""
    namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
    owned = f"{naming.owned_selector()},{naming.instance_selector(name)}"
    found = await asyncio.gather(
        *(cluster.listed(version, kind, namespace, owned) for version, kind in OWNED_KINDS)
    )
    mine = [obj for kind in found for obj in kind if belongs(obj, service)]
    monitored = await cluster.serves(PODMONITOR_API, "PodMonitor")
    return Observed(
        now=datetime.now(UTC),
        objects={key_of(obj): obj for obj in mine},
        pods=await cluster.listed("v1", "Pod", namespace, naming.instance_selector(name)),
        apis=frozenset({PODMONITOR_API} if monitored else ()),
        status=service.get("status", {}),
    )


def belongs(obj: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Whether an object with our labels is this service's.

    One that lost its owner is taken back; one of another owner, such as of a deleted service of
    the same name, is not.
    """
    owners = obj["metadata"].get("ownerReferences") or ()
    return not owners or any(owner["uid"] == service["metadata"]["uid"] for owner in owners)


def is_leaving(obj: Mapping[str, Any], service: Mapping[str, Any]) -> bool:
    """Whether an object is left over from a deleted service of the same name."""
    kind, name = naming.KIND, service["metadata"]["name"]
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner["kind"] == kind and owner["name"] == name for owner in owners)


def failed_status(observed: Observed, generation: int, reason: str, message: str) -> Object:
    """Status of a service that cannot be made as declared: what was observed before stays."""
    found = [Finding(kind, kind == DEGRADED, reason, message) for kind in (READY, DEGRADED)]
    previous = observed.status.get("conditions", ())
    conditions = render(found, previous, generation, observed.now)
    types = {condition["type"] for condition in conditions}
    kept = [dict(condition) for condition in previous if condition["type"] not in types]
    return {
        **observed.status,
        "observedGeneration": generation,
        "conditions": [*conditions, *kept],
    }
