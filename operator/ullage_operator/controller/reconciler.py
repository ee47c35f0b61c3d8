"""Reconciles one service: observe the cluster, plan, apply the plan, and write the status."""

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ullage_operator.api.bases import Bases, base_names
from ullage_operator.api.errors import (
    ClusterDenied,
    OperatorError,
    Permanent,
    Temporary,
)
from ullage_operator.api.naming import BASE, EVENT, STATEFUL_SET
from ullage_operator.api.renames import dropped_fields
from ullage_operator.api.settings import VERSION, Settings
from ullage_operator.api.spec import Service
from ullage_operator.conditions.pod_problem import ObjectWarning, PodProblem
from ullage_operator.controller.apply import Applier, ApplyResult, Replaced
from ullage_operator.controller.autoscaler import Autoscaler, ScaledService
from ullage_operator.controller.healer import Healer
from ullage_operator.controller.observe import failed_status, observe
from ullage_operator.controller.rollout_queue import RolloutQueue
from ullage_operator.controller.router_client import RouterClient, router_addresses
from ullage_operator.kube.cache import Cache, Denied, ServiceKey
from ullage_operator.kube.client import Cluster
from ullage_operator.planning.contest import (
    ANSWER_S,
    ASK_AGAIN_S,
    Question,
    ServingTurn,
    asked,
    challenger_of,
    held,
    holder_of,
    turn_of,
)
from ullage_operator.planning.observed import Observed
from ullage_operator.planning.plan import ServicePlan, status_after
from ullage_operator.planning.rollout_observation import observe_rollout
from ullage_operator.planning.standing import Declared, Standing, plan_standing, read, standing
from ullage_operator.planning.status import warned_objects
from ullage_operator.policy.engine_health import silent_pools
from ullage_operator.policy.pool_sizes import own_policies, with_replicas
from ullage_operator.rollout.state import is_canary_running

Object = dict[str, Any]

_logger = logging.getLogger(__name__)
_MIN_WAIT_S = 1.0
_MAX_WARNED = 3
"""Maximum number of pods and workloads whose Events one reconciliation reads."""
_MAX_COUNTED_TRIES = 7
"""Number of failed attempts after which the backoff stops growing, at about one minute."""


def _generation(obj: Object) -> tuple[str, int]:
    """Return an object's uid and generation, which identify a version of its spec."""
    return obj["metadata"]["uid"], obj["metadata"]["generation"]


