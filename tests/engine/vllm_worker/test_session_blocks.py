"""The blocks of idle sessions: the counts equal those of a walk over all sessions."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ullage_testing.fake_vllm import FakeVllm

from ullage_engine.kv_cache.prefix_cache import MAX_SESSIONS
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.vllm_worker.reservations import Reservations
from ullage_engine.vllm_worker.session_blocks import SessionBlocks

NUM_BLOCKS = 12
WINDOW_BLOCKS = 6
"""Blocks below this id are of a group that grows, all others of one that slides."""


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0


def by_a_walk(sessions: list[list[Block]]) -> float:
    lasting = Counter[int]()
    windows = Counter[int]()
    blocks = {block.block_id: block for session in sessions for block in session}
    for session in sessions:
        for block in session:
            counter = lasting if block.block_id < WINDOW_BLOCKS else windows
            counter[block.block_id] += 1
    own = sum(count == blocks[number].ref_cnt for number, count in lasting.items())
    return own + sum(count / blocks[number].ref_cnt for number, count in windows.items())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "end", "request", "request ends"]),
            st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=6),
        ),
        max_size=40,
    )
)
def test_counts_equal_a_walk_over_all_sessions(actions: list[tuple[str, set[int]]]) -> None:
    pool = [Block(number) for number in range(NUM_BLOCKS)]
    counted = SessionBlocks()
    sessions: list[list[Block]] = []
    requests: list[list[Block]] = []

    def parts(session: list[Block]) -> tuple[list[Block], list[Block]]:
        lasting = [each for each in session if each.block_id < WINDOW_BLOCKS]
        return lasting, [each for each in session if each.block_id >= WINDOW_BLOCKS]

    for action, numbers in actions:
        holders = sessions if action in ("keep", "end") else requests
        if action in ("keep", "request"):
            blocks = [pool[number] for number in sorted(numbers)]
            for block in blocks:
                block.ref_cnt += 1
            holders.append(blocks)
            if action == "keep":
                counted.add(*parts(blocks))
        elif holders:
            ended = holders.pop(len(numbers) % len(holders))
            if action == "end":
                counted.remove(*parts(ended))
            for block in ended:
                block.ref_cnt -= 1
        assert counted.num_reclaimable() == pytest.approx(by_a_walk(sessions))

    for session in sessions:
        counted.remove(*parts(session))
    assert counted.num_reclaimable() == 0


def test_of_too_many_sessions_the_least_recently_used_one_ends() -> None:
    core = FakeVllm(num_blocks=40, block_tokens=4)
    reservations = Reservations(core, session_blocks=8, session_idle_s=60.0, clock=lambda: 0.0)
    request = EngineRequest(
        request_id="one",
        token_ids=list(range(9)),
        num_prompt_tokens=9,
        max_tokens=2,
        sampling=SamplingParams(temperature=0.0),
    )
    reservations.reserve("one", 3)
    core.add(request, max_tokens=2)
    for _ in range(2):
        core.step()
        reservations.on_step()
    reservations.release("one")

    for number in range(MAX_SESSIONS):
        reservations.keep_session(f"s{number}", "one")
    assert reservations.num_sessions == MAX_SESSIONS
    assert reservations.use_session("s0")

    reservations.keep_session("one more", "one")
    assert reservations.num_sessions == MAX_SESSIONS
    assert not reservations.use_session("s1")
    assert all(reservations.use_session(key) for key in ("s0", "s2", "one more"))
    reservations.check_integrity()
