"""Tracks how shared model caches are filled, and which pools wait for them.

A Job downloads the model into a claim. New engines and canaries wait for the Job. If the Job fails
or cannot be created, engines start anyway and download the model themselves. The status records
which claims are filled, because Kubernetes removes finished Jobs.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any

from ullage_operator.api import naming
from ullage_operator.api.spec import Service
from ullage_operator.conditions.conditions import Condition
from ullage_operator.conditions.diagnosis import diagnose, is_unmounted
from ullage_operator.conditions.missing_pods import WAIT_S, why_missing
from ullage_operator.conditions.pod_problem import Warnings
from ullage_operator.conditions.pods import age_s
from ullage_operator.manifests.fetch_job import SharedCache, shared_caches

LiveObject = dict[str, Any]

MODEL_CACHE_WARM = "ModelCacheWarm"
"""Type of the condition that is True when every claim has its model."""
PENDING = "Pending"
FETCHING = "Fetching"
FETCHED = "Fetched"
FAILED = "Failed"
RECHECK_S = 10.0
"""Seconds between requests for a running Job's progress."""
_LONGEST = 512
_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class FetchObservation:
    """Observations about model downloads that the Job objects themselves do not contain."""

    sees_jobs: bool = False
    """Whether the operator can list Jobs. If it cannot, engines do not wait for Jobs."""
    pods: Sequence[LiveObject] = ()
    """Pods of the Jobs that download models."""
    progress: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Download progress that running pods report, by Job name."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """The progress of filling one claim with its model."""

    cache: SharedCache
    phase: str
    job: str = ""
    """Name of the existing Job (empty if there is no Job)."""
    bytes: int = 0
    total_bytes: int = 0
    message: str = ""
    """Reason why the Job failed, or why its pod does not start."""
    is_awaited: bool = False
    """Whether engines that do not exist yet must wait for the Job."""

    @property
    def is_unfinished(self) -> bool:
        return self.phase in (PENDING, FETCHING)

    @property
    def is_wanted(self) -> bool:
        """Return whether a Job should exist for this claim. A filled claim needs none."""
        return self.phase != FETCHED

    def __str__(self) -> str:
        cache = self.cache
        text = f"claim {cache.claim}, {cache.source}"
        if self.total_bytes:
            unit, name = (_GIB, "GiB") if self.total_bytes >= _GIB else (_MIB, "MiB")
            sizes = f"{self.bytes / unit:.1f} of {self.total_bytes / unit:.1f} {name}"
            text = f"{text}: {sizes}"
        return f"{text}: {self.message}" if self.message else text


def cache_states(
    service: Service,
    objects: Iterable[LiveObject],
    fetches: FetchObservation,
    status: Mapping[str, Any],
    now: datetime,
    warnings: Warnings = MappingProxyType({}),
) -> list[CacheState]:
    """Return the state of each claim that the spec asks to pre-fill with a model.

    Args:
        objects: the live objects of the service.
        status: the service's current status.
        warnings: Events about Jobs without a pod, and about pods that do not start.
    """
    states = []
    for cache in shared_caches(service):
        before = _before(cache, status)
        job = _job_of(cache, objects)
        if before.get("phase") == FETCHED:
            states.append(_remembered(cache, before, job))
        elif job is None:
            states.append(_without_job(cache, before, fetches))
        else:
            states.append(_state_of_job(cache, job, before, fetches, now, warnings))
    return states


def waiting_pools(states: Iterable[CacheState]) -> dict[str, str]:
    """Return a message for each pool whose first engines wait for a Job to download the model.

    The messages are keyed by pool.
    """
    return {
        pool: f"waits until its model is fetched: {state}"
        for state in states
        if state.is_awaited
        for pool in state.cache.pools
    }


def caches_condition(states: Sequence[CacheState]) -> list[Condition]:
    """Return the ModelCacheWarm condition, or an empty list if there are no claims to pre-fill."""
    if not states:
        return []
    failed = [state for state in states if state.phase == FAILED]
    if failed:
        message = (
            f"{failed[0]}; correct that, and delete Job {failed[0].job} to try again now. Engines "
            "start without it and fetch the model themselves"
        )
        return [Condition(MODEL_CACHE_WARM, False, "FetchFailed", message)]

    unfinished = [state for state in states if state.is_unfinished]
    if unfinished:
        message = "; ".join(map(str, unfinished))
        return [Condition(MODEL_CACHE_WARM, False, unfinished[0].phase, message)]
    message = "; ".join(map(str, states))
    return [Condition(MODEL_CACHE_WARM, True, FETCHED, message)]


def cache_status(pool: str, states: Iterable[CacheState]) -> dict[str, Any]:
    """Return the `modelCache` section of a pool's status (empty for a pool without a cache)."""
    for state in states:
        if pool in state.cache.pools:
            return {
                "modelCache": {
                    "phase": state.phase,
                    "claimName": state.cache.claim,
                    "source": state.cache.source,
                    **({"store": state.cache.store} if state.cache.store else {}),
                    "bytes": state.bytes,
                    "totalBytes": state.total_bytes,
                    **({"message": state.message} if state.message else {}),
                }
            }
    return {}


def _without_job(
    cache: SharedCache, before: Mapping[str, Any], fetches: FetchObservation
) -> CacheState:
    """Return the state of a claim that has no Job.

    Engines do not wait if the last status already reported the Job as missing, because the Job then
    cannot be created. They also do not wait if a previous Job failed and is being recreated.
    """
    phase = before.get("phase")
    message = "its Job does not exist; see the condition Degraded or MissingPermission"
    is_awaited = fetches.sees_jobs and phase not in (PENDING, FAILED)
    return CacheState(
        cache, PENDING, message=message if phase == PENDING else "", is_awaited=is_awaited
    )


