"""CPU time of workers is that of their whole families, and stays when they are replaced."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ullage_engine.server.worker_cpu import WorkerCpu

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {BURN + "time.sleep(600)"!r}])
sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Computes nothing, but its child does for 0.3 s."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as process:
        yield process
        process.communicate()


def test_children_count_and_a_new_worker_goes_on(parent: subprocess.Popen[bytes]) -> None:
    pids: list[int | None] = [None]
    cpu = WorkerCpu(lambda: pids[-1])
    assert cpu.seconds() == 0
    pids.append(parent.pid)
    until = time.monotonic() + 60
    while cpu.seconds() < 0.2:
        assert time.monotonic() < until
        time.sleep(0.02)
    before = cpu.seconds()

    parent.communicate()
    assert cpu.seconds() == before
    with subprocess.Popen([sys.executable, "-c", BURN + "input()"], stdin=subprocess.PIPE) as own:
        pids.append(own.pid)
        while cpu.seconds() < before + 0.2:
            assert time.monotonic() < until
            time.sleep(0.02)
        own.communicate(b"\n")
    pids.append(None)
    assert cpu.seconds() >= before + 0.2
