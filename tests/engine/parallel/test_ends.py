"""The ends of processes, with and without the kernel's word."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from ullage_engine.parallel.ends import ended_ranks


@pytest.fixture
def processes() -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    started = {rank: subprocess.Popen(["sleep", "60"]) for rank in (1, 2, 3)}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def forbidden(pid: int, flags: int = 0) -> int:
    raise PermissionError("Operation not permitted")


@pytest.mark.parametrize("is_allowed", [True, False])
def test_ends_are_noticed_one_by_one(
    processes: dict[int, subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    is_allowed: bool,
) -> None:
    if not is_allowed:
        monkeypatch.setattr(os, "pidfd_open", forbidden)
    descriptors = len(os.listdir("/proc/self/fd"))
    ends = ended_ranks(processes)
    for rank in (2, 1, 3):
        processes[rank].kill()
        assert next(ends) == rank
    assert list(ends) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_process_that_is_gone_already_has_ended(
    processes: dict[int, subprocess.Popen[bytes]],
) -> None:
    processes[2].kill()
    processes[2].wait()
    assert next(ended_ranks(processes)) == 2
