"""What killed ranks left in /dev/shm is removed by the next start of their engine, and nothing that
another one made."""

import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ullage_engine.vllm_worker.shared_memory import FOLDER, SharedMemory

ENGINE = """
import mmap, sys
from pathlib import Path
from ullage_engine.vllm_worker.shared_memory import SharedMemory

folder = Path(sys.argv[1])
memory = SharedMemory(sys.argv[2], folder)
memory.sweep()
maps = []
for name in sys.argv[3:]:
    path = folder / name
    if not path.exists():
        path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file:
        maps.append(mmap.mmap(file.fileno(), 0))
memory.note()
print("noted", flush=True)
if input():
    for name in sys.argv[3:]:
        (folder / name).unlink()
    memory.close()
"""

RANK = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
input()
"""

Process = subprocess.Popen[bytes]
Run = Callable[..., Process]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs a script with arguments until it has said that it is there."""
    with ExitStack() as stack:

        def run_one(script: str, *arguments: object) -> Process:
            command = [sys.executable, "-c", script, *map(str, arguments)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline()
            return process

        yield run_one


def kill(process: Process) -> None:
    process.kill()
    process.wait(60)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_next_start_removes_what_a_killed_one_mapped(tmp_path: Path, run: Run) -> None:
    left = ["nccl-a", "psm_1a2b", "sem.mp-x", "vllm_dist_1-tp:0-[0-1]-cpushm_0"]
    kill(run(ENGINE, tmp_path, "one", *left))
    assert SharedMemory("one", tmp_path).sweep() == left
    assert names(tmp_path) == set()


def test_a_killed_process_that_nobody_has_waited_for_has_ended(tmp_path: Path, run: Run) -> None:
    process = run(ENGINE, tmp_path, "one", "psm_one")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert SharedMemory("one", tmp_path).sweep() == ["psm_one"]


def test_files_that_no_start_of_the_engine_recorded_stay(tmp_path: Path, run: Run) -> None:
    # Of another engine, and of a program that has only just written it or closed it for a while.
    kill(run(ENGINE, tmp_path, "other", "psm_other"))
    (tmp_path / "psm_nobody").write_bytes(bytes(mmap.PAGESIZE))
    os.utime(tmp_path / "psm_nobody", times=(time.time() - 3600.0,) * 2)
    kill(run(ENGINE, tmp_path, "one", "psm_one", "of_one"))
    assert SharedMemory("one", tmp_path).sweep() == ["psm_one"]
    assert {"psm_other", "psm_nobody", "of_one"} <= names(tmp_path)


def test_a_file_that_a_process_still_maps_stays_until_that_ends(tmp_path: Path, run: Run) -> None:
    engine = run(ENGINE, tmp_path, "one", "psm_one")
    rank = run(RANK, tmp_path / "psm_one")
    kill(engine)
    memory = SharedMemory("one", tmp_path)
    assert memory.sweep() == []
    kill(rank)
    assert memory.sweep() == ["psm_one"]
    assert names(tmp_path) == set()


def test_a_running_engine_keeps_its_files(tmp_path: Path, run: Run) -> None:
    run(ENGINE, tmp_path, "one", "psm_one")
    assert SharedMemory("one", tmp_path).sweep() == []
    assert "psm_one" in names(tmp_path)


def test_another_file_that_has_got_the_name_stays(tmp_path: Path, run: Run) -> None:
    kill(run(ENGINE, tmp_path, "one", "psm_one"))
    # Both at once, so that the inodes differ.
    (tmp_path / "later").write_bytes(b"another one's")
    (tmp_path / "later").replace(tmp_path / "psm_one")
    assert SharedMemory("one", tmp_path).sweep() == []
    assert names(tmp_path) == {"psm_one"}


def test_a_record_is_not_believed_where_it_names_files_elsewhere(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    kill(run(ENGINE, folder, "one", "psm_one"))
    victim = tmp_path / "victim"
    victim.write_bytes(b"kept")
    [record] = folder.glob("ullage-ranks-*")
    text = record.read_text()
    inode = (folder / "psm_one").stat().st_ino
    changed = text.replace("psm_one", "../victim").replace(str(inode), str(victim.stat().st_ino))
    assert changed != text
    record.write_text(changed)
    assert SharedMemory("one", folder).sweep() == []
    assert victim.exists()


def test_an_engine_that_has_cleared_up_leaves_no_record(tmp_path: Path, run: Run) -> None:
    engine = run(ENGINE, tmp_path, "one", "psm_one")
    engine.communicate(b"end\n", timeout=60)
    assert engine.returncode == 0
    assert names(tmp_path) == set()


def test_a_watch_records_what_comes_later(tmp_path: Path) -> None:
    memory = SharedMemory("one", tmp_path)
    memory.watch()
    path = tmp_path / "psm_late"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("ullage-ranks-*")):
            assert time.monotonic() < deadline, "nothing is recorded"
            time.sleep(0.05)
    memory.close()
    # The file is still there, so the next start needs the record.
    assert list(tmp_path.glob("ullage-ranks-*"))


def test_a_semaphore_of_a_killed_process_is_removed(run: Run) -> None:
    """In /dev/shm itself, where the C library makes it, under another name than it is mapped by."""
    script = """
import multiprocessing, sys
from ullage_engine.vllm_worker.shared_memory import SharedMemory

lock = multiprocessing.get_context("spawn").Lock()
SharedMemory(sys.argv[1]).note()
print(lock._semlock.name.lstrip("/"), flush=True)
input()
"""
    command = [sys.executable, "-c", script, f"test {os.getpid()}"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    path = FOLDER / f"sem.{process.stdout.readline().decode().strip()}"
    try:
        assert path.exists()
        # Its resource tracker, which would remove it, goes with it.
        os.killpg(process.pid, 9)
        process.wait(60)
        assert SharedMemory(f"test {os.getpid()}").sweep() == [path.name]
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
        process.stdout.close()
        process.stdin.close()


def test_a_semaphore_of_this_process_stays() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    path = FOLDER / f"sem.{lock._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]
    memory = SharedMemory(f"test {os.getpid()}")
    memory.note()
    assert memory.sweep() == []
    assert path.exists()
    del lock
    memory.close()
