"""Divides this machine's memory and cores among the engines.

In a cluster, each engine is confined by its container's limits. On this machine, every engine would
otherwise try to use all memory and cores.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ullage_cli.local.workloads import Manifest, pod_names, workloads
from ullage_common.process.cores import physical_cores, usable_cores
from ullage_common.process.memory import usable_bytes
from ullage_operator.api import naming
from ullage_operator.manifests.config_files import to_yaml

MIN_OWN_CORES = 2
"""Minimum number of physical cores per worker at which each engine gets dedicated cores.

With fewer cores per worker, dedicated cores would leave most of the machine idle whenever only one
engine is busy.
"""

EngineConfigs = Mapping[str, Mapping[str, Any]]
"""Parsed configuration files of engines, by workload name."""


def share_memory(objects: Sequence[Manifest]) -> list[Manifest]:
    """Return the plan's objects with a memory budget for every worker.

    Workers without `deviceBytes` split the machine's usable memory equally, after subtracting the
    other workers' budgets and the requested host tiers.
    """
    engines: dict[str, dict[str, Any]] = {
        item["metadata"]["name"]: yaml.safe_load(item["data"][naming.ENGINE_CONFIG])
        for item in objects
        if _has_engine_config(item)
    }
    num_pods = {item["metadata"]["name"]: len(pod_names(item)) for item in workloads(objects)}
    num_workers = {name: num_pods[name] * engine["gpus"] for name, engine in engines.items()}

    budgets = {name: engine["memory"].get("device_bytes") for name, engine in engines.items()}
    taken = sum((budgets[name] or 0) * num_workers[name] for name in engines)
    taken += _host_tier_bytes(engines, num_pods)

    num_open = sum(num_workers[name] for name in engines if budgets[name] is None)
    share = max(0, usable_bytes() - taken) // max(1, num_open)
    for engine in engines.values():
        engine["memory"].setdefault("device_bytes", share)

    return [
        _with_engine_config(item, engines[item["metadata"]["name"]])
        if _has_engine_config(item)
        else item
        for item in objects
    ]


def _has_engine_config(item: Manifest) -> bool:
    return naming.ENGINE_CONFIG in item.get("data", {})


def _with_engine_config(item: Manifest, engine: Mapping[str, Any]) -> Manifest:
    return {**item, "data": item["data"] | {naming.ENGINE_CONFIG: to_yaml(engine)}}


def _host_tier_bytes(engines: EngineConfigs, num_pods: Mapping[str, int]) -> int:
    """Return the total size of the KV tiers in host memory, in bytes, summed over all engine pods.

    Engines without a prefix cache have no such tier.
    """
    sizes = [
        engine["memory"]["tiers"]["host"].get("size", 0) * num_pods[name]
        for name, engine in engines.items()
        if engine["memory"]["prefix_cache"]
    ]
    return sum(sizes)


def machine_cores() -> list[list[int]]:
    """Return the physical cores that this process may use, each as a list of hardware threads."""
    allowed = sorted(os.sched_getaffinity(0))
    return physical_cores(allowed[: usable_cores()])


def share_cores(
    objects: Sequence[Manifest], cores: Sequence[Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """Return each engine's CPU core settings (for its `server` section), by pod name.

    A single engine gets all cores. Several engines get dedicated cores, in proportion to their
    workers, if there are at least MIN_OWN_CORES per worker. Otherwise all engines share all cores,
    and threads that wait for one another sleep instead of spinning. All engines of an autoscaled
    pool are counted, even those that are not running.

    Args:
        objects: the operator's plan.
        cores: physical cores, each as a list of hardware threads. All threads of a core go to the
            same engine, because they compete for the core's execution units.
    """
    num_workers = _workers_by_pod(objects)
    if len(num_workers) == 1:
        return {name: {"owns_cores": True} for name in num_workers}

    cores_per_worker = len(cores) // max(1, sum(num_workers.values()))
    if cores_per_worker < MIN_OWN_CORES:
        return {name: {"owns_cores": False} for name in num_workers}

    settings: dict[str, dict[str, Any]] = {}
    remaining = list(cores)
    for name, count in num_workers.items():
        num_own = count * cores_per_worker
        threads = [thread for core in remaining[:num_own] for thread in core]
        settings[name] = {"owns_cores": True, "cores": threads}
        remaining = remaining[num_own:]

    return settings


def _workers_by_pod(objects: Sequence[Manifest]) -> dict[str, int]:
    """Return the number of workers of every engine, by pod name."""
    configs = {item["metadata"]["name"]: item["data"] for item in objects if "data" in item}
    num_workers: dict[str, int] = {}
    for workload in workloads(objects):
        if text := configs[workload["metadata"]["name"]].get(naming.ENGINE_CONFIG):
            num_workers |= dict.fromkeys(pod_names(workload), yaml.safe_load(text)["gpus"])
    return num_workers
