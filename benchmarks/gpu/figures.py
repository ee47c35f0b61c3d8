"""The findings of the programme's parts: figures with their aims, and facts."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = "results.jsonl"
"""Name of a run's results file, to which each finding is appended as a line of JSON."""


class Figure(NamedTuple):
    """One measured value."""

    name: str
    value: float
    unit: str
    aim: float | None = None
    """Minimum value that passes, or None to record the figure without judging it."""
    is_limit: bool = False
    """Whether the aim is instead the maximum value that passes."""

    @property
    def passes(self) -> bool:
        if self.aim is None:
            return True
        return self.value <= self.aim if self.is_limit else self.value >= self.aim


class Fact(NamedTuple):
    """An observation that is not a number, such as a version or a setting."""

    name: str
    text: str


Report = Callable[[Figure | Fact], None]
"""Records a finding as soon as a part has it."""


@dataclass(frozen=True)
class Job:
    """The arguments of every part."""

    device: str
    """Device to run on: `cuda`, or `cpu` for a rehearsal."""
    tiny: bool
    """Whether this is a rehearsal, which has tiny sizes and does not judge speeds."""
    out: Path
    """Folder for the results."""
    scratch: Path
    """Folder for checkpoints and prepared weights, which is removed at the end."""
    bundle: Path | None
    """Folder of the GPU bundle, or None without a bundle."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def speed_aim(self, aim: float) -> float | None:
        """Return an aim for a speed, or None in a rehearsal, which does not judge speeds."""
        return None if self.tiny else aim


def count(name: str, value: float, least: float) -> Figure:
    """Return a figure without a unit that passes if it is at least `least`."""
    return Figure(name, value, "", least)


def at_most(name: str, value: float, unit: str, limit: float | None) -> Figure:
    """Return a figure that passes up to a limit. With a limit of None, it is only recorded."""
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
    """The results file of a run, to which several processes append lines."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS

    def add(self, part: str, finding: Figure | Fact) -> None:
        """Append a part's finding. The line is in the file when this method returns."""
        if isinstance(finding, Fact):
            self._append({"part": part, "fact": finding.name, "text": finding.text})
            return
        values = finding._asdict()
        name = values.pop("name")
        self._append({"part": part, "figure": name, **values, "passes": finding.passes})

    def begin(self, part: str, limit_s: float) -> None:
        """Append that a part begins. The part's later lines belong to this run of the part."""
        self._append({"part": part, "began": round(limit_s, 2)})

    def crash(self, part: str, reason: str) -> None:
        """Append the reason why a part could not continue."""
        self._append({"part": part, "crashed": reason})

    def end(self, part: str, status: str, seconds: float, message: str = "", *, tiny: bool) -> None:
        """Append how a part ended, as one of `programme.STATUSES`."""
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
        """Return all lines, except for a partial last line after a kill."""
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
