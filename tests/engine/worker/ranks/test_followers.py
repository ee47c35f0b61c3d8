"""Rank 0's side of its group, with ranks that only speak."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ullage_testing.child_process import start_child

from ullage_engine.protocol.errors import GroupLostError, RankFailedError
from ullage_engine.protocol.messages import Loading
from ullage_engine.worker.forks import ForkedProcess
from ullage_engine.worker.rank_group import Failed, Join, RankProcesses, WarmUp, rank_failed

SCRIPT = """
import sys, msgspec, zmq
from ullage_engine.protocol.messages import Loading
from ullage_engine.worker.rank_group import Done, Failed, Stop, ToRank
link = zmq.Context().socket(zmq.PAIR)
link.connect(sys.argv[2])
rank, encode = int(sys.argv[1]), msgspec.msgpack.encode
while True:
    command = msgspec.msgpack.decode(link.recv(), type=ToRank)
    if isinstance(command, Stop):
        sys.exit(0)
    if type(command).__name__ == "WarmUp" and rank == 2:
        link.send(encode(Failed("memory.deviceBytes: too little")))
        sys.exit(2)
    link.send(encode(Loading(stage="arena", done_bytes=1, total_bytes=2, rank=rank)))
    link.send(encode(Done(num_blocks=10 * rank)))
"""


ONCE = """
import sys, msgspec, zmq
from ullage_engine.worker.rank_group import Done
link = zmq.Context().socket(zmq.PAIR)
link.connect(sys.argv[1])
link.send(msgspec.msgpack.encode(Done()))
sys.stdin.read()
"""


def start_rank(rank: int, endpoint: str) -> ForkedProcess:
    return start_child([sys.executable, "-c", SCRIPT, str(rank), endpoint])


@pytest.fixture
def told() -> list[Loading]:
    """What ranks say of their loading."""
    return []


@pytest.fixture
def start(tmp_path: Path, told: list[Loading]) -> Iterator[Callable[[int], RankProcesses]]:
    with ExitStack() as stack:

        def start_group(world: int) -> RankProcesses:
            processes = RankProcesses(world, tmp_path / "g", start_rank, told.append)
            stack.callback(processes.kill)
            return processes

        yield start_group


def test_answers_come_in_the_order_of_ranks_and_failures_name_theirs(
    start: Callable[[int], RankProcesses], told: list[Loading]
) -> None:
    processes = start(4)
    processes.broadcast(Join("store"))
    assert [answer.num_blocks for answer in processes.wait_done()] == [10, 20, 30]
    assert [each.rank for each in told] == [1, 2, 3]
    assert processes.resident_bytes() > 3 << 20
    processes.broadcast(WarmUp())
    with pytest.raises(RankFailedError, match=r"^rank 2: memory\.deviceBytes: too little$"):
        processes.wait_done()
    # It has said why it ended, so this process has not ended with it.


def test_a_rank_that_stops_when_asked_has_nothing_more_to_say(
    start: Callable[[int], RankProcesses],
) -> None:
    processes = start(2)
    processes.broadcast(Join("store"))
    processes.wait_done()
    processes.broadcast(Join("store"))
    with pytest.raises(GroupLostError, match="rank 1 answered Done, not tokens"):
        processes.wait_sampled(1)
    processes.stop()


def test_a_rank_that_is_gone_does_not_keep_its_group_from_stopping(tmp_path: Path) -> None:
    def start_one(rank: int, endpoint: str) -> ForkedProcess:
        return start_child([sys.executable, "-c", ONCE, endpoint])

    processes = RankProcesses(2, tmp_path / "g", start_one, print)
    with ExitStack() as stack:
        stack.callback(processes.kill)
        processes.wait_done()
        processes._is_stopping.set()  # or its end were this process's
        (process,) = processes._processes.values()
        process.kill()
        process.wait()
        stopping = threading.Thread(target=processes.stop, daemon=True)
        stopping.start()
        stopping.join(10)
        assert not stopping.is_alive()


def test_of_several_failures_the_one_that_another_start_would_not_mend_is_told() -> None:
    lost = Failed("RuntimeError: connection closed by peer", may_retry=True)
    both = rank_failed({1: lost, 2: Failed("memory.deviceBytes: too little")})
    assert (str(both), both.may_retry) == ("rank 2: memory.deviceBytes: too little", False)
    again = rank_failed({1: lost, 3: lost})
    assert again.may_retry
    assert str(again) == f"rank 1: {lost.error}; rank 3: {lost.error}"
