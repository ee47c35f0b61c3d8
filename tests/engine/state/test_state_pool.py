"""Memory of convolution states, and the block that replayed tokens write to."""

import pytest
import torch

from ullage_engine.core.plan import Moves
from ullage_engine.kernels.buffers import storage_bytes
from ullage_engine.kernels.pool import HostPool, KVPool, StatePool, move
from ullage_engine.models.geometry import LayerSpec, ModelGeometry

ATTENTION, CONV = LayerSpec(), LayerSpec(mixer="conv")


def make_geometry(kernel: int, *layers: LayerSpec) -> ModelGeometry:
    return ModelGeometry(
        architecture="lfm2",
        layers=layers,
        hidden=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate=64,
        vocab=50,
        max_position=512,
        rope_theta=1e4,
        rms_eps=1e-5,
        tied=True,
        eos_token_ids=[],
        conv_kernel=kernel,
        conv_channels=24 if kernel else 0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_views_of_one_allocation_of_the_priced_size(dtype: torch.dtype) -> None:
    geometry = make_geometry(3, CONV, ATTENTION, CONV)
    pool = StatePool(geometry, 6, dtype, torch.device("cpu"))
    assert pool.num_slots == 6
    assert [tuple(layer.shape) for layer in pool.layers] == [(6, 2, 24)] * 2
    assert storage_bytes(pool.layers) == 6 * geometry.state_bytes(dtype.itemsize)
    pool.layers[1][4] = 1.0
    assert pool.states.float().sum() == 2 * 24


def test_a_stage_without_convolutions_has_slots_of_nothing() -> None:
    pool = StatePool(make_geometry(3, ATTENTION), 6, torch.float32, torch.device("cpu"))
    assert (pool.layers, pool.num_slots) == ([], 6)


@pytest.mark.parametrize(("kernel", "extra"), [(0, 0), (3, 1)])
def test_only_models_with_convolutions_have_a_scratch_block(kernel: int, extra: int) -> None:
    geometry = make_geometry(kernel, ATTENTION, CONV if kernel else ATTENTION)
    pool = KVPool(geometry, 5, 16, torch.float32, torch.device("cpu"))
    host = HostPool(pool, 1)
    assert pool.num_blocks == pool.scratch_block == 5
    assert pool.layers[0].keys.shape[1] == (5 + extra) * 16
    pool.layers[0].keys[:, 4 * 16 :] = 7.0
    move(Moves(swap_out=[(4, 0)], swap_in=[(0, 1)], copy=[(1, 2)]), pool, host)
    assert torch.equal(pool.blocks[:, 2], pool.blocks[:, 4])
