"""Converts documents written for version 0.1.0, in which fields had other names or formats.

Manifests, the specs that the operator saves, and engine releases all have the structure of a spec,
so one table of renames converts all of them.
"""

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from ullage_operator.api.errors import Problem
from ullage_operator.api.section_reader import api_word

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def _percent(value: Any) -> Any:
    """Convert a fraction to a percentage, for example 0.85 to 85.

    Any other value stays unchanged, so that validation rejects it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not math.isfinite(value):
        return value
    percent = Decimal(str(value)) * 100
    return int(percent) if percent == percent.to_integral_value() else float(percent)


def _decimal(value: Any) -> Any:
    """Convert a fractional number to text (0.5 to "0.5"). Whole numbers stay unchanged."""
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else f"{Decimal(str(value)):f}"


def _decimal_percent(value: Any) -> Any:
    return _decimal(_percent(value))


def _seconds(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}s" if is_number else value


def _method(value: Any) -> Any:
    """Convert the 0.1.0 name `model` of a summary method to `Extractive`, and keep other values."""
    return "Extractive" if value in ("model", "Model") else value


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Rename:
    """A field of version 0.1.0, with its current name and format."""

    old: str
    """Old path below spec. `*` stands for any key of a map, `[]` for any item of a list."""
    new: str
    """New path, relative to the section that had the field (empty if the field was removed)."""
    convert: Callable[[Any], Any] = _same
    reason: str = "it has no effect any more"
    """Why the field was removed."""


_SHARES = {
    "pools.*.autoscaling.targets.kvUtilization": "kvUtilizationPercent",
    "pools.*.memory.threshold": "thresholdPercent",
    "pools.*.memory.adapterShare": "adapterPercent",
    "memory.threshold": "thresholdPercent",
    "memory.adapterShare": "adapterPercent",
    "routing.rungs.shrinkContext.maxDroppedShare": "maxDroppedPercent",
    "routing.rungs.shrinkOutput.minShare": "minPercent",
    "routing.placement.breaker.maxEjectedShare": "maxEjectionPercent",
    "routing.placement.retries.share": "percent",
    "cascade.confidence.threshold": "thresholdPercent",
    "prompts.compress.threshold": "thresholdPercent",
    "prompts.compress.share": "percent",
    "prompts.compress.factShare": "factPercent",
    "degrade.hysteresis": "hysteresisPercent",
    "degrade.throttling.batchStep": "batchStepPercent",
    "degrade.throttling.minBatchShare": "minBatchPercent",
    "degrade.levels.[].below": "belowPercent",
    "degrade.levels.[].batchShare": "batchPercent",
    "healing.minHealth": "minHealthPercent",
    "rollout.thresholds.ttftRatio": "ttftPercent",
    "rollout.thresholds.e2eRatio": "e2ePercent",
}
_FINE_SHARES = {
    "rollout.thresholds.errorRate": "errorPercent",
    "slo.errorRate": "errorPercent",
    "observability.tracing.sampleRatio": "samplePercent",
}
_DECIMALS = (
    "routing.placement.retries.perSecond",
    "streaming.tokensPerSecond",
    "degrade.levels.[].maxTemperature",
    "degrade.levels.[].maxTopP",
    "tenants.defaults.weight",
    "tenants.defaults.tokensPerSecond",
    "tenants.named.[].weight",
    "tenants.named.[].tokensPerSecond",
)
_DURATIONS = {
    "routing.rungs.reject.minRetryAfter": "minRetryDelay",
    "routing.rungs.reject.maxRetryAfter": "maxRetryDelay",
}
"""Renamed duration fields.

