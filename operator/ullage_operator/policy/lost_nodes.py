"""Decides which nodes may be lost, from the state of their pods."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from ullage_operator.conditions.pods import (
    has_started,
    is_follower,
    is_ready,
    node_of,
    parse_time,
    ready_since,
)

Pod = Mapping[str, Any]

DOUBT_AFTER_S = 20.0
"""Seconds for which a started pod must be unready before its node is suspected lost."""
NODE_CHECK_S = 15.0
"""Seconds between checks of a node that may be lost."""


def elapsed_s(at: datetime | None, now: datetime) -> float:
    return max(0.0, (now - at).total_seconds()) if at else 0.0


def doubtful_nodes(pods: Iterable[Pod], now: datetime) -> frozenset[str]:
    """Return the nodes that may be lost, judging by the state of their pods.

    A node may be lost if it has pods that should have terminated already, or pods that started but
    are not ready.
    """
    return frozenset(node_of(pod) for pod in pods if node_of(pod) and _doubtful_in_s(pod, now) == 0)


def node_wait_s(pod: Pod, now: datetime) -> float | None:
    """Return the seconds until a pod's node should be checked, or None while the pod is healthy."""
    wait_s = _doubtful_in_s(pod, now) if node_of(pod) else None
    return NODE_CHECK_S if wait_s == 0 else wait_s


def _doubtful_in_s(pod: Pod, now: datetime) -> float | None:
    if ends := parse_time(pod["metadata"].get("deletionTimestamp")):
        return max(0.0, (ends - now).total_seconds())

    # A follower is not ready while its group loads, which is no sign of a lost node.
    if has_started(pod) and not is_ready(pod) and not is_follower(pod):
        return max(0.0, DOUBT_AFTER_S - elapsed_s(ready_since(pod), now))
    return None


def is_lost(node: Mapping[str, Any] | None) -> bool:
    """Return whether a node was deleted or does not respond."""
    if node is None:
        return True
    listed = node.get("status", {}).get("conditions", ())
    ready = next((each["status"] for each in listed if each["type"] == "Ready"), "Unknown")
    return bool(ready != "True")
