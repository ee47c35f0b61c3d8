"""Checks a spec for contradictions between fields that the CRD cannot detect."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ullage_common.config.engine import DEFAULT_HOST_TIER
from ullage_operator.api.errors import Problem
from ullage_operator.api.pool_defaults import device_of, ordered_pools, role_of, with_pool_defaults
from ullage_operator.api.quantities import amount, parse_bytes
from ullage_operator.api.spec import claim_of

MIN_BYTES = 2**20
"""Minimum memory setting, in bytes. A smaller one cannot hold even one request or KV block."""
MAX_BYTES = 2**46
"""Maximum value of a memory setting in bytes: 64 TiB, more than any machine has."""
_MIG_SLICE = "/mig-"
"""Substring of the resource names that NVIDIA's device plugin gives to MIG slices."""
_HOST_SIZE = "tiers.host.size"


def contradictions(spec: Mapping[str, Any]) -> list[Problem]:
    """Return the contradictions between fields of a complete spec that passed CRD validation."""
    if unreadable := [*unreadable_amounts(spec), *shared_roles(spec)]:
        return unreadable

    complete = with_pool_defaults(spec)
    pools = complete["pools"].items()
    in_memory = (each for name, pool in pools for each in _memory(spec, name, pool))
    sliced = (each for name, pool in pools for each in _slices(spec, name, pool))
    # Pools that inherit the same field report it once.
    return [*excesses(spec), *sliced, *_adapters(spec), *dict.fromkeys(in_memory)]


