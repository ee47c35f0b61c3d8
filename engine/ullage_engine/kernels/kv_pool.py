"""KV cache memory: the paged pool, host slots for swapped blocks, and convolution states.

Pages hold KV in the activations' dtype, or in float8 E4M3 with one scale per head. Scales are
powers of two, so multiplying or dividing by them is exact and only the conversion to E4M3 rounds. A
kernel may therefore scale queries and sums instead of keys and values, with bit-identical results.
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ullage_engine.kernels.arena import ArenaLayout
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.pinned_memory import PinnedMemory
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.protocol.step_plan import Moves

LARGEST = 448.0
"""Largest finite value of E4M3. The format has no infinity, so larger values are clamped to this.
"""

MIN_EXPONENT = -15
MAX_EXPONENT = 7
"""Largest exponent that a scale may have. `MIN_EXPONENT` is the smallest.

Within these limits, float16 can represent every stored value and every scale.
"""


LAYOUT_VERSION = 1
"""Version of the layout and contents of a stored block.

Increment this if the layout or the contents change, so that KV stored by an older version is not
reused.
"""


class _Bits(NamedTuple):
    """How to convert E4M3 codes to a wider floating-point type by shifting their bits."""

    integers: torch.dtype
    shift: int
    mask: int
    bias: int
    """Difference between the exponent biases. Shifted bits represent the value times 2^-bias."""


_BITS = {
    torch.float32: _Bits(torch.int32, 20, -(1 << 31) | 0x7F << 20, 120),
    torch.bfloat16: _Bits(torch.int16, 4, -(1 << 15) | 0x7F << 4, 120),
    torch.float16: _Bits(torch.int16, 7, -(1 << 15) | 0x7F << 7, 8),
}


class HeadScales(NamedTuple):
    """The float8 scales of a layer's heads, in the activations' dtype."""

    values: torch.Tensor  # [2 * kv_heads, 1, 1], keys first
    factors: torch.Tensor  # the same, times `widening_factor`


def head_scales(bounds: Sequence[float], dtype: torch.dtype, device: torch.device) -> HeadScales:
    """Return each head's scale: the smallest power of two that fits its values into E4M3's range.

    Args:
        bounds: largest absolute value per head, key heads first.
        dtype: type of the activations.
        device: device of the scales.

    Raises:
        WeightsError: a bound is NaN.
    """
    if any(map(math.isnan, bounds)):
        raise WeightsError(
            "the K/V weights contain NaN, so spec.model.kvDtype FP8 (model.kv_dtype) has no scale; "
            "download the model again"
        )
    # frexp gives a fraction below 1, so 2 to this exponent is above the quotient.
    exponents = [
        min(MAX_EXPONENT, max(MIN_EXPONENT, math.frexp(bound / LARGEST)[1])) for bound in bounds
    ]
    values = torch.tensor([2.0**exponent for exponent in exponents], device=device)[:, None, None]
    factors = values * widening_factor(dtype)
    return HeadScales(values.to(dtype), factors.to(dtype))


def narrow(numbers: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
    """Round values to float8 codes of the same shape. The values are overwritten.

    A value that is too large for its scale saturates to the largest code.
    """
    numbers.div_(scales).clamp_(-LARGEST, LARGEST)
    codes.view(torch.float8_e4m3fn).copy_(numbers)


def widening_factor(dtype: torch.dtype) -> float:
    """Return the factor that `widen` needs to decode float8 values that have no scale."""
    return float(2.0 ** _BITS[dtype].bias)


def widen(codes: torch.Tensor, factors: torch.Tensor | float, out: torch.Tensor) -> None:
    """Convert float8 codes exactly to the dtype of `out`, several times faster than torch.

    The bits are shifted into the wider type. Its exponent has a different bias, which `factors`
    must compensate for (`widening_factor`). The NaN code decodes to 480. `narrow` writes this code
    only for NaN inputs.
    """
    layout = _BITS[out.dtype]
    bits = out.view(layout.integers)
    bits.copy_(codes.view(torch.int8))
    bits.bitwise_left_shift_(layout.shift).bitwise_and_(layout.mask)
    out.mul_(factors)


class LayerCache(NamedTuple):
    """The keys and values of one layer, with views of their memory by block and by slot.

    A token's slot is its block id times the tokens per block, plus its position in the block.
    """

    blocks: torch.Tensor  # [2 * kv_heads, num_blocks, block_tokens * head_dim], keys first
    keys: torch.Tensor  # [kv_heads, num_slots, head_dim]
    values: torch.Tensor  # [kv_heads, num_slots, head_dim]
    scales: HeadScales | None = None
    """Scales of float8 KV, or None if KV is not float8. Float8 tensors hold E4M3 bytes."""


def scratch_blocks(model_config: ModelConfig) -> int:
    """Return the number of extra blocks that hold the KV of recomputed tokens.

    Only models with convolutions recompute tokens, in order to restore a convolution's state.
    """
    return 1 if model_config.conv_kernel else 0


def kv_block_bytes(
    model_config: ModelConfig, block_tokens: int, itemsize: int, *, windowed: bool = False
) -> int:
    """Return the size of one KV block in bytes, summed over its layers.

    Args:
        model_config: the model.
        block_tokens: tokens per block.
        itemsize: bytes per stored element.
        windowed: whether layers with sliding windows have separate blocks.
    """
    return block_tokens * model_config.page_bytes_per_token(itemsize, windowed=windowed)


class KVPool:
    """The device's KV cache for all sequences, in a single allocation.

    All pages of this memory are touched up front.

    Heads are the first dimension, so that gathering the blocks of one head yields a matrix. A model
    with convolutions has one more block than `num_blocks`, which is written but never read.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[HeadScales] | None = None,
        *,
        windowed: bool = False,
    ) -> None:
        """Allocate the pool.

        Args:
            model_config: the model.
            num_blocks: number of blocks for sequences.
            block_tokens: tokens per block.
            dtype: type of the stored elements, unless KV is float8.
            device: device of the pool.
            scales: float8 scales of each attention layer, or None to store KV as `dtype`.
            windowed: whether layers with sliding windows have separate blocks. If so, a block
                stores the KV of either the layers with windows or the layers without. The i-th
                layer of either kind is stored at position i of that kind's blocks.
        """
        heads = 2 * model_config.num_kv_heads
        width = block_tokens * model_config.head_dim
        total = num_blocks + scratch_blocks(model_config)
        places = _layer_places(model_config, windowed)
        shape = (max(places, default=-1) + 1, heads, total, width)
        stored = dtype if scales is None else torch.uint8
        pool = torch.empty(shape, dtype=stored, device=device).zero_()
        self.num_blocks = num_blocks
        self.blocks = pool.view(shape[0] * heads, total, width)  # keys and values of all layers
        self.layers = [
            _layer_cache(pool[place], model_config, scales[index] if scales is not None else None)
            for index, place in enumerate(places)
        ]

    @property
    def scratch_block(self) -> int:
        """ID of the block for the KV of recomputed tokens.

        The block exists only if the model has convolutions.
        """
        return self.num_blocks

    def clear(self, block: int) -> None:
        """Zero one block in all layers.

        Attention multiplies the unused slots at the end of a block by zero. An infinity or NaN left
        by an earlier sequence would survive this multiplication.
        """
        self.blocks[:, block].zero_()

    def copy(self, source: int, destination: int) -> None:
        """Copy one block in all layers, without allocating memory."""
        self.blocks[:, destination].copy_(self.blocks[:, source])


