"""Pods that are asked for and that nobody makes, such as where a quota refuses them. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from ullage_operator.conditions import PROGRESSING
from ullage_operator.trouble import Trouble, parse_time

WAIT_S = 60.0
"""Controllers need a moment, and a webhook that restarts is back by then."""


class Made(NamedTuple):
    """A Deployment or StatefulSet and its pods."""

    live: Mapping[str, Any]
    pods: int
    """That exist, those that end too."""
    told: int | None
    """How many the service's status named last."""


def unmade(workloads: Iterable[Made], status: Mapping[str, Any], now: datetime) -> list[Trouble]:
    """What lacks pods for too long.

    Args:
        status: of the service, as it is.
    """
    if _progressing_s(status, now) < WAIT_S:
        return []
    return [Trouble("", "PodsNotMade", _message(e), False) for e in workloads if _lacks(e)]


def look_again_s(
    workloads: Iterable[Made], status: Mapping[str, Any], now: datetime
) -> float | None:
    """When a lack of pods becomes one to tell of; None where there is none, or it is told."""
    left_s = WAIT_S - _progressing_s(status, now)
    return left_s if left_s > 0 and any(map(_lacks, workloads)) else None


def _lacks(made: Made) -> bool:
    """Now and when it was told last: a pod that is being replaced is away for a moment.

    A Deployment's controller says that it failed, and may have seen a spec before it makes pods.
    """
    live, wanted = made.live, _wanted(made.live)
    if live["kind"] == "Deployment" and not _failure(live):
        return False
    told = wanted if made.told is None else made.told
    seen = live.get("status", {}).get("observedGeneration", 0)
    is_newest = seen >= live["metadata"].get("generation", 0)
    return is_newest and max(_exist(live), made.pods, told) < wanted


def _wanted(live: Mapping[str, Any]) -> int:
    return int(live["spec"].get("replicas", 1))


def _exist(live: Mapping[str, Any]) -> int:
    return int(live.get("status", {}).get("replicas", 0))


def _message(made: Made) -> str:
    """With the words of the API server, which a Deployment hands on and a StatefulSet does not."""
    kind, name = made.live["kind"], made.live["metadata"]["name"]
    look = f"kubectl describe {kind.lower()} {name}"
    why = _failure(made.live) or f"a quota or an admission policy may refuse them; {look}"
    return f"{kind} {name} has {made.pods} of {_wanted(made.live)} pods: {why}"


def _failure(live: Mapping[str, Any]) -> str:
    """Why a Deployment's controller could not make a pod; empty where it could."""
    listed = live.get("status", {}).get("conditions", ())
    failed = (each for each in listed if each["type"] == "ReplicaFailure")
    return next((each.get("message", "") for each in failed if each["status"] == "True"), "")


def _progressing_s(status: Mapping[str, Any], now: datetime) -> float:
    """Seconds since the service began to progress; 0 where it does not."""
    found = (each for each in status.get("conditions", ()) if each["type"] == PROGRESSING)
    condition = next(found, {"status": "False"})
    since = parse_time(condition.get("lastTransitionTime"))
    return (now - since).total_seconds() if since and condition["status"] == "True" else 0.0