Durations used to be numbers and are now text. Under the old names, stored numbers would be invalid,
and the API server would reject every write to the object, including status updates.
"""
_OF_PODS = {
    "podLabels": "podTemplate.metadata.labels",
    "podAnnotations": "podTemplate.metadata.annotations",
    "nodeSelector": "podTemplate.spec.nodeSelector",
    "tolerations": "podTemplate.spec.tolerations",
    "affinity": "podTemplate.spec.affinity",
    "topologySpreadConstraints": "podTemplate.spec.topologySpreadConstraints",
    "priorityClassName": "podTemplate.spec.priorityClassName",
    "runtimeClassName": "podTemplate.spec.runtimeClassName",
    "volumes": "podTemplate.spec.volumes",
    "env": "podTemplate.spec.containers[engine].env",
    "envFrom": "podTemplate.spec.containers[engine].envFrom",
    "volumeMounts": "podTemplate.spec.containers[engine].volumeMounts",
}

RENAMES: tuple[Rename, ...] = (
    *(Rename(old, new, _percent) for old, new in _SHARES.items()),
    *(Rename(old, new, _decimal_percent) for old, new in _FINE_SHARES.items()),
    *(Rename(old, old.rpartition(".")[2], _decimal) for old in _DECIMALS),
    *(Rename(old, new, _seconds) for old, new in _DURATIONS.items()),
    *(Rename(f"pools.*.{old}", new) for old, new in _OF_PODS.items()),
    *(Rename(f"router.{old}", new) for old, new in _OF_PODS.items() if "[engine]" not in new),
    # The list comes after its items, since stored items lack fields that are required now and
    # have fractions.
    Rename("degrade.levels", "pressureLevels"),
    Rename("prompts.compress.method", "method", _method),
    Rename("prompts.compress.timeout", ""),
    Rename(
        "router.processes",
        "",
        reason="a router pod has one process, so raise router.replicas instead",
    ),
)
"""Every field whose name or format has changed since 0.1.0."""


_MOVED = frozenset(rename for rename in RENAMES if rename.new.startswith("podTemplate."))


def remedy(path: str, value: Any) -> str:
    """Return a hint about how to replace a 0.1.0 field (empty for all other fields).

    Args:
        path: the field's path, starting with `spec`.
    """
    rename = next((each for each in RENAMES if _matches(each, path)), None)
    if rename is None:
        return ""
    if not rename.new:
        return f"{rename.reason}; leave it out"
    written = rename.convert(value)
    if rename.convert is _percent and isinstance(written, float) and math.isfinite(written):
        return f"write {rename.new}: {_whole(written)} instead, {_difference(written)}"
    shown = f": {written}" if isinstance(written, int | float) else ""
    return f"write {rename.new}{shown} instead"


def _whole(percent: float) -> int:
    """Round a percentage to the nearest integer, rounding halves up."""
    return int(Decimal(str(percent)).to_integral_value(ROUND_HALF_UP))


def _difference(percent: float) -> str:
    """Describe how far rounding to a whole percent moves a percentage, in percentage points."""
    more = Decimal(_whole(percent)) - Decimal(str(percent))
    side = "more" if more > 0 else "less"
    return f"{abs(more):f} percentage points {side}: shares are whole percentages"


def rounded(spec: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Round the percentages of a 0.1.0 spec, and return it with the changes that an upgrade makes.

    Each change reports the field's old and new values, or that the field is dropped.
    """
    result = copy.deepcopy(dict(spec))
    changes: list[Problem] = []
    for rename in RENAMES:
        *above, name = rename.old.split(".")
        for path, section in _sections(result, above):
            if name in section and (text := _round(section, name, rename)):
                changes.append(Problem(f"{path}.{name}", text))
    return result, changes


def _round(section: dict[str, Any], name: str, rename: Rename) -> str:
    """Round a fraction to a whole percent in place, and describe the change (empty if none).

    If the field was dropped, or an upgrade replaces its value, the change is described but the
    field is not modified.
    """
    value = section[name]
    if not rename.new:
        return f"{value!r} is left out; {rename.reason}"
    if rename.convert is _method and _method(value) != value:
        return f"{value!r} is {rename.new}: {_method(value)} now: extracts, without the model"
    if rename.convert is not _percent or not isinstance(percent := _percent(value), float):
        return ""
    if not math.isfinite(percent):
        return ""
    section[name] = float(Decimal(_whole(percent)) / 100)
    return f"{value!r} is {rename.new}: {_whole(percent)} now, {_difference(percent)}"


