"""Records how steps and requests were batched over time, as a trace for Perfetto.

All steps share one lane, unless they overlap. Each request has its own lane with its phases: queue,
prefill and decode. The file uses the Trace Event Format, with times in microseconds, and
chrome://tracing can open it as well.
"""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

_PROCESS = 1
_STEPS = 0
_MORE_STEPS = 1 << 20
"""First id of the lanes for overlapping steps, which occur with pipeline parallelism."""


class Timeline:
    """Collects the events of one trace file."""

    def __init__(self, began: float) -> None:
        """Begin a trace at the Unix time `began`, in seconds."""
        self.began = began
        self.about: Mapping[str, object] = {}
        """Facts about the worker, which trace viewers show beside the trace."""
        self._lanes: dict[str, int] = {}
        self._steps_until = {_STEPS: 0.0}
        """Unix time at which the latest step of each lane ended."""
        self._events: list[dict[str, object]] = [
            _name("process_name", "engine", _STEPS),
            _name("thread_name", "steps", _STEPS),
        ]

    def add_step(self, ended: float, seconds: float, fields: dict[str, object]) -> None:
        """Add a completed step to the trace.

        Args:
            ended: Unix time at which the step ended.
            seconds: duration of the step in seconds.
            fields: details of the step, such as the number of tokens.
        """
        since = ended - seconds
        free = (lane for lane, until in self._steps_until.items() if until <= since)
        lane = next(free, None)
        if lane is None:
            lane = _MORE_STEPS + len(self._steps_until)
            self._events.append(_name("thread_name", "overlapping steps", lane))
        self._steps_until[lane] = ended
        self._span("step", lane, since, ended, fields)

    def add_phase(
        self,
        key: str,
        name: str,
        phase: str,
        since: float,
        until: float,
        fields: dict[str, object],
    ) -> None:
        """Add one phase of a request, clipped to the start of the trace.

        Args:
            key: the request's key. Each key has its own lane.
            name: display name of the lane.
            phase: name of the phase.
            since: Unix time at which the phase began.
            until: Unix time at which the phase ended.
            fields: further details.
        """
        lane = self._lanes.get(key)
        if lane is None:
            lane = len(self._lanes) + 1
            self._lanes[key] = lane
            self._events.append(_name("thread_name", f"request {name}", lane))
        self._span(phase, lane, max(since, self.began), until, fields)

    def add_counters(self, at: float, values: dict[str, float]) -> None:
        """Add counter values, which trace viewers plot over time."""
        for name, value in values.items():
            self._events.append(
                {
                    "ph": "C",
                    "name": name,
                    "pid": _PROCESS,
                    "ts": self._us(at),
                    "args": {name: value},
                }
            )

    def write(self, path: Path) -> None:
        """Write the trace to a gzip-compressed file."""
        document: dict[str, object] = {"displayTimeUnit": "ms", "traceEvents": self._events}
        document["otherData"] = {"began_unix_s": self.began, **self.about}
        with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
            json.dump(document, file)

    def _span(
        self, name: str, lane: int, since: float, until: float, fields: dict[str, object]
    ) -> None:
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "pid": _PROCESS,
                "tid": lane,
                "ts": self._us(since),
                "dur": max(1, self._us(until) - self._us(since)),
                "args": fields,
            }
        )

    def _us(self, at: float) -> int:
        return round((at - self.began) * 1e6)


def _name(kind: str, name: str, lane: int) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": lane, "args": {"name": name}}
