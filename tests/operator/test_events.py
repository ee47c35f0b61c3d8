"""Events: every decision once, series for what repeats, and never more than a service's share."""

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ullage_operator.drift import stamped
from ullage_operator.events import BURST, Deeds, Note, Recorder, transitions

NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
SERVICE = {"metadata": {"name": "demo", "namespace": "models", "uid": "u1"}}
NOTE = Note("PodRestarted", "Restart", "pod demo-single-0: silent for 90 s", warning=True)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def condition(kind: str, status: str, reason: str, message: str = "m") -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def test_a_decision_is_an_event_about_the_service() -> None:
    event = Recorder("operator-0").record(SERVICE, NOTE, NOW)
    assert event is not None
    assert event["metadata"].pop("name").startswith("demo.")
    assert event == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "models"},
        "eventTime": "2026-01-02T03:04:05.000006Z",
        "reportingController": "serving.ullage.dev/operator",
        "reportingInstance": "operator-0",
        "action": "Restart",
        "reason": "PodRestarted",
        "regarding": {
            "apiVersion": "serving.ullage.dev/v1alpha1",
            "kind": "LLMService",
            "name": "demo",
            "namespace": "models",
            "uid": "u1",
        },
        "note": "pod demo-single-0: silent for 90 s",
        "type": "Warning",
    }


def test_what_repeats_becomes_a_series_told_once_a_minute() -> None:
    recorder = Recorder("o")
    first = recorder.record(SERVICE, NOTE, NOW)
    assert first
    assert [recorder.record(SERVICE, NOTE, after(s)) for s in (1, 20, 59)] == [None] * 3
    later = recorder.record(SERVICE, NOTE, after(61))
    assert later
    assert later.pop("series") == {"count": 5, "lastObservedTime": "2026-01-02T03:05:06.000006Z"}
    assert later == first
    anew = recorder.record(SERVICE, NOTE, after(61 + 361))
    assert anew and anew["metadata"]["name"] != first["metadata"]["name"]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 200)), max_size=200))
def test_a_service_never_makes_more_than_its_share(course: list[tuple[int, int]]) -> None:
    recorder, seconds, told = Recorder("o"), 0, 0
    for wait, number in course:
        seconds += wait
        note = Note("R", "A", f"message {number}")
        made = recorder.record(SERVICE, note, after(seconds))
        told += made is not None and "series" not in made
    assert told <= BURST + seconds / 30


def test_one_noisy_service_does_not_silence_another() -> None:
    recorder = Recorder("o")
    for number in range(BURST + 5):
        recorder.record(SERVICE, Note("R", "A", str(number)), NOW)
    assert recorder.dropped == 5
    other = {"metadata": {"name": "b", "namespace": "models", "uid": "u2"}}
    assert recorder.record(other, NOTE, NOW)


def test_a_long_message_is_cut_at_a_character() -> None:
    event = Recorder("o").record(SERVICE, Note("R", "A", "é" * 2000), NOW)
    assert event
    assert 1000 < len(event["note"].encode()) <= 1024
    assert event["note"].endswith("é…")


def test_conditions_are_told_when_status_or_reason_change() -> None:
    before = [condition("Ready", "True", "AllReady"), condition("Degraded", "False", "AsExpected")]
    worse = [
        condition("Ready", "False", "CrashLoopBackOff", "pod a"),
        condition("Degraded", "True", "CrashLoopBackOff", "pod a"),
    ]
    assert transitions(before, worse) == [Note("CrashLoopBackOff", "Observe", "pod a", True)]
    assert transitions(worse, before) == [
        Note("Ready", "Observe", "m"),
        Note("Recovered", "Observe", "m"),
    ]
    assert transitions(before, [c | {"message": "other"} for c in before]) == []


def test_what_two_conditions_say_is_told_once_and_as_a_warning_if_either_is_one() -> None:
    before = [condition("Progressing", "True", "A"), condition("RolloutHealthy", "True", "A")]
    after = [
        condition("Progressing", "False", "Errors", "rolled back"),
        condition("RolloutHealthy", "False", "Errors", "rolled back"),
    ]
    assert transitions(before, after) == [Note("Errors", "Observe", "rolled back", True)]


def test_of_a_new_service_only_the_unusual_is_told() -> None:
    new = [
        condition("Ready", "False", "NoEngineReady"),
        condition("Progressing", "True", "RollingOut"),
        condition("Degraded", "False", "AsExpected"),
    ]
    assert [note.reason for note in transitions([], new)] == ["RollingOut"]


def test_deeds_tell_drift_from_change_and_nothing_from_what_stayed() -> None:
    def live(version: int, replicas: int) -> dict[str, Any]:
        meta = {"name": "s", "resourceVersion": str(version)}
        return stamped({"kind": "StatefulSet", "metadata": meta, "spec": {"replicas": replicas}})

    deeds = Deeds()
    deeds.applied(live(1, 1), None, live(1, 1))
    deeds.applied(live(2, 2), live(1, 1), live(2, 2))
    edited = live(2, 2)
    edited["metadata"]["resourceVersion"] = "3"
    deeds.applied(live(2, 2), edited, live(4, 2))
    deeds.applied(live(2, 2), live(5, 2), live(5, 2))
    deeds.deleted.append("Service x")
    assert [(note.reason, note.message) for note in deeds.notes()] == [
        ("Created", "StatefulSet s"),
        ("Updated", "StatefulSet s"),
        ("DriftRepaired", "StatefulSet s"),
        ("Deleted", "Service x"),
    ]