def _remembered(
    cache: SharedCache, before: Mapping[str, Any], job: LiveObject | None
) -> CacheState:
    name = job["metadata"]["name"] if job else ""
    total = before.get("totalBytes", 0)
    return CacheState(cache, FETCHED, name, before.get("bytes", 0), total)


def _state_of_job(
    cache: SharedCache,
    job: LiveObject,
    before: Mapping[str, Any],
    fetches: FetchObservation,
    now: datetime,
    warnings: Warnings,
) -> CacheState:
    name = job["metadata"]["name"]
    pods = [pod for pod in fetches.pods if _is_of(pod, job)]
    pods.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    report = _report(pods) or fetches.progress.get(name, {})
    done = _count(report, "bytes", before)
    total = _count(report, "total_bytes", before, "totalBytes")

    if _has(job, "Complete"):
        return CacheState(cache, FETCHED, name, done, total)
    if _has(job, "Failed"):
        message = str(report.get("error", "")) or _ended_with(pods) or _reason(job)
        message = message or str(before.get("message", ""))
        return CacheState(cache, FAILED, name, done, total, message[:_LONGEST])

    starting = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending"]
    problems = diagnose(starting, now, warnings=warnings)
    message = str(problems[0])[:_LONGEST] if problems else ""
    if _lacks_pod(job, fetches, now):
        message = f"Job {name} has no pods: {why_missing(job, warnings)}"[:_LONGEST]
    is_running = any(pod.get("status", {}).get("phase") == "Running" for pod in pods)
    phase = FETCHING if is_running else PENDING
    return CacheState(cache, phase, name, done, total, message, is_awaited=True)


def unstarted_fetches(
    objects: Iterable[LiveObject], fetches: FetchObservation, now: datetime
) -> list[LiveObject]:
    """Return the Jobs without a pod and the pods without volumes, whose Events say why."""
    jobs = [item for item in objects if item["kind"] == "Job" and _lacks_pod(item, fetches, now)]
    return [*jobs, *(pod for pod in fetches.pods if is_unmounted(pod, now))]


def _lacks_pod(job: LiveObject, fetches: FetchObservation, now: datetime) -> bool:
    """Return whether an unfinished Job has had no pod for long, for example because of a quota."""
    if _has(job, "Complete") or _has(job, "Failed") or age_s(job, now) < WAIT_S:
        return False
    return not any(_is_of(pod, job) for pod in fetches.pods)


def _before(cache: SharedCache, status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the claim's entry in the last status.

    The result is empty if there is no entry, or if it names another model or bucket.
    """
    pools = status.get("pools", {})
    for pool in cache.pools:
        said: Mapping[str, Any] = pools.get(pool, {}).get("modelCache", {})
        filled = (said.get("claimName"), said.get("source"), said.get("store", ""))
        if filled == (cache.claim, cache.source, cache.store):
            return said
    return {}


def _job_of(cache: SharedCache, objects: Iterable[LiveObject]) -> LiveObject | None:
    """Return the newest Job that downloads the cache's model into its claim."""
    jobs = [item for item in objects if item["kind"] == "Job" and _is_for(item, cache)]
    jobs.sort(key=lambda item: str(item["metadata"].get("creationTimestamp", "")))
    return jobs[-1] if jobs else None


def _is_for(job: LiveObject, cache: SharedCache) -> bool:
    said = job["metadata"].get("annotations") or {}
    wanted = {
        naming.FETCH_CLAIM: cache.claim,
        naming.FETCH_SOURCE: cache.source,
        naming.FETCH_STORE: cache.store,
    }
    return all(said.get(name, "") == value for name, value in wanted.items())


def _is_of(pod: LiveObject, job: LiveObject) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == job["metadata"].get("uid") for owner in owners)


def _conditions(job: LiveObject) -> dict[str, Mapping[str, Any]]:
    listed = job.get("status", {}).get("conditions") or ()
    return {each["type"]: each for each in listed if each.get("status") == "True"}


def _has(job: LiveObject, condition: str) -> bool:
    return condition in _conditions(job)


def _reason(job: LiveObject) -> str:
    condition = _conditions(job)["Failed"]
    return f"{condition.get('reason', '')}: {condition.get('message', '')}"


def _terminated(pods: Iterable[LiveObject]) -> list[str]:
    """Return the termination messages of all containers in the given pods, in pod order."""
    return [
        str(status["state"]["terminated"].get("message", ""))
        for pod in pods
        for status in pod.get("status", {}).get("containerStatuses") or ()
        if "terminated" in status.get("state", {})
    ]


def _report(pods: Iterable[LiveObject]) -> dict[str, Any]:
    """Return the newest download report in the pods' termination messages (empty if none)."""
    for text in reversed(_terminated(pods)):
        if report := parse_progress(text):
            return report
    return {}


def _ended_with(pods: Iterable[LiveObject]) -> str:
    texts = [text.strip().splitlines()[-1] for text in _terminated(pods) if text.strip()]
    return texts[-1] if texts else ""


def parse_progress(text: str | bytes) -> dict[str, Any]:
    """Parse the progress of a download from JSON text (empty for any other text)."""
    try:
        report = json.loads(text)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def _count(report: Mapping[str, Any], name: str, before: Mapping[str, Any], said: str = "") -> int:
    """Return a number of bytes from a download report.

    If the report lacks the number, use the one in `before`. An invalid number becomes 0.

    Args:
        report: the download report.
        name: the number's key in the report.
        before: the claim's entry in the last status.
        said: the number's key in `before`, if it differs from `name`.
    """
    value = report.get(name, before.get(said or name, 0))
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and value >= 0 else 0
