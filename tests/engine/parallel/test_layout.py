"""Who computes what: every layer, head and channel exactly once, the same every time."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.model_config.model_config import ExpertsSpec, LayerSpec, ModelConfig
from ullage_engine.parallel.layout import (
    LayoutError,
    RankLayout,
    check_model,
    check_world,
    device_map,
    group_kv_bytes,
    kv_heads,
    query_heads,
    rank_model_config,
    split_runs,
    stage_layers,
)

ATTENTION_8B = (2, 6, 10, 14, 18, 21)
ATTENTION_1B = (2, 5, 8, 10, 12, 14)


def model_config(
    attention: tuple[int, ...] | None = None, num_layers: int = 16, **changes: object
) -> ModelConfig:
    """LFM2-1.2B, but for what is given; without `attention` all layers attend."""
    fields: dict[str, object] = {
        "architecture": "lfm2",
        "hidden": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "intermediate": 8192,
        "vocab": 65536,
        "max_position": 4096,
        "rope_theta": 1e6,
        "rms_eps": 1e-5,
        "tied": True,
        "conv_kernel": 3,
        "conv_channels": 2048,
        "layers": tuple(
            LayerSpec(mixer="attention" if attention is None or index in attention else "conv")
            for index in range(num_layers)
        ),
        **changes,
    }
    return ModelConfig(**fields)  # type: ignore[arg-type]


def lfm2_8b() -> ModelConfig:
    layers = tuple(
        LayerSpec(
            mixer="attention" if index in ATTENTION_8B else "conv",
            feed_forward="dense" if index < 2 else "experts",
        )
        for index in range(24)
    )
    experts = ExpertsSpec(num_experts=32, experts_per_token=4, intermediate=1792, scoring="sigmoid")
    return model_config(layers=layers, intermediate=7168, experts=experts)


@pytest.mark.parametrize(
    ("model", "pipeline", "ends", "attending"),
    [
        (lfm2_8b(), 2, [12, 24], [3, 3]),
        (lfm2_8b(), 4, [6, 12, 18, 24], [1, 2, 1, 2]),
        (model_config(ATTENTION_1B), 2, [9, 16], [3, 3]),
        (model_config(num_layers=30), 4, [7, 15, 23, 30], [7, 8, 8, 7]),
    ],
)
def test_known_models_are_cut_where_kv_and_work_balance(
    model: ModelConfig, pipeline: int, ends: list[int], attending: list[int]
) -> None:
    layout = RankLayout(1, pipeline)
    assert [layers.end for layers in stage_layers(model, pipeline)] == ends
    parts = [rank_model_config(model, layout, rank) for rank in range(pipeline)]
    assert [part.num_attention_layers for part in parts] == attending


COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=9)


@settings(max_examples=50, deadline=None)
@given(COSTS, COSTS, st.integers(1, 5))
def test_a_split_has_the_smallest_maxima_there_are(
    first: list[int], second: list[int], parts: int
) -> None:
    count = min(len(first), len(second))
    parts = min(parts, count)

    def cost(values: list[int], runs: list[tuple[int, int]]) -> int:
        return max(sum(values[start:end]) for start, end in runs)

    def key(runs: list[tuple[int, int]]) -> tuple[int, int]:
        return cost(first, runs), cost(second, runs)

    found = split_runs(
        count,
        parts,
        [lambda i, start, end: sum(first[start:end]), lambda i, start, end: sum(second[start:end])],
    )
    assert found[0][0] == 0
    assert found[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(found))
    assert all(start < end for start, end in found)
    assert key(found) == min(key(runs) for runs in all_splits(0, count, parts))


def all_splits(start: int, count: int, parts: int) -> list[list[tuple[int, int]]]:
    if parts == 1:
        return [[(start, count)]] if start < count else []
    return [
        [(start, end), *rest]
        for end in range(start + 1, count)
        for rest in all_splits(end, count, parts - 1)
    ]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_ranks_together_are_the_whole_model(data: st.DataObject) -> None:
    num_kv = data.draw(st.integers(1, 8))
    group = data.draw(st.integers(1, 4))
    tensor = data.draw(st.integers(1, 4))
    pipeline = data.draw(st.integers(1, 3))
    attention = tuple(data.draw(st.sets(st.integers(0, 8), min_size=1)))
    model = model_config(attention, 9, num_heads=num_kv * group, num_kv_heads=num_kv)
    layout = RankLayout(tensor, pipeline)
    try:
        check_model("single", model, layout)
    except LayoutError:
        return
    parts = [rank_model_config(model, layout, rank) for rank in range(layout.world)]
    stage = parts[: layout.tensor]
    assert sum(part.num_heads for part in stage) == model.num_heads
    assert sum(part.intermediate for part in stage) == model.intermediate
    assert sum(part.conv_channels for part in stage) == model.conv_channels
    assert sum((part.layers for part in parts[:: layout.tensor]), ()) == model.layers
    for rank, part in enumerate(parts):
        assert part.num_heads % part.num_kv_heads == 0
        # Every query head finds its own KV head on its rank.
        queries = query_heads(model, layout, rank)
        keys = kv_heads(model, layout, rank)
        for head in range(queries.start, queries.end):
            assert keys.start <= head // model.group_size < keys.end
            own_group = (head - queries.start) // part.group_size
            assert keys.start + own_group == head // model.group_size
    assert group_kv_bytes(model, layout, 2) >= model.kv_bytes_per_token(2)


def test_the_device_map_names_every_rank_once_and_never_changes() -> None:
    layout = RankLayout(2, 2)
    places = device_map(lfm2_8b(), layout, "cuda")
    assert places == device_map(lfm2_8b(), layout, "cuda")
    assert [(p.rank, p.stage, p.tensor_rank, p.device) for p in places] == [
        (0, 0, 0, "cuda:0"),
        (1, 0, 1, "cuda:1"),
        (2, 1, 0, "cuda:2"),
        (3, 1, 1, "cuda:3"),
    ]
    assert str(places[2]) == (
        "rank 2  stage 1  tensor rank 0  cuda:2  layers 12-23 (3 attend)  heads 16/4"
    )


def test_smollm2s_nine_heads_are_shared_out_unevenly() -> None:
    model = model_config(num_heads=9, num_kv_heads=3, num_layers=30)
    parts = [rank_model_config(model, RankLayout(2, 1), rank) for rank in range(2)]
    assert [(part.num_heads, part.num_kv_heads) for part in parts] == [(3, 1), (6, 2)]


REFUSED: list[tuple[dict[str, object], RankLayout, str]] = [
    (
        {"num_heads": 9, "num_kv_heads": 3},
        RankLayout(6, 1),
        "pools.large.parallelism.tensor: 6 ranks cannot share the model's 9 query and 3 KV heads; "
        "set one of 1, 2, 3, 9 and",
    ),
    ({}, RankLayout(1, 17), "pools.large.parallelism.pipeline: 17 is more than the model's 16"),
]


@pytest.mark.parametrize(("changes", "layout", "words"), REFUSED)
def test_a_model_that_cannot_be_shared_out_is_refused_with_a_remedy(
    changes: dict[str, object], layout: RankLayout, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        check_model("large", model_config(**changes), layout)  # type: ignore[arg-type]


def test_a_wrong_world_size_is_refused() -> None:
    assert check_world("large", 4, 2, 2) == RankLayout(2, 2)
    words = r"pools.large.gpus: 3 is not .*tensor 2 \* .*pipeline 2 = 4; change one of the three"
    with pytest.raises(LayoutError, match=words):
        check_world("large", 3, 2, 2)
    with pytest.raises(LayoutError, match=r"parallelism.tensor: 0 is below 1"):
        check_world("large", 0, 0, 1)
