"""Events: what they say, and that a decision that repeats makes no second one."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from ullage_operator.api.errors import ClusterRefused
from ullage_operator.conditions.events import EventNote
from ullage_operator.kube import events
from ullage_operator.kube.client import Cluster
from ullage_operator.kube.events import REPEAT_S, EventRecorder, event_of

NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
SERVICE = {"metadata": {"name": "demo", "namespace": "models", "uid": "u1"}}
NOTE = EventNote("PodRestarted", "Restart", "pod demo-single-0: silent for 90 s", warning=True)


class Clock(datetime):
    """A time that tests set."""

    present = NOW

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return cls.present


class CreatedEvents:
    """A cluster that keeps what is created."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []

    async def create(self, event: dict[str, Any]) -> dict[str, Any]:
        self.created.append(event)
        return event


def recorded(
    monkeypatch: pytest.MonkeyPatch, *decisions: tuple[float, EventNote, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The Events of (seconds, note, service)."""
    monkeypatch.setattr(events, "datetime", Clock)
    cluster = CreatedEvents()

    async def scenario() -> None:
        recorder = EventRecorder(cast(Cluster, cluster))
        for seconds, note, service in decisions:
            Clock.present = NOW + timedelta(seconds=seconds)
            recorder.record(service, [note])
        await recorder.close()

    asyncio.run(scenario())
    return cluster.created


def test_a_flood_is_written_slowly_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_BURST", 3)
    monkeypatch.setattr(events, "RATE", 0.001)
    monkeypatch.setattr(events, "MAX_WAITING", 5)
    monkeypatch.setattr(events, "CLOSE_S", 0.1)
    notes = [EventNote("R", "A", str(number)) for number in range(9)]
    applied = recorded(monkeypatch, *((0.0, note, SERVICE) for note in notes))
    assert [event["note"] for event in applied] == ["0", "1", "2"]  # the next in 1000 s


def test_one_that_cannot_be_written_costs_itself_alone() -> None:
    class Refusing(CreatedEvents):
        async def create(self, event: dict[str, Any]) -> dict[str, Any]:
            if event["note"] == "0":
                raise ClusterRefused("no")
            return await super().create(event)

    cluster = Refusing()

    async def scenario() -> None:
        recorder = EventRecorder(cast(Cluster, cluster))
        recorder.record(SERVICE, [EventNote("R", "A", str(number)) for number in range(2)])
        await recorder.close()

    asyncio.run(scenario())
    assert [event["note"] for event in cluster.created] == ["1"]


def test_a_decision_is_an_event_about_the_service() -> None:
    event = event_of(SERVICE, NOTE, NOW, "operator-0")
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


def test_what_repeats_within_minutes_makes_no_second_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = (0, 1, 60, REPEAT_S - 1, REPEAT_S)
    first, later = recorded(monkeypatch, *((seconds, NOTE, SERVICE) for seconds in times))
    assert first["metadata"]["name"] != later["metadata"]["name"]
    assert "series" not in first
    assert "series" not in later


def test_what_repeats_after_the_clock_was_set_back_makes_one_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = (0, -7200, -7190)
    assert len(recorded(monkeypatch, *((seconds, NOTE, SERVICE) for seconds in times))) == 2


def test_another_decision_and_another_service_have_events_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = {"metadata": {"name": "b", "namespace": "models", "uid": "u2"}}
    decisions = [(0.0, NOTE, SERVICE), (0.0, EventNote("R", "A", "m"), SERVICE), (0.0, NOTE, other)]
    assert len(recorded(monkeypatch, *decisions)) == 3


def test_the_memory_of_decisions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_REMEMBERED", 2)
    notes = [EventNote("R", "A", message) for message in ("a", "b", "c", "a", "c")]
    applied = recorded(monkeypatch, *((0.0, note, SERVICE) for note in notes))
    assert [event["note"] for event in applied] == ["a", "b", "c", "a"]


def test_a_long_message_is_cut_at_a_character() -> None:
    event = event_of(SERVICE, EventNote("R", "A", "é" * 2000), NOW, "o")
    assert 1000 < len(event["note"].encode()) <= 1024
    assert event["note"].endswith("é…")
