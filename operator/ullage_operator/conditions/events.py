"""Kubernetes Events for changes in a service's conditions.

An Event reports a transition and never an ongoing state, so that `kubectl describe` lists changes
instead of reconciliations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ullage_operator.conditions.conditions import CONTESTED, DEFINITION_OUTDATED, ENGINES_CONSISTENT
from ullage_operator.conditions.consistency import DIFFER

MAX_NOTE_BYTES = 1024
"""Maximum length of an Event's message in Kubernetes."""


_FAULTS = ("Degraded", "MissingPermission", "KindsUnlisted", DEFINITION_OUTDATED, CONTESTED)
"""Types of conditions that are True while something is wrong."""


@dataclass(frozen=True, slots=True)
class EventNote:
    """The text of an Event about a service."""

    reason: str
    """Reason of the Event, in CamelCase."""
    action: str
    """Action of the Event, in CamelCase."""
    message: str
    warning: bool = False


def transitions(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> list[EventNote]:
    """Return the Events for changes in a service's conditions.

    An Event is emitted when the status or reason of a condition changes. A new service gets Events
    only for unusual conditions. For example, it is normal that a new service is not serving yet.
    """
    previous = {condition["type"]: condition for condition in before}
    notes = [
        EventNote(_title(each), "Observe", each["message"], _is_bad(each))
        for each in after
        if _is_news(previous.get(each["type"]), each)
    ]

    # Ready and Degraded often have the same message. The warning is kept, since it comes last.
    worst = sorted(notes, key=lambda note: note.warning)
    return list({(note.reason, note.message): note for note in worst}.values())


def _is_news(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    if before is None:
        is_usual = now["reason"] == "Stable" or now["type"] in ("Progressing", ENGINES_CONSISTENT)
        return bool(now["status"] == "True" and not is_usual)
    return any(before[key] != now[key] for key in ("status", "reason"))


def _is_bad(condition: Mapping[str, Any]) -> bool:
    is_fault = condition["type"] in _FAULTS
    if condition["type"] in ("Progressing", "MonitoringAvailable"):
        return False
    if condition["type"] == ENGINES_CONSISTENT:
        return bool(condition["reason"] == DIFFER)
    return bool((condition["status"] == "True") == is_fault)


def _title(condition: Mapping[str, Any]) -> str:
    """Return the reason to show in an Event about a changed condition.

    It is usually the condition's own reason. If the service becomes ready or is no longer degraded,
    it is `Ready` or `Recovered`.
    """
    match condition["type"], condition["status"]:
        case "Ready", "True":
            return "Ready"
        case "Degraded", "False":
            return "Recovered"
    return str(condition["reason"])


def clipped(text: str) -> str:
    """Truncate a text to an Event's maximum message length, without splitting a character."""
    data = text.encode()
    if len(data) <= MAX_NOTE_BYTES:
        return text
    return data[: MAX_NOTE_BYTES - 3].decode(errors="ignore") + "…"