def _matches(rename: Rename, path: str) -> bool:
    steps = rename.old.split(".")
    wild = {"*": r"[^.\[\]]+", "[]": r"\[[^\]]+\]"}
    parts = [wild.get(step, re.escape(step)) for step in steps]
    pattern = r"\.".join(parts).replace(r"\.\[", r"\[")
    return re.fullmatch(rf"spec\.{pattern}", path) is not None and not _is_kept(rename)


def _is_kept(rename: Rename) -> bool:
    """Return whether a field keeps its name and only changes its format."""
    return rename.new == rename.old.rpartition(".")[2]


def upgraded(
    spec: Mapping[str, Any], definition: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Convert a 0.1.0 spec to the current names and formats. A current spec stays unchanged.

    Args:
        definition: the schema of a spec, used to convert enum values and decimals to the API's
            notation. Without it, they keep the notation of configuration files, which the operator
            also uses in releases and in the specs that it saves.
    """
    result = copy.deepcopy(dict(spec))
    for rename in RENAMES:
        if rename.convert is _decimal and definition is None:
            continue
        for _, section in _sections(result, rename.old.split(".")[:-1]):
            _move(section, rename)
    if isinstance(pools := result.get("pools"), dict):
        _give_roles(pools)
    if definition:
        _replace_words(result, definition)
    return result


class _Items(dict[str, Any]):
    """A list as managedFields describes it, stored as a dict from position to item.

    managedFields covers only the items that one client set, so a plain list would have gaps. The
    position is the item's index in the live list, or its merge key if the index is unknown.
    """


def _sections(
    value: Any, steps: Sequence[str], path: str = "spec"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and value of each object in a spec that a path with wildcards matches.

    In the yielded path, actual names and indices replace the wildcards `*` and `[]`.
    """
    if not steps:
        if isinstance(value, dict):
            yield path, value
        return
    first, *rest = steps
    if first == "[]" and isinstance(value, list | _Items):
        for place, item in value.items() if isinstance(value, _Items) else enumerate(value):
            yield from _sections(item, rest, f"{path}[{place}]")
    elif isinstance(value, dict):
        for name in value if first == "*" else [first]:
            if name in value:
                yield from _sections(value[name], rest, f"{path}.{name}")


def _move(section: dict[str, Any], rename: Rename) -> None:
    name = rename.old.rpartition(".")[2]
    if name not in section:
        return
    value = rename.convert(section.pop(name))
    is_empty = value is None or value in ([], {})
    if not rename.new or (is_empty and rename in _MOVED):
        return

    *above, last = rename.new.replace("containers[engine]", "containers.engine").split(".")
    target = section
    for step in above:
        target = _below(target, step)

    # Fields that the template already has stay.
    if isinstance(value, dict) and isinstance(target.get(last), dict):
        target[last] |= value
    elif isinstance(value, list) and isinstance(target.get(last), list):
        target[last] = value + [each for each in target[last] if not _is_among(each, value)]
    else:
        target[last] = value


def _is_among(item: Any, items: Sequence[Any]) -> bool:
    """Return whether a list already contains an item with the same name or mount path as `item`."""
    keys = [key for key in ("name", "mountPath") if isinstance(item, dict) and key in item]
    key = keys[-1] if keys else ""
    return any(isinstance(each, dict) and key and each.get(key) == item[key] for each in items)


def _below(section: dict[str, Any], step: str) -> dict[str, Any]:
    """Return a section's child object by name, creating it if it is missing."""
    containers = section.get("containers") if step == "engine" else None
    if step == "containers":
        section.setdefault("containers", [])
        return section
    if isinstance(containers, list):
        for container in containers:
            if isinstance(container, dict) and container.get("name") == step:
                return container
        added: dict[str, Any] = {"name": step}
        containers.append(added)
        return added
    if not isinstance(section.get(step), dict):
        section[step] = {}
    inner: dict[str, Any] = section[step]
    return inner


def _give_roles(pools: dict[str, Any]) -> None:
    """Set the pool roles that 0.1.0 derived from pool names, unless any pool already has a role."""
    objects = {name: pool for name, pool in pools.items() if isinstance(pool, dict)}
    if any("role" in pool for pool in objects.values()) or not {"single", "large"} & set(objects):
        return
    for name, pool in objects.items():
        if name != "single":
            pool["role"] = "Large" if name == "large" else "Overflow"


def _replace_words(value: Any, schema: Mapping[str, Any]) -> None:
    """Replace enum values in the spelling of version 0.1.0 with the API's spelling, in place."""
    items: Any = ()
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        every = schema.get("additionalProperties")
        items = [(name, properties.get(name, every)) for name in value]
    elif isinstance(value, list):
        items = [(place, schema.get("items")) for place in range(len(value))]

    for key, field in items:
        if not isinstance(field, Mapping):
            continue
        words = field.get("enum", ())
        if isinstance(value[key], str) and value[key] not in words:
            if (word := api_word(value[key])) in words:
                value[key] = word
        else:
            _replace_words(value[key], field)


def dropped_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the 0.1.0 fields that a client declared but the API server dropped.

    The result maps paths to values. A value is None if only the path is known.

    An API server drops fields that its CRD does not define, even when it reads a stored object. The
    last-applied annotation of `kubectl apply` still contains these fields. For server-side apply,
    managedFields contains their paths without values.
    """
    metadata = manifest["metadata"]
    text = (metadata.get("annotations") or {}).get(LAST_APPLIED)
    fields: dict[str, Any] = {}
    if text is not None:
        try:
            declared = json.loads(text)
        except ValueError:
            declared = None
        spec = declared.get("spec") if isinstance(declared, dict) else None
        fields |= _old_fields(spec)

    for entry in metadata.get("managedFields") or ():
        if entry.get("operation") == "Apply" and not entry.get("subresource"):
            tree = (entry.get("fieldsV1") or {}).get("f:spec")
            declared = _plain(tree, manifest.get("spec"))
            fields |= dict.fromkeys(dict(_old_fields(declared)))

    present = dict(_old_fields(manifest.get("spec")))
    return {path: value for path, value in fields.items() if path not in present}


def _plain(tree: Any, live: Any) -> Any:
    """Convert a fieldsV1 tree from managedFields to nested fields with plain names.

    The tree marks every key with a prefix such as `f:`, which is removed.

    Args:
        live: the part of the live object that the tree describes. The tree identifies list items
            only by their keys, so their indices are looked up here.
    """
    if not isinstance(tree, Mapping):
        return {}
    is_list = any(step.startswith(("k:", "i:", "v:")) for step in tree)
    result: dict[str, Any] = _Items() if is_list else {}
    for step, below in tree.items():
        kind, _, name = step.partition(":")
        if kind == "f":
            inner = live.get(name) if isinstance(live, Mapping) else None
            result[name] = _plain(below, inner)
        elif kind in ("k", "i"):
            place = _place(kind, name, live)
            inner = live[place] if isinstance(place, int) else None
            result[str(place)] = _plain(below, inner)
    return result


def _place(kind: str, name: str, live: Any) -> int | str:
    """Return the index of the live list item that a key in managedFields identifies.

    If no item has the key, return the key as text.
    """
    items = live if isinstance(live, list) else []
    try:
        key = json.loads(name)
    except ValueError:
        return name
    if kind == "i" and isinstance(key, int):
        return key if 0 <= key < len(items) else str(key)
    if not isinstance(key, dict):
        return name

    for place, item in enumerate(items):
        if isinstance(item, Mapping) and all(item.get(each) == key[each] for each in key):
            return place
    return ", ".join(f"{each}={value}" for each, value in key.items())


def _old_fields(spec: Any) -> Iterator[tuple[str, Any]]:
    for rename in RENAMES:
        if _is_kept(rename):
            continue
        *above, name = rename.old.split(".")
        for path, section in _sections(spec, above):
            if name in section:
                yield f"{path}.{name}", section[name]
