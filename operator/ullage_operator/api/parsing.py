"""Reads an LLMService from a manifest, or from an object that an API server stored."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ullage_common.config.engine import default_max_loras
from ullage_operator.api import schema
from ullage_operator.api.bases import NO_BASES, Bases, base_names, with_bases
from ullage_operator.api.contradictions import contradictions
from ullage_operator.api.errors import InvalidManifest, Problem
from ullage_operator.api.pool_defaults import with_pool_defaults
from ullage_operator.api.quantities import parse_seconds
from ullage_operator.api.renames import upgraded
from ullage_operator.api.section_reader import camel, field_names, section_reader
from ullage_operator.api.sections import MemorySpec
from ullage_operator.api.spec import Service, Spec, claim_of

_read_spec = section_reader(Spec)
_API_NAMES = {name: camel(name) for name in field_names(Spec)}
_NAMES = re.compile(r"args\.\S+|(?<!\w)'[^']*'|\w+")
"""Matches one word of a message. Quoted text and vLLM arguments each count as one word."""
_OF_A_POOL = re.compile(r"spec\.pools\.(\w+)\.memory\.(\w+)")


def parse(manifest: Any, default_namespace: str = "default", bases: Bases = NO_BASES) -> Service:
    """Return the service that a manifest describes.

    Args:
        manifest: the manifest of an LLMService.
        default_namespace: the namespace of a manifest without one.
        bases: the bases that the manifest may reference.

    Raises:
        InvalidManifest: the API server would reject the manifest, a field is unknown, or a base is
            missing from `bases`.
    """
    definition = schema.load_schema()
    stored, problems = schema.complete(definition, manifest)
    if problems:
        raise InvalidManifest(problems)

    spec = _over_bases(definition, stored, stored["spec"], bases)
    if problems := contradictions(spec):
        raise InvalidManifest(problems)
    return service_of(stored["metadata"], to_spec(spec), default_namespace)


def _over_bases(
    definition: schema.Schema, manifest: Mapping[str, Any], spec: Any, bases: Bases
) -> Any:
    """Return a spec merged over its bases, or the unchanged spec if it references no bases."""
    if not base_names(spec):
        return spec
    return with_bases(definition, manifest["metadata"]["name"], spec, bases)


def parse_stored(manifest: Mapping[str, Any]) -> Service:
    """Return a service that an API server has validated and stored with its defaults.

    Unknown fields are ignored. They belong to a newer CRD, which may be installed before the
    operator is upgraded.

    Raises:
        InvalidManifest: a value cannot be read, or two values contradict each other.
    """
    return parse_filled(manifest)[0]


def parse_filled(manifest: Mapping[str, Any], bases: Bases = NO_BASES) -> tuple[Service, list[str]]:
    """Return a stored service, and the paths of missing fields for which defaults were filled in.

    An API server fills in the defaults of its installed CRD. If that CRD is older than this
    operator, newer fields are stored without defaults.

    Raises:
        InvalidManifest: a value cannot be read, or two values contradict each other.
    """
    whole = schema.load_schema()
    definition = whole["properties"]["spec"]

    # An API server with an older definition returns the field names of that definition.
    spec: Any = manifest.get("spec")
    spec = upgraded(spec, definition) if isinstance(spec, Mapping) else spec
    filled = schema.fill(definition, spec, "spec")
    if problems := [*schema.misfits(definition, spec, "spec")]:
        raise InvalidManifest(problems)

    spec = _over_bases(whole, manifest, spec, bases)
    values = to_spec(spec)
    if problems := contradictions(spec):
        raise InvalidManifest(problems)
    return service_of(manifest["metadata"], values), filled


def to_spec(stored: Mapping[str, Any]) -> Spec:
    """Convert a stored spec, whose defaults are already filled in, to an immutable `Spec`.

    Raises:
        InvalidManifest: a value is missing or cannot be read.
    """
    complete = with_tenant_defaults(with_pool_defaults(stored))
    try:
        return _with_room_for_adapters(
            _with_time_to_start(msgspec.convert(_read_spec(complete, ""), Spec))
        )
    except msgspec.ValidationError as error:
        raise _refusal(error, stored) from error


def _with_time_to_start(spec: Spec) -> Spec:
    """Return a spec whose rollout deadline is at least as long as its pools' startup timeouts.

    The deadline is extended only if a pool sets a startup timeout above the default. Otherwise a
    rollout could give up before the startup timeout has expired.
    """
    pools = schema.load_schema()["properties"]["spec"]["properties"]["pools"]
    usual = pools["additionalProperties"]["properties"]["startTimeout"]["default"]
    longest = max((pool.start_timeout for pool in spec.pools.values()), default=0.0)
    if longest <= max(parse_seconds(usual), spec.rollout.start_deadline):
        return spec
    rollout = msgspec.structs.replace(spec.rollout, start_deadline=longest)
    return msgspec.structs.replace(spec, rollout=rollout)


def _with_room_for_adapters(spec: Spec) -> Spec:
    """Return a spec with enough LoRA slots and mounted claims to serve all of its adapters.

    Slots and claims that the spec sets stay unchanged. Editing the adapters triggers a rollout of
    engines only if the adapters need more slots or other claims.
    """
    replaced = msgspec.structs.replace
    has_adapters = bool(spec.adapters)

    def with_slots(memory: MemorySpec) -> MemorySpec:
        slots = default_max_loras(memory.max_loras, has_adapters=has_adapters)
        return replaced(memory, max_loras=slots)

    claims = spec.adapter_claims
    if claims is None:
        named = (claim_of(adapter.source) for adapter in spec.adapters)
        claims = tuple(dict.fromkeys(filter(None, named)))
    pools = {
        name: replaced(pool, memory=with_slots(pool.memory)) for name, pool in spec.pools.items()
    }
    return replaced(spec, memory=with_slots(spec.memory), pools=pools, adapter_claims=claims)


def in_api_names(text: str) -> str:
    """Replace configuration-file field names in a message with the API's field names.

    vLLM arguments and quoted text keep their names, because users wrote them.
    """
    return _NAMES.sub(lambda match: _API_NAMES.get(match[0], match[0]), text)


def _refusal(error: msgspec.ValidationError, stored: Mapping[str, Any]) -> InvalidManifest:
    text, _, where = str(error).partition(" - at `$")
    text = in_api_names(text)
    path = "spec" + in_api_names(where.rstrip("`"))

    # A pool inherits the service's memory, so its path may name a field that only the service has.
    inherited = _OF_A_POOL.match(path)
    if inherited and inherited[2] not in stored["pools"][inherited[1]].get("memory", {}):
        path = path.replace(f"pools.{inherited[1]}.", "", 1)

    if missing := re.search("missing required field `(.+)`", text):
        path = f"{path}.{camel(missing[1])}"
        return InvalidManifest([Problem(path, "required field is missing")])
    return InvalidManifest([Problem(path, text)])


def service_of(
    metadata: Mapping[str, Any], spec: Spec, default_namespace: str = "default"
) -> Service:
    return Service(
        name=metadata["name"],
        namespace=metadata.get("namespace", default_namespace),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        spec=spec,
    )


def with_tenant_defaults(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the spec with the tenant defaults filled in for every named tenant."""
    tenants = spec.get("tenants")
    if not tenants:
        return spec
    named = [tenants["defaults"] | tenant for tenant in tenants["named"]]
    return {**spec, "tenants": tenants | {"named": named}}
