"""Which rank computes what: pure arithmetic, so the map is the same after every restart.

Rank = stage * tensor + tensor rank: the ranks that share a layer are neighbours, because they speak
to each other twice a layer and stages only once a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ullage_engine.models.geometry import LayerSpec, ModelGeometry
from ullage_engine.parallel.split import Criterion, split_runs


class LayoutError(ValueError):
    """The model cannot be shared out so; one line naming field, value and remedy."""


class Share(msgspec.Struct, frozen=True):
    """A run of things that are counted: layers, heads, channels."""

    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How a group of ranks is arranged."""

    tensor: int = 1
    """Ranks that share each layer."""
    pipeline: int = 1
    """Stages, each with a run of the layers."""

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor

    def rank(self, stage: int, tensor_rank: int) -> int:
        return stage * self.tensor + tensor_rank

    def is_first(self, rank: int) -> bool:
        """Whether the rank embeds tokens."""
        return self.stage(rank) == 0

    def is_last(self, rank: int) -> bool:
        """Whether the rank's stage has the logits."""
        return self.stage(rank) == self.pipeline - 1

    @property
    def sampling_rank(self) -> int:
        """The rank that chooses tokens."""
        return self.rank(self.pipeline - 1, 0)


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the device map."""

    rank: int
    stage: int
    tensor_rank: int
    device: str
    first_layer: int
    num_layers: int
    num_attention_layers: int
    num_heads: int
    num_kv_heads: int

    def __str__(self) -> str:
        last = self.first_layer + self.num_layers - 1
        return (
            f"rank {self.rank}  stage {self.stage}  tensor rank {self.tensor_rank}  "
            f"{self.device}  layers {self.first_layer}-{last} "
            f"({self.num_attention_layers} attend)  heads {self.num_heads}/{self.num_kv_heads}"
        )


def check_world(pool: str, gpus: int, tensor: int, pipeline: int) -> RankLayout:
    """The layout that a configuration asks for.

    Raises:
        LayoutError: its numbers do not agree.
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


