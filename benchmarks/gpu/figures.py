"""What a part of the programme yields: figures, each with the aim that it has to reach."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = "results.jsonl"
"""Name of the file of a run: one JSON object a line, written as things happen."""


class Figure(NamedTuple):
    """One thing measured."""

    name: str
    value: float
    unit: str
    aim: float | None = None
    """The least value that passes; None: the figure is recorded and not judged."""
    is_limit: bool = False
    """Whether the aim is the greatest value that passes."""

    @property
    def passes(self) -> bool:
        if self.aim is None:
            return True
        return self.value <= self.aim if self.is_limit else self.value >= self.aim


class Fact(NamedTuple):
    """Something seen that is no number: a version, a setting."""

    name: str
    text: str


Report = Callable[[Figure | Fact], None]
"""What a part tells each finding to, as soon as it has it."""


@dataclass(frozen=True)
class Job:
    """What every part is told."""

    device: str
    """cuda, or cpu for a rehearsal."""
    tiny: bool
    """Whether sizes are those of a rehearsal; speeds are recorded then and not judged."""
    out: Path
    """Folder of results, which are kept."""
    scratch: Path
    """Folder of checkpoints and prepared weights, which are not."""
    bundle: Path | None
    """Folder that travelled with the programme; None: none did."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def speed_aim(self, aim: float) -> float | None:
        """Return an aim of speed, None in a rehearsal."""
        return None if self.tiny else aim


def count(name: str, value: float, least: float) -> Figure:
    """Return a figure without a unit of which at least so many are wanted."""
    return Figure(name, value, "", least)


def at_most(name: str, value: float, unit: str, limit: float | None) -> Figure:
    """Return a figure that has a limit, or None as the limit: then it is only recorded."""
    return Figure(name, value, unit, limit, is_limit=True)


def none_of(name: str, value: float) -> Figure:
    """Return a figure that has to be zero."""
    return Figure(name, value, "", 0.0, is_limit=True)


class Results:
    """The file of a run, to which processes append one line after the other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RESULTS

    def add(self, part: str, found: Figure | Fact) -> None:
        """Append what a part found; it is on the disk when this returns."""
        if isinstance(found, Fact):
            self._append({"part": part, "fact": found.name, "text": found.text})
            return
        self._append(
            {"part": part, "figure": found.name, **found._asdict(), "passes": found.passes}
        )

    def end(self, part: str, status: str, seconds: float, message: str = "") -> None:
        """Append how a part ended: see `programme.STATUSES`."""
        self._append(
            {"part": part, "ended": status, "seconds": round(seconds, 2), "message": message}
        )

    def read(self) -> list[dict[str, Any]]:
        """Return all lines; the last one may have been cut short by a kill and is left out then."""
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
        row.pop("name", None)
        row["at"] = round(time.time(), 2)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
