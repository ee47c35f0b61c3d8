"""What is kept of conversations, and what goes first when memory is needed."""

from collections.abc import Callable
from typing import Any

import pytest

from ullage_engine.kv_cache.prefix_cache import PrefixCache
from ullage_engine.scheduler.scheduler import KvPolicy


class Turns:
    """A store in which conversations leave their KV."""

    def __init__(self, blocks: int, session_blocks: int = 100, idle_s: float = 10.0) -> None:
        self.now = 0.0
        policy = KvPolicy(session_blocks=session_blocks, session_idle=idle_s)
        self.store = PrefixCache(blocks, 2, policy, lambda: self.now)

    def turn(self, start: int, blocks: int, session: str = "") -> list[int]:
        """Computes `blocks` blocks of tokens counted from `start`; the tokens."""
        tokens = [start + at for at in range(2 * blocks)]
        table = self.store.allocate(blocks)
        table = self.store.insert(tokens, table, 0, blocks)
        self.store.free(table)
        if session:
            self.store.keep_session(session, table)
        self.store.check_integrity([])
        return tokens

    def kept(self, tokens: list[int]) -> int:
        """Blocks of these tokens that are still known."""
        return len(self.store.match([*tokens, -1]))


def test_a_session_outlives_what_no_session_needs() -> None:
    turns = Turns(blocks=6)
    session = turns.turn(0, 2, "s")
    other = turns.turn(100, 2)
    turns.turn(200, 4)
    assert (turns.kept(session), turns.kept(other)) == (2, 0)


def test_pinned_blocks_count_as_reclaimable_and_are_given_up_when_needed() -> None:
    turns = Turns(blocks=6)
    session = turns.turn(0, 4, "s")
    assert (turns.store.num_reclaimable, turns.store.num_available) == (4, 6)
    turns.turn(100, 6)
    assert turns.kept(session) == 0
    assert (len(turns.store.sessions), turns.store.num_session_blocks) == (0, 0)


def test_the_session_used_longest_ago_goes_first() -> None:
    turns = Turns(blocks=6)
    first = turns.turn(0, 3, "first")
    second = turns.turn(100, 3, "second")
    turns.store.sessions.use("first")
    turns.turn(200, 2)
    assert turns.kept(first) == 3
    assert turns.kept(second) < 3


def test_idle_sessions_are_evicted_before_prefixes_used_since_the_longest_idle_first() -> None:
    turns = Turns(blocks=8)
    idle = turns.turn(0, 2, "idle")
    later = turns.turn(50, 2, "later")
    turns.now = 8.0
    prefix = turns.turn(100, 2)
    busy = turns.turn(150, 2, "busy")
    turns.now = 11.0
    turns.store.sessions.end_idle()
    assert len(turns.store.sessions) == 1
    turns.turn(200, 2)
    assert [turns.kept(each) for each in (idle, later, prefix, busy)] == [0, 2, 2, 2]
    turns.turn(300, 2)
    assert [turns.kept(each) for each in (idle, later, prefix, busy)] == [0, 0, 2, 2]


def test_what_others_used_since_does_not_go_with_an_idle_session() -> None:
    turns = Turns(blocks=6)
    idle = turns.turn(0, 4, "idle")
    turns.now = 5.0
    turns.turn(0, 2)
    turns.now = 10.0
    turns.store.sessions.end_idle()
    other = turns.turn(100, 2)
    turns.turn(200, 2)
    assert (turns.kept(idle), turns.kept(other)) == (2, 2)
    turns.turn(0, 2)
    turns.turn(300, 4)
    assert turns.kept(idle) == 2


def test_only_the_beginning_within_the_limit_is_pinned() -> None:
    turns = Turns(blocks=8, session_blocks=2)
    session = turns.turn(0, 5, "s")
    assert turns.store.num_session_blocks == 2
    turns.turn(100, 6)
    assert turns.kept(session) == 2


