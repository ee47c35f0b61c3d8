"""Faults hit real processes, and leave everything else as it was."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ullage_verify import memory_limit
from ullage_verify.faults import admin_faults, pod_faults, process_faults
from ullage_verify.processes import ServerProcesses
from ullage_verify.target import TargetError

SERVER = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(600)
"""
WORKER = """
import time
held = b"1" * (120 << 20)
print("up", flush=True)
while True:
    sum(range(10_000))
    time.sleep(0.001)
"""
HAS_GROUPS = os.geteuid() == 0 and any(
    (root / "cgroup.procs").exists() for root in memory_limit.ROOTS
)


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """Yield the ids of a server's first process and of its worker."""
    command = [sys.executable, "-c", SERVER, WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        worker = int(process.stdout.readline())
        try:
            yield process.pid, worker
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def state(pid: int) -> str:
    """Return a process's state letter, Z if it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(pid: int, letter: str) -> None:
    until = time.monotonic() + 30
    while state(pid) != letter:
        assert time.monotonic() < until, state(pid)
        time.sleep(0.01)


def test_the_worker_is_the_busiest_process(server: tuple[int, int]) -> None:
    first, worker = server
    processes = ServerProcesses(first)
    assert sorted(processes.family()) == sorted(server)
    assert processes.busiest() == worker
    assert processes.resident_bytes() > 120 << 20


def test_signals(server: tuple[int, int]) -> None:
    first, worker = server
    with process_faults(first) as faults:
        asyncio.run(_happen(faults["SIGSTOP of the busiest process"]))
        wait_for(worker, "T")
        asyncio.run(_happen(faults["SIGKILL of the busiest process"]))
        wait_for(worker, "Z")
    assert state(first) in "SR"


def test_a_stopped_process_continues_at_the_end(server: tuple[int, int]) -> None:
    first, worker = server
    with pytest.raises(KeyboardInterrupt), process_faults(first) as faults:
        asyncio.run(_happen(faults["SIGSTOP of the busiest process"]))
        wait_for(worker, "T")
        raise KeyboardInterrupt
    assert state(worker) in "SR"


async def _happen(fault: object) -> None:
    assert callable(fault)
    await fault()


@pytest.mark.skipif(not HAS_GROUPS, reason="making control groups needs root and their files")
def test_memory_is_really_exhausted_and_the_group_removed(server: tuple[int, int]) -> None:
    first, worker = server
    group = Path(f"/proc/{first}/cgroup").read_text()
    with process_faults(first) as faults:
        asyncio.run(_happen(faults["full memory, and the kernel kills"]))
    wait_for(worker, "Z")
    assert Path(f"/proc/{first}/cgroup").read_text() == group
    left = [root.glob("ullage-verify-*") for root in memory_limit.ROOTS if root.is_dir()]
    assert not [folder for folders in left for folder in folders]


@pytest.mark.skipif(not HAS_GROUPS, reason="making control groups needs root and their files")
def test_an_interrupted_fault_leaves_no_process_and_no_limit(server: tuple[int, int]) -> None:
    """Nothing more fills the memory when the limit is gone."""
    first, worker = server
    group = Path(f"/proc/{worker}/cgroup").read_text()

    async def interrupted(fault: object) -> None:
        task = asyncio.create_task(_happen(fault))
        await asyncio.sleep(0.6)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with process_faults(first) as faults:
        asyncio.run(interrupted(faults["full memory, and the kernel kills"]))
    assert state(worker) == "Z" or Path(f"/proc/{worker}/cgroup").read_text() == group
    left = [root.glob("ullage-verify-*") for root in memory_limit.ROOTS if root.is_dir()]
    assert not [folder for folders in left for folder in folders]
    hogs = [path for path in Path("/proc").glob("[0-9]*/cmdline") if is_hog(path)]
    assert not hogs


def is_hog(path: Path) -> bool:
    try:
        return b"os.fork() == 0" in path.read_bytes()
    except OSError:
        return False


def test_errors_name_the_option() -> None:
    with (
        pytest.raises(TargetError, match="--pid 4194304: no such process"),
        process_faults(4194304),
    ):
        pass
    with pytest.raises(TargetError, match=r"--admin 127\.0\.0\.1:9: "):
        asyncio.run(_happen(admin_faults("127.0.0.1:9")["death of the worker"]))


def test_a_pod_is_deleted_by_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fault = pod_faults("prod", "chat-single-0")["death of the pod"]
    asyncio.run(_happen(fault))
    said = (tmp_path / "said").read_text()
    assert said.startswith("--namespace prod delete pod chat-single-0 --grace-period=0 --force")

    kubectl.write_text("#!/bin/sh\necho 'pod not found' >&2; exit 1\n")
    with pytest.raises(TargetError, match="pod not found"):
        asyncio.run(_happen(fault))


def test_a_kubectl_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("ullage_verify.faults.DELETE_TIMEOUT_S", 0.5)
    with pytest.raises(TargetError, match=r"no answer in 0\.5 s"):
        asyncio.run(_happen(pod_faults("prod", "chat-single-0")["death of the pod"]))
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.skipif(not HAS_GROUPS, reason="making control groups needs root and their files")
def test_memory_that_cannot_be_filled_is_no_kill(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "_HOG", "raise SystemExit(3)")
    with (
        process_faults(server[0]) as faults,
        pytest.raises(TargetError, match="ended with status 3"),
    ):
        asyncio.run(_happen(faults["full memory, and the kernel kills"]))
    assert state(server[1]) != "Z"


def test_kubectl_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(TargetError, match="kubectl is missing"):
        asyncio.run(_happen(pod_faults("a", "b")["death of the pod"]))
