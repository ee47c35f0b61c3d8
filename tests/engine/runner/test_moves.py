"""Whole blocks copied within the pool, to the host and back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ullage_engine.kernels.kv_pool import HostPool, KVPool, kv_block_bytes, move, storage_bytes
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.step_plan import Moves
from ullage_engine.runner.model_runner import ModelRunner

GEOMETRY = ModelConfig(
    architecture="llama",
    layers=(LayerSpec(),) * 3,
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
)
NUM_BLOCKS = 6
NUM_SLOTS = 4
BLOCK = 16


def make_pools(dtype: torch.dtype = torch.bfloat16) -> tuple[KVPool, HostPool]:
    pool = KVPool(GEOMETRY, NUM_BLOCKS, BLOCK, dtype, torch.device("cpu"))
    pool.blocks.copy_(torch.randn(pool.blocks.shape))
    return pool, HostPool(pool, NUM_SLOTS)


def block_of(pool: KVPool, block: int) -> torch.Tensor:
    """Keys and values of a block over all layers, read through the layers' own views."""
    slots = slice(block * BLOCK, (block + 1) * BLOCK)
    return torch.stack([torch.stack([c.keys[:, slots], c.values[:, slots]]) for c in pool.layers])


blocks = st.integers(0, NUM_BLOCKS - 1)
slots = st.integers(0, NUM_SLOTS - 1)


@settings(max_examples=60, deadline=None)
@given(
    swap_out=st.lists(st.tuples(blocks, slots), max_size=4),
    swap_in=st.lists(st.tuples(slots, blocks), max_size=4),
    copy=st.lists(st.tuples(blocks, blocks), max_size=4),
)
def test_moves_happen_in_their_order(
    swap_out: list[tuple[int, int]],
    swap_in: list[tuple[int, int]],
    copy: list[tuple[int, int]],
) -> None:
    pool, host = make_pools()
    expected = [block_of(pool, block).clone() for block in range(NUM_BLOCKS)]
    stored = [torch.zeros_like(expected[0])] * NUM_SLOTS
    for block, slot in swap_out:
        stored[slot] = expected[block]
    for slot, block in swap_in:
        expected[block] = stored[slot]
    for source, destination in copy:
        expected[destination] = expected[source]
    move(Moves(swap_out=swap_out, swap_in=swap_in, copy=copy), pool, host)
    for block in range(NUM_BLOCKS):
        assert torch.equal(block_of(pool, block), expected[block])


class Operations(TorchDispatchMode):
    """Names of all operations that were run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_moves_only_copy_between_views() -> None:
    pool, host = make_pools()
    with Operations() as operations:
        move(Moves(swap_out=[(0, 1)], swap_in=[(1, 2)], copy=[(2, 3)]), pool, host)
    assert operations.names == {"aten.select.int", "aten.copy_.default"}


def test_the_host_holds_whole_blocks() -> None:
    pool, host = make_pools(torch.float32)
    block = kv_block_bytes(GEOMETRY, BLOCK, 4)
    assert host.num_slots == NUM_SLOTS
    assert storage_bytes([pool.blocks]) == NUM_BLOCKS * block
    assert storage_bytes([pool.blocks, pool.layers[1].keys]) == NUM_BLOCKS * block


def test_a_swapped_sequence_continues_as_if_it_had_stayed(
    smollm2: LoadedModel,
    new_runner: Callable[..., ModelRunner],
    generate: Callable[..., list[list[int]]],
) -> None:
    runner = new_runner(smollm2, num_blocks=256)
    prompt = [50 + 7 * index for index in range(40)]
    [expected] = generate(runner, [prompt], 2)
    runner.allocate_kv(256, num_host_slots=3)
    assert runner.num_host_slots == 3
    assert generate(runner, [prompt], 1) == [expected[:1]]
    runner.move(Moves(swap_out=[(block, block) for block in range(3)]))
    generate(runner, [[9] * 48], 1)
    runner.move(Moves(swap_in=[(block, block + 10) for block in range(3)]))
    runner.move(Moves(copy=[(block + 10, block) for block in range(3)]))
    [continued] = generate(runner, [prompt + expected[:1]], 1, start=40)
    assert continued == expected[1:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moves_allocate_nothing_on_a_gpu() -> None:
    pool = KVPool(GEOMETRY, NUM_BLOCKS, BLOCK, torch.bfloat16, torch.device("cuda"))
    host = HostPool(pool, NUM_SLOTS)
    pool.blocks.normal_()
    expected = pool.blocks[:, 0].clone()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    move(Moves(swap_out=[(0, 1)], swap_in=[(1, 2)], copy=[(2, 3)]), pool, host)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(pool.blocks[:, 3], expected)


def test_what_is_prefetched_is_there_and_copies_are_timed() -> None:
    pool, host = make_pools()
    before = [block_of(pool, block).clone() for block in range(NUM_BLOCKS)]
    assert host.measure() > 0
    for block in range(NUM_BLOCKS):
        assert torch.equal(block_of(pool, block), before[block])
    assert host.timer.seconds == 0.0
    move(Moves(swap_out=[(0, 1)]), pool, host)
    swapped = host.timer.seconds
    assert swapped > 0
    move(Moves(copy=[(5, 4)]), pool, host)
    assert host.timer.seconds == swapped
    move(Moves(prefetch=[(1, 2)]), pool, host)
    host.finish_prefetch()
    assert torch.equal(block_of(pool, 2), before[0])
    assert host.timer.seconds > swapped
