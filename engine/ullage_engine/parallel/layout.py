"""The layout of ranks: which part of the model each rank computes, and how much it transfers.

The layout is pure arithmetic. It is therefore the same after every restart, and the memory ledger
can reserve transfer buffers before they are allocated. A rank's number is stage * tensor + tensor
rank, where `tensor` is the number of ranks that share a layer. These ranks have adjacent numbers
because they communicate twice per layer, whereas stages communicate only once per step. Layers are
split into stages so that the largest stage is as small as possible. The size of a stage is measured
by several criteria, of which the later ones only break ties.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import msgspec

from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.protocol.worker_state import RankPlace

Criterion = Callable[[int, int, int], int]
"""A function that returns the cost of the run (contiguous range of items) from `start` to `end`.

Its arguments are the run's `index`, `start` and `end`. A longer run never costs less.
"""


def split_runs(count: int, parts: int, criteria: Sequence[Criterion]) -> list[tuple[int, int]]:
    """Split `count` items into `parts` contiguous, non-empty runs. Return each run's (start, end).

    The split minimises the maximum cost of a run under the first criterion. Ties are broken by the
    remaining criteria in order, and finally in favour of the split whose first runs are shortest.
    """
    assert 0 < parts <= count, f"{count} things cannot make {parts} runs"

    limits: list[tuple[Criterion, float]] = []
    for criterion in criteria:
        limits.append((criterion, _least_largest(count, parts, criterion, limits)))
    return _first_cut(count, parts, limits)


def _is_within(limits: Sequence[tuple[Criterion, float]], run: tuple[int, int, int]) -> bool:
    return all(criterion(*run) <= limit for criterion, limit in limits)


def _least_largest(
    count: int, parts: int, criterion: Criterion, limits: Sequence[tuple[Criterion, float]]
) -> float:
    """Return the lowest possible cost of a split's most expensive run.

    The cost is measured by one criterion. Splits with a run that exceeds the `limits` of the
    earlier criteria are ruled out.
    """

    @cache
    def best(index: int, start: int) -> float:
        if index == parts:
            return 0 if start == count else inf
        options = (
            max(criterion(index, start, end), best(index + 1, end))
            for end in range(start + 1, count + 1)
            if _is_within(limits, (index, start, end))
        )
        return min(options, default=inf)

    return best(0, 0)


def _first_cut(
    count: int, parts: int, limits: Sequence[tuple[Criterion, float]]
) -> list[tuple[int, int]]:
    @cache
    def is_possible(index: int, start: int) -> bool:
        if index == parts:
            return start == count
        ends = range(start + 1, count + 1)
        return any(
            _is_within(limits, (index, start, end)) and is_possible(index + 1, end) for end in ends
        )

    runs = []
    start = 0

    for index in range(parts):
        end = next(
            end
            for end in range(start + 1, count + 1)
            if _is_within(limits, (index, start, end)) and is_possible(index + 1, end)
        )
        runs.append((start, end))
        start = end

    return runs


class LayoutError(ValueError):
    """The model cannot be divided among the ranks.

    The message is one line that names the field, the value and the remedy.
    """


class Share(msgspec.Struct, frozen=True):
    """A contiguous range of layers, heads or channels that belongs to one rank."""

    start: int
    end: int

    @property
    def count(self) -> int:
        """Number of layers, heads or channels in the range."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How an engine's ranks are arranged into pipeline stages and tensor-parallel groups."""

    tensor: int = 1
    """Number of ranks that share each layer."""
    pipeline: int = 1
    """Number of pipeline stages. Each stage computes a contiguous range of layers."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        """Return the stage of a rank."""
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Return the index of a rank among the ranks that share its layers."""
        return rank % self.tensor

    def rank(self, stage: int, tensor_rank: int) -> int:
        """Return the number of the rank at index `tensor_rank` within a stage."""
        return stage * self.tensor + tensor_rank

    def is_first(self, rank: int) -> bool:
        """Return whether the rank belongs to the first pipeline stage, which embeds the tokens."""
        return self.stage(rank) == 0

    def is_last(self, rank: int) -> bool:
        """Return whether the rank belongs to the last pipeline stage, which computes the logits."""
        return self.stage(rank) == self.pipeline - 1

    @property
    def sampling_rank(self) -> int:
        """The rank that samples tokens."""
        return self.rank(self.pipeline - 1, 0)


