"""Several plans in flight: disjoint, of about equal size, and each sequence waits for its own."""

from collections.abc import Callable
from typing import Any

from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.scheduler.scheduler import KvPolicy

MakeRig = Callable[..., Any]


def names(plan: StepPlan) -> list[str]:
    return [chunk.request_id for chunk in plan.chunks]


def begin(rig: Any) -> list[str]:
    """Begins the next plan; returns whom it computes."""
    plan = rig.scheduler.schedule()
    rig.begin(plan)
    return names(plan)


def prefilled(rig: Any, count: int, max_tokens: int = 20) -> None:
    """Submits prompts, and computes them up to their first token."""
    for number in range(count):
        assert rig.submit(rig.request(f"r{number}", [number + 1] * 5, max_tokens)) is None
    begin(rig)
    rig.end()


def test_decodes_are_shared_out_to_the_plans_in_flight(make_rig: MakeRig) -> None:
    rig = make_rig(in_flight=2)
    prefilled(rig, 5)
    first = begin(rig)
    second = begin(rig)
    assert (first, second) == (["r0", "r1", "r2"], ["r3", "r4"])
    assert begin(rig) == []
    for expected in (first, second, first, second):
        assert sorted(output.request_id for output in rig.end()) == expected
        assert begin(rig) == expected


def test_one_sequence_is_in_one_plan_and_one_plan_has_all_where_one_is_in_flight(
    make_rig: MakeRig,
) -> None:
    alone = make_rig(in_flight=2)
    prefilled(alone, 1)
    assert (begin(alone), begin(alone)) == (["r0"], [])
    together = make_rig()
    prefilled(together, 5)
    assert begin(together) == [f"r{number}" for number in range(5)]


def test_what_ends_is_made_up_for_by_the_other_plan(make_rig: MakeRig) -> None:
    rig = make_rig(in_flight=2)
    prefilled(rig, 6)
    assert (begin(rig), begin(rig)) == (["r0", "r1", "r2"], ["r3", "r4", "r5"])
    for name in ("r4", "r5"):
        rig.scheduler.cancel(name)
    rig.end()
    # Of four that are left two are computed, and then the one that was left out with the other.
    assert begin(rig) == ["r0", "r1"]
    rig.end()
    assert begin(rig) == ["r2", "r3"]


def test_prompts_and_decodes_of_others_fill_the_second_plan(make_rig: MakeRig) -> None:
    rig = make_rig(in_flight=2, prompt_tokens=32)
    prefilled(rig, 2)
    rig.submit(rig.request("long", [9] * 100, max_tokens=2))
    assert (begin(rig), begin(rig)) == (["r0", "long"], ["r1"])
    assert rig.run() == {
        **{f"r{number}": rig.undisturbed([number + 1] * 5, 0, 20) for number in range(2)},
        "long": rig.undisturbed([9] * 100, 0, 2),
    }


def test_a_cancelled_sequence_leaves_its_token_and_blocks_behind(make_rig: MakeRig) -> None:
    """Its blocks go to a request of the same name before its plan is committed."""
    rig = make_rig(in_flight=2, blocks=4, policy=KvPolicy(prefix_cache=False), expected=4)
    rig.submit(rig.request("a", [1] * 20, max_tokens=4))
    rig.submit(rig.request("b", [2] * 20, max_tokens=4))
    begin(rig)
    rig.end()
    plan = rig.scheduler.schedule()
    assert names(plan) == ["a"]
    rig.begin(plan)
    rig.scheduler.cancel("a")
    assert not rig.scheduler.is_awaited("a")
    again = [3] * 20
    assert rig.submit(rig.request("a", again, max_tokens=4)) is None
    later = rig.scheduler.schedule()
    assert sorted(names(later)) == ["a", "b"]
    (chunk,) = [each for each in later.chunks if each.request_id == "a"]
    assert set(chunk.block_ids) == set(plan.chunks[0].block_ids)
    rig.begin(later)
    rig.outputs.pop("a")
    assert rig.end() == []
    assert rig.run() == {
        "a": rig.undisturbed(again, 0, 4),
        "b": rig.undisturbed([2] * 20, 0, 4),
    }


def test_a_sequence_in_flight_is_preempted_when_its_plan_is_committed(make_rig: MakeRig) -> None:
    rig = make_rig(in_flight=2, blocks=4, policy=KvPolicy(prefix_cache=False), expected=1)
    for name in ("old", "new"):
        assert rig.submit(rig.request(name, [len(name)] * 30, max_tokens=9), resumed=True) is None
    while len(rig.tokens("new")) < 2:
        rig.step()
    # Both fill their two blocks now. The older one needs a third and the newer one is in flight.
    while rig.computed:
        rig.end()
    order = []
    while not rig.scheduler.stats().num_preemptions:
        order.append(begin(rig))
        if not order[-1] or len(rig.computed) == 2:
            rig.end()
    assert rig.run() == {name: rig.undisturbed([len(name)] * 30, 0, 9) for name in ("old", "new")}
