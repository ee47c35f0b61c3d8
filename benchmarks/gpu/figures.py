"""Findings of a part of the programme: figures with their aims, and facts."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = "results.jsonl"
"""Name of the file of a run: one JSON object a line, appended as findings come."""


class Figure(NamedTuple):
    """One thing measured."""

    name: str
    value: float
    unit: str
    aim: float | None = None
    """Smallest value that passes, or None to record the figure without judging it."""
    is_limit: bool = False
    """Whether the aim is the largest value that passes instead."""

    @property
    def passes(self) -> bool:
        if self.aim is None:
            return True
        return self.value <= self.aim if self.is_limit else self.value >= self.aim


class Fact(NamedTuple):
    """An observation that is no number: a version, a setting."""

    name: str
    text: str


Report = Callable[[Figure | Fact], None]
"""Record a finding, as soon as a part has it."""


@dataclass(frozen=True)
class Job:
    """The arguments of every part."""

    device: str
    """cuda, or cpu for a rehearsal."""
    tiny: bool
    """Whether this is a rehearsal, which has tiny sizes and does not judge speeds."""
    out: Path
    """Folder of results."""
    scratch: Path
    """Folder of checkpoints and prepared weights, removed at the end."""
    bundle: Path | None
    """Folder of the bundle, or None."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def speed_aim(self, aim: float) -> float | None:
        """Return an aim of speed, or None in a rehearsal."""
        return None if self.tiny else aim


def count(name: str, value: float, least: float) -> Figure:
    """Return a figure without a unit that passes if it is at least `least`."""
    return Figure(name, value, "", least)


def at_most(name: str, value: float, unit: str, limit: float | None) -> Figure:
    """Return a figure that passes up to a limit. A limit of None only records it."""
    return Figure(name, value, unit, limit, is_limit=True)


def none_of(name: str, value: float) -> Figure:
    """Return a figure that passes only if it is zero."""
    return Figure(name, value, "", 0.0, is_limit=True)


def one_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {lines[0]}" if lines else name


class Results:
    """The file of a run, to which processes append one line after the other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS

    def add(self, part: str, finding: Figure | Fact) -> None:
        """Append a finding of a part. The file has it when this returns."""
        if isinstance(finding, Fact):
            self._append({"part": part, "fact": finding.name, "text": finding.text})
            return
        values = finding._asdict()
        name = values.pop("name")
        self._append({"part": part, "figure": name, **values, "passes": finding.passes})

    def begin(self, part: str, limit_s: float) -> None:
        """Append the beginning of a part. Its later lines belong to this run."""
        self._append({"part": part, "began": round(limit_s, 2)})

    def crash(self, part: str, reason: str) -> None:
        """Append why a part could not continue."""
        self._append({"part": part, "crashed": reason})

    def end(self, part: str, status: str, seconds: float, message: str = "", *, tiny: bool) -> None:
        """Append how a part ended: see `programme.STATUSES`."""
        self._append(
            {
                "part": part,
                "ended": status,
                "seconds": round(seconds, 2),
                "message": message,
                "tiny": tiny,
            }
        )

    def read(self) -> list[dict[str, Any]]:
        """Return all lines, without a last one that a kill cut short."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return rows

    def _append(self, row: dict[str, Any]) -> None:
        row["at"] = round(time.time(), 2)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