def _layer_places(model_config: ModelConfig, windowed: bool) -> list[int]:
    """Return the position of each attention layer's KV within a block.

    If `windowed`, layers with sliding windows and other layers are counted separately.
    """
    counts = [0, 0]
    places = []
    for layer in model_config.layers:
        if layer.mixer == "attention":
            group = windowed and layer.window > 0
            places.append(counts[group])
            counts[group] += 1
    return places


def _layer_cache(
    layer: torch.Tensor, model_config: ModelConfig, scales: HeadScales | None
) -> LayerCache:
    kv_heads = model_config.num_kv_heads
    slots = layer.view(2 * kv_heads, -1, model_config.head_dim)
    return LayerCache(layer, slots[:kv_heads], slots[kv_heads:], scales)


class StatePool:
    """The convolution states of all sequences, in a single allocation.

    All pages of this memory are touched up front. A state is the last kernel - 1 input columns of
    each convolution, oldest first.
    """

    def __init__(
        self, model_config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        columns = max(0, model_config.conv_kernel - 1)
        shape = (model_config.num_conv_layers, num_slots, columns, model_config.conv_channels)
        self.states = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.layers = list(self.states)
        """State tensor of each convolution layer, [num_slots, kernel - 1, channels]."""

    @property
    def num_slots(self) -> int:
        return self.states.shape[1]


class HostPool:
    """Slots in host memory. Each slot can hold one KV block of all layers.

    All pages of this memory are touched up front. For a GPU, the memory stays pinned for the
    lifetime of the pool. Torch needs a temporary buffer to copy non-contiguous memory between
    devices, so blocks are copied through a staging block on the device. Prefetched blocks use a
    second staging block, on a separate stream.
    """

    def __init__(self, pool: KVPool, num_slots: int, shared: torch.Tensor | None = None) -> None:
        """Allocate the slots.

        Args:
            pool: KV blocks on the device.
            num_slots: number of slots to allocate.
            shared: memory of the host tier, [slots, bytes per block]. Its slots are
                numbered from `num_slots`, and their current contents are kept.
        """
        rows, _, width = pool.blocks.shape
        is_remote = pool.blocks.device.type != "cpu"
        self._pool = pool
        num_bytes = num_slots * rows * width * pool.blocks.itemsize
        self._memory = PinnedMemory.allocate(num_bytes, pool.blocks.device, "memory.hostKV")
        self._slots = self._memory.tensor.view(pool.blocks.dtype).view(num_slots, rows, width)
        self._shared = self._slots[:0]
        if shared is not None:
            self._shared = shared.view(pool.blocks.dtype).view(len(shared), rows, width)
        self._staging = pool.blocks.new_zeros((rows, width)) if is_remote else None
        self._prefetched = pool.blocks.new_zeros((rows, width)) if is_remote else None
        self._stream = _side_stream(pool.blocks.device)
        self._is_prefetching = False
        self.timer = CopyTimer(pool.blocks.device)

    @property
    def num_slots(self) -> int:
        return self._slots.shape[0]

    def swap_out(self, block: int, slot: int) -> None:
        """Copy a block to a host slot. Device work that is queued later may overwrite the block."""
        source = self._pool.blocks[:, block]
        if self._staging is not None:
            source = self._staging.copy_(source)
        self._slot(slot).copy_(source, non_blocking=True)

    def swap_in(self, slot: int, block: int) -> None:
        """Copy a host slot to a block. Device work that is queued later sees the new contents."""
        self._copy_in(slot, block, self._staging)

    def prefetch(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Start copying host slots to blocks. `finish_prefetch` waits for the copies.

        A GPU copies on a separate stream while the step computes. On a CPU the copy is synchronous,
        because a background copy would take cores from the step.
        """
        if self._stream is None:
            with self.timer:
                for slot, block in pairs:
                    self._copy_in(slot, block, None)
            return
        self._is_prefetching = True
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), self.timer:
            for slot, block in pairs:
                self._copy_in(slot, block, self._prefetched)

    def finish_prefetch(self) -> None:
        """Wait until all prefetched blocks are copied.

        Afterwards the host slots may be overwritten, and work queued on the device sees the new
        blocks.
        """
        if self._is_prefetching and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._stream.synchronize()
        self._is_prefetching = False

    def measure(self) -> float:
        """Measure how many seconds it takes to copy one block to the host or back.

        The result is the fastest of many copies. The blocks keep their contents.
        """
        count = max(1, min(self.num_slots, self._pool.num_blocks))
        timers = [CopyTimer(self._pool.blocks.device) for _ in range(_MEASUREMENTS)]
        # Each pair of copies is timed alone, since other processes may interrupt most of them.
        for number, timer in enumerate(timers):
            with timer:
                self.swap_out(number % count, number % count)
                self.swap_in(number % count, number % count)
        return max(min(timer.seconds for timer in timers) / 2, 1e-9)

    def _slot(self, slot: int) -> torch.Tensor:
        own = self.num_slots
        return self._slots[slot] if slot < own else self._shared[slot - own]

    def _copy_in(self, slot: int, block: int, staging: torch.Tensor | None) -> None:
        source = self._slot(slot)
        if staging is not None:
            source = staging.copy_(source, non_blocking=True)
        self._pool.blocks[:, block].copy_(source)


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


_MEASUREMENTS = 64
"""Number of copies to the host and back that `HostPool.measure` times."""


class CopyTimer:
    """Sums the durations of copies, measured by CUDA events on a GPU and by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._started_at = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if not self._is_cuda:
            self._started_at = time.perf_counter()
            return
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        self._events.append((begin, end))

    def __exit__(self, *error: object) -> None:
        if self._is_cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started_at

    @property
    def seconds(self) -> float:
        """Total seconds of all copies so far. Reading this property waits for pending copies."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._events = []
        return self._seconds


def move(moves: Moves, pool: KVPool, host: HostPool) -> None:
    """Swap, copy and prefetch whole blocks as planned in `moves`, without allocating memory.

    The blocks are moved in the order that `Moves` specifies.
    """
    if moves.swap_out or moves.swap_in:
        with host.timer:
            for block, slot in moves.swap_out:
                host.swap_out(block, slot)
            for slot, block in moves.swap_in:
                host.swap_in(slot, block)
    for source, destination in moves.copy:
        pool.copy(source, destination)
    if moves.prefetch:
        host.prefetch(moves.prefetch)


def allocate(
    layout: ArenaLayout, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Allocate an arena, touch all its pages, and return flat views keyed by buffer name.

    Buffers with four bytes per element are float32, buffers with one byte per element are uint8,
    and all others have the type `dtype`.
    """
    types = {1: torch.uint8, 4: torch.float32}
    # empty and zero_, because zeros would leave the pages unbacked until first use.
    storage = torch.empty(layout.nbytes, dtype=torch.uint8, device=device).zero_()
    return {
        buffer.name: storage[buffer.offset : buffer.end].view(types.get(buffer.itemsize, dtype))
        for buffer in layout.buffers
    }


def shaped(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return the first elements of a flat buffer as a contiguous tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return buffer[:count].view(shape)


def storage_bytes(tensors: Iterable[torch.Tensor], alignment: int = 1) -> int:
    """Return the total size in bytes of these tensors' storages, counting shared storage once.

    Each storage is rounded up to a multiple of `alignment`, as in a file with aligned tensors.
    """
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(-(-each.nbytes() // alignment) * alignment for each in storages.values())


def write_kv(
    cache: LayerCache,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    codes: torch.Tensor | None,
) -> None:
    """Write a step's keys and values to their slots. With float8 KV, the inputs are overwritten.

    Args:
        cache: pages of a layer.
        slots: int64 slot of each token.
        keys: [kv_heads, tokens, head_dim].
        values: [kv_heads, tokens, head_dim].
        codes: for float8 KV, a flat uint8 buffer with at least as many elements as `keys`.
    """
    if cache.scales is None:
        cache.keys.index_copy_(1, slots, keys)
        cache.values.index_copy_(1, slots, values)
        return
    assert codes is not None, "float8 KV needs a buffer for its codes"
    stored = shaped(codes, *keys.shape)
    kv_heads = keys.shape[0]
    narrow(keys, cache.scales.values[:kv_heads], stored)
    cache.keys.index_copy_(1, slots, stored)
    narrow(values, cache.scales.values[kv_heads:], stored)
    cache.values.index_copy_(1, slots, stored)


def gather(
    cache: LayerCache,
    heads: slice,
    block_ids: torch.Tensor,
    codes: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Copy blocks of some heads from the cache to `out`.

    Args:
        cache: pages of a layer.
        heads: selected heads among the 2 * kv_heads of the cache, keys first.
        block_ids: blocks to copy.
        codes: for float8 KV, a flat uint8 buffer with at least as many elements as `out`.
        out: [heads, blocks, block_tokens * head_dim].
    """
    if cache.scales is None:
        torch.index_select(cache.blocks[heads], 1, block_ids, out=out)
        return
    assert codes is not None, "float8 KV needs a buffer for its codes"
    gathered = shaped(codes, *out.shape)
    torch.index_select(cache.blocks[heads], 1, block_ids, out=gathered)
    widen(gathered, cache.scales.factors[heads], out)
