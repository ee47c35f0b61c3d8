"""Convolution states: shared where they are at hand, and rebuilt exactly where they are not.

Four convolutions of three taps: eight tokens rebuild a state.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.scheduler.scheduler import KvPolicy

LAYERS = 4
REPLAY = 8

MakeRig = Callable[..., Any]


def document(length: int) -> list[int]:
    return [1000 + at for at in range(length)]


def replays(plan: StepPlan) -> dict[str, int]:
    return {chunk.request_id: chunk.num_replayed for chunk in plan.chunks}


def second_answer(make_rig: MakeRig, **options: Any) -> tuple[Any, list[int]]:
    """A request answered after one whose prompt it goes on from; the rig, and what is right."""
    rig = make_rig(conv_layers=LAYERS, **options)
    rig.submit(rig.request("first", document(50), 4))
    rig.run()
    prompt = [*document(50), 7, 8, 9]
    rig.submit(rig.request("second", prompt, 6))
    return rig, rig.undisturbed(prompt, 0, 6)


def test_a_prefix_hit_replays_what_its_state_needs_and_no_more(make_rig: MakeRig) -> None:
    rig, expected = second_answer(make_rig)
    plan = rig.scheduler.schedule()
    (chunk,) = plan.chunks
    assert (chunk.start, chunk.num_replayed, chunk.state_slot) == (48 - REPLAY, REPLAY, None)
    rig.finish(plan)
    assert rig.run()["second"] == expected
    # Replayed tokens were found all the same.
    assert rig.outputs["second"][0].num_cached_tokens == 48
    assert rig.scheduler.stats().prefix_hit_tokens == 48


def test_a_replay_one_token_too_short_changes_the_answer(make_rig: MakeRig) -> None:
    rig, expected = second_answer(make_rig, replay_tokens=REPLAY - 1)
    assert rig.run()["second"][0] != expected[0]


def test_a_hit_shorter_than_the_replay_begins_at_the_first_token(make_rig: MakeRig) -> None:
    rig = make_rig(conv_layers=10)
    rig.submit(rig.request("first", document(17), 2))
    rig.run()
    rig.submit(rig.request("second", [*document(16), 5], 4))
    plan = rig.scheduler.schedule()
    assert (plan.chunks[0].start, plan.chunks[0].num_replayed) == (0, 16)
    rig.finish(plan)
    assert rig.run()["second"] == rig.undisturbed([*document(16), 5], 0, 4)


def test_a_replay_longer_than_the_budget_takes_several_steps(make_rig: MakeRig) -> None:
    rig, expected = second_answer(make_rig, prompt_tokens=3)
    plans = []
    for _ in range(4):
        plans.append(rig.scheduler.schedule())
        rig.finish(plans[-1])
    shapes = [(plan.chunks[0].start, plan.chunks[0].num_replayed) for plan in plans]
    assert shapes == [(40, 3), (43, 3), (46, 2), (49, 0)]
    assert [plan.chunks[0].state_slot is None for plan in plans] == [True, False, False, False]
    assert rig.run()["second"] == expected


def test_many_that_need_a_replay_before_they_decode_queue_for_the_budget(make_rig: MakeRig) -> None:
    rig = make_rig(conv_layers=LAYERS, prompt_tokens=20)
    rig.submit(rig.request("first", document(33), 2))
    rig.run()
    names = [f"r{number}" for number in range(8)]
    for seed, name in enumerate(names):
        rig.submit(rig.request(name, document(33), 3, seed=seed))
    plan = rig.scheduler.schedule()
    # Two replays of eight tokens and their one own; the third begins with what is left.
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [9, 9, 2]
    rig.finish(plan)
    answers = rig.run()
    for seed, name in enumerate(names):
        assert answers[name] == rig.undisturbed(document(33), seed, 3)


def test_samples_go_on_from_the_state_of_the_first(make_rig: MakeRig) -> None:
    rig = make_rig(conv_layers=LAYERS)
    rig.submit(*[rig.request(f"s{seed}", document(40), 5, seed=seed) for seed in range(4)])
    plans = [rig.scheduler.schedule()]
    assert [(each.start, len(each.token_ids)) for each in plans[0].chunks] == [(0, 39)]
    rig.finish(plans[0])
    plan = rig.scheduler.schedule()
    assert replays(plan) == {f"s{seed}": 0 for seed in range(4)}
    # All read one state; each writes its own.
    assert len({chunk.state_slot for chunk in plan.chunks}) == 1
    assert len({chunk.next_state_slot for chunk in plan.chunks}) == 4
    rig.finish(plan)
    answers = rig.run()
    for seed in range(4):
        assert answers[f"s{seed}"] == rig.undisturbed(document(40), seed, 5)


@pytest.mark.parametrize(("back", "replayed"), [(1, 0), (4, REPLAY)])
def test_a_branch_replays_only_where_its_parents_state_is_past(
    make_rig: MakeRig, back: int, replayed: int
) -> None:
    rig = make_rig(conv_layers=LAYERS, policy=KvPolicy(prefix_cache=False))
    rig.submit(rig.request("parent", document(30), 20))
    for _ in range(6):
        rig.step()
    tokens = [*document(30), *rig.tokens("parent")]
    branch = [*tokens[:-back], 5]
    rig.scheduler.fork("parent", rig.request("child", branch, 6))
    rig.scheduler.cancel("parent")
    plan = rig.scheduler.schedule()
    assert replays(plan) == {"child": replayed}
    rig.finish(plan)
    assert rig.run()["child"] == rig.undisturbed(branch, 0, 6)


@pytest.mark.parametrize(("others", "replayed"), [(0, 0), (2, REPLAY)])
def test_a_swapped_sequence_keeps_its_state_until_the_slot_is_needed(
    make_rig: MakeRig, others: int, replayed: int
) -> None:
    policy = KvPolicy(prefix_cache=False, host_slots=8)
    rig = make_rig(conv_layers=LAYERS, policy=policy, max_sequences=2, prefill_rate=1.0)
    rig.submit(rig.request("swapped", document(40), 12))
    for _ in range(3):
        rig.step()
    rig.scheduler.preempt_newest()
    for number in range(others):
        rig.submit(rig.request(f"other{number}", [number + 1] * 20, 3, priority=1))
    plan = rig.scheduler.schedule()
    while "swapped" not in replays(plan):
        rig.finish(plan)
        plan = rig.scheduler.schedule()
    assert rig.scheduler.stats().num_swaps == 1
    assert replays(plan)["swapped"] == replayed
    rig.finish(plan)
    assert rig.run()["swapped"] == rig.undisturbed(document(40), 0, 12)
