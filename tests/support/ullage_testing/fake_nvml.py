"""GPUs that NVIDIA's bindings find in other processes: a library compiled from fake_nvml.c."""

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def compile_library(folder: Path) -> None:
    """Makes libnvidia-ml.so.1 in a folder."""
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, SOURCE]
    subprocess.run(command, check=True)


class FakeNvml:
    """The state of the GPUs, which the library reads at every call. See fake_nvml.c."""

    def __init__(self, library_dir: Path, state: Path) -> None:
        self._state = state
        self._values: dict[str, int] = {}
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library_dir),
            "FAKE_NVML": str(state),
        }
        """Environment of a process that has these GPUs."""
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)
        self.set({})

    def reset(self, values: dict[str, int]) -> None:
        """Leaves nothing of former values."""
        self._values = {}
        self.set(values)

    def set(self, values: dict[str, int]) -> None:
        """Changes values, all of them at once."""
        self._values |= values
        new = self._state.with_suffix(".new")
        new.write_text("".join(f"{key} {value}\n" for key, value in self._values.items()))
        new.rename(self._state)
