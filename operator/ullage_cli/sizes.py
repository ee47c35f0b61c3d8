"""Asks the engine for the sizes of models. The engine computes them in a process of its own."""

import subprocess
import sys

import msgspec
from rich.console import Console

from ullage_common.entry_points import missing_extra
from ullage_common.model_sizes import SizesReport, SizesRequest
from ullage_operator.api.errors import LocalFailure

MODULE = "ullage_engine.sizes.main"


def compute_sizes(request: SizesRequest) -> SizesReport:
    """Return the sizes of models, and what the engine finds on this machine.

    A spinner on standard error shows the progress, because the process loads torch.

    Raises:
        LocalFailure: the engine is not installed, or its process failed.
    """
    if error := missing_extra("engine"):
        raise LocalFailure(error)

    command = [sys.executable, "-m", MODULE]
    with Console(stderr=True).status("reading the model's sizes ..."):
        process = subprocess.run(command, input=msgspec.json.encode(request), capture_output=True)
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise LocalFailure(
            f"the engine's process ended with status {process.returncode}: {lines[-1]}; if a "
            "module is missing, install ullage[engine]"
        )
    return msgspec.json.decode(process.stdout, type=SizesReport)


def readable(size: int) -> str:
    """Format a number of bytes, for example 1.5 GiB."""
    if size >= 1 << 30:
        return f"{size / (1 << 30):.1f} GiB"
    return f"{size / (1 << 20):.0f} MiB"
