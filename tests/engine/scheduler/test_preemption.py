"""Preemption: what it costs, that it ends, and whom it never touches."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_engine.kv_cache.prefix_cache import PrefixCache
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.scheduler.reservations import BlockReservations
from ullage_engine.scheduler.scheduler import KvPolicy
from ullage_engine.scheduler.sequence import Rank, Sequence
from ullage_engine.scheduler.swap import SwapManager, is_swap_cheaper

MakeRig = Callable[..., Any]
SLOW = 1.0
FAST = 1e12
"""Prefill speeds, tokens a second, at which swapping always and never pays."""
SWAPS = KvPolicy(host_slots=100)


def prompt(number: int, length: int) -> list[int]:
    return [1000 * number + at for at in range(length)]


# swap or recompute -------------------------------------------------------------------------------


@given(num_bytes=st.integers(1, 1 << 40), seconds=st.floats(0, 1e6), bandwidth=st.floats(1.0, 1e12))
@hypothesis_settings(max_examples=100, deadline=None)
def test_swapping_pays_when_both_ways_take_less_than_computing(
    num_bytes: int, seconds: float, bandwidth: float
) -> None:
    both_ways = 2 * num_bytes / bandwidth
    assert is_swap_cheaper(num_bytes, seconds, bandwidth) == (both_ways < seconds)
    assert not is_swap_cheaper(num_bytes, 0.0, bandwidth)


@pytest.mark.parametrize(("bandwidth", "num_swaps"), [(1e3, 0), (1e6, 1)])
def test_the_measured_bandwidth_decides(
    make_rig: MakeRig, bandwidth: float, num_swaps: int
) -> None:
    """8 blocks of 16 kB both ways take 256 s at 1 kB/s; computing 119 tokens takes 119 s."""
    rig = make_rig(policy=replace(SWAPS, swap_bytes_per_second=bandwidth), prefill_rate=SLOW)
    preempted(rig)
    assert rig.scheduler.stats().num_swaps == num_swaps


def test_kv_is_copied_in_beside_the_step_before_the_one_that_needs_it(make_rig: MakeRig) -> None:
    rig = make_rig(policy=SWAPS, prefill_rate=SLOW)
    rig.submit(rig.request("beside", prompt(2, 20), max_tokens=60))
    preempted(rig)
    rig.scheduler.evict_all()
    plan = rig.scheduler.schedule()
    assert [chunk.request_id for chunk in plan.chunks] == ["beside"]
    assert (len(plan.moves.swap_out), len(plan.moves.prefetch)) == (8, 8)
    assert not plan.moves.swap_in
    rig.finish(plan)
    plan = rig.scheduler.schedule()
    assert not plan.moves
    assert [each.request_id for each in plan.chunks] == ["beside", "a"]
    assert (plan.chunks[1].start, len(plan.chunks[1].token_ids)) == (119, 1)
    rig.finish(plan)
    assert rig.run()["a"] == rig.undisturbed(prompt(1, 100), 0, 60)
    stats = rig.scheduler.stats()
    assert (stats.swap_out_bytes, stats.swap_in_bytes) == (8 * rig.block_bytes, 8 * rig.block_bytes)


def preempted(rig: Any, decodes: int = 20) -> None:
    """Computes a prompt of 100 tokens and some output, then preempts."""
    rig.submit(rig.request("a", prompt(1, 100), max_tokens=60))
    while len(rig.tokens("a")) < decodes:
        rig.step()
    assert rig.scheduler.preempt_newest()
    rig.scheduler.check_integrity()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_swapped_sequence_goes_on_without_computing_anything_again(
    make_rig: MakeRig, prefix_cache: bool
) -> None:
    policy = KvPolicy(prefix_cache=prefix_cache, host_slots=100)
    rig = make_rig(policy=policy, prefill_rate=SLOW)
    preempted(rig)
    assert rig.scheduler.stats().num_swaps == 1
    assert rig.held_blocks == 0
    rig.scheduler.evict_all()
    plan = rig.scheduler.schedule()
    assert (len(plan.moves.swap_out), len(plan.moves.swap_in)) == (8, 8)
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(119, 1)]
    rig.finish(plan)
    assert rig.run()["a"] == rig.undisturbed(prompt(1, 100), 0, 60)


def test_what_is_still_cached_is_not_brought_back(make_rig: MakeRig) -> None:
    rig = make_rig(policy=SWAPS, prefill_rate=SLOW)
    preempted(rig)
    plan = rig.scheduler.schedule()
    # 7 of the 8 blocks are full and nobody needed their memory.
    assert len(plan.moves.swap_in) == 1
    rig.finish(plan)
    assert rig.run()["a"] == rig.undisturbed(prompt(1, 100), 0, 60)


def test_a_short_sequence_is_computed_again(make_rig: MakeRig) -> None:
    rig = make_rig(policy=SWAPS, prefill_rate=FAST)
    preempted(rig)
    rig.scheduler.evict_all()
    plan = rig.scheduler.schedule()
    assert rig.scheduler.stats().num_swaps == 0
    assert not plan.moves
    assert plan.chunks[0].start == 0


def test_without_a_free_slot_it_is_computed_again(make_rig: MakeRig) -> None:
    rig = make_rig(policy=KvPolicy(host_slots=7), prefill_rate=SLOW)
    preempted(rig)
    assert rig.scheduler.stats().num_swaps == 0
    assert rig.run()["a"] == rig.undisturbed(prompt(1, 100), 0, 60)


def test_blocks_that_others_use_are_not_copied(make_rig: MakeRig) -> None:
    rig = make_rig(policy=SWAPS, prefill_rate=SLOW)
    rig.submit(rig.request("a", prompt(1, 96) + [7] * 30, max_tokens=60))
    rig.submit(rig.request("b", prompt(1, 96) + [8] * 30, max_tokens=60))
    while not rig.tokens("b"):
        rig.step()
    rig.scheduler.preempt_newest()
    # 96 of the 126 tokens are shared with the one that goes on.
    plan = rig.scheduler.replan(0)
    assert len(plan.moves.swap_out) == 2
    rig.finish(plan)
    # Without them what was copied is of no use.
    rig.scheduler.cancel("a")
    rig.scheduler.evict_all()
    assert rig.run()["b"] == rig.undisturbed(prompt(1, 96) + [8] * 30, 0, 60)


def test_a_cancelled_sequence_leaves_its_slots(make_rig: MakeRig) -> None:
    rig = make_rig(policy=KvPolicy(host_slots=8), prefill_rate=SLOW)
    for _ in range(3):
        preempted(rig)
        rig.scheduler.cancel("a")
        rig.scheduler.check_integrity()
        rig.outputs.clear()
    assert rig.scheduler.stats().num_swaps == 3
    assert not rig.scheduler.schedule().moves


def test_a_sequence_preempted_again_before_it_came_back_stays_swapped(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=12, policy=SWAPS, prefill_rate=SLOW, expected=4)
    for number in range(3):
        rig.submit(rig.request(str(number), prompt(number, 40), max_tokens=90))
    results = rig.run()
    assert results == {str(n): rig.undisturbed(prompt(n, 40), 0, 90) for n in range(3)}
    assert 0 < rig.scheduler.stats().num_swaps <= rig.scheduler.stats().num_preemptions


def test_who_is_preempted_between_start_and_step_keeps_its_slots() -> None:
    store = PrefixCache(8, 16, KvPolicy(), time.monotonic)
    profile = MemoryProfile(16, (CacheGroup(1),), kv_pool_bytes=8 * 16)
    reservations = BlockReservations(store, profile)
    throughput = ThroughputEstimator()
    throughput.prefill_tokens_per_second = SLOW
    mover = SwapManager(store, 1, KvPolicy(host_slots=8), throughput)
    request = EngineRequest(
        request_id="a",
        token_ids=prompt(1, 40),
        num_prompt_tokens=40,
        max_tokens=9,
        sampling=SamplingParams(),
    )
    sequence = Sequence(request, Rank(0, 0, 0), 128, 8, list(request.token_ids))
    reservations.defer(sequence)
    reservations.grant_deferred([sequence])
    sequence.blocks.ids = reservations.take(sequence, 3, ()) or []
    sequence.num_computed = 40
    sequence.is_running = True
    for _ in range(3):
        mover.swap_out(sequence)
        reservations.defer(sequence)
        reservations.grant_deferred([sequence])
        mover.swap_in(sequence, reservations)
    mover.check_integrity([sequence])
    # Out once and in once, however often it was about to start.
    moves = mover.drain([])
    assert (len(moves.swap_out), len(moves.swap_in)) == (3, 3)
    assert [slot for slot, _ in moves.swap_in] == [slot for _, slot in moves.swap_out]
    assert [block for _, block in moves.swap_in] == sequence.blocks.ids
    assert mover.num_swaps == 1


# no livelock -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [KvPolicy(), KvPolicy(prefix_cache=False), KvPolicy(host_slots=30)]
)
def test_many_long_outputs_on_a_small_pool_all_finish(make_rig: MakeRig, policy: KvPolicy) -> None:
    """20 outputs of 15 blocks each on a pool of 40: vLLM's thrash, without the thrash."""
    rig = make_rig(
        blocks=40, policy=policy, max_sequences=20, prompt_tokens=256, expected=8, prefill_rate=SLOW
    )
    requests = [rig.request(str(n), prompt(n, 30), max_tokens=200, seed=n) for n in range(20)]
    for request in requests:
        rig.submit(request, resumed=True)
    computed = 0
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule()
        computed += plan.num_tokens
        rig.finish(plan)
    for request in requests:
        assert rig.tokens(request.request_id) == rig.undisturbed(
            request.token_ids, request.sampling.seed, 200
        )
    # A few preemptions a request, and less than twice the tokens of an undisturbed run.
    assert rig.scheduler.stats().num_preemptions <= 3 * len(requests)
    assert computed < 2 * 20 * 230