def check_model(pool: str, geometry: ModelGeometry, layout: RankLayout) -> None:
    """Makes sure that every rank gets a part of the model.

    KV heads are shared out, unevenly if need be (SmolLM2's 9 query and 3 KV heads on two tensor
    ranks are 3/1 and 6/2). With fewer KV heads than ranks each is kept by several, which takes as
    many ranks for each of them.

    Raises:
        LayoutError: some rank would have none.
    """
    if layout.pipeline > geometry.num_layers:
        raise LayoutError(
            f"pools.{pool}.parallelism.pipeline: {layout.pipeline} is more than the model's "
            f"{geometry.num_layers} layers; set {geometry.num_layers} or less"
        )
    tensor, heads, kv_heads = layout.tensor, geometry.num_heads, geometry.num_kv_heads
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
    """The index-th of `parts` runs of `count` things, as even as they can be."""
    return Share(count * index // parts, count * (index + 1) // parts)


def kv_heads(geometry: ModelGeometry, layout: RankLayout, rank: int) -> Share:
    """The KV heads of a rank; with more tensor ranks than heads, one that several keep."""
    tensor, index = layout.tensor, layout.tensor_rank(rank)
    if tensor <= geometry.num_kv_heads:
        return share(geometry.num_kv_heads, tensor, index)
    kept = index * geometry.num_kv_heads // tensor
    return Share(kept, kept + 1)


def query_heads(geometry: ModelGeometry, layout: RankLayout, rank: int) -> Share:
    """The query heads of a rank: all that share its KV heads, or its part of them."""
    if layout.tensor > geometry.num_kv_heads:
        return share(geometry.num_heads, layout.tensor, layout.tensor_rank(rank))
    held = kv_heads(geometry, layout, rank)
    return Share(held.start * geometry.group_size, held.end * geometry.group_size)


def stage_layers(geometry: ModelGeometry, pipeline: int) -> list[Share]:
    """The layers of each stage.

    The most attention layers of a stage are fewest, for blocks of KV are as many as the stage
    allows that has the least room for them; of such splits the slowest stage works least; of those
    the largest weights are smallest.
    """
    if pipeline == 1:
        return [Share(0, geometry.num_layers)]
    edges = split_runs(geometry.num_layers, pipeline, list(_criteria(geometry, pipeline)))
    return [Share(start, end) for start, end in edges]


def rank_layers(geometry: ModelGeometry, layout: RankLayout, rank: int) -> Share:
    return stage_layers(geometry, layout.pipeline)[layout.stage(rank)]


def rank_geometry(geometry: ModelGeometry, layout: RankLayout, rank: int) -> ModelGeometry:
    """The part of a model that one rank computes."""
    layers = rank_layers(geometry, layout, rank)

    def part(count: int) -> int:
        return share(count, layout.tensor, layout.tensor_rank(rank)).count

    experts = geometry.experts
    if experts is not None:
        experts = msgspec.structs.replace(experts, intermediate=part(experts.intermediate))
    return msgspec.structs.replace(
        geometry,
        layers=geometry.layers[layers.start : layers.end],
        first_layer=layers.start,
        num_heads=query_heads(geometry, layout, rank).count,
        num_kv_heads=kv_heads(geometry, layout, rank).count,
        intermediate=part(geometry.intermediate),
        conv_channels=part(geometry.conv_channels),
        experts=experts,
    )


def device_map(geometry: ModelGeometry, layout: RankLayout, device_type: str) -> list[RankPlace]:
    """What every rank computes and where."""
    return [_place(geometry, layout, rank, device_type) for rank in range(layout.world)]


def _place(geometry: ModelGeometry, layout: RankLayout, rank: int, device_type: str) -> RankPlace:
    own = rank_geometry(geometry, layout, rank)
    return RankPlace(
        rank=rank,
        stage=layout.stage(rank),
        tensor_rank=layout.tensor_rank(rank),
        device=device_type if device_type == "cpu" else f"{device_type}:{rank}",
        first_layer=rank_layers(geometry, layout, rank).start,
        num_layers=own.num_layers,
        num_attention_layers=own.num_attention_layers,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
    )


def _criteria(geometry: ModelGeometry, pipeline: int) -> Iterator[Criterion]:
    embedding = geometry.vocab * geometry.hidden

    def attention(stage: int, start: int, end: int) -> int:
        return sum(layer.mixer == "attention" for layer in geometry.layers[start:end])

    def work(stage: int, start: int, end: int) -> int:
        return sum(_active_numbers(geometry, layer) for layer in geometry.layers[start:end])

    def weights(stage: int, start: int, end: int) -> int:
        ends = (stage == 0) + (stage == pipeline - 1)
        layers = (_stored_numbers(geometry, layer) for layer in geometry.layers[start:end])
        return sum(layers) + ends * embedding

    yield from (attention, work, weights)


def _mixer_numbers(geometry: ModelGeometry, layer: LayerSpec) -> int:
    if layer.mixer == "conv":
        return 4 * geometry.hidden * geometry.conv_channels
    return geometry.hidden * (geometry.qkv_width + geometry.query_width)


def _active_numbers(geometry: ModelGeometry, layer: LayerSpec) -> int:
    """Weights that one token is multiplied by."""
    width, experts = geometry.intermediate, geometry.experts
    if layer.feed_forward == "experts" and experts is not None:
        width = experts.experts_per_token * experts.intermediate
    return _mixer_numbers(geometry, layer) + 3 * geometry.hidden * width


def _stored_numbers(geometry: ModelGeometry, layer: LayerSpec) -> int:
    width, experts = geometry.intermediate, geometry.experts
    if layer.feed_forward == "experts" and experts is not None:
        width = experts.num_experts * experts.intermediate
    return _mixer_numbers(geometry, layer) + 3 * geometry.hidden * width
