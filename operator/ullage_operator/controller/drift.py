"""Detects differences between planned and live objects, and edits by other clients."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.overlay import merge_key

Object = dict[str, Any]

APPLIED_HASH = f"{naming.GROUP}/applied-hash"
"""Annotation with a hash of the manifest that was last applied.

The hash also changes when a field is removed from the manifest, which a comparison with the live
object would miss.
"""
_FLAGS = frozenset({"hostIPC", "hostNetwork", "hostPID", "readOnly", "stdin", "stdinOnce", "tty"})
"""Boolean pod fields that the API server omits if they are false.

Other boolean fields may default to true.
"""


def with_applied_hash(desired: Mapping[str, Any]) -> Object:
    """Return a manifest annotated with its own hash."""
    meta = desired["metadata"]
    text = json.dumps(desired, sort_keys=True, separators=(",", ":"))
    applied_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    annotations = meta.get("annotations", {}) | {APPLIED_HASH: applied_hash}
    return {**desired, "metadata": {**meta, "annotations": annotations}}


def has_drifted(desired: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Return whether a manifest, annotated with its hash, must be reapplied to a live object.

    Fields that the manifest does not set belong to other clients. An empty field that the live
    object omits is not drift. A quantity that the API server has normalised looks like drift, but
    reapplying the manifest changes nothing.
    """
    return not _is_within(desired, live)


def was_edited(desired: Mapping[str, Any], live: Mapping[str, Any]) -> bool:
    """Return whether another client edited an object after this exact manifest was applied."""
    applied_hash = desired["metadata"]["annotations"][APPLIED_HASH]
    return bool((live["metadata"].get("annotations") or {}).get(APPLIED_HASH) == applied_hash)


def _is_dropped(name: str, value: Any) -> bool:
    """Return whether the API server may omit a field with this value from the stored object."""
    return value in ("", [], None) or (value is False and name in _FLAGS)


def _is_within(desired: Any, live: Any) -> bool:
    if isinstance(desired, Mapping) and isinstance(live, Mapping):
        return all(
            _is_within(value, live[name]) if name in live else _is_dropped(name, value)
            for name, value in desired.items()
        )
    if isinstance(desired, list) and isinstance(live, list):
        key = merge_key(desired, live)
        if key is not None:
            items = {item[key]: item for item in live}
            return all(_is_within(item, items.get(item[key])) for item in desired)
        return len(desired) == len(live) and all(map(_is_within, desired, live))
    return bool(desired == live)
