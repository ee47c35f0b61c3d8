"""Experts slice by slice in a whole model: the same results, in the memory that was predicted."""

from pathlib import Path

import pytest
import torch
from ullage_testing.small_models import FAMILIES, SMALL, make_runner

from ullage_engine.kernels import arena
from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.registry import lfm2_moe
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

TOKENS = 150


@pytest.fixture
def loaded(seed: int) -> LoadedModel:
    values = {"model_type": "lfm2_moe", **SMALL, **FAMILIES["lfm2_moe"]}
    config = lfm2_moe(HFConfig(Path("config.json"), values))
    tensors = {
        plan.name: torch.randn(plan.shape).mul_(plan.shape[-1] ** -0.5)
        for plan in plan_tensors(config)
    }
    return LoadedModel(config, tensors, sum(each.nbytes for each in tensors.values()))


def all_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """The logits of every row, computed in two parts."""
    blocks = list(range(-(-len(tokens) // 16)))
    chunk = Chunk("0", tokens, 0, blocks, None, tokens, len(tokens), next_state_slot=0)
    hidden = runner.hidden(StepPlan([chunk]))
    out = torch.empty(len(tokens), runner.model_config.vocab)
    runner.write_logits(hidden, out[:100])
    runner.write_logits(hidden, out[100:], first=100)
    return out


@pytest.mark.parametrize("most", [1, 64, TOKENS])
def test_logits_do_not_depend_on_the_slice(
    loaded: LoadedModel, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(0, loaded.model_config.vocab, (TOKENS,)).tolist()
    whole = make_runner(loaded)
    wanted = all_logits(whole, tokens)
    monkeypatch.setitem(arena.SLICE_TOKENS, "cpu", most)
    sliced = make_runner(loaded)
    assert (all_logits(sliced, tokens) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert sliced.step_arena_bytes <= whole.step_arena_bytes
    assert sliced.allocated_bytes()["step_arena"] == sliced.step_arena_bytes


def test_the_arena_has_room_for_slices_of_the_device(loaded: LoadedModel) -> None:
    tokens = arena.SLICE_TOKENS["cpu"]
    limits = arena.StepLimits(4 * tokens, 16, 512, 1024, itemsize=4)
    on_gpu = arena.StepLimits(
        4 * tokens, 16, 512, 1024, itemsize=4, max_slice_tokens=arena.SLICE_TOKENS["cuda"]
    )
    config = loaded.model_config
    chosen = [
        {each.name: each.num_elements for each in arena.step_arena(config, own).buffers}
        for own in (limits, on_gpu)
    ]
    assert chosen[0]["expert_weights"] == tokens * 3
    assert chosen[1]["expert_weights"] == 4 * tokens * 3
