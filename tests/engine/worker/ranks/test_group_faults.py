"""What a group's faults look like from outside it: to the engine's loop and to the server."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from ullage_testing.child_process import start_none

from ullage_engine.memory.out_of_memory import is_device_lost
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.protocol.errors import GroupLostError
from ullage_engine.protocol.requests import PromptLogprobs
from ullage_engine.protocol.step_plan import Moves, SampledToken, StepPlan
from ullage_engine.server.hang_detector import read_proc_stats
from ullage_engine.worker.rank_group import DistributedRunner, RankProcesses


class OutOfMemory:
    """A rank whose every step fails."""

    def move(self, moves: Moves) -> None:
        raise torch.OutOfMemoryError("no")

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_step_that_fails_on_one_rank_is_never_tried_again(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    processes = RankProcesses(1, tmp_path_factory.mktemp("g") / "g", start_none, print)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(processes.kill)
        runner = DistributedRunner(OutOfMemory(), processes, RankLayout(2, 1), 4)
        for attempt in (lambda: runner.execute(StepPlan([])), lambda: runner.move(Moves())):
            with pytest.raises(GroupLostError, match="rank 0") as caught:
                attempt()
            assert is_device_lost(caught.value)


def test_a_stopped_child_is_a_stopped_worker() -> None:
    script = "import subprocess; child = subprocess.Popen(['sleep', '60']); child.wait()"
    with subprocess.Popen([sys.executable, "-c", script], process_group=0) as parent:
        try:
            until(lambda: bool(children(parent.pid)))
            (child,) = children(parent.pid)
            vitals = read_proc_stats(parent.pid)
            assert vitals is not None
            assert not vitals.is_stopped
            os.kill(child, signal.SIGSTOP)
            until(lambda: is_stopped(parent.pid))
            os.kill(child, signal.SIGCONT)
            until(lambda: not is_stopped(parent.pid))
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    vitals = read_proc_stats(pid)
    assert vitals is not None
    return vitals.is_stopped


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        os.sched_yield()
