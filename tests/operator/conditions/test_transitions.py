"""Which changes of conditions become Events."""

from typing import Any

from ullage_operator.conditions.conditions import outdated_definition
from ullage_operator.conditions.events import EventNote, transitions


def condition(kind: str, status: str, reason: str, message: str = "m") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def test_conditions_are_noted_when_status_or_reason_change() -> None:
    before = [condition("Ready", "True", "AllReady"), condition("Degraded", "False", "AsExpected")]
    worse = [
        condition("Ready", "False", "CrashLoopBackOff", "pod a"),
        condition("Degraded", "True", "CrashLoopBackOff", "pod a"),
    ]
    assert transitions(before, worse) == [EventNote("CrashLoopBackOff", "Observe", "pod a", True)]
    assert transitions(worse, before) == [
        EventNote("Ready", "Observe", "m"),
        EventNote("Recovered", "Observe", "m"),
    ]
    assert transitions(before, [c | {"message": "other"} for c in before]) == []


def test_what_two_conditions_say_is_told_once_and_as_a_warning_if_either_is_one() -> None:
    before = [condition("Progressing", "True", "A"), condition("RolloutHealthy", "True", "A")]
    after = [
        condition("Progressing", "False", "Errors", "rolled back"),
        condition("RolloutHealthy", "False", "Errors", "rolled back"),
    ]
    assert transitions(before, after) == [EventNote("Errors", "Observe", "rolled back", True)]


def test_of_a_new_service_only_the_unusual_is_told() -> None:
    new = [
        condition("Ready", "False", "NoEngineReady"),
        condition("Progressing", "True", "RollingOut"),
        condition("Degraded", "False", "AsExpected"),
    ]
    assert transitions([], new) == []
    missing = condition("MissingPermission", "True", "Forbidden")
    assert [note.reason for note in transitions([], [*new, missing])] == ["Forbidden"]


def test_what_the_pages_call_a_warning_is_one() -> None:
    now = [condition(each.type, "True", each.reason) for each in outdated_definition(["spec.a"])]
    assert [(note.reason, note.warning) for note in transitions([], now)] == [
        ("DefaultsMissing", True)
    ]
