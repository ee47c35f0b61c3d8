"""Rank 0's side of its group, with ranks that only speak."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from ullage_engine.messages import Loading
from ullage_engine.parallel.commands import Failed, Join, WarmUp
from ullage_engine.parallel.errors import GroupLostError, RankFailedError
from ullage_engine.parallel.followers import Followers, rank_failed

SCRIPT = """
import sys, msgspec, zmq
from ullage_engine.messages import Loading
from ullage_engine.parallel.commands import Done, Failed, Stop, ToFollower
link = zmq.Context().socket(zmq.PAIR)
link.connect(sys.argv[2])
rank, encode = int(sys.argv[1]), msgspec.msgpack.encode
while True:
    command = msgspec.msgpack.decode(link.recv(), type=ToFollower)
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
from ullage_engine.parallel.commands import Done
link = zmq.Context().socket(zmq.PAIR)
link.connect(sys.argv[1])
link.send(msgspec.msgpack.encode(Done()))
sys.stdin.read()
"""


def command(rank: int, endpoint: str) -> Sequence[str]:
    return [sys.executable, "-c", SCRIPT, str(rank), endpoint]


@pytest.fixture
def told() -> list[Loading]:
    """What ranks say of their loading."""
    return []


@pytest.fixture
def start(tmp_path: Path, told: list[Loading]) -> Iterator[Callable[[int], Followers]]:
    with ExitStack() as stack:

        def start_group(world: int) -> Followers:
            followers = Followers(world, tmp_path / "g", command, told.append)
            stack.callback(followers.kill)
            return followers

        yield start_group


def test_answers_come_in_the_order_of_ranks_and_failures_name_theirs(
    start: Callable[[int], Followers], told: list[Loading]
) -> None:
    followers = start(4)
    followers.tell_all(Join("store"))
    assert [answer.num_blocks for answer in followers.done()] == [10, 20, 30]
    assert [each.rank for each in told] == [1, 2, 3]
    assert followers.resident_bytes() > 3 << 20
    followers.tell_all(WarmUp())
    with pytest.raises(RankFailedError, match=r"^rank 2: memory\.deviceBytes: too little$"):
        followers.done()
    # It has said why it ended, so this process has not ended with it.


def test_a_rank_that_stops_when_asked_has_nothing_more_to_say(
    start: Callable[[int], Followers],
) -> None:
    followers = start(2)
    followers.tell_all(Join("store"))
    followers.done()
    followers.tell_all(Join("store"))
    with pytest.raises(GroupLostError, match="rank 1 answered Done, not tokens"):
        followers.sampled(1)
    followers.stop()


def test_a_rank_that_is_gone_does_not_keep_its_group_from_stopping(tmp_path: Path) -> None:
    followers = Followers(
        2, tmp_path / "g", lambda rank, endpoint: [sys.executable, "-c", ONCE, endpoint], print
    )
    with ExitStack() as stack:
        stack.callback(followers.kill)
        followers.done()
        followers._is_stopping.set()  # or its end were this process's
        (process,) = followers._processes.values()
        process.kill()
        process.wait()
        stopping = threading.Thread(target=followers.stop, daemon=True)
        stopping.start()
        stopping.join(10)
        assert not stopping.is_alive()


def test_of_several_failures_the_one_that_another_start_would_not_mend_is_told() -> None:
    lost = Failed("RuntimeError: connection closed by peer", may_retry=True)
    both = rank_failed({1: lost, 2: Failed("memory.deviceBytes: too little")})
    assert (str(both), both.may_retry) == ("rank 2: memory.deviceBytes: too little", False)
    again = rank_failed({1: lost, 3: lost})
    assert again.may_retry and str(again) == f"rank 1: {lost.error}; rank 3: {lost.error}"
