"""What experts are chosen by is not rounded to the computing type."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.parallel.slices import Slicer

BIAS = "layers.{}.router_bias"


@pytest.fixture
def saved(tmp_path: Path, random_model: Callable[[str, int], Any]) -> Any:
    """transformers' bfloat16 model, which keeps the bias in float32, saved to `tmp_path`."""
    seed = 20_261
    model = random_model("lfm2_moe", seed).bfloat16()
    for layer in model.model.layers[1:]:
        layer.feed_forward.expert_bias.data = torch.randn(8)
    model.save_pretrained(tmp_path)
    return model


def expected(model: Any) -> dict[str, torch.Tensor]:
    layers = list(enumerate(model.model.layers))[1:]
    return {BIAS.format(index): layer.feed_forward.expert_bias for index, layer in layers}


def test_the_bias_is_float32_as_in_the_checkpoint(
    saved: Any, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    tensors = load(f"file://{tmp_path}", torch.bfloat16).tensors
    biases = expected(saved)
    assert any(not torch.equal(each, each.bfloat16().float()) for each in biases.values())
    for name, bias in biases.items():
        assert tensors[name].dtype == torch.float32
        assert torch.equal(tensors[name], bias)
    others = {name: each for name, each in tensors.items() if name not in biases}
    assert {each.dtype for each in others.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_so_it_is_on_every_rank(
    saved: Any, tmp_path: Path, load: Callable[..., LoadedModel], tensor: int, pipeline: int
) -> None:
    loaded = load(f"file://{tmp_path}", torch.bfloat16)
    biases = expected(saved)
    held: set[str] = set()
    for rank in range(2):
        slicer = Slicer(loaded.model_config, RankLayout(tensor=tensor, pipeline=pipeline), rank)
        held_here = [name for name in loaded.tensors if slicer.holds(name)]
        parts = {name: slicer.cut(name, loaded.tensors[name]) for name in held_here}
        assert all(torch.equal(parts[name], biases[name]) for name in biases.keys() & parts.keys())
        held |= biases.keys() & parts.keys()
    assert held == biases.keys()
