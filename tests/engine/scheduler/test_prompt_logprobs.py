"""Every token of a prompt is scored once, from rows that saw all tokens before it."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ullage_engine.scheduler.scheduler import KvPolicy

MakeRig = Callable[..., Any]


def prompt(length: int, number: int = 0) -> list[int]:
    return [1000 * number + at for at in range(length)]


def wanted(rig: Any, tokens: list[int]) -> list[int]:
    """What the token after each prefix depends on."""
    return [rig.undisturbed(tokens[:end], 0, 1)[0] for end in range(1, len(tokens))]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_prompt_is_scored_chunk_by_chunk(make_rig: MakeRig, in_flight: int) -> None:
    rig = make_rig(prompt_tokens=24, in_flight=in_flight)
    tokens = prompt(70)
    rig.submit(rig.request("a", tokens, prompt_logprobs=2))
    rig.submit(rig.request("b", prompt(30, 1)))
    rig.run()
    assert rig.scores == {"a": wanted(rig, tokens)}
    assert rig.tokens("a") == rig.undisturbed(tokens, 0, 8)


def test_a_prompt_of_one_token_has_nothing_to_score(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit(rig.request("a", [5], prompt_logprobs=0))
    rig.run()
    assert rig.scores == {}
    assert rig.tokens("a") == rig.undisturbed([5], 0, 8)


def test_cached_tokens_are_computed_again(make_rig: MakeRig) -> None:
    """Rows that are not computed have no logits. The blocks are still shared in the end."""
    rig = make_rig(tier_slots=64)
    tokens = prompt(70)
    rig.submit(rig.request("first", tokens))
    rig.run()
    rig.submit(rig.request("a", tokens, prompt_logprobs=0))
    plan = rig.scheduler.schedule()
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(0, 64)]
    rig.finish(plan)
    rig.run()
    assert rig.scores["a"] == wanted(rig, tokens)
    assert rig.outputs["a"][0].num_cached_tokens == 0

    rig.submit(rig.request("last", tokens))
    assert rig.scheduler.schedule().chunks[0].start == 64


def test_it_does_not_wait_for_a_prefix_that_another_computes(make_rig: MakeRig) -> None:
    rig = make_rig(prompt_tokens=32)
    tokens = prompt(100)
    rig.submit(rig.request("first", tokens))
    rig.step()
    rig.submit(rig.request("a", tokens, prompt_logprobs=0))
    rig.step()
    assert rig.scheduler.stats().num_running == 2
    rig.run()
    assert rig.scores["a"] == wanted(rig, tokens)


@pytest.mark.parametrize("host_slots", [0, 100])
def test_a_preempted_prompt_goes_on_where_it_was(make_rig: MakeRig, host_slots: int) -> None:
    """Nothing is scored twice, and blocks of tokens that are scored may come from the cache."""
    rig = make_rig(prompt_tokens=32, policy=KvPolicy(host_slots=host_slots), prefill_rate=1.0)
    tokens = prompt(100)
    rig.submit(rig.request("a", tokens, prompt_logprobs=0))
    rig.step()
    rig.step()
    assert rig.scheduler.preempt_newest()
    plan = rig.scheduler.schedule()
    [chunk] = plan.chunks
    assert chunk.start >= 48
    assert chunk.targets.start == 65
    rig.finish(plan)
    rig.run()
    assert rig.scores["a"] == wanted(rig, tokens)


def test_a_step_that_is_computed_again_is_scored_once(make_rig: MakeRig) -> None:
    rig = make_rig(prompt_tokens=64)
    tokens = prompt(60)
    rig.submit(rig.request("a", tokens, prompt_logprobs=0))
    rig.device.execute(rig.scheduler.schedule())
    rig.finish(rig.scheduler.replan(20))
    rig.run()
    assert rig.scores["a"] == wanted(rig, tokens)


def test_the_next_worker_scores_the_rest(make_rig: MakeRig) -> None:
    rig = make_rig(prompt_tokens=32)
    tokens = prompt(100)
    request = rig.request("a", tokens, prompt_logprobs=0)
    rig.submit(request)
    rig.step()
    rig.device.forget()
    rig.scheduler = rig.new_scheduler()
    rig.submit(replace(request, num_scored=33), resumed=True)
    rig.run()
    assert rig.scores["a"] == wanted(rig, tokens)


def test_one_sample_scores_the_prompt_of_all(make_rig: MakeRig) -> None:
    rig = make_rig(prompt_tokens=32)
    tokens = prompt(100)
    first = rig.request("a", tokens, prompt_logprobs=0)
    others = [rig.request(name, tokens, seed=seed) for seed, name in enumerate("bc", start=1)]
    rig.submit(first, *others)
    rig.run()
    assert rig.scores == {"a": wanted(rig, tokens)}
    assert rig.tokens("c") == rig.undisturbed(tokens, 2, 8)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_traffic(data: st.DataObject) -> None:
    """Shared prefixes, preemptions and a small pool cost no score."""
    from ullage_testing.fake_device import Rig

    rig = Rig(
        blocks=24,
        prompt_tokens=data.draw(st.sampled_from([5, 16, 40])),
        policy=KvPolicy(host_slots=data.draw(st.sampled_from([0, 30]))),
        prefill_rate=1.0,
        conv_layers=data.draw(st.sampled_from([0, 1])),
        in_flight=data.draw(st.sampled_from([1, 2])),
        tier_slots=data.draw(st.sampled_from([0, 30])),
    )
    asked: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 6))):
        shared = prompt(data.draw(st.integers(1, 60)))
        tokens = shared + [7] * data.draw(st.integers(0, 5))
        scores = data.draw(st.booleans())
        name = f"request-{number}"
        rig.submit(rig.request(name, tokens, prompt_logprobs=0 if scores else None))
        if scores and name in rig.scheduler._sequences:
            asked[name] = tokens
        for _ in range(data.draw(st.integers(0, 4))):
            rig.step()
        if data.draw(st.booleans()) and not rig.computed:
            rig.scheduler.preempt_newest()
    rig.run()
    assert {name: rig.scores.get(name, []) for name in asked} == {
        name: wanted(rig, tokens) for name, tokens in asked.items()
    }
