"""The measured costs of steps, which a worker leaves to the next worker of the same fork server.

Measuring takes about a second on two cores, during which streams that wait for a restarted worker
stand still.
"""

import logging
import os
from pathlib import Path

import msgspec

log = logging.getLogger("ullage.engine.worker")

_FILE = "step-costs.json"
_START_FIELD = 19
"""Position of the start time in /proc/PID/stat, counted after the process name."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of steps on this machine, in seconds."""

    decode_context_s: float
    """Cost of each context token that a decode reads, or 0 if it was too small to measure."""
    prompt_token_s: float
    """Cost of a token at the start of a prompt."""
    prompt_context_s: float
    """Additional cost of a prompt token for each context token before it."""


class _Left(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    key: str
    costs: StepCosts


def costs_key(weights_key: str, parent: int) -> str:
    """Return a key for costs that another worker may reuse.

    Args:
        weights_key: key of the prepared weights.
        parent: process id of the fork server. Its start time is part of the key, because a process
            of another container may have the same id.

    Returns:
        The key, or "" if the fork server has exited.
    """
    try:
        stat = Path(f"/proc/{parent}/stat").read_text()
    except OSError:
        return ""
    started = stat.rpartition(")")[2].split()[_START_FIELD]
    return f"{parent} {started} {weights_key}"


def read_costs(run_dir: Path, key: str) -> StepCosts | None:
    """Return the costs that an earlier worker of this fork server has measured, or None."""
    try:
        stored = msgspec.json.decode((run_dir / _FILE).read_bytes(), type=_Left)
    except (OSError, msgspec.DecodeError):
        return None
    return stored.costs if key and stored.key == key else None


def leave_costs(run_dir: Path, key: str, costs: StepCosts) -> None:
    """Write the costs for the next worker. If that fails, the next worker measures again."""
    path = run_dir / f"{_FILE}.{os.getpid()}"
    try:
        path.write_bytes(msgspec.json.encode(_Left(key=key, costs=costs)))
        path.replace(run_dir / _FILE)
    except OSError as error:
        log.warning("the costs of steps cannot be kept for the next worker: %s", error)
