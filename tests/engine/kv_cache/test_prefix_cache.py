"""Sharing computed prefixes: what is saved, what it costs, and that nobody notices otherwise."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.scheduler.scheduler import KvPolicy

MakeRig = Callable[..., Any]
SYSTEM = list(range(1000, 1100))
OFF = KvPolicy(prefix_cache=False)


def test_a_second_request_computes_only_what_is_new(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit(rig.request("a", SYSTEM + [1] * 20))
    rig.run()
    rig.submit(rig.request("b", SYSTEM + [2] * 20))
    (chunk,) = rig.scheduler.schedule().chunks
    assert (chunk.start, len(chunk.token_ids)) == (96, 24)
    counters = rig.scheduler.stats()
    assert (counters.prefix_lookup_tokens, counters.prefix_hit_tokens) == (240, 96)


def test_usage_tells_the_cached_tokens_of_the_prompt(make_rig: MakeRig) -> None:
    rig = make_rig()
    for name in ("a", "b"):
        rig.submit(rig.request(name, SYSTEM, max_tokens=3))
        rig.run()
    assert [output.num_cached_tokens for output in rig.outputs["a"]] == [0, 0, 0]
    assert [output.num_cached_tokens for output in rig.outputs["b"]] == [96, 96, 96]


def test_requests_of_different_salts_share_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    for name, salt in (("a", "one"), ("b", "two"), ("c", ""), ("again", "one")):
        rig.submit(rig.request(name, SYSTEM, max_tokens=3, salt=salt))
        rig.run()
        assert rig.tokens(name) == rig.undisturbed(SYSTEM, 0, 3)
    cached = {name: outputs[-1].num_cached_tokens for name, outputs in rig.outputs.items()}
    assert cached == {"a": 0, "b": 0, "c": 0, "again": 96}
    # Nor does one wait for what the other computes at the same moment.
    for name, salt in (("d", "three"), ("e", "four")):
        rig.submit(rig.request(name, list(range(40)), salt=salt))
    assert len(rig.scheduler.schedule().chunks) == 2


def test_a_prompt_known_to_its_end_still_computes_its_last_token(make_rig: MakeRig) -> None:
    rig = make_rig()
    for name in ("a", "b"):
        rig.submit(rig.request(name, SYSTEM[:96], max_tokens=3))
        rig.run()
    assert rig.tokens("a") == rig.tokens("b") == rig.undisturbed(SYSTEM[:96], 0, 3)
    # The last block was computed again and is stored once.
    assert rig.scheduler.stats().prefix_merged_tokens == 16


def test_a_running_sequence_shares_with_those_that_come(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit(rig.request("a", SYSTEM, max_tokens=50))
    rig.step()
    rig.step()
    held = rig.held_blocks
    rig.submit(rig.request("b", SYSTEM + [2] * 10, max_tokens=4))
    assert rig.held_blocks == held
    rig.step()
    assert rig.held_blocks == held + 1


def test_a_hit_lowers_the_price_only_by_what_others_hold_anyway(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=20, expected=64)
    rig.submit(rig.request("a", SYSTEM, max_tokens=60))
    rig.step()
    rig.step()
    # 10 of 20 blocks are promised or held; alone this one would need 11.
    refused = rig.submit(rig.request("other", list(range(170)), max_tokens=4))
    assert refused.needed_bytes == 11 * rig.block_bytes
    assert rig.submit(rig.request("b", SYSTEM + [2] * 70, max_tokens=4)) is None
    rig.run()
    # Now nobody holds the prefix: using it takes as much from others as computing it.
    before = rig.scheduler.stats().headroom_bytes
    rig.submit(rig.request("c", SYSTEM + [3] * 70, max_tokens=4))
    assert rig.scheduler.stats().headroom_bytes == before - 11 * rig.block_bytes


def test_a_hit_stays_while_its_owner_waits(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=40, max_sequences=1)
    rig.submit(rig.request("a", SYSTEM, max_tokens=2))
    rig.run()
    rig.submit(rig.request("long", list(range(300)), max_tokens=10))
    rig.submit(rig.request("b", [*SYSTEM, 2], max_tokens=2))
    rig.run()
    assert rig.outputs["b"][0].num_cached_tokens == 96


def test_the_same_prompt_is_not_computed_twice_at_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit(rig.request("a", SYSTEM + [1] * 9))
    rig.submit(rig.request("b", SYSTEM + [2] * 9))
    computed = 0
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule()
        computed += sum(len(chunk.token_ids) for chunk in plan.chunks)
        rig.finish(plan)
    assert computed == 109 + 13 + 2 * 7
    assert rig.scheduler.stats().prefix_merged_tokens == 0


@pytest.mark.parametrize("ending", ["cancel", "preempt"])
def test_nobody_waits_for_a_prefix_whose_owner_is_gone(make_rig: MakeRig, ending: str) -> None:
    rig = make_rig()
    rig.submit(rig.request("a", list(range(500)), priority=1))
    rig.submit(rig.request("b", list(range(400)), max_tokens=3))
    rig.step()
    assert rig.scheduler.stats().num_running == 1
    if ending == "cancel":
        rig.scheduler.cancel("a")
    else:
        rig.scheduler.preempt_newest()
    rig.scheduler.set_batch_share(1.0)
    assert rig.run()["b"] == rig.undisturbed(list(range(400)), 0, 3)


def test_a_more_important_sequence_waits_for_nobodys_prefix(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit(rig.request("a", list(range(500))))
    rig.step()
    rig.submit(rig.request("urgent", list(range(400)), priority=1))
    plan = rig.scheduler.schedule()
    assert plan.chunks[0].request_id == "urgent"
    rig.finish(plan)


def test_a_full_cache_is_as_good_as_an_empty_pool(make_rig: MakeRig) -> None:
    """Memory that is kept for reuse never refuses a request and never wedges."""
    rig = make_rig(blocks=20)
    pool = rig.scheduler.stats().headroom_bytes
    for number in range(30):
        prompt = [5000 * number + at for at in range(250)]
        assert rig.submit(rig.request(str(number), prompt, max_tokens=40)) is None
        assert rig.run()[str(number)] == rig.undisturbed(prompt, 0, 40)
        assert rig.scheduler.stats().headroom_bytes == pool
    assert rig.scheduler.stats().kv_reclaimable_bytes > 0.9 * pool


def test_turned_off_nothing_is_kept(make_rig: MakeRig) -> None:
    rig = make_rig(policy=OFF)
    for name in ("a", "b"):
        rig.submit(rig.request(name, SYSTEM, session="s"))
        rig.run()
    counters = rig.scheduler.stats()
    assert (counters.prefix_lookup_tokens, counters.prefix_hit_tokens) == (0, 0)
    assert rig.scheduler.stats().kv_free_bytes == rig.scheduler.stats().headroom_bytes
    assert rig.scheduler.stats().num_sessions == 0


PROMPTS = st.lists(
    st.tuples(st.integers(0, 100), st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=9
)


def test_on_and_off_give_the_same_tokens(make_rig: MakeRig) -> None:
    @given(prompts=PROMPTS, gap=st.integers(0, 6), blocks=st.integers(12, 40))
    @settings(max_examples=60, deadline=None)
    def same(prompts: list[tuple[int, int, int]], gap: int, blocks: int) -> None:
        for policy in (KvPolicy(), KvPolicy(host_slots=12), OFF):
            rig = make_rig(blocks=blocks, policy=policy, expected=4, prefill_rate=1.0)
            for number, (shared, own, max_tokens) in enumerate(prompts):
                tokens = SYSTEM[:shared] + [number] * own
                rig.submit(rig.request(str(number), tokens, max_tokens, seed=number), resumed=True)
                for _ in range(gap):
                    rig.step()
            results = rig.run()
            for number, (shared, own, max_tokens) in enumerate(prompts):
                tokens = SYSTEM[:shared] + [number] * own
                count = min(max_tokens, 16 * blocks - len(tokens))
                assert results[str(number)] == rig.undisturbed(tokens, number, count)

    same()
