"""The most memory that this process had in a while."""

from pathlib import Path


class PeakMemory:
    """Measures from its making on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _bytes("VmRSS")

    @property
    def grown_bytes(self) -> int:
        """Bytes above those at the beginning."""
        return _bytes("VmHWM") - self._before


def _bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return int(line.split()[1]) << 10
