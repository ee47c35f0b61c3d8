"""Quotas that several processes share: as exact as those of one, also after a death."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_router.policy.quota import Quota, Shortage, TokenBucket
from ullage_router.shared_quota import QuotaFolder, SharedQuota

FULL = Quota(requests=TokenBucket.full(30, 0.0), tokens=TokenBucket.full(500, 0.0), concurrency=6)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(("enter", "charge", "leave")),
        st.floats(0, 5),
        st.integers(1, 200),
    ),
    max_size=60,
)


def _stepped(quota: Quota, what: str, now: float, amount: int) -> Quota | Shortage:
    match what:
        case "enter":
            return quota.enter(now)
        case "charge":
            return quota.charge(amount, now)
        case _:
            return quota.leave(amount, amount / 2, now)


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_several_views_are_one_quota(steps: list[tuple[int, str, float, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        views = [QuotaFolder(Path(folder), index).open("alice", FULL) for index in range(3)]
        alone = FULL
        now = 0.0
        active = [0, 0, 0]
        for place, what, pause, amount in steps:
            now += pause
            if what == "leave" and not active[place]:
                continue
            expected = _stepped(alone, what, now, amount)
            step = partial(_stepped, what=what, now=now, amount=amount)
            assert views[place].apply(step) == expected
            if isinstance(expected, Quota):
                active[place] += expected.active - alone.active
                alone = expected
            assert {view.state for view in views} == {alone}
        QuotaFolder(Path(folder), 1)  # the process of index 1 died and has a successor
        assert views[0].state.active == active[0] + active[2]
        for view in views:
            view.close()


ENTERING = """
import sys
from pathlib import Path
from ullage_router.policy.quota import Quota
from ullage_router.shared_quota import QuotaFolder

folder = QuotaFolder(Path(sys.argv[1]), int(sys.argv[2]))
quota = folder.open("alice", Quota(concurrency=500))
print("ready", flush=True)
sys.stdin.readline()
entered = [quota.apply(lambda q: q.enter(0.0)) for _ in range(400)]
print(sum(isinstance(each, Quota) for each in entered), flush=True)
sys.stdin.readline()
"""


def test_processes_at_the_same_time_enter_as_often_as_one_could(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENTERING, str(tmp_path), str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        counts = [int(process.stdout.readline()) for process in processes if process.stdout]
        assert sum(counts) == 500
        processes[0].kill()
        processes[0].wait()
        view = QuotaFolder(tmp_path, 0).open("alice", Quota(concurrency=500))
        assert view.state.active == 500 - counts[0]
        view.close()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_step_that_fails_leaves_no_lock(tmp_path: Path) -> None:
    quota = SharedQuota(tmp_path / "alice", 0, FULL)
    with pytest.raises(ZeroDivisionError):
        quota.apply(lambda q: q.leave(1 / 0, 0, 0))
    assert quota.state == FULL
    quota.close()
