"""Whether a live object still is what was last applied: saves the requests that change nothing."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ullage_operator.naming import GROUP

APPLIED_HASH = f"{GROUP}/applied-hash"
"""Annotation: of which configuration an object was made; tells a field that left it since."""

Object = Mapping[str, Any]


def stamped(desired: Object) -> dict[str, Any]:
    """`desired` with its hash as an annotation."""
    meta = desired["metadata"]
    annotations = meta.get("annotations", {}) | {APPLIED_HASH: _hash(desired)}
    return {**desired, "metadata": {**meta, "annotations": annotations}}


def has_drifted(desired: Object, live: Object) -> bool:
    """Whether `desired`, which is stamped, must be applied again.

    Fields that `desired` does not name are others' business. A quantity that the API server has
    rewritten looks drifted; applying it again changes nothing.
    """
    return not _within(desired, live)


def was_edited(desired: Object, live: Object) -> bool:
    """Whether a drifted object was made of this very configuration and changed by others since."""
    made_of = desired["metadata"]["annotations"][APPLIED_HASH]
    return bool((live["metadata"].get("annotations") or {}).get(APPLIED_HASH) == made_of)


def _within(desired: Any, live: Any) -> bool:
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return all(name in live and _within(value, live[name]) for name, value in desired.items())
    if isinstance(desired, list) and isinstance(live, list):
        return len(desired) == len(live) and all(map(_within, desired, live))
    return bool(desired == live)


def _hash(obj: Object) -> str:
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
