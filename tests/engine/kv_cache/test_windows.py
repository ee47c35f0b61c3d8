"""Layers with sliding windows have blocks of their own, used again when windows slid past them."""

from collections.abc import Callable
from typing import Any

import pytest

from ullage_engine.scheduler.scheduler import KvPolicy

MakeRig = Callable[..., Any]
WINDOW = 40
CHUNK = 32
MOST = -(-(WINDOW - 1 + CHUNK) // 16) + 1
"""Blocks of its window that a sequence holds at most."""
LONG = list(range(1000, 1320))


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_sequence_holds_its_window_and_gives_back_the_rest(
    make_rig: MakeRig, prefix_cache: bool
) -> None:
    """420 tokens are 27 blocks, and as many of the window's layers if nothing were given back."""
    policy = KvPolicy(prefix_cache=prefix_cache)
    rig = make_rig(
        blocks=27 + MOST, window=WINDOW, prompt_tokens=CHUNK, policy=policy, expected=100
    )
    assert rig.submit(rig.request("a", LONG, max_tokens=100)) is None
    most = 0
    while rig.scheduler.has_work:
        rig.step()
        stats = rig.scheduler.stats()
        most = max(most, stats.kv_held_bytes // rig.block_bytes)
    assert rig.tokens("a") == rig.undisturbed(LONG, 0, 100)
    assert 26 < most <= 27 + MOST
    assert rig.scheduler.stats().num_preemptions == 0


def test_the_price_is_what_is_held(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=60, window=WINDOW, prompt_tokens=CHUNK, expected=4)
    before = rig.scheduler.stats().headroom_bytes
    rig.submit(rig.request("a", LONG, max_tokens=4))
    assert before - rig.scheduler.stats().headroom_bytes == (21 + MOST) * rig.block_bytes
    while rig.scheduler.has_work:
        held = before - rig.scheduler.stats().headroom_bytes
        assert held <= (21 + MOST) * rig.block_bytes
        rig.step()
    assert rig.scheduler.stats().headroom_bytes == before


def test_a_prefix_is_found_while_its_last_window_is_there(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=100, window=WINDOW, prompt_tokens=CHUNK)
    rig.submit(rig.request("a", LONG + [1] * 20, max_tokens=4))
    rig.run()
    rig.submit(rig.request("b", LONG + [2] * 20, max_tokens=4))
    rig.run()
    assert rig.outputs["b"][-1].num_cached_tokens == 320
    assert rig.tokens("b") == rig.undisturbed(LONG + [2] * 20, 0, 4)


def test_without_its_last_window_a_prefix_is_found_as_far_as_there_is_one(
    make_rig: MakeRig,
) -> None:
    """Blocks that a window has slid past are evicted before the prefix itself is."""
    rig = make_rig(blocks=54, window=WINDOW, prompt_tokens=CHUNK, expected=8)
    rig.submit(rig.request("a", LONG, max_tokens=80))
    while len(rig.tokens("a")) < 70:
        rig.step()
    rig.submit(rig.request("other", list(range(5000, 5280)), max_tokens=4), resumed=True)
    while not rig.tokens("other"):
        rig.step()
    rig.submit(rig.request("b", [*LONG, 7], max_tokens=4), resumed=True)
    rig.run()
    for name, prompt in (("a", LONG), ("b", [*LONG, 7])):
        assert rig.tokens(name) == rig.undisturbed(prompt, 0, len(rig.tokens(name)))
    assert rig.outputs["b"][-1].num_cached_tokens < 320


def test_the_next_turn_of_a_session_finds_all_of_the_last(make_rig: MakeRig) -> None:
    rig = make_rig(
        blocks=60,
        window=WINDOW,
        prompt_tokens=CHUNK,
        policy=KvPolicy(session_blocks=100),
        expected=8,
    )
    rig.submit(rig.request("a", LONG, max_tokens=17, session="s"))
    rig.run()
    for number in range(4):
        rig.submit(rig.request(f"o{number}", [9000 + 100 * number + at for at in range(150)]))
        rig.run()
    turn = LONG + rig.tokens("a") + [3] * 10
    rig.submit(rig.request("b", turn, max_tokens=4, session="s"))
    rig.run()
    assert rig.outputs["b"][-1].num_cached_tokens == 336
    assert rig.tokens("b") == rig.undisturbed(turn, 0, 4)


def test_a_swapped_sequence_brings_its_window_back(make_rig: MakeRig) -> None:
    rig = make_rig(
        blocks=60,
        window=WINDOW,
        prompt_tokens=CHUNK,
        policy=KvPolicy(host_slots=60),
        prefill_rate=1.0,
    )
    rig.submit(rig.request("a", LONG, max_tokens=60))
    while len(rig.tokens("a")) < 20:
        rig.step()
    rig.scheduler.preempt_newest()
    rig.scheduler.evict_all()
    plan = rig.scheduler.schedule()
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(339, 1)]
    assert 22 < len(plan.moves.swap_in) <= 22 + MOST
    rig.finish(plan)
    assert rig.run()["a"] == rig.undisturbed(LONG, 0, 60)


def test_a_step_that_was_not_committed_leaves_nothing_to_swap(make_rig: MakeRig) -> None:
    """Blocks of tokens that were never computed are copied to the host in neither table."""
    rig = make_rig(
        blocks=60,
        window=WINDOW,
        prompt_tokens=CHUNK,
        policy=KvPolicy(host_slots=60),
        prefill_rate=1.0,
    )
    rig.submit(rig.request("first", [1, 2, 3], max_tokens=30))
    rig.step()
    rig.submit(rig.request("a", LONG, max_tokens=8))
    for _ in range(5):
        rig.step()
    plan = rig.scheduler.schedule()
    rig.device.move(plan.moves)
    rig.device.execute(plan)
    rig.scheduler.preempt_newest()
    rig.finish(rig.scheduler.replan(CHUNK))
    rig.scheduler.evict_all()
    plan = rig.scheduler.schedule()
    assert plan.moves.prefetch
    rig.finish(plan)
    assert rig.run()["a"] == rig.undisturbed(LONG, 0, 8)
