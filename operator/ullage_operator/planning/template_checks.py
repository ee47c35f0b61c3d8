"""Checks that pod templates in a spec do not conflict with the operator's own fields."""

from collections.abc import Iterator

from ullage_operator.api import naming
from ullage_operator.api.errors import Problem
from ullage_operator.api.overlay import conflicts, overlap
from ullage_operator.api.pod_rules import template_problems
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import Settings
from ullage_operator.api.spec import Service
from ullage_operator.manifests.engine_pod import own_engine
from ullage_operator.manifests.resources import kv_holders
from ullage_operator.manifests.router_pod import own_router
from ullage_operator.manifests.volumes import KV_VOLUME, engine_mounts


def template_conflicts(service: Service, settings: Settings) -> Iterator[Problem]:
    """Yield problems with pod templates.

    A template must not set fields that the API forbids or that the operator sets itself.
    """
    router = service.spec.router.pod_template
    places = {"spec.router": router}
    places |= {f"spec.pools.{n}": pool.pod_template for n, pool in service.spec.pools.items()}
    problems = [
        problem
        for place, template in places.items()
        for problem in template_problems(template, f"{place}.podTemplate")
    ]
    if problems:
        yield from problems
        return

    if router:
        yield from conflicts(router, own_router(service, "", settings), "spec.router.podTemplate")
    for name, pool in service.spec.pools.items():
        if settings.on_kubernetes:
            yield from kv_folder_problems(service, name, pool)
        if pool.pod_template:
            own = own_engine(service, name, pool, "", settings)
            yield from conflicts(pool.pod_template, own, f"spec.pools.{name}.podTemplate")


def kv_folder_problems(service: Service, pool_name: str, pool: PoolSpec) -> Iterator[Problem]:
    """Yield a problem for each mount that conflicts with the folder of a pool's KV file tier.

    The folder must not overlap the operator's own mounts, and must not be mounted read-only.
    """
    file = pool.memory.tiers.file
    if file is None:
        return

    is_own = pool.memory.tiers != service.spec.memory.tiers
    path = f"spec.{f'pools.{pool_name}.' if is_own else ''}memory.tiers.file.path"
    others = [m["mountPath"] for m in engine_mounts(service, pool) if m["name"] != KV_VOLUME]
    if overlaps := overlap(file.folder, others):
        yield Problem(
            path,
            f"{file.folder} {overlaps}, which is the operator's own; choose another folder, or "
            f"leave path out for {naming.KV_DIR}",
        )
    for mount in kv_holders(pool):
        if mount.get("readOnly"):
            yield Problem(
                path,
                f"{file.folder} lies in {mount['mountPath']}, which podTemplate mounts readOnly; "
                "leave readOnly out there",
            )
