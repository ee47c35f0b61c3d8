"""What killed processes left in /dev/shm is removed, and nothing that another one uses."""

import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ullage_engine.vllm_worker.ranks import SHARED_MEMORY, sweep

MAP = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
input()
"""


def make(folder: Path, name: str, age_s: float = 3600.0) -> Path:
    path = folder / name
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, times=(time.time() - age_s,) * 2)
    return path


@pytest.fixture
def user(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which maps the file psm_used."""
    command = [sys.executable, "-c", MAP, str(make(tmp_path, "psm_used"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.usefixtures("user")
def test_files_that_nobody_maps_are_removed(tmp_path: Path) -> None:
    unused = ["psm_1a2b", "sem.mp-x", "vllm_dist_1-tp:0-[0-1]-cpushm_0", "nccl-a"]
    for name in unused:
        make(tmp_path, name)
    # It may be mapped in a moment.
    make(tmp_path, "psm_new", age_s=0.0)
    make(tmp_path, "of_others")
    assert sorted(sweep(tmp_path)) == sorted(unused)
    assert {path.name for path in tmp_path.iterdir()} == {"psm_used", "psm_new", "of_others"}


def test_a_file_is_removed_when_the_process_that_mapped_it_is_gone(
    tmp_path: Path, user: subprocess.Popen[bytes]
) -> None:
    assert sweep(tmp_path) == []
    user.kill()
    user.wait(60)
    assert sweep(tmp_path) == ["psm_used"]


def test_a_semaphore_that_only_its_maker_has_stays() -> None:
    """In /dev/shm itself, where the C library makes it."""
    lock = multiprocessing.get_context("spawn").Lock()
    path = SHARED_MEMORY / f"sem.{lock._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]
    os.utime(path, times=(time.time() - 3600.0,) * 2)
    sweep()
    assert path.exists()
