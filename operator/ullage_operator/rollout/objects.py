"""Builds a rollout's objects: its state, the canary's engines, and the routers' rollout file."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import yaml

from ullage_common.canary_answers import PROMPTS_FILE
from ullage_operator.api import naming
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.builder import Builder
from ullage_operator.manifests.config_files import to_yaml
from ullage_operator.manifests.engine_choice import may_be_vllm
from ullage_operator.manifests.manifests import pool_objects
from ullage_operator.policy.pool_sizes import may_sleep
from ullage_operator.rollout.facts import canary_size, template_hash
from ullage_operator.rollout.plan import RolloutPlan
from ullage_operator.rollout.release import shared_hash
from ullage_operator.rollout.stages import RolloutStage
from ullage_operator.rollout.state import dump

Manifest = dict[str, Any]


def rollout_objects(service: Service, plan: RolloutPlan, settings: Settings) -> list[Manifest]:
    """Return the ConfigMap with the rollout's state, then the objects of the canary's engines."""
    name = naming.rollout_name(service.name)
    text = dump(plan.state)
    kept = Builder(service, naming.ENGINE).config_map(name, naming.ROLLOUT_STATE, text)
    objects = [kept]
    for pool_name in plan.pools:
        pool = plan.canary.spec.pools[pool_name]
        size = canary_size(service, pool_name, plan.places)
        few = msgspec.structs.replace(pool, replicas=size)
        canary_objects = pool_objects(plan.canary, naming.canary_pool(pool_name), few, settings)
        objects += with_revision(plan.canary, canary_objects, plan.progress.canary)
    return objects


def with_revision(service: Service, objects: Iterable[Manifest], revision: str) -> list[Manifest]:
    """Return a pool's objects, with its StatefulSets annotated with the revision and hashes.

    Later reconciliations compare the hashes to tell an operator upgrade from an edit.
    """
    hashes = {naming.REVISION: revision, naming.SHARED_HASH: shared_hash(service)}
    return [
        _with_hashes(item, hashes) if item["kind"] == "StatefulSet" else item for item in objects
    ]


def _with_hashes(item: Manifest, hashes: Mapping[str, str]) -> Manifest:
    own = {**hashes, naming.TEMPLATE_HASH: template_hash(item)}
    annotations = item["metadata"].get("annotations", {}) | own
    return {**item, "metadata": {**item["metadata"], "annotations": annotations}}


def router_file(plan: RolloutPlan) -> str:
    """Return the rollout file for routers: the canary, and the adapters of pools that may sleep.

    `ullage_router.rollout` reads the file.
    """
    progress = plan.progress
    name = plan.stable.name
    spec = plan.stable.spec
    document: Manifest = {"revision": progress.stable} | _stop_said(spec.stop)
    if may_be_vllm(spec) and any(map(may_sleep, spec.pools.values())):
        document["adapters"] = [adapter.name for adapter in spec.adapters]
    if plan.pools:
        pools = [
            {
                "name": pool,
                "targets": [
                    f"{naming.pool_name(name, naming.canary_pool(pool))}:{naming.GRPC_PORT}"
                ],
            }
            for pool in plan.pools
        ]
        document["canary"] = {
            "revision": progress.canary,
            "weight": plan.weight,
            "step": progress.step,
            "pools": pools,
            **_answers_compared(plan),
        }
    return to_yaml(document)


def _answers_compared(plan: RolloutPlan) -> Manifest:
    """Return the section by which routers compare answers (empty if they compare none)."""
    answers = plan.canary.spec.rollout.answers
    if answers is None or plan.progress.stage is not RolloutStage.CANARY:
        return {}
    path = f"{naming.PROMPTS_DIR}/{PROMPTS_FILE}"
    return {"answers": {} if answers.prompts == "sampled" else {"prompts_file": path}}


def _stop_said(is_stopped: bool) -> Manifest:
    # Routers of an older image do not know this field, so it is set only if it is needed.
    return {"stopped": True} if is_stopped else {}


def with_stop_said(text: str, is_stopped: bool) -> str:
    """Return the routers' rollout file, updating only the flag that marks a stopped service."""
    document = yaml.safe_load(text)
    kept = {name: value for name, value in document.items() if name != "stopped"}
    changed = kept | _stop_said(is_stopped)
    return text if changed == document else to_yaml(changed)