def test_the_most_important_is_never_preempted(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=24, expected=8)
    for number in range(6):
        name = str(number)
        rig.submit(rig.request(name, prompt(number, 30), 150, priority=number == 4), resumed=True)
    rig.run()
    assert rig.outputs["4"][-1].num_preemptions == 0
    assert rig.scheduler.stats().num_preemptions > 0


# how many at once --------------------------------------------------------------------------------


def test_a_share_of_the_batch_lets_fewer_start_and_preempts_nobody(make_rig: MakeRig) -> None:
    rig = make_rig(max_sequences=8, blocks=200)
    for number in range(8):
        rig.submit(rig.request(str(number), prompt(number, 20), max_tokens=10 + 10 * number))
    rig.step()
    assert rig.scheduler.stats().num_running == 8
    rig.scheduler.set_batch_share(0.5)
    rig.submit(rig.request("late", prompt(9, 20), max_tokens=3))
    rig.step()
    assert (rig.scheduler.stats().num_running, rig.scheduler.stats().num_preemptions) == (8, 0)
    while rig.scheduler.stats().num_running > 4:
        rig.step()
        assert not rig.tokens("late")
    while not rig.tokens("late"):
        rig.step()
        assert rig.scheduler.stats().num_running <= 4
    rig.scheduler.set_batch_share(0.0)
    rig.run()


