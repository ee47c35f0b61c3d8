"""The cost model of steps: its fit finds the model that made the measurements."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_replay.cost import Curve, FitError, MeasuredStep, StepCost, StepSize, fit

TRUE = StepCost(
    decodes=Curve(((1.0, 0.02), (4.0, 0.03), (16.0, 0.06))),
    prompts=Curve(((1.0, 0.001), (512.0, 0.4))),
    prompt_step=0.015,
    per_decode_context=1e-6,
    per_prompt_context=2e-7,
)


def measured(count: int, noise: float) -> list[MeasuredStep]:
    draw = random.Random(1)
    steps = []
    for _ in range(count):
        decodes = draw.choice([0, 1, 1, 2, 3, 5, 8, 10, 16])
        prompt = draw.choice([0, 0, 20, 100, 300, 512]) if decodes else draw.choice([20, 100, 512])
        context = float(prompt * draw.randint(10, 1000))
        size = StepSize(decodes, prompt, decodes * draw.randint(100, 2000), context)
        seconds = TRUE.seconds(size) * draw.uniform(1 - noise, 1 + noise)
        steps.append(MeasuredStep(size, seconds))
    return steps


def test_the_fit_predicts_steps_that_it_has_not_seen() -> None:
    cost = fit(measured(2000, noise=0.05))
    assert cost.error < 0.04
    for size in (StepSize(6, 0, 3000, 0), StepSize(0, 200, 0, 2e4), StepSize(12, 64, 9000, 4e4)):
        assert cost.seconds(size) == pytest.approx(TRUE.seconds(size), rel=0.03)


def test_one_stalled_step_does_not_move_the_fit() -> None:
    steps = measured(2000, noise=0.0)
    steps[7] = steps[7]._replace(seconds=30.0)
    assert fit(steps).seconds(StepSize(4, 0, 1000, 0)) == pytest.approx(0.031, rel=0.02)


def test_too_few_steps_and_steps_without_decodes_are_refused() -> None:
    with pytest.raises(FitError, match="29 steps are too few; measure at least 30"):
        fit(measured(29, 0.0))
    prompts = [each for each in measured(2000, 0.0) if not each.size.decodes]
    with pytest.raises(FitError, match="no step decodes"):
        fit(prompts)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 600), st.floats(1e-4, 10.0)), min_size=40)
)
@settings(max_examples=40, deadline=None)
def test_no_prediction_is_negative_or_falls_with_more_work(
    sizes: list[tuple[int, int, float]],
) -> None:
    steps = [
        MeasuredStep(StepSize(decodes, prompt, 100.0 * decodes, 10.0 * prompt), seconds)
        for decodes, prompt, seconds in sizes
        if decodes or prompt
    ]
    try:
        cost = fit(steps)
    except FitError:
        return
    alone = [cost.seconds(StepSize(decodes, 0, 0, 0)) for decodes in range(1, 60)]
    more = [cost.seconds(StepSize(1, prompt, 0, 0)) for prompt in range(1, 700, 7)]
    for seconds in (alone, more):
        # Sums of the same terms may differ in their last bit.
        assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(seconds))
        assert min(seconds) >= 0.0
