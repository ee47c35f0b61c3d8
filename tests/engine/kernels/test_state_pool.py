"""Memory of convolution states, and the block that replayed tokens write to."""

import pytest
import torch

from ullage_engine.kernels.kv_pool import HostPool, KVPool, StatePool, move, storage_bytes
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.protocol.step_plan import Moves

ATTENTION = LayerSpec()
CONV = LayerSpec(mixer="conv")


def make_model_config(kernel: int, *layers: LayerSpec) -> ModelConfig:
    return ModelConfig(
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
        conv_kernel=kernel,
        conv_channels=24 if kernel else 0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_views_of_one_allocation_of_the_priced_size(dtype: torch.dtype) -> None:
    model_config = make_model_config(3, CONV, ATTENTION, CONV)
    pool = StatePool(model_config, 6, dtype, torch.device("cpu"))
    assert pool.num_slots == 6
    assert [tuple(layer.shape) for layer in pool.layers] == [(6, 2, 24)] * 2
    assert storage_bytes(pool.layers) == 6 * model_config.state_bytes(dtype.itemsize)
    pool.layers[1][4] = 1.0
    assert pool.states.float().sum() == 2 * 24


def test_a_stage_without_convolutions_has_slots_of_nothing() -> None:
    pool = StatePool(make_model_config(3, ATTENTION), 6, torch.float32, torch.device("cpu"))
    assert (pool.layers, pool.num_slots) == ([], 6)


@pytest.mark.parametrize(("kernel", "extra"), [(0, 0), (3, 1)])
def test_only_models_with_convolutions_have_a_scratch_block(kernel: int, extra: int) -> None:
    model_config = make_model_config(kernel, ATTENTION, CONV if kernel else ATTENTION)
    pool = KVPool(model_config, 5, 16, torch.float32, torch.device("cpu"))
    host = HostPool(pool, 1)
    assert pool.num_blocks == pool.scratch_block == 5
    assert pool.layers[0].keys.shape[1] == (5 + extra) * 16
    pool.layers[0].keys[:, 4 * 16 :] = 7.0
    move(Moves(swap_out=[(4, 0)], swap_in=[(0, 1)], copy=[(1, 2)]), pool, host)
    assert torch.equal(pool.blocks[:, 2], pool.blocks[:, 4])
