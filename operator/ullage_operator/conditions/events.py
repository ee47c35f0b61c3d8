"""Kubernetes Events for changes of a service's conditions. Pure.

An Event is written at a transition and never for a state that lasts, so that `kubectl describe`
lists what happened and not how often the operator looked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ullage_operator.conditions.conditions import CONTESTED, DEFINITION_OUTDATED, ENGINES_CONSISTENT
from ullage_operator.conditions.consistency import DIFFER

MAX_NOTE_BYTES = 1024
"""Longest message of an Event that Kubernetes takes."""


_FAULTS = ("Degraded", "MissingPermission", "KindsUnlisted", DEFINITION_OUTDATED, CONTESTED)
"""Types of conditions that hold while something is wrong."""


@dataclass(frozen=True, slots=True)
class EventNote:
    """A decision about a service, as its Event words it."""

    reason: str
    """Reason of the Event, in CamelCase."""
    action: str
    """What was done, in CamelCase."""
    message: str
    warning: bool = False


def transitions(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]
) -> list[EventNote]:
    """The Events that a change of a service's conditions makes.

    A condition makes one when its status or its reason changes. For a new service only what is
    unusual does: that nothing serves yet and pods are being made goes without saying.
    """
    previous = {condition["type"]: condition for condition in before}
    notes = [
        EventNote(_title(each), "Observe", each["message"], _is_bad(each))
        for each in after
        if _is_news(previous.get(each["type"]), each)
    ]
    worst = sorted(notes, key=lambda note: note.warning)  # Ready and Degraded often say the same
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
    """`Ready` and `Recovered` say what became of the service; the rest is the reason itself."""
    match condition["type"], condition["status"]:
        case "Ready", "True":
            return "Ready"
        case "Degraded", "False":
            return "Recovered"
    return str(condition["reason"])


def clipped(text: str) -> str:
    """Cut a text to what an Event may say, without splitting a character."""
    data = text.encode()
    if len(data) <= MAX_NOTE_BYTES:
        return text
    return data[: MAX_NOTE_BYTES - 3].decode(errors="ignore") + "…"
