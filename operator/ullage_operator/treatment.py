"""Between what is observed of a service and what healing decides about: pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ullage_operator import naming
from ullage_operator.conditions import timestamp
from ullage_operator.events import Note
from ullage_operator.headroom import Vitals
from ullage_operator.healing import HOUR, Cure, Held, Past, Patient, Policy
from ullage_operator.spec import Healing
from ullage_operator.streams import Target
from ullage_operator.trouble import (
    Trouble,
    has_started,
    is_ready,
    node_of,
    parse_time,
    pool_of,
    ready_since,
)

Pod = Mapping[str, Any]
DOUBT_AFTER_S = 20.0
"""A pod that was ready and is not for so long may have lost its node."""
NODE_CHECK_S = 15.0
"""How often a node in doubt is asked for."""
_UNKNOWN = Vitals(pool="")


def policy_of(healing: Healing) -> Policy:
    return Policy(
        enabled=healing.enabled,
        not_ready_after=healing.not_ready_after,
        silent_after=healing.silent_after,
        min_health=healing.min_health,
        restarts_per_hour=healing.restarts_per_hour,
        first_backoff=healing.backoff.first,
        max_backoff=healing.backoff.max,
    )


def targets(pods: Iterable[Pod], min_health: float) -> dict[str, Target]:
    """Engines whose headroom to follow, by uid: those that have started and do not end."""
    return {
        pod["metadata"]["uid"]: Target(pool_of(pod), _address(pod["status"]["podIP"]), min_health)
        for pod in pods
        if pool_of(pod) and has_started(pod) and not _is_leaving(pod) and _has_address(pod)
    }


def _has_address(pod: Pod) -> bool:
    return bool(pod.get("status", {}).get("podIP"))


def _address(ip: str) -> str:
    return f"[{ip}]:{naming.PROBE_PORT}" if ":" in ip else f"{ip}:{naming.PROBE_PORT}"


def _is_leaving(pod: Pod) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def patients(
    pods: Iterable[Pod],
    vitals: Mapping[str, Vitals],
    lost_nodes: frozenset[str],
    now: datetime,
) -> list[Patient]:
    """The engines' pods as healing sees them.

    Args:
        vitals: by uid.
        now: in UTC.
    """
    engines = (pod for pod in pods if pool_of(pod))
    return [_patient(pod, vitals.get(pod["metadata"]["uid"]), lost_nodes, now) for pod in engines]


def _patient(pod: Pod, heard: Vitals | None, lost: frozenset[str], now: datetime) -> Patient:
    heard, ready = heard or _UNKNOWN, is_ready(pod)
    return Patient(
        name=str(pod["metadata"]["name"]),
        uid=str(pod["metadata"]["uid"]),
        pool=pool_of(pod),
        has_started=has_started(pod),
        is_ready=ready,
        # A pod that has only just started was "not ready" all the time that it loaded.
        not_ready_s=0.0 if ready else min(heard.known_s, _since(ready_since(pod), now)),
        was_heard=heard.report is not None,
        silent_s=heard.silent_s,
        unhealthy_s=heard.unhealthy_s,
        is_leaving=_is_leaving(pod),
        overdue_s=_since(parse_time(pod["metadata"].get("deletionTimestamp")), now),
        is_on_lost_node=node_of(pod) in lost,
    )


def _since(at: datetime | None, now: datetime) -> float:
    return max(0.0, (now - at).total_seconds()) if at else 0.0


def silent_pools(vitals: Iterable[Vitals], silent_after: float) -> frozenset[str]:
    """Pools with an engine of which routers are to be asked whether they hear it."""
    return frozenset(v.pool for v in vitals if v.report and v.silent_s >= silent_after)


def doubtful_nodes(pods: Iterable[Pod], now: datetime) -> frozenset[str]:
    """Nodes worth asking for: pods of theirs should be gone, or are not ready though started."""
    return frozenset(node_of(pod) for pod in pods if node_of(pod) and _doubtful_in_s(pod, now) == 0)


def node_wait_s(pod: Pod, now: datetime) -> float | None:
    """Seconds until its node should be asked for; None while the pod is well."""
    wait_s = _doubtful_in_s(pod, now) if node_of(pod) else None
    return NODE_CHECK_S if wait_s == 0 else wait_s


def _doubtful_in_s(pod: Pod, now: datetime) -> float | None:
    if ends := parse_time(pod["metadata"].get("deletionTimestamp")):
        return max(0.0, (ends - now).total_seconds())
    if has_started(pod) and not is_ready(pod):
        return max(0.0, DOUBT_AFTER_S - _since(ready_since(pod), now))
    return None


def is_lost(node: Mapping[str, Any] | None) -> bool:
    """Whether a node is gone, or does not answer."""
    if node is None:
        return True
    listed = node.get("status", {}).get("conditions", ())
    told = next((each["status"] for each in listed if each["type"] == "Ready"), "Unknown")
    return bool(told != "True")


def remembered(status: Mapping[str, Any]) -> list[Past]:
    """The restarts that a service's status tells of."""
    listed = status.get("healing", {}).get("restarts", ())
    return [Past(r["pool"], r["pod"], r["reason"], _at(r["time"])) for r in listed]


def _at(text: str) -> datetime:
    found = parse_time(text)
    assert found is not None, "the schema requires it"
    return found


def told(past: Iterable[Past], cures: Sequence[Cure], now: datetime) -> list[dict[str, str]]:
    """`status.healing.restarts`: written before a pod is deleted, so that none is uncounted."""
    new = [Past(c.pod.pool, c.pod.name, c.reason, now) for c in cures if not c.by_force]
    kept = [each for each in past if each.at > now - HOUR]
    return [
        {"pool": each.pool, "pod": each.pod, "reason": each.reason, "time": timestamp(each.at)}
        for each in [*kept, *new]
    ]


def held_troubles(held: Iterable[Held]) -> list[Trouble]:
    """Pods that should be made anew and are not yet, for the condition Degraded."""
    return [Trouble(each.pod.name, each.reason, each.message, blocks=False) for each in held]


def note_of(cure: Cure) -> Note:
    if cure.by_force:
        return Note("PodForgotten", "Delete", f"pod {cure.pod.name}: {cure.message}", True)
    message = f"pod {cure.pod.name}: {cure.reason}: {cure.message}; it is made anew"
    return Note("PodRestarted", "Restart", message, True)