def _slices(spec: Mapping[str, Any], name: str, pool: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem if each engine of a pool would span several MIG slices.

    NCCL cannot connect MIG slices. The CRD has no rule for this, because it has no default for the
    number of GPUs.
    """
    resource = pool["gpuResourceName"]
    gpus = pool["gpus"]
    if _MIG_SLICE in resource and gpus > 1 and device_of(spec) != "cpu":
        yield Problem(
            f"spec.pools.{name}.gpus",
            f"{gpus} of {resource} cannot form a group, because NCCL does not connect MIG slices; "
            "set gpus: 1 and more replicas, or take whole GPUs",
        )


def _adapters(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield problems with adapters: no slots, too high a rank, or a claim that is not mounted."""
    memory = spec["memory"]
    adapters = spec.get("adapters", ())
    slots = memory.get("maxLoras")
    rank = memory["maxLoraRank"]

    if slots == 0 and adapters:
        yield Problem(
            "spec.memory.maxLoras",
            "0 leaves no slot for spec.adapters; raise it, or leave one of them out",
        )
    if slots and spec["engine"] == "Native":
        yield Problem(
            "spec.memory.maxLoras",
            f"{slots} is for LoRA adapters, which the native engine cannot serve; set engine to "
            "VLLM, or leave it out",
        )

    mounted = spec.get("adapterClaims")
    for index, adapter in enumerate(adapters):
        if adapter["rank"] > rank:
            yield Problem(
                f"spec.adapters[{index}].rank",
                f"{adapter['rank']} exceeds memory.maxLoraRank {rank}, the size of a slot; "
                "raise maxLoraRank",
            )
        claim = claim_of(adapter["source"])
        if (
            claim
            and mounted is not None
            and claim not in (claim_of(spec["model"]["source"]), *mounted)
        ):
            yield Problem(
                f"spec.adapters[{index}].source",
                f"is on claim {claim}, which engines do not mount; add it to spec.adapterClaims",
            )


def shared_roles(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield problems with pool roles that make it ambiguous which pool serves a request.

    The CRD has rules for this, but objects stored under an older CRD may violate them.
    """
    names = ordered_pools(spec)
    for role in ("standard", "large"):
        sharing = [name for name in names if role_of(spec["pools"][name]) == role]
        if len(sharing) > 1:
            text = (
                f"pools {' and '.join(sharing)} have role {role.capitalize()}; set role of the "
                "one for large requests to Large, and of others to Overflow"
            )
            yield Problem("spec.pools", text)
    if all(role_of(pool) == "overflow" for pool in spec["pools"].values()):
        text = "no pool takes ordinary requests; set role of one to Standard"
        yield Problem("spec.pools", text)


def _memory(spec: Mapping[str, Any], name: str, pool: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield problems with memory sizes that no machine has or that are too small for an engine.

    Args:
        spec: the spec as written.
        name: the name of the pool.
        pool: the pool with its defaults.
    """
    memory = pool["memory"]
    limit = pool.get("resources", {}).get("limits", {}).get("memory", MAX_BYTES)
    own = spec["pools"][name].get("memory", {})

    def path(key: str) -> str:
        is_own = key.partition(".")[0] in own
        return f"spec.pools.{name}.memory.{key}" if is_own else f"spec.memory.{key}"

    if "maxKV" in memory and parse_bytes(memory["maxKV"]) < MIN_BYTES:
        yield Problem(path("maxKV"), f"{memory['maxKV']} holds no request; give at least 1Mi")

    tiers = memory.get("tiers", {})
    # A default host tier takes the memory that is free, so it cannot contradict other fields.
    default = f"{DEFAULT_HOST_TIER >> 20}Mi" if "remote" in tiers or "file" in tiers else 0
    host = tiers.get("host", {}).get("size", default)
    yield from (replace(each, path=path(each.path)) for each in _tiers(tiers, host))

    amounts = {key: memory.get(key) for key in ("deviceBytes", "hostKV")} | {_HOST_SIZE: host}
    asked = {key: parse_bytes(given) for key, given in amounts.items() if given}
    num_ranks = pool["gpus"] // pool.get("nodes", 1)  # of one pod
    ranks = {"deviceBytes": num_ranks}
    for_each = {"deviceBytes": f" for each of {num_ranks} workers"} if num_ranks > 1 else {}
    totals = {key: size * ranks.get(key, 1) for key, size in asked.items()}
    for key, total in totals.items():
        if total > amount(limit):
            most = "any machine has" if limit == MAX_BYTES else f"resources.limits.memory {limit}"
            each = for_each.get(key, "")
            yield Problem(path(key), f"{amounts[key]}{each} is more than {most}; lower it")

    on_cpu = [totals.get(key, 0) for key in ("deviceBytes", _HOST_SIZE)]
    has_tiers = memory["prefixCache"] and device_of(spec) != "cuda"
    if has_tiers and max(on_cpu) <= amount(limit) < sum(on_cpu):
        each = for_each.get("deviceBytes", "")
        yield Problem(
            path(_HOST_SIZE),
            f"{host} and deviceBytes {memory['deviceBytes']}{each} together are more than "
            f"resources.limits.memory {limit}; lower one of them, or raise the limit",
        )

    if "deviceBytes" in asked and device_of(spec) != "cuda":
        percent = memory["thresholdPercent"]
        reserve = memory["safetyReserve"]
        if asked["deviceBytes"] * percent // 100 - parse_bytes(reserve) < MIN_BYTES:
            yield Problem(
                path("deviceBytes"),
                f"{memory['deviceBytes']} leaves an engine nothing: of the {percent} % of it that "
                f"thresholdPercent allows, safetyReserve {reserve} is kept empty; raise it or "
                "lower safetyReserve",
            )


def unreadable_amounts(spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each invalid quantity that would be copied into pods unchanged."""
    places = {"spec.router": spec["router"]}
    places |= {f"spec.pools.{name}": pool for name, pool in spec["pools"].items()}
    for place, section in places.items():
        amounts = {
            f"resources.{kind}.{name}": value
            for kind, each in section.get("resources", {}).items()
            for name, value in each.items()
        }
        amounts["shmSize"] = section.get("shmSize", 0)
        cache = section.get("modelCache", {})
        amounts["modelCache.sizeLimit"] = cache.get("sizeLimit", 0)
        amounts["modelCache.claimTemplate.size"] = cache.get("claimTemplate", {}).get("size", 0)
        for path, value in amounts.items():
            try:
                amount(value)
            except ValueError as error:
                yield Problem(f"{place}.{path}", str(error))


def _tiers(tiers: Mapping[str, Any], host: int | str) -> Iterator[Problem]:
    """Yield problems with KV tiers that cannot hold a single block.

    The problems' paths are relative to `memory`.

    Args:
        tiers: the tiers of the spec.
        host: the size of the KV tier in host memory.
    """
    host_bytes = parse_bytes(host)
    if not host_bytes and (below := [name for name in ("remote", "file") if name in tiers]):
        yield Problem(
            _HOST_SIZE,
            f"{host} leaves no host tier, through which {' and '.join(below)} pass their blocks; "
            f"give at least 1Mi, or leave {' and '.join(below)} out",
        )
    if 0 < host_bytes < MIN_BYTES:
        yield Problem(_HOST_SIZE, f"{host} holds no block; give at least 1Mi, or 0 for no tiers")
    size = tiers.get("file", {}).get("size", MIN_BYTES)
    if parse_bytes(size) < MIN_BYTES:
        yield Problem("tiers.file.size", f"{size} holds no block; give at least 1Mi")


def excesses(spec: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each resource request above its limit, which Kubernetes would reject.

    The CRD has no CEL rule for this. API servers before 1.34 assume that the text of a quantity may
    be megabytes long, so a rule that compares two quantities would exceed the cost limit.
    """
    places = {"router": spec["router"]} | {f"pools.{n}": pool for n, pool in spec["pools"].items()}
    return [
        Problem(
            f"spec.{place}.resources.requests.{name}",
            f"{asked} exceeds the limit {limits[name]}; lower the request or raise the limit",
        )
        for place, section in places.items()
        for resources in [section.get("resources", {})]
        for limits in [resources.get("limits", {})]
        for name, asked in resources.get("requests", {}).items()
        if name in limits and amount(asked) > amount(limits[name])
    ]