def check_world(pool: str, gpus: int, tensor: int, pipeline: int) -> RankLayout:
    """Return the rank layout that a pool's configuration describes.

    Raises:
        LayoutError: the configured values contradict each other.
    """
    for name, value in (("tensor", tensor), ("pipeline", pipeline)):
        if value < 1:
            raise LayoutError(f"pools.{pool}.parallelism.{name}: {value} is below 1; set 1 or more")
    if tensor * pipeline != gpus:
        raise LayoutError(
            f"pools.{pool}.gpus: {gpus} is not parallelism.tensor {tensor} * "
            f"parallelism.pipeline {pipeline} = {tensor * pipeline}; change one of the three"
        )
    return RankLayout(tensor, pipeline)


def check_model(pool: str, model_config: ModelConfig, layout: RankLayout) -> None:
    """Check that every rank gets a part of the model.

    KV heads are distributed, unevenly if necessary. For example, two tensor ranks get 3 and 6 of
    SmolLM2's 9 query heads, and 1 and 2 of its 3 KV heads. If there are fewer KV heads than ranks,
    several ranks hold a copy of each head, and every head must have the same number of copies.

    Raises:
        LayoutError: the ranks cannot share the layers or the heads.
    """
    if layout.pipeline > model_config.num_layers:
        raise LayoutError(
            f"pools.{pool}.parallelism.pipeline: {layout.pipeline} is more than the model's "
            f"{model_config.num_layers} layers; set {model_config.num_layers} or less"
        )

    tensor = layout.tensor
    heads = model_config.num_heads
    kv_heads = model_config.num_kv_heads
    if tensor > kv_heads and (tensor % kv_heads or heads % tensor):
        fitting = [
            n for n in range(1, heads + 1) if n <= kv_heads or not (n % kv_heads or heads % n)
        ]
        raise LayoutError(
            f"pools.{pool}.parallelism.tensor: {tensor} ranks cannot share the model's {heads} "
            f"query and {kv_heads} KV heads; set one of {', '.join(map(str, fitting))} and "
            "let pipeline make up the rest"
        )


