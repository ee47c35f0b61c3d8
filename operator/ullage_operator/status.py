"""What exists of a service, for the plan; and the status of one that cannot be served."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ullage_operator import naming
from ullage_operator.conditions import DEGRADED, READY, Finding, render
from ullage_operator.kinds import CONFIG_MAP, OWNED
from ullage_operator.plan import Observed, key_of
from ullage_operator.store import ServiceKey, Store

Object = dict[str, Any]


def observe(store: Store, service: Object) -> Observed:
    """All that the plan of `service` depends on."""
    key = ServiceKey(service["metadata"]["namespace"], service["metadata"]["name"])
    mine = [obj for obj in store.owned(key) if belongs(obj, service)]
    optional = [kind for kind in OWNED if kind.optional]
    return Observed(
        now=datetime.now(UTC),
        objects={key_of(obj): obj for obj in mine},
        pods=store.pods(key),
        serves=frozenset(kind.name for kind in optional if store.serves(kind, key.namespace)),
        missing=tuple(map(str, store.missing(key.namespace))),
        is_remembered=store.sees(CONFIG_MAP, key.namespace),
        status=service.get("status", {}),
        steering=(service["metadata"].get("annotations") or {}).get(naming.ROLLOUT, ""),
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
