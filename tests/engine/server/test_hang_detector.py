"""When a silent worker hangs and when it is only slow; decided purely, read from real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.server.hang_detector import MAX_TICK_S, HangDetector, ProcStats, read_proc_stats
from ullage_engine.server.restart_policy import RestartPolicy

POLICY = RestartPolicy(step_deadline_s=30.0)
WARM = POLICY.slow_start_steps
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ASLEEP = ProcStats(is_stopped=False, is_waiting=True, cpu_ticks=100)
STOPPED = ProcStats(is_stopped=True, is_waiting=True, cpu_ticks=100)
STARVED = ProcStats(is_stopped=False, is_waiting=False, cpu_ticks=100)


def hangs_after(
    stats: Callable[[int], ProcStats | None],
    *,
    steps: tuple[float, ...] = (0.05,) * WARM,
    measured_s: float = 0.0,
    has_work: bool = True,
    is_loading: bool = False,
    look_s: float = 0.25,
) -> tuple[float, str]:
    """Seconds of silence until the verdict, looked at regularly; (inf, "") if there is none."""
    detector = HangDetector(POLICY)
    detector.on_ready(measured_s)
    for step in steps:
        detector.on_step(step)
    detector.on_message()
    for tick in range(int(700 / look_s)):
        detector.tick(look_s, is_loading=is_loading, has_work=has_work)
        found = stats(tick)
        if detector.is_suspect and found is not None:
            detector.observe(found, look_s)
        if reason := detector.reason(is_loading=is_loading):
            return (tick + 1) * look_s, reason
    return float("inf"), ""


def test_a_step_that_sleeps_hangs_after_many_times_the_slowest_one() -> None:
    at, reason = hangs_after(lambda tick: ASLEEP, steps=(0.01, 0.05) * WARM)
    assert 2.0 < at < 3.5
    assert reason == "idle in a step"
    at, reason = hangs_after(lambda tick: ASLEEP, steps=(0.01, 0.5, 0.01) * WARM)
    assert 10.0 < at < 11.5
    assert reason == "idle in a step"
    # Of a worker that has measured its longest step, no later than one that computes.
    at, reason = hangs_after(lambda tick: ASLEEP, steps=(0.01, 0.5) * WARM, measured_s=0.5)
    assert 8.0 < at < 9.5
    assert reason == "idle in a step"


def test_before_the_first_step_only_the_deadline_holds() -> None:
    at, _ = hangs_after(lambda tick: ASLEEP, steps=())
    assert 30.0 < at < 31.0


def test_first_steps_have_twice_the_time() -> None:
    at, _ = hangs_after(lambda tick: ASLEEP, steps=(0.05,))
    assert 4.0 < at < 5.5
    at, reason = hangs_after(spinning(1.0), steps=(), measured_s=0.5)
    assert 16.0 < at < 17.5
    assert reason == BUSY


BUSY = "busy in a step without an end"


def spinning(share: float, threads: int = 1, look_s: float = 0.25) -> Callable[[int], ProcStats]:
    """A worker some of whose threads compute whenever neighbours let them: a share of the time."""

    def stats(tick: int) -> ProcStats:
        ticks = int(tick * look_s * share * TICKS_PER_S)
        own = {1000 + thread: ticks for thread in range(threads)}
        return ProcStats(False, False, ticks * threads, own | {99: 7})

    return stats


def test_a_step_that_computes_without_an_end_hangs_after_some_of_the_longest() -> None:
    at, reason = hangs_after(spinning(1.0), measured_s=0.6)
    assert 8.0 < at < 9.5
    assert reason == BUSY
    at, reason = hangs_after(spinning(1.0), measured_s=5.0)
    assert 15.0 < at < 16.5
    assert reason == BUSY
    # One that took long is remembered.
    at, reason = hangs_after(spinning(1.0), steps=(4.0, *(0.05,) * 1000), measured_s=0.6)
    assert 12.0 < at < 13.5
    assert reason == BUSY
    at, reason = hangs_after(spinning(1.0), steps=(4.0, *(0.05,) * 1024), measured_s=0.6)
    assert 8.0 < at < 9.5
    assert reason == BUSY


def test_neighbours_time_is_not_a_workers() -> None:
    at, reason = hangs_after(spinning(0.5, threads=8), measured_s=0.6)
    assert 16.0 < at < 17.5
    assert reason == BUSY
    at, reason = hangs_after(spinning(0.1), measured_s=0.6)
    assert 30.0 < at < 31.0
    assert reason == "no step within the deadline"


SECONDS = st.floats(0.001, 12.0)


@settings(max_examples=300, deadline=None)
@given(
    history=st.lists(SECONDS, max_size=40),
    measured_s=SECONDS,
    longer=st.floats(0.0, 2.9),
    shares=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=30),
    threads=st.integers(1, 4),
)
def test_no_healthy_step_is_taken_for_a_hang_whatever_neighbours_do(
    history: list[float], measured_s: float, longer: float, shares: list[float], threads: int
) -> None:
    """It computes up to 2.9 times as long as the longest known, in whatever share of the time
    neighbours leave: it ends unless that takes longer than the deadline."""
    detector = HangDetector(POLICY)
    detector.on_ready(measured_s)
    for seconds in history:
        detector.on_step(seconds)
    detector.on_message()
    needed_s = longer * max([measured_s, *history])

    computed_s = passed_s = 0.0
    for tick in range(10_000):
        if computed_s >= needed_s or passed_s > POLICY.step_deadline_s:
            break
        share = shares[tick % len(shares)]
        computed_s += 0.25 * share
        passed_s += 0.25
        ticks = int(computed_s * TICKS_PER_S)
        detector.tick(0.25, is_loading=False, has_work=True)
        if detector.is_suspect:
            own = dict.fromkeys(range(threads), ticks)
            detector.observe(ProcStats(False, False, ticks * threads, own), 0.25)
        reason = detector.reason(is_loading=False)
        assert not reason or passed_s > POLICY.step_deadline_s, (reason, passed_s)


@settings(max_examples=200, deadline=None)
@given(
    history=st.lists(st.floats(0.001, 2.6), min_size=WARM, max_size=60),
    measured_s=st.floats(0.01, 2.6),
    share=st.floats(0.6, 1.0),
)
def test_a_hang_is_found_in_time_whatever_was_before(
    history: list[float], measured_s: float, share: float
) -> None:
    """A worker whose steps take at most 2.6 s and that has most of a core: within 15 s."""
    steps = tuple(history)
    for stats in (spinning(share), lambda tick: ASLEEP):
        at, reason = hangs_after(stats, steps=steps, measured_s=measured_s)
        assert at < 15.0
        assert reason


def test_steps_of_long_ago_are_forgotten() -> None:
    at, _ = hangs_after(lambda tick: ASLEEP, steps=(9.0, *[0.01] * 128), measured_s=9.0)
    assert at < 3.5


@pytest.mark.parametrize(
    "stats",
    [
        lambda tick: STARVED,  # it wants a core that others have, or waits for a disk
        lambda tick: ProcStats(is_stopped=False, is_waiting=False, cpu_ticks=tick),
        lambda tick: ProcStats(is_stopped=False, is_waiting=True, cpu_ticks=tick // 4),
        lambda tick: None,  # nothing can be known of it
    ],
    ids=["starved", "computes", "computes now and then", "unknown"],
)
def test_a_step_that_computes_is_slow_up_to_the_deadline(
    stats: Callable[[int], ProcStats | None],
) -> None:
    at, reason = hangs_after(stats)
    assert 30.0 < at < 31.0
    assert reason == "no step within the deadline"


@pytest.mark.parametrize("has_work", [True, False])
@pytest.mark.parametrize("is_loading", [True, False])
def test_a_stopped_worker_hangs_at_once(has_work: bool, is_loading: bool) -> None:
    at, reason = hangs_after(lambda tick: STOPPED, has_work=has_work, is_loading=is_loading)
    assert 1.0 < at < 2.0
    assert reason == "stopped by a signal"


def test_an_idle_worker_may_sleep_and_a_loading_one_has_long() -> None:
    assert hangs_after(lambda tick: ASLEEP, has_work=False) == (float("inf"), "")
    at, reason = hangs_after(lambda tick: ASLEEP, is_loading=True)
    assert 600.0 < at < 601.0
    assert reason == "silent while loading"


def test_a_heartbeat_is_no_step() -> None:
    detector = HangDetector(POLICY)
    num_looks = 0
    while not detector.reason(is_loading=False) and num_looks < 1000:
        num_looks += 1
        detector.on_message()
        detector.tick(0.25, is_loading=False, has_work=True)
    assert 30.0 < num_looks * 0.25 < 31.0


def test_time_in_which_the_watcher_did_not_run_does_not_count() -> None:
    """As when the whole container was frozen: what the worker said meanwhile is not read yet."""
    detector = HangDetector(POLICY)
    detector.on_step(0.05)
    detector.tick(3600.0, is_loading=False, has_work=True)
    detector.observe(STOPPED, 3600.0)
    assert detector.reason(is_loading=False) == ""
    assert MAX_TICK_S < POLICY.stopped_after_s < POLICY.min_suspect_s


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that spins, then sleeps when it gets a line."""
    code = "print(flush=True)\nimport select, sys\n"
    code += "while not select.select([sys.stdin], [], [], 0)[0]: pass\nsys.stdin.readline()\n"
    code += "print(flush=True)\nsys.stdin.readline()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def until(pid: int, condition: Callable[[ProcStats], bool]) -> ProcStats:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        stats = read_proc_stats(pid)
        assert stats is not None
        if condition(stats):
            return stats
    raise AssertionError(stats)


def test_vitals_of_a_process_that_computes_is_stopped_sleeps_and_is_gone(
    child: "subprocess.Popen[str]",
) -> None:
    first = until(child.pid, lambda stats: not stats.is_waiting)
    later = until(child.pid, lambda stats: stats.cpu_ticks > first.cpu_ticks + 2)
    assert later.thread_ticks[child.pid] > first.thread_ticks[child.pid]
    os.kill(child.pid, signal.SIGSTOP)
    stopped = until(child.pid, lambda stats: stats.is_stopped)
    assert stopped.is_waiting
    os.kill(child.pid, signal.SIGCONT)
    until(child.pid, lambda stats: stats.cpu_ticks > stopped.cpu_ticks)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    child.stdout.readline()
    asleep = until(child.pid, lambda stats: stats.is_waiting)
    assert not asleep.is_stopped
    assert read_proc_stats(child.pid) == asleep
    child.kill()
    child.wait()
    assert read_proc_stats(child.pid) is None
