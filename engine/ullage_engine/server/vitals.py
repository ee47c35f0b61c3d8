"""What the kernel says of a process, from /proc."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Vitals:
    """One process at one moment, over all its threads."""

    is_stopped: bool
    """By a signal: it goes on only when somebody tells it to."""
    is_waiting: bool
    """Every thread sleeps until something happens; none runs, waits for a core or for a disk."""
    cpu_ticks: int
    """Processor time so far, in ticks of the kernel (10 ms); of its children that ended, too."""


def read_vitals(pid: int) -> Vitals | None:
    """The vitals of a process; None when it is gone."""
    try:
        process = _fields(Path(f"/proc/{pid}/stat"))
        threads = [_fields(path / "stat") for path in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return None
    states = {fields[0] for fields in threads}
    return Vitals(
        is_stopped=states == {"T"},
        is_waiting=states <= {"S", "I", "T"},
        cpu_ticks=sum(int(field) for field in process[11:15]),
    )


def _fields(path: Path) -> list[str]:
    """Fields of a stat file from the third, the state, on; the second may hold blanks."""
    return path.read_text().rpartition(")")[2].split()