class ReconcileResult(NamedTuple):
    """The outcome of one reconciliation of a service."""

    result: str
    status: Object
    """The status to report."""
    plan: ServicePlan | None = None
    """The applied plan (None without a usable spec). Restarts wait for the write of the status."""
    recheck_s: float | None = None
    """Maximum number of seconds until the next reconciliation, or None for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileTimes:
    """Intervals of reconciliations, in seconds."""

    resync_s: float = 300.0
    """Maximum time between reconciliations of a service, even without changes."""
    retry_s: float = 1.0
    """Delay of the first retry. Each further retry doubles the delay, up to 64 times this value."""


class Reconciler:
    """Makes the cluster match the declared services. Each call reconciles one service."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        applier: Applier,
        healer: Healer,
        autoscaler: Autoscaler[ServiceKey],
        rollout_queue: RolloutQueue,
        settings: Settings,
        times: ReconcileTimes,
        name: str,
    ) -> None:
        self._name = name
        self._questions: dict[ServiceKey, Question] = {}
        """Liveness queries to other operators, by the service that the queried operator manages."""
        self._challengers: dict[ServiceKey, Question] = {}
        """Liveness queries from other operators, by the service that this operator manages."""
        self._cluster = cluster
        self._cache = cache
        self._applier = applier
        self._healer = healer
        self._autoscaler = autoscaler
        self._rollout_queue = rollout_queue
        self._settings = settings
        self._times = times
        self._router_client = RouterClient()
        self._failures: dict[ServiceKey, int] = {}
        """Number of consecutive failed reconciliations, by service."""
        self._uids: dict[ServiceKey, str] = {}
        """Uids of the services that this operator manages."""
        self._unwritten: dict[ServiceKey, Mapping[str, PodProblem]] = {}
        """Errors of the last writes of StatefulSets, by service and pool."""
        self._read: dict[ServiceKey, tuple[tuple[Any, ...], Declared]] = {}
        self._reading = asyncio.Lock()

    async def reconcile(self, key: ServiceKey) -> tuple[str, float | None]:
        """Bring one service a step closer to its spec.

        Returns:
            The result label, and the seconds until the next reconciliation (None if none is due).
        """
        recheck_s = None
        try:
            result, recheck_s = await self._reconcile_once(key)
        except Temporary as error:
            _logger.warning("%s: will retry: %s", key, error)
            return "temporary", self._backoff_s(key, error.delay_s)
        except Permanent as error:
            _logger.error("%s: its status cannot be written: %s", key, error)
            result = "permanent"

        if result != "temporary":
            self._failures.pop(key, None)
        if result != "gone":
            # Random times keep a thousand services from being reconciled all at once.
            resync_s = self._times.resync_s * random.uniform(0.8, 1.0)
            return result, max(_MIN_WAIT_S, min(resync_s, recheck_s or resync_s))
        self._forget(key)
        return result, None

    def _backoff_s(self, key: ServiceKey, least_s: float) -> float:
        """Return the seconds until the next try, with exponential backoff."""
        self._failures[key] = tries = min(self._failures.get(key, 0) + 1, _MAX_COUNTED_TRIES)
        delay_s = self._times.retry_s * 2.0 ** (tries - 1)
        return max(least_s, delay_s * random.uniform(0.8, 1.0))

    def drop(self) -> None:
        """Discard the state of all services, because another operator is the leader now."""
        self._uids.clear()
        self._unwritten.clear()
        self._read.clear()
        self._failures.clear()
        self._questions.clear()
        self._challengers.clear()
        self._healer.drop()
        self._router_client.drop()
        self._autoscaler.drop()
        self._rollout_queue.drop()

    def _forget(self, key: ServiceKey) -> None:
        """Discard all state of a deleted service."""
        self._uids.pop(key, None)
        self._questions.pop(key, None)
        self._challengers.pop(key, None)
        self._stop_serving(key)

    def _stop_serving(self, key: ServiceKey) -> None:
        self._unwritten.pop(key, None)
        self._read.pop(key, None)
        self._failures.pop(key, None)
        self._healer.forget(key)
        self._router_client.forget(key)
        self._autoscaler.forget(key)
        self._rollout_queue.forget(key)

    async def _reconcile_once(self, key: ServiceKey) -> tuple[str, float | None]:
        """Reconcile once, and return the result label and the maximum delay until the next run."""
        manifest = self._cache.service(key)
        if manifest is None or "deletionTimestamp" in manifest["metadata"]:
            return "gone", None  # the garbage collector deletes the objects of the service

        uid = manifest["metadata"]["uid"]
        if self._uids.get(key, uid) != uid:
            self._forget(key)  # its deletion was not seen, only the next service of its name
        self._uids[key] = uid

        turn = turn_of(
            self._name, manifest.get("status", {}), self._questions.get(key), time.monotonic()
        )
        if turn is not ServingTurn.SERVE:
            return await self._leave_to_other(key, manifest, turn)
        if question := self._questions.pop(key, None):
            _logger.warning("%s: takes over: operator %s does not answer", key, question.holder)

        observed = self._with_challenger(key, observe(self._cache, manifest))
        observed = await self._with_canary_samples(key, observed)
        try:
            result, status, planned, recheck_s = await self._plan_and_apply(key, manifest, observed)
        except Replaced:
            return "gone", None

        status = held(self._name, status)
        if status != observed.status:
            await self._applier.report(key, manifest, status)
        if planned is not None:
            await self._healer.restart_pods(key, manifest, planned.healing.restarts, observed.now)
        return result, recheck_s

    async def _leave_to_other(
        self, key: ServiceKey, manifest: Object, turn: ServingTurn
    ) -> tuple[str, float]:
        """Stop managing a service that another operator manages, and check if that one is alive.

        The service's status names the other operator.
        """
        status = manifest.get("status", {})
        holder = holder_of(status)
        self._stop_serving(key)

        if turn is ServingTurn.ASK:
            before = self._questions.get(key, Question("", 0.0))
            is_answered = before.holder == holder and before.is_answered
            if before.holder != holder:
                message = (
                    "%s: operator %s serves it; this operator, %s, asks whether that one is "
                    "alive, and leaves the service alone meanwhile"
                )
                _logger.warning(message, key, holder, self._name)
            await self._applier.report(key, manifest, asked(self._name, status))
            self._questions[key] = Question(holder, time.monotonic(), is_answered)
        elif turn is ServingTurn.YIELD and not self._questions[key].is_answered:
            self._questions[key] = dataclasses.replace(self._questions[key], is_answered=True)
            message = (
                "%s: operator %s is alive and serves it, so this one, %s, does not; give each of "
                "the two releases namespaces of its own (watch.namespaces), or uninstall one"
            )
            _logger.error(message, key, holder, self._name)

        return "yielded", ASK_AGAIN_S if turn is ServingTurn.YIELD else ANSWER_S

    def _with_challenger(self, key: ServiceKey, observed: Observed) -> Observed:
        """Return `observed` with the name of another operator that watches the service, if any.

        The other operator is known from the liveness query that it recently sent to this one.
        """
        now_s = time.monotonic()
        if name := challenger_of(observed.status):
            if key not in self._challengers:
                message = "%s: operator %s watches it, too, and leaves it to this one, %s"
                _logger.error(message, key, name, self._name)
            self._challengers[key] = Question(name, now_s)
        question = self._challengers.get(key)
        if question and now_s - question.asked_s > 2 * ASK_AGAIN_S:
            question = self._challengers.pop(key) and None
        return dataclasses.replace(observed, challenger=question.holder if question else "")

    async def _with_canary_samples(self, key: ServiceKey, observed: Observed) -> Observed:
        """Return `observed`, with the routers' request counts added while a canary is running."""
        if not is_canary_running(observe_rollout(key.name, observed).stored_state):
            return observed
        answers = await self._router_client.canary_samples(key, observed.pods)
        return dataclasses.replace(
            observed, canary_samples=answers.samples, unanswered=answers.unanswered
        )

    async def _with_router_view(self, service: Service, observed: Observed) -> Observed:
        """Return `observed` with the pools in which no router can reach a ready engine.

        Routers are asked only about pools in which an engine has stopped reporting to the operator.
        """
        pools = silent_pools(observed.engine_health.values(), service.spec.healing.silent_after)
        if not pools:
            return observed
        unreachable = await self._router_client.unreachable_pools(
            observed.pods, pools, observed.now
        )
        return dataclasses.replace(observed, unreachable_pools=unreachable)

    async def _with_fetch_progress(self, observed: Observed) -> Observed:
        """Return `observed` with the progress of running Jobs that download models."""
        if not observed.fetches.pods:
            return observed
        progress = await self._router_client.fetch_progress(observed.fetches.pods)
        fetches = dataclasses.replace(observed.fetches, progress=progress)
        return dataclasses.replace(observed, fetches=fetches)

    async def _with_warnings(
        self, key: ServiceKey, service: Service, observed: Observed
    ) -> Observed:
        """Return `observed` with the Warning Events of pods that fail to start."""
        warnings = {}
        missing_rights = observed.missing_rights
        try:
            for uid in warned_objects(service, observed)[:_MAX_WARNED]:
                if event := await self._cluster.warning(key.namespace, uid):
                    reason = str(event.get("reason", ""))
                    note = str(event.get("note", ""))
                    warnings[uid] = ObjectWarning(reason, note.strip())
        except ClusterDenied as error:
            denied = Denied(error.verb, EVENT.qualified, key.namespace)
            missing_rights = (*missing_rights, str(denied))
        except OperatorError as error:
            _logger.warning("%s: its pods' Events cannot be read: %s", key, error)
        return dataclasses.replace(observed, warnings=warnings, missing_rights=missing_rights)

    async def close(self) -> None:
        await self._router_client.close()

    async def _plan_and_apply(
        self, key: ServiceKey, manifest: Object, observed: Observed
    ) -> ReconcileResult:
        """Plan a service, apply the plan, and return the result with the status to report."""
        declared = await self._declared(key, manifest)
        stands = standing(manifest, declared, observed, self._settings)
        if stands is None:
            self._rollout_queue.forget(key)  # nothing happens until somebody corrects the spec
            return ReconcileResult("invalid", failed_status(manifest, observed, declared.problems))

        service = stands.service
        observed = dataclasses.replace(
            observed,
            unwritten_engines=self._unwritten.pop(key, {}),
            refused=declared.problems,
            undefined=declared.filled,
        )
        observed = await self._healer.observe(key, service, observed)
        observed = await self._with_router_view(service, observed)
        observed = await self._with_warnings(key, service, observed)
        observed = await self._with_fetch_progress(observed)
        observed = self._with_replicas(key, service, observed)

        planned = self._plan(key, stands, observed)
        applied = await self._applier.apply(key, manifest, planned, observed)
        self._unwritten[key] = applied.engine_problems
        after = self._with_result(manifest, observed, applied)
        status = planned.status if after == observed else status_after(service, planned, after)

        recheck_s = planned.recheck_s
        if applied.delayed:
            wait_s = self._backoff_s(key, applied.delay_s)
            recheck_s = min(wait_s, recheck_s or wait_s)

        is_refused = declared.problems and applied.result == "ok"
        return ReconcileResult(
            "invalid" if is_refused else applied.result, status, planned, recheck_s
        )

    def _plan(self, key: ServiceKey, stands: Standing, observed: Observed) -> ServicePlan:
        """Plan a service within the limits of the rollout queue, and record its rollout there.

        There is no `await` between asking the queue and recording the rollout, so two services
        cannot claim the same slot in the queue.
        """
        observed = dataclasses.replace(
            observed,
            may_begin_rollout=self._rollout_queue.may_begin(key, self._statuses),
            may_yield=self._rollout_queue.may_yield(key),
        )
        planned = plan_standing(stands, observed, self._settings)
        if stands.is_partial:
            self._rollout_queue.forget(key)
        else:
            rollout = planned.rollout
            self._rollout_queue.on_planned(
                key,
                rollout.progress,
                router_waits=rollout.router_waits,
                router_rolls=rollout.router_rolls,
                seeks_room=rollout.seeks_room,
                lacks_room=rollout.lacks_room,
            )
        return planned

    def _statuses(self) -> Iterator[tuple[ServiceKey, Object]]:
        for key in self._cache.services():
            yield key, (self._cache.service(key) or {}).get("status", {})

    def _with_result(self, manifest: Object, observed: Observed, applied: ApplyResult) -> Observed:
        """Return `observed` with the objects and errors that resulted from applying the plan."""
        return dataclasses.replace(
            observed,
            objects=observe(self._cache, manifest).objects,
            missing_rights=(*observed.missing_rights, *map(str, applied.denied)),
            unapplied=applied.problems,
        )

    def _with_replicas(self, key: ServiceKey, service: Service, observed: Observed) -> Observed:
        """Return `observed` with the autoscaler's decisions about the number of engines.

        Decisions continue from the live sizes of pools, so there are none while these are unknown.
        """
        if not self._cache.sees(STATEFUL_SET, key.namespace):
            return observed
        policies = own_policies(service)
        routers, leaving = router_addresses(observed.pods if policies else ())
        scaled = ScaledService(policies, routers, leaving)
        pools = with_replicas(service, observed.objects, observed.scaling).spec.pools
        current = {name: pool.replicas for name, pool in pools.items()}
        decisions = self._autoscaler.follow(key, scaled, current)
        return dataclasses.replace(observed, scaling=decisions)

    async def _declared(self, key: ServiceKey, manifest: Object) -> Declared:
        """Return the parsed service, from the cache unless the service or one of its bases changed.

        A change is detected by a new generation, or by a difference in which declared fields the
        API server dropped, because that may change without a new generation.
        """
        names = base_names(manifest.get("spec"))
        present = {name: self._cache.base(key.namespace, name) for name in names}
        base_manifests = {name: base for name, base in present.items() if base is not None}
        bases = Bases(
            {name: base.get("spec") or {} for name, base in base_manifests.items()},
            self._remedy_for_bases(key.namespace) if names else "",
        )
        version = (
            *map(_generation, (manifest, *base_manifests.values())),
            bases.remedy,
            *dropped_fields(manifest),
        )

        cached = self._read.get(key)
        if cached is None or cached[0] != version:
            if names:  # validating the merged spec takes a while, so a thread does
                async with self._reading:
                    declared = await asyncio.to_thread(read, manifest, self._settings, bases)
            else:
                declared = read(manifest, self._settings)
            for problem in declared.problems:
                _logger.error("%s: invalid: %s", key, problem)
            cached = (version, declared)
            self._read[key] = cached
        return cached[1]

    def _remedy_for_bases(self, namespace: str) -> str:
        """Return the fix to suggest in an error about a missing base."""
        if not self._cache.serves(BASE, namespace):
            return f"the cluster does not know the kind; apply the crds/ of version {VERSION}"
        if not self._cache.sees(BASE, namespace):
            return f"let the operator list and watch {BASE.qualified}"
        return f"create it in namespace {namespace}, or leave it out"
