"""The layer of experts against transformers', by every path."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from ullage_engine.kernels.arena import SLICE_TOKENS
from ullage_engine.kernels.deterministic import RowProducts
from ullage_engine.layers import moe as matrices_module
from ullage_engine.layers.linear import PlainLinear, RowInvariantLinear
from ullage_engine.layers.moe import (
    PANEL_COLUMNS,
    Experts,
    GroupedExperts,
    LoopedExperts,
    PickedExperts,
    can_group,
    column_panels,
    expert_linears,
)

Build = Callable[..., Experts]
NewLayer = Callable[..., Any]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def run(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """What is added to hidden states, which begin at 1."""
    out = torch.ones_like(x)
    experts.run(x, out)
    return out - 1


class EachPair(LoopedExperts):
    """However many pairs there are, each is multiplied by itself."""

    few_pairs = 1000


def each(weights: torch.Tensor) -> EachPair:
    return EachPair([PlainLinear(matrix) for matrix in weights])


def picked(weights: torch.Tensor) -> PickedExperts:
    """What a GPU with Triton computes, without its kernel."""
    return PickedExperts(each(weights), grouped(weights))


def grouped(weights: torch.Tensor) -> GroupedExperts:
    return GroupedExperts(weights, [PlainLinear(each) for each in weights])


@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 7, 200])
@torch.inference_mode()
def test_equals_transformers(
    new_layer: NewLayer, build: Build, tokens: int, is_skewed: bool
) -> None:
    layer = new_layer(is_skewed)
    x = torch.randn(tokens, 64)
    assert relative(run(build(layer, 200), x), layer.expected(x)) < 1e-5


@pytest.mark.parametrize("is_skewed", [False, True])
@torch.inference_mode()
def test_all_paths_are_equal(
    new_layer: NewLayer, build: Build, is_skewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = new_layer(is_skewed)
    x = torch.randn(50, 64)
    sorted_pairs = run(build(layer, 50), x)
    monkeypatch.setattr(matrices_module, "PANEL_ELEMENTS", 64 * 150)
    assert relative(run(build(layer, 50, grouped), x), sorted_pairs) < 1e-5
    assert relative(run(build(layer, 50, each), x), sorted_pairs) < 1e-5
    assert relative(run(build(layer, 50, picked), x[:4]), sorted_pairs[:4]) < 1e-5


@pytest.mark.parametrize("wrap", [grouped, each])
@torch.inference_mode()
def test_bfloat16_is_as_near_as_its_rounding(
    new_layer: NewLayer, build: Build, wrap: Callable[[torch.Tensor], LoopedExperts]
) -> None:
    layer = new_layer(True)
    x = torch.randn(200, 64).bfloat16()
    expected = layer.expected(x.float())
    out = torch.zeros_like(x)
    build(layer, 200, wrap=wrap, dtype=torch.bfloat16).run(x, out)
    # A few tokens may choose another expert; most are as near as eight bits allow.
    errors = (out.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.02
    assert (errors < 0.05).float().mean() > 0.8


@torch.inference_mode()
def test_tokens_beyond_a_slice(new_layer: NewLayer, build: Build) -> None:
    layer = new_layer()
    tokens = SLICE_TOKENS["cpu"] + 70
    x = torch.randn(tokens, 64)
    assert relative(run(build(layer, tokens), x), layer.expected(x)) < 1e-5


class Downloads:
    """Counts copies to the host, which on a GPU wait for all that was launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        download = torch.Tensor.cpu

        def counted(tensor: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return download(tensor)

        monkeypatch.setattr(torch.Tensor, "cpu", counted)


@pytest.mark.parametrize(("slices", "most"), [(1, 200), (4, 50)])
@torch.inference_mode()
def test_a_slice_reads_on_the_host_where_rows_end_once_at_most(
    new_layer: NewLayer,
    build: Build,
    slices: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = new_layer()
    x = torch.randn(200, 64)
    wanted = layer.expected(x)
    downloads = Downloads(monkeypatch)
    assert relative(run(build(layer, 200, max_slice_tokens=most), x), wanted) < 1e-5
    assert downloads.count == slices
    grouped_too = build(layer, 200, grouped, max_slice_tokens=most)
    assert relative(run(grouped_too, x), wanted) < 1e-5
    assert downloads.count == slices, "grouped products find an expert's rows on the device"


@torch.inference_mode()
def test_ranks_with_halves_of_every_expert_add_up(new_layer: NewLayer, build: Build) -> None:
    layer = new_layer()
    x = torch.randn(20, 64)
    whole = run(build(layer, 20), x)
    first = run(build(half(layer, 0), 20), x)
    both = run(build(half(layer, 1), 20, reduce=lambda partial: partial.add_(first)), x)
    assert relative(both, whole) < 1e-5


def half(layer: Any, rank: int) -> Any:
    """One rank's part of two."""
    size = layer.spec.intermediate // 2
    own = slice(rank * size, (rank + 1) * size)
    bias = layer.gate_up_bias
    down_bias = layer.down_bias
    return replace(
        layer,
        spec=structs.replace(layer.spec, intermediate=size),
        gate_up=torch.cat([each[:, own] for each in layer.gate_up.chunk(2, 1)], 1),
        down=layer.down[:, :, own],
        gate_up_bias=None if bias is None else torch.cat([b[:, own] for b in bias.chunk(2, 1)], 1),
        down_bias=down_bias if rank == 0 else None,
    )


def row_invariant_linear(rows: torch.Tensor) -> RowInvariantLinear:
    matrix = RowInvariantLinear(rows, RowProducts())
    assert matrix.verify_row_invariance([8, 16, 64, 128])
    return matrix


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(new_layer: NewLayer, build: Build) -> None:
    layer = new_layer()

    def wrap(weights: torch.Tensor) -> LoopedExperts:
        return LoopedExperts([row_invariant_linear(each) for each in weights], deterministic=True)

    experts = build(layer, 1200, wrap, matrix=row_invariant_linear, deterministic=True)
    x = torch.randn(1200, 64)
    whole = run(experts, x)
    assert relative(whole, layer.expected(x)) < 1e-5
    for rows in ([5], [1199, 3, 5], list(range(100, 180))):
        padded = torch.zeros(-(-len(rows) // 8) * 8, 64)
        padded[: len(rows)] = x[rows]
        assert torch.equal(run(experts, padded)[: len(rows)], whole[rows])


def test_plain_weights_of_a_cpu_are_looped_over() -> None:
    made = expert_linears(torch.randn(4, 6, 5), PlainLinear, deterministic=False)
    assert isinstance(made, LoopedExperts)


@pytest.mark.parametrize(
    ("dtype", "width", "expected"),
    [(torch.bfloat16, 64, True), (torch.bfloat16, 60, False), (torch.float32, 64, False)],
)
def test_what_a_gpu_groups(dtype: torch.dtype, width: int, expected: bool) -> None:
    assert can_group(torch.empty(2, 16, width, dtype=dtype)) is expected


@pytest.mark.parametrize(("columns", "most"), [(64, 1), (100, 64), (3584, 500), (10, 1000)])
def test_panels_cover_all_columns(columns: int, most: int) -> None:
    panels = column_panels(columns, most)
    assert [c for panel in panels for c in range(columns)[panel]] == list(range(columns))
    assert all((panel.stop - panel.start) <= max(PANEL_COLUMNS, most) for panel in panels)