def share(count: int, parts: int, index: int) -> Share:
    """Split `count` items into `parts` ranges, as evenly as possible, and return range `index`."""
    return Share(count * index // parts, count * (index + 1) // parts)


def kv_heads(model_config: ModelConfig, layout: RankLayout, rank: int) -> Share:
    """Return the KV heads of a rank.

    If there are more tensor ranks than KV heads, this is a single head that several ranks share.
    """
    tensor = layout.tensor
    index = layout.tensor_rank(rank)
    if tensor <= model_config.num_kv_heads:
        return share(model_config.num_kv_heads, tensor, index)
    kept = index * model_config.num_kv_heads // tensor
    return Share(kept, kept + 1)


def query_heads(model_config: ModelConfig, layout: RankLayout, rank: int) -> Share:
    """Return the query heads that a rank computes.

    These are all query heads of the rank's KV heads. If several ranks hold copies of a KV head, its
    query heads are divided among them.
    """
    if layout.tensor > model_config.num_kv_heads:
        return share(model_config.num_heads, layout.tensor, layout.tensor_rank(rank))
    held = kv_heads(model_config, layout, rank)
    return Share(held.start * model_config.group_size, held.end * model_config.group_size)


def stage_layers(model_config: ModelConfig, pipeline: int) -> list[Share]:
    """Return the layers of each stage.

    The split minimises the maximum number of attention layers per stage, because the stage with
    the least memory for KV limits the number of blocks. Ties are broken by the work of the slowest
    stage, and then by the maximum size of the weights per stage.
    """
    if pipeline == 1:
        return [Share(0, model_config.num_layers)]
    edges = split_runs(model_config.num_layers, pipeline, list(_criteria(model_config, pipeline)))
    return [Share(start, end) for start, end in edges]


def rank_layers(model_config: ModelConfig, layout: RankLayout, rank: int) -> Share:
    """Return the layers that a rank computes."""
    return stage_layers(model_config, layout.pipeline)[layout.stage(rank)]


def rank_model_config(model_config: ModelConfig, layout: RankLayout, rank: int) -> ModelConfig:
    """Return the configuration of one rank's part of a model."""
    layers = rank_layers(model_config, layout, rank)

    def part(count: int) -> int:
        return share(count, layout.tensor, layout.tensor_rank(rank)).count

    experts = model_config.experts
    if experts is not None:
        experts = msgspec.structs.replace(experts, intermediate=part(experts.intermediate))

    return msgspec.structs.replace(
        model_config,
        layers=model_config.layers[layers.start : layers.end],
        first_layer=layers.start,
        num_heads=query_heads(model_config, layout, rank).count,
        num_kv_heads=kv_heads(model_config, layout, rank).count,
        intermediate=part(model_config.intermediate),
        conv_channels=part(model_config.conv_channels),
        experts=experts,
    )


def device_map(model_config: ModelConfig, layout: RankLayout, device_type: str) -> list[RankPlace]:
    """Return, for each rank, its device and the layers and attention heads it computes."""
    return [_place(model_config, layout, rank, device_type) for rank in range(layout.world)]


def _place(model_config: ModelConfig, layout: RankLayout, rank: int, device_type: str) -> RankPlace:
    own = rank_model_config(model_config, layout, rank)
    return RankPlace(
        rank=rank,
        stage=layout.stage(rank),
        tensor_rank=layout.tensor_rank(rank),
        device=device_type if device_type == "cpu" else f"{device_type}:{rank}",
        first_layer=rank_layers(model_config, layout, rank).start,
        num_layers=own.num_layers,
        num_attention_layers=own.num_attention_layers,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
    )


def _criteria(model_config: ModelConfig, pipeline: int) -> Iterator[Criterion]:
    embedding = model_config.vocab * model_config.hidden

    def attention(stage: int, start: int, end: int) -> int:
        return sum(layer.mixer == "attention" for layer in model_config.layers[start:end])

    def work(stage: int, start: int, end: int) -> int:
        layers = model_config.layers[start:end]
        return sum(_numbers(model_config, layer, is_active=True) for layer in layers)

    def weights(stage: int, start: int, end: int) -> int:
        ends = (stage == 0) + (stage == pipeline - 1)
        layers = model_config.layers[start:end]
        stored = sum(_numbers(model_config, layer, is_active=False) for layer in layers)
        return stored + ends * embedding

    yield from (attention, work, weights)


def _numbers(model_config: ModelConfig, layer: LayerSpec, *, is_active: bool) -> int:
    """Return the number of weights in a layer's large matrices.

    If `is_active`, count only the experts that compute a single token instead of all experts.
    """
    hidden = model_config.hidden
    width = model_config.intermediate
    experts = model_config.experts
    mixer = hidden * (model_config.qkv_width + model_config.query_width)
    if layer.mixer == "conv":
        mixer = 4 * hidden * model_config.conv_channels
    if layer.feed_forward == "experts" and experts is not None:
        count = experts.experts_per_token if is_active else experts.num_experts
        width = count * experts.intermediate
    return mixer + 3 * hidden * width


def transfer_bytes(layout: RankLayout, rank: int, max_rows: int, hidden: int, itemsize: int) -> int:
    """Return the bytes of the buffers that a rank needs to exchange data with other ranks.

    There is one buffer each for partial sums, for rows from the previous stage, and for rows to the
    next stage. A rank has only those buffers that its place in the layout requires.
    """
    buffers = (layout.tensor > 1) + (not layout.is_first(rank)) + (not layout.is_last(rank))
    return buffers * max_rows * hidden * itemsize


def group_kv_bytes(
    model_config: ModelConfig, layout: RankLayout, itemsize: int, *, windowed: bool = False
) -> int:
    """Return how many bytes one token takes up in a KV block, summed over all ranks.

    Heads that are copied to several ranks count once per rank. If `windowed`, layers with sliding
    windows have their own blocks, and the result is the size in a single block of either kind. All
    blocks have the same size, with room for the larger of the two groups of layers.
    """
    parts = [rank_model_config(model_config, layout, rank) for rank in range(layout.world)]
    return sum(part.page_bytes_per_token(itemsize, windowed=windowed) for part in parts)


def group_state_bytes(model_config: ModelConfig, layout: RankLayout, itemsize: int) -> int:
    """Return the size in bytes of one sequence's convolution state, summed over all ranks."""
    parts = [rank_model_config(model_config, layout, rank) for rank in range(layout.world)]
    return sum(part.state_bytes(itemsize) for part in parts)
