"""The step loop over convolutions: failed steps, searches and short memory leave every token right.

Whoever chooses a token is checked against the model alone with the same tokens before it.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.protocol.requests import BeamParams, EngineRequest, PromptLogprobs
from ullage_engine.protocol.step_plan import Moves, SampledToken, StepPlan
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.scheduler.scheduler import KvPolicy
from ullage_engine.worker.engine import EngineCore

MAX_STEPS = 3000


class Faulty:
    """A device that is checked, and whose steps fail when they have written all they write."""

    def __init__(self, rig: Any, random: Random, share: float) -> None:
        self.num_failed = 0
        self._rig = rig
        self._random = random
        self._share = share
        self._failed_step = -1

    def move(self, moves: Moves) -> None:
        self._rig.device.move(moves)

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        assert plan.num_tokens <= self._rig.max_step_tokens
        sampled: list[SampledToken] = self._rig.device.execute(plan)
        chosen = {each.request_id: each.token_id for each in sampled}
        for chunk in plan.chunks:
            if chunk.sampling is not None:
                alone = self._rig.undisturbed(chunk.history, chunk.sampling.seed, 1)
                assert [chosen[chunk.request_id]] == alone, chunk.request_id
        self._fail(plan)
        return sampled

    def _fail(self, plan: StepPlan) -> None:
        step = self._rig.scheduler.stats().num_steps
        if step != self._failed_step and self._random.random() < self._share:
            self._failed_step = step
            self.num_failed += 1
            # A chunk that fails alone would be given up.
            if len(plan.chunks) > 1 and self._random.random() < 0.5:
                raise ValueError("the step cannot be computed")
            raise torch.OutOfMemoryError("out of memory")


def traffic(rig: Any, random: Random) -> list[list[EngineRequest]]:
    """Prompts that begin alike, some answered several times or by a search."""
    groups = []
    for number in range(7):
        prompt = [1000 + at for at in range(random.choice([0, 16, 33, 64]))] + [number % 3] * 5
        request = rig.request(f"g{number}", prompt, random.randint(1, 24), seed=number)
        kind = random.choice(["one", "one", "samples", "search"])
        if kind == "search":
            beam = BeamParams(width=random.randint(2, 3))
            groups.append([msgspec.structs.replace(request, beam=beam, stop_token_ids=[12])])
        else:
            samples = range(random.randint(2, 4) if kind == "samples" else 1)
            ids = [f"g{number}.{sample}" for sample in samples]
            groups.append([msgspec.structs.replace(request, request_id=each) for each in ids])
    return groups


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.2]), st.sampled_from([4, 40]))
def test_every_token_is_the_models_own(
    make_rig: Callable[..., Any], seed: int, share: float, budget: int
) -> None:
    random = Random(seed)
    policy = KvPolicy(prefix_cache=random.random() < 0.7, host_slots=random.choice([0, 6]))
    rig = make_rig(
        blocks=16, policy=policy, max_sequences=4, prompt_tokens=budget, expected=4, conv_layers=4
    )
    runner = Faulty(rig, random, share)
    engine = EngineCore(rig.scheduler, runner, ThroughputEstimator())
    waiting = traffic(rig, random)
    unfinished = set()
    for step in range(MAX_STEPS):
        if waiting and step % 3 == 0:
            group = waiting.pop()
            assert engine.submit_group(group, resumed=True) == []
            unfinished |= {request.request_id for request in group}
        unfinished -= {each.request_id for each in engine.step() if each.finish}
        engine.scheduler.check_integrity()
        if not unfinished and not waiting:
            break
    assert not unfinished
    assert not engine.has_work
    assert engine.take_failed() == []
    assert (runner.num_failed > 0) <= (share > 0)