def test_a_longer_turn_takes_the_place_of_the_one_before() -> None:
    turns = Turns(blocks=8)
    turns.turn(0, 2, "s")
    longer = turns.turn(0, 4, "s")
    assert (len(turns.store.sessions), turns.store.num_session_blocks) == (1, 4)
    turns.turn(100, 4)
    assert turns.kept(longer) == 4


def test_the_number_of_sessions_is_bounded() -> None:
    turns = Turns(blocks=1100)
    for number in range(1030):
        turns.turn(10 * number, 1, f"s{number}")
    assert (len(turns.store.sessions), turns.store.num_session_blocks) == (1024, 1024)
    assert turns.store.num_reclaimable == 1030


@pytest.mark.parametrize("session_limit", [0, 24])
def test_long_conversations_share_a_small_pool(
    make_rig: Callable[..., Any], session_limit: int
) -> None:
    """MEM02: six conversations that together are more than the pool are never refused."""
    rig = make_rig(blocks=100, policy=KvPolicy(session_blocks=session_limit), expected=16)
    histories = {f"s{number}": [1000 * number + at for at in range(120)] for number in range(6)}
    hits = []
    for turn in range(8):
        # As many at once as the pool holds: all six at first, two in the end.
        at_once = 6 if turn < 3 else 2
        names = list(histories)
        for batch in range(0, 6, at_once):
            for session in names[batch : batch + at_once]:
                tokens = list(histories[session])
                request = rig.request(f"{session}-{turn}", tokens, 16, session=session)
                assert rig.submit(request) is None, "refused for lack of memory"
            answers = rig.run()
            for session in names[batch : batch + at_once]:
                name = f"{session}-{turn}"
                history = histories[session]
                assert answers[name] == rig.undisturbed(history, 0, 16)
                hits.append(rig.outputs[name][0].num_cached_tokens / len(history))
                history += answers[name] + [7] * 14
    assert rig.scheduler.stats().num_preemptions == 0
    if session_limit:
        assert rig.scheduler.stats().num_sessions > 0
        assert min(hits[6:18]) > 0.7
    assert sum(hits[6:]) > 0


PROMPT = list(range(60))


def test_a_session_never_holds_more_than_its_bound_while_it_runs(
    make_rig: Callable[..., Any],
) -> None:
    """60 tokens of prompt and 100 of output are 10 blocks; the session may hold 6."""
    rig = make_rig(session_blocks=6, policy=KvPolicy(session_blocks=6), expected=100)
    assert rig.submit(rig.request("a", PROMPT, max_tokens=100, session="s")) is None
    most = 0
    while rig.scheduler.has_work:
        rig.step()
        most = max(most, rig.held_blocks)
    assert (most, len(rig.tokens("a")), rig.outputs["a"][-1].finish) == (6, 6 * 16 - 60, "length")
    assert rig.tokens("a") == rig.undisturbed(PROMPT, 0, 36)
    rig.submit(rig.request("b", PROMPT, max_tokens=100))
    assert len(rig.run()["b"]) == 100


def test_requests_of_one_session_share_its_bound(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(session_blocks=8, expected=8)
    assert rig.submit(rig.request("a", PROMPT, session="s")) is None
    refused = rig.submit(rig.request("b", [7] * 60, session="s"))
    assert not refused.never
    assert "session: its other requests leave" in refused.message
    assert rig.submit(rig.request("other", [7] * 60, session="t")) is None
    rig.run()
    assert rig.submit(rig.request("b", [7] * 60, session="s")) is None


def test_a_prompt_above_the_bound_of_a_session_is_refused_for_good(
    make_rig: Callable[..., Any],
) -> None:
    rig = make_rig(session_blocks=3)
    refused = rig.submit(rig.request("a", PROMPT, session="s"))
    assert refused.never
    assert "raise memory.sessionKVLimit" in refused.message
    assert rig.submit(rig.request("a", PROMPT)) is None
