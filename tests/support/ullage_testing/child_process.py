"""Executes programs where the engine forks ranks from itself, which a test's process cannot do."""

import os
from collections.abc import Sequence

from ullage_engine.worker.forks import ForkedProcess


def start_child(command: Sequence[str]) -> ForkedProcess:
    """Executes a program, found in PATH, as a child of this process."""
    return ForkedProcess(os.posix_spawnp(command[0], command, os.environ))


def start_none(*_: object) -> ForkedProcess:
    """In the place of a function that starts ranks, where there must be none."""
    raise AssertionError("this group has one rank")