# what platforms before this one got wrong --------------------------------------------------------


def test_a_short_prompt_with_a_huge_output_limit_is_admitted(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=40, max_model_len=40_000)
    assert rig.submit(rig.request("a", prompt(1, 30), max_tokens=32_768)) is None
    # It ends where the pool does, not in an error.
    assert len(rig.run()["a"]) == 40 * 16 - 30
    assert rig.outputs["a"][-1].finish == "length"


def test_memory_that_was_used_before_is_as_free_as_before(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=40, policy=KvPolicy(session_blocks=100, host_slots=20))
    pool = rig.scheduler.stats().headroom_bytes
    for number in range(25):
        request = rig.request(str(number), prompt(number, 500), 20, session=f"s{number % 5}")
        assert rig.submit(request) is None
        rig.run()
        assert rig.scheduler.stats().headroom_bytes == pool


def test_the_output_estimate_falls_as_readily_as_it_rises(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=400)

    def serve(count: int, max_tokens: int) -> int:
        for number in range(count):
            stop = [rig.invented] if max_tokens == 1 else []
            rig.submit(rig.request("r", prompt(number, 10), max_tokens, stop=stop))
            while rig.scheduler.has_work:
                rig.scheduler.commit(rig.invent(rig.scheduler.schedule()))
        estimate = rig.scheduler.stats().expected_output_tokens
        assert isinstance(estimate, int)
        return estimate

    assert serve(25, 300) >= 300
    assert serve(300, 1) < 10


def test_a_refusal_is_always_typed_and_says_what_to_do(make_rig: MakeRig) -> None:
    rig = make_rig(blocks=10, max_model_len=400)
    rig.submit(rig.request("a", prompt(1, 60), max_tokens=60))
    never = rig.submit(rig.request("b", prompt(2, 380), max_tokens=5))
    later = rig.submit(rig.request("c", prompt(3, 120), max_tokens=5))
    assert never.never
    assert "shorten it" in never.message
    assert not later.never
    assert later.retry_after_s > 0
    assert "try again later" in later.message
    assert later.needed_bytes > later.available_bytes >= 0


# waste -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [KvPolicy(), KvPolicy(prefix_cache=False)])
def test_waste_under_a_mixed_load_is_below_four_percent(
    make_rig: MakeRig, policy: KvPolicy
) -> None:
    """PA1: prompts of 100 to 2000 tokens, a third of them alike, a few with several samples."""
    rig = make_rig(
        blocks=1500, policy=policy, max_sequences=24, prompt_tokens=512, max_model_len=4096
    )
    wastes: list[float] = []
    for number in range(40):
        length = 100 + 1900 * (number * 7 % 40) // 39
        tokens = prompt(number % 3 if number % 3 else number + 10, length)
        samples = 3 if number % 9 == 0 else 1
        requests = [rig.request(f"{number}.{n}", tokens, 48 + number) for n in range(samples)]
        rig.submit(*requests, resumed=True)
        for _ in range(6):
            plan = rig.scheduler.schedule()
            rig.scheduler.commit(rig.invent(plan))
            if rig.held_blocks > 100:
                wastes.append(rig.scheduler.stats().kv_waste_ratio)
    assert len(wastes) > 100
    assert sum(wastes) / len(wastes) < 0.02
    assert max(wastes) < 0.04
