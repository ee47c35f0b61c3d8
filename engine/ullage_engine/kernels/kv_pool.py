"""Device memory of the cache: the paged KV pool, host slots for swapped blocks, convolution states.

KV is written into pages and gathered from them in the computing type, or in float8 E4M3 with a
scale for each head that is a power of two. Dividing by such a scale and multiplying by it is exact,
so the one rounding is E4M3's, and a kernel that applies the scale to queries and sums has the bits
of one that applies it to keys and values.
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
"""Largest number of E4M3, which has no infinity: what exceeds it is stored as that."""

MIN_EXPONENT = -15
MAX_EXPONENT = 7
"""Exponents of scales: every stored number and every scale is one of float16, too."""


LAYOUT_VERSION = 1
"""Version of how a block's numbers lie in a slot, and of what they are: a change of either makes KV
that others have stored unknown."""


class _Bits(NamedTuple):
    """The places of E4M3's bits in a number of another type."""

    integers: torch.dtype
    shift: int
    mask: int
    bias: int
    """The number that these bits are is its value times 2 to the power -bias."""


_BITS = {
    torch.float32: _Bits(torch.int32, 20, -(1 << 31) | 0x7F << 20, 120),
    torch.bfloat16: _Bits(torch.int16, 4, -(1 << 15) | 0x7F << 4, 120),
    torch.float16: _Bits(torch.int16, 7, -(1 << 15) | 0x7F << 7, 8),
}


class HeadScales(NamedTuple):
    """The values of a stored 1 in each head of a layer, in the computing type."""

    values: torch.Tensor  # [2 * kv_heads, 1, 1], keys first
    factors: torch.Tensor  # the same, times what `widen` finds missing


def head_scales(bounds: Sequence[float], dtype: torch.dtype, device: torch.device) -> HeadScales:
    """Find the least power of two for each head with which all up to its bound can be stored.

    Raises:
        WeightsError: a bound is no number, which float8 would store as one.
    """
    if any(map(math.isnan, bounds)):
        raise WeightsError(
            "weights of keys or values are no numbers, so model.kv_dtype fp8 has no scales for "
            "them; download the model again"
        )
    # A fraction of 0.5 to 1 times 2 to this power is the quotient.
    exponents = [
        min(MAX_EXPONENT, max(MIN_EXPONENT, math.frexp(bound / LARGEST)[1])) for bound in bounds
    ]
    values = torch.tensor([2.0**exponent for exponent in exponents], device=device)[:, None, None]
    factors = values * widening_factor(dtype)
    return HeadScales(values.to(dtype), factors.to(dtype))


