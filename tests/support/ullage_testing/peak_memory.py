"""The most memory that a process had in a while."""

from pathlib import Path


class PeakMemory:
    """Measures from its making on.

    Args:
        pid: of the process. This one if it is absent.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._folder = Path("/proc") / ("self" if pid is None else str(pid))
        (self._folder / "clear_refs").write_text("5")  # the peak begins anew
        self._before = self._bytes("VmRSS")

    @property
    def grown_bytes(self) -> int:
        """Bytes above those at the beginning."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        [line] = [line for line in lines if line.startswith(name)]
        return int(line.split()[1]) << 10
