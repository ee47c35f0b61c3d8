"""What the kernel says of a worker, from /proc: of its process and of the ranks it started."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Vitals:
    """A process at one moment, over all its threads, or several together."""

    is_stopped: bool
    """By a signal: it goes on only when somebody tells it to."""
    is_waiting: bool
    """Every thread sleeps until something happens; none runs, waits for a core or for a disk."""
    cpu_ticks: int
    """Processor time so far, in ticks of the kernel (10 ms); of its children that ended, too."""


def read_vitals(pid: int) -> Vitals | None:
    """The vitals of a process and its children as one; None when it is gone.

    A rank waits for the others most of the time, so one that sleeps means nothing by itself; and
    one that is stopped stops them all.
    """
    own = _read(pid)
    if own is None:
        return None
    group = [own, *(vitals for child in _children(pid) if (vitals := _read(child)) is not None)]
    return Vitals(
        is_stopped=any(each.is_stopped for each in group),
        is_waiting=all(each.is_waiting for each in group),
        cpu_ticks=sum(each.cpu_ticks for each in group),
    )


def _read(pid: int) -> Vitals | None:
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


def _children(pid: int) -> list[int]:
    """Children of the main thread, which starts all ranks."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _fields(path: Path) -> list[str]:
    """Fields of a stat file from the third, the state, on; the second may hold blanks."""
    return path.read_text().rpartition(")")[2].split()
