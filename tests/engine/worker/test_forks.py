"""Forked processes: their exit statuses, and who outlives whom. Each case has a process of its own,
since a test's process has threads."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ullage_testing.child_process import start_child

SCRIPT = """
import os, signal, sys, time
from ullage_engine.worker.forks import ForkedProcess, fork

def run():
    {body}

process = ForkedProcess(fork(run))
{rest}
"""


def run_forking(body: str, rest: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(body=body, rest=rest)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return 0", "0"),
        ("return 7", "7"),
        ("sys.exit(5)", "5"),
        ("sys.exit('wrong')", "1"),
        ("raise RuntimeError('no kernel image')", "1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", str(-signal.SIGKILL)),
    ],
)
def test_the_status_of_a_fork(body: str, status: str) -> None:
    done = run_forking(body, "print(process.wait(), process.poll(), process.returncode)")
    assert done.stdout.split() == [status] * 3
    assert ("no kernel image" in done.stderr) == ("kernel" in body)


def test_a_fork_never_runs_the_code_of_its_parent() -> None:
    done = run_forking("raise SystemExit(3)", "process.wait(); print('parent')")
    assert done.stdout == "parent\n"


def test_a_wait_that_is_too_short_and_a_kill() -> None:
    rest = "print(process.wait(0.01), process.poll()); process.kill(); print(process.wait())"
    done = run_forking("time.sleep(60)", rest)
    assert done.stdout.split() == ["None", "None", str(-signal.SIGKILL)]


def test_a_kill_of_one_that_has_exited_does_nothing() -> None:
    done = run_forking("return 4", "process.wait(); process.kill(); print(process.poll())")
    assert done.stdout == "4\n"


def test_several_threads_learn_the_status_that_the_kernel_tells_once() -> None:
    rest = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    waiting = [pool.submit(process.wait) for _ in range(8)]
    process.kill()
    print({each.result() for each in waiting})
"""
    assert run_forking("time.sleep(60)", rest).stdout == "{-9}\n"


def test_a_fork_dies_with_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    rest = f"open({str(path)!r}, 'w').write(str(process.pid)); time.sleep(60)"
    script = SCRIPT.format(body="time.sleep(60)", rest=rest)
    parent = start_child([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = psutil.Process(int(path.read_text()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs([child], timeout=20)[1] == []
