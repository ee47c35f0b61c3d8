"""Extracts one request's events (the steps of its trace) from log lines, and sorts them by time."""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ullage_cli.trace.logs import Log

_PROCESSES = (
    ("ullage_router", "router"),
    ("ullage.engine.worker", "worker"),
    ("ullage.engine.group", "worker"),
    ("ullage.engine", "engine"),
)
"""Maps a prefix of the logger's name to the process. The first match wins."""

_ORDER = (
    ("router", "arrived"),
    ("router", "tokenised"),
    ("router", "decided"),
    ("router", "queued"),
    ("router", "sent"),
    ("engine", "received"),
    ("worker", "admitted"),
    ("worker", "first_chunk"),
    ("worker", "preempted"),
    ("worker", "resumed"),
    ("engine", "resumed"),
    ("engine", "first_token"),
    ("router", "admitted"),
    ("router", "first_token"),
    ("worker", "finished"),
    ("engine", "finished"),
    ("router", "finished"),
)
"""Order in which to show events of the same millisecond. Log lines have no finer timestamps."""
_PLACES = {key: place for place, key in enumerate(_ORDER)}

_HIDDEN = frozenset({"time", "level", "logger", "message", "request_id", "event", "process"})
"""Fields of log lines that are hidden or shown in a separate column."""
_IN_TIMELINE = frozenset({"decided", "resumed", "lost"})
"""Router events that also appear in the timeline of the request's final log line."""
_SUMMARY = (
    "status",
    "error",
    "finish",
    "model",
    "output_tokens",
    "cached_tokens",
    "ttft_s",
    "duration_s",
    "degraded",
    "trail",
    "retry_after_s",
    "coalesced_with",
    "tenant",
)
"""Fields of the router's final log line that describe the request as a whole."""


class TraceStep(NamedTuple):
    """One event of the request in one process."""

    at: datetime
    process: str
    """`router`, `engine` (the server process) or `worker`. Otherwise the name of the logger."""
    pod: str
    event: str
    fields: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `-o json` prints."""
        at = self.at.isoformat(timespec="microseconds").replace("+00:00", "Z")
        own = {"time": at, "process": self.process, "pod": self.pod, "event": self.event}
        return own | self.fields


def steps_of(request_id: str, logs: Iterable[Log]) -> list[TraceStep]:
    """Return a request's steps, from the logs of all pods, in chronological order.

    The router's final log line about a request contains a timeline. That router's earlier lines are
    skipped if the timeline already covers their events.
    """
    steps: list[TraceStep] = []
    for log in logs:
        lines = [line for text in log.lines if (line := _parsed(text, request_id))]
        has_timeline = any("timeline" in line for line in lines)
        for line in lines:
            if "timeline" in line:
                steps += _timeline(line, log.pod)
            elif not (has_timeline and _is_in_timeline(line)):
                steps.append(_step(line, log.pod))
    return list(_merged(steps))


def _merged(steps: list[TraceStep]) -> Iterator[TraceStep]:
    """Yield the steps of all processes in chronological order, keeping each process's own order.

    A router's timeline is more precise than log lines, which have only millisecond precision. A
    cause in the timeline can therefore appear to be later than its effect in a log. In that case,
    the effect is assigned the time of its cause, so that times never decrease.
    """
    waiting: dict[tuple[str, str], deque[TraceStep]] = defaultdict(deque)
    for step in sorted(steps, key=lambda step: step.at):
        waiting[step.pod, step.process].append(step)

    latest: datetime | None = None
    while waiting:
        process = min(waiting, key=lambda process: _order(waiting[process][0]))
        step = waiting[process].popleft()
        if not waiting[process]:
            del waiting[process]
        latest = max(step.at, latest or step.at)
        yield step._replace(at=latest)


def _order(step: TraceStep) -> tuple[datetime, int]:
    """Return the sort key of a step: the millisecond, then the event's usual place in a request.

    Most log lines have only millisecond precision, so `_ORDER` decides between events of the same
    millisecond.
    """
    millisecond = step.at.replace(microsecond=step.at.microsecond // 1000 * 1000)
    return millisecond, _PLACES.get((step.process, step.event), len(_ORDER))


def _parsed(text: str, request_id: str) -> dict[str, Any] | None:
    """Parse a line of text, and return None if it is not a log line about the request."""
    # This test is far cheaper than parsing every line.
    if json.dumps(request_id, ensure_ascii=False)[1:-1] not in text:
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or line.get("request_id") != request_id:
        return None
    return line if isinstance(line.get("time"), str) else None


def _is_in_timeline(line: Mapping[str, Any]) -> bool:
    """Return whether a line's event also appears in the timeline of the router's final log line."""
    return _process(line) == "router" and line.get("event") in _IN_TIMELINE


def _process(line: Mapping[str, Any]) -> str:
    """Return the process that wrote a line, or the logger's name for an unknown process."""
    logger = str(line.get("logger", ""))
    return next((name for start, name in _PROCESSES if logger.startswith(start)), logger)


def _step(line: dict[str, Any], pod: str) -> TraceStep:
    event = line.get("event") or line.get("message", "")
    at = datetime.fromisoformat(line["time"])
    fields = {name: value for name, value in line.items() if name not in _HIDDEN}
    if "exception" in line or line.get("level") in ("warning", "error"):
        fields = {"level": line["level"], "message": line["message"]} | fields
    return TraceStep(at, _process(line), pod, event, fields)


def _timeline(line: dict[str, Any], pod: str) -> Iterator[TraceStep]:
    """Yield the steps in the timeline of the router's final log line about a request."""
    arrived = float(line["arrived"])

    def at(seconds: float) -> datetime:
        return datetime.fromtimestamp(arrived + seconds, UTC)

    yield TraceStep(at(0.0), "router", pod, "arrived", {})

    for moment in line["timeline"]:
        fields = {
            name: value
            for name, value in moment.items()
            if name not in ("event", "after_s") and value not in (None, "")
        }
        yield TraceStep(at(moment["after_s"]), "router", pod, moment["event"], fields)

    fields = {name: line[name] for name in _SUMMARY if line.get(name) not in (None, "", [], {})}
    yield TraceStep(at(line["duration_s"]), "router", pod, line.get("event", "finished"), fields)
