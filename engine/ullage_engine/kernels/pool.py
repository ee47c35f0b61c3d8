"""The paged KV pool, the host memory that its blocks are swapped to, and convolution states."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ullage_engine.core.plan import Moves
from ullage_engine.kernels.float8 import HeadScales
from ullage_engine.models.geometry import ModelGeometry


class LayerCache(NamedTuple):
    """One layer's keys and values: the same memory seen as blocks and as slots.

    Slot = block id * block tokens + position within the block.
    """

    blocks: torch.Tensor  # [2 * kv_heads, num_blocks, block_tokens * head_dim], keys first
    keys: torch.Tensor  # [kv_heads, num_slots, head_dim]
    values: torch.Tensor  # [kv_heads, num_slots, head_dim]
    scales: HeadScales | None = None
    """With them the tensors above are bytes, each a float8 E4M3."""


def scratch_blocks(geometry: ModelGeometry) -> int:
    """Blocks beside those of sequences, for the KV of tokens that are computed a second time."""
    return 1 if geometry.conv_kernel else 0


def kv_block_bytes(geometry: ModelGeometry, block_tokens: int, itemsize: int) -> int:
    """Bytes of one block over all layers; `itemsize` is that of a stored number."""
    return block_tokens * geometry.kv_bytes_per_token(itemsize)


class KVPool:
    """The KV of all sequences on the device, in one allocation, every page touched.

    Heads come first so that the blocks of one head gather into a matrix. Where a model has
    convolutions there is one block more than `num_blocks`, which is written and never read.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[HeadScales] | None = None,
    ) -> None:
        """`scales`, one for each layer that attends: KV is stored as float8, not as `dtype`."""
        heads, width = 2 * geometry.num_kv_heads, block_tokens * geometry.head_dim
        total = num_blocks + scratch_blocks(geometry)
        shape = (geometry.num_attention_layers, heads, total, width)
        stored = dtype if scales is None else torch.uint8
        pool = torch.empty(shape, dtype=stored, device=device).zero_()
        self.num_blocks = num_blocks
        self.blocks = pool.view(shape[0] * heads, total, width)  # keys and values of all layers
        self.layers = [
            _layer_cache(layer, geometry, scales[index] if scales is not None else None)
            for index, layer in enumerate(pool)
        ]

    @property
    def scratch_block(self) -> int:
        """Takes the KV of replayed tokens; there is one only if the model has convolutions."""
        return self.num_blocks

    def clear(self, block: int) -> None:
        """Zeros one block over all layers: attention multiplies what lies behind its last token by
        zero, and an earlier user's infinity or NaN would outlive that."""
        self.blocks[:, block].zero_()

    def copy(self, source: int, destination: int) -> None:
        """Copies one block over all layers; allocates nothing."""
        self.blocks[:, destination].copy_(self.blocks[:, source])


def _layer_cache(
    layer: torch.Tensor, geometry: ModelGeometry, scales: HeadScales | None
) -> LayerCache:
    kv_heads = geometry.num_kv_heads
    slots = layer.view(2 * kv_heads, -1, geometry.head_dim)
    return LayerCache(layer, slots[:kv_heads], slots[kv_heads:], scales)


class StatePool:
    """Convolution states of all sequences, in one allocation, every page touched.

    A state is the last kernel - 1 columns of each convolution's input, oldest first.
    """

    def __init__(
        self, geometry: ModelGeometry, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        columns = max(0, geometry.conv_kernel - 1)
        shape = (geometry.num_conv_layers, num_slots, columns, geometry.conv_channels)
        self.states = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.layers = list(self.states)
        """One for each convolution layer, [num_slots, kernel - 1, channels]."""

    @property
    def num_slots(self) -> int:
        return self.states.shape[1]


class HostPool:
    """Slots in host memory, each for one block over all layers; every page touched.

    Beside a GPU the memory is pinned, and a block passes through one block of staging on the
    device, because only memory without gaps is copied between devices without a temporary.
    """

    def __init__(self, pool: KVPool, num_slots: int) -> None:
        rows, _, width = pool.blocks.shape
        is_remote = pool.blocks.device.type != "cpu"
        self._pool = pool
        self._slots = torch.empty(
            (num_slots, rows, width), dtype=pool.blocks.dtype, pin_memory=is_remote
        ).zero_()
        self._staging = pool.blocks.new_zeros((rows, width)) if is_remote else None

    @property
    def num_slots(self) -> int:
        return self._slots.shape[0]

    def swap_out(self, block: int, slot: int) -> None:
        """Copies a block to the host; later device work may overwrite the block."""
        source = self._pool.blocks[:, block]
        if self._staging is not None:
            source = self._staging.copy_(source)
        self._slots[slot].copy_(source, non_blocking=True)

    def swap_in(self, slot: int, block: int) -> None:
        """Copies a slot to a block; later device work sees it."""
        source = self._slots[slot]
        if self._staging is not None:
            source = self._staging.copy_(source, non_blocking=True)
        self._pool.blocks[:, block].copy_(source)


def move(moves: Moves, pool: KVPool, host: HostPool) -> None:
    """Makes copies of whole blocks in the order of `Moves`; allocates nothing."""
    for block, slot in moves.swap_out:
        host.swap_out(block, slot)
    for slot, block in moves.swap_in:
        host.swap_in(slot, block)
    for source, destination in moves.copy:
        pool.copy(source, destination)