def narrow(numbers: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
    """Write numbers as float8 codes of the same shape, and overwrite the numbers.

    A number that is too large for its scale saturates at the largest code.
    """
    numbers.div_(scales).clamp_(-LARGEST, LARGEST)
    codes.view(torch.float8_e4m3fn).copy_(numbers)


def widening_factor(dtype: torch.dtype) -> float:
    """Return the factor with which `widen` gives the values of codes that have no scale."""
    return float(2.0 ** _BITS[dtype].bias)


def widen(codes: torch.Tensor, factors: torch.Tensor | float, out: torch.Tensor) -> None:
    """Write what bytes stand for; exact, and several times faster than torch's conversion.

    The bits are moved to their places in a wider number, whose exponent has another bias. Not a
    number reads as 480: `narrow` makes it of nothing but not a number.
    """
    layout = _BITS[out.dtype]
    bits = out.view(layout.integers)
    bits.copy_(codes.view(torch.int8))
    bits.bitwise_left_shift_(layout.shift).bitwise_and_(layout.mask)
    out.mul_(factors)


class LayerCache(NamedTuple):
    """One layer's keys and values: the same memory seen as blocks and as slots.

    Slot = block id * block tokens + position within the block.
    """

    blocks: torch.Tensor  # [2 * kv_heads, num_blocks, block_tokens * head_dim], keys first
    keys: torch.Tensor  # [kv_heads, num_slots, head_dim]
    values: torch.Tensor  # [kv_heads, num_slots, head_dim]
    scales: HeadScales | None = None
    """Scales of float8 KV: with them the tensors above are bytes, each a float8 E4M3."""


def scratch_blocks(model_config: ModelConfig) -> int:
    """Count the blocks beside those of sequences, for the KV of tokens that are computed a second
    time.
    """
    return 1 if model_config.conv_kernel else 0


def kv_block_bytes(
    model_config: ModelConfig, block_tokens: int, itemsize: int, *, windowed: bool = False
) -> int:
    """Return the bytes of one block; `itemsize` is that of a stored number."""
    return block_tokens * model_config.page_bytes_per_token(itemsize, windowed=windowed)


class KVPool:
    """The KV of all sequences on the device, in one allocation, every page touched.

    Heads come first so that the blocks of one head gather into a matrix. Where a model has
    convolutions there is one block more than `num_blocks`, which is written and never read.
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
        """`scales`, one for each layer that attends: KV is stored as float8, not as `dtype`.

        `windowed`: a block holds tokens of the layers with sliding windows, or of those without:
        the i-th layer of either lies in the same place.
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
        """Takes the KV of replayed tokens; there is one only if the model has convolutions."""
        return self.num_blocks

    def clear(self, block: int) -> None:
        """Zeros one block over all layers: attention multiplies what lies behind its last token by
        zero, and an earlier user's infinity or NaN would outlive that.
        """
        self.blocks[:, block].zero_()

    def copy(self, source: int, destination: int) -> None:
        """Copy one block over all layers; allocates nothing."""
        self.blocks[:, destination].copy_(self.blocks[:, source])


def _layer_places(model_config: ModelConfig, windowed: bool) -> list[int]:
    """Return the place in a block of each layer that attends."""
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
    """The convolution states of all sequences, in one allocation, every page touched.

    A state is the last kernel - 1 columns of each convolution's input, oldest first.
    """

    def __init__(
        self, model_config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        columns = max(0, model_config.conv_kernel - 1)
        shape = (model_config.num_conv_layers, num_slots, columns, model_config.conv_channels)
        self.states = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.layers = list(self.states)
        """States of each convolution layer, [num_slots, kernel - 1, channels]."""

    @property
    def num_slots(self) -> int:
        return self.states.shape[1]


class HostPool:
    """Slots in host memory, each for one block over all layers; every page touched.

    Beside a GPU the memory is pinned for as long as the pool lives, and a block passes through one
    block of staging on the device, because only memory without gaps is copied between devices
    without a temporary. What is prefetched passes through another one, on a stream of its own.
    """

    def __init__(self, pool: KVPool, num_slots: int, shared: torch.Tensor | None = None) -> None:
        """`shared` [slots, bytes of a block]: memory of the host tier, whose slots count behind
        `num_slots` of its own; what they hold stays.
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
        """Copy a block to the host; later device work may overwrite the block."""
        source = self._pool.blocks[:, block]
        if self._staging is not None:
            source = self._staging.copy_(source)
        self._slot(slot).copy_(source, non_blocking=True)

    def swap_in(self, slot: int, block: int) -> None:
        """Copy a slot to a block; later device work sees it."""
        self._copy_in(slot, block, self._staging)

    def prefetch(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Start copying host slots to blocks. `finish_prefetch` waits for the copies.

        A GPU copies on a stream of its own while the step computes. A CPU copies at once, since the
        copy would take the cores of the step.
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
        """Return when what was prefetched is there: its slots may be written again, and later
        device work sees it.
        """
        if self._is_prefetching and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._stream.synchronize()
        self._is_prefetching = False

    def measure(self) -> float:
        """Measures the seconds of copying one block in either direction, at its best.

        The blocks keep what they hold.
        """
        count = max(1, min(self.num_slots, self._pool.num_blocks))
        timers = [CopyTimer(self._pool.blocks.device) for _ in range(_MEASUREMENTS)]
        # Each pair of copies by itself: on a processor that others use, most are interrupted.
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
"""Blocks that are copied out and in to measure how fast that is."""


class CopyTimer:
    """Sums the seconds of copies: on a GPU between two events of its stream, else by the clock."""

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
        """Seconds of all copies so far; waits for those under way."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        self._events = []
        return self._seconds


def move(moves: Moves, pool: KVPool, host: HostPool) -> None:
    """Make copies of whole blocks in the order of `Moves`; allocates nothing."""
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
    """Allocates flat views by name in one allocation, every page touched.

    Four-byte buffers are float32, one-byte buffers uint8, others `dtype`.
    """
    types = {1: torch.uint8, 4: torch.float32}
    # empty and zero_, because zeros would leave the pages unbacked until first use.
    storage = torch.empty(layout.nbytes, dtype=torch.uint8, device=device).zero_()
    return {
        buffer.name: storage[buffer.offset : buffer.end].view(types.get(buffer.itemsize, dtype))
        for buffer in layout.buffers
    }


def shaped(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return the start of a flat buffer, as a contiguous tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return buffer[:count].view(shape)


def storage_bytes(tensors: Iterable[torch.Tensor], alignment: int = 1) -> int:
    """Sum the bytes of all memory that these tensors are views of, each piece of it counted once.

    `alignment` rounds every piece up, as laying it out in a file does.
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
    """Store a step's keys and values [kv_heads, tokens, head_dim], which it may overwrite.

    `codes`: a flat buffer of bytes as large as either, if KV is stored as float8.
    """
    if cache.scales is None:
        cache.keys.index_copy_(1, slots, keys)
        cache.values.index_copy_(1, slots, values)
        return
    assert codes is not None, "float8 without a buffer for it"
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
    """Copy blocks of some of the cache's 2 * kv_heads to out [heads, blocks, width].

    `codes`: a flat buffer of as many bytes as `out` has numbers, if KV is stored as float8.
    """
    if cache.scales is None:
        torch.index_select(cache.blocks[heads], 1, block_ids, out=out)
        return
    assert codes is not None, "float8 without a buffer for it"
    gathered = shaped(codes, *out.shape)
    torch.index_select(cache.blocks[heads], 1, block_ids, out=gathered)
    widen(gathered, cache.scales.factors[heads], out)
