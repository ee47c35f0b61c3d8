"""LFM2's gated short convolution: one launch computes a step's output and the resulting states.

The result is y = C * sum over j of weight[j] * (B * u)[row of tap j]. Each tap reads either a row
of the step or a column of a sequence's state. The products B * u are rounded to the states' dtype,
so the result does not depend on where one step ends and the next begins.
"""

import torch
import triton.language as tl

from ullage_engine.kernels.batch import ConvPlan
from ullage_engine.kernels.triton import Put
from ullage_engine.kernels.triton.launch import jit, jit_for_any, launch, power_of_two

MAX_CHANNELS = 1024
"""Maximum number of channels per program."""


@jit
def column_at(
    projected: tl.tensor,  # [tokens, 3 * channels] B, C, u
    state: tl.tensor,  # [slots, COLUMNS, channels]
    slots: tl.tensor,  # [chunks]
    index: tl.tensor,  # of the step's rows, then of its chunks' states
    channel: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Load a block of channels of B * u from one column of the convolution's input.

    The column belongs either to a row of the step or to the state of a chunk.
    """
    is_row = index < tokens
    row = projected + index.to(tl.int64) * 3 * channels + channel
    is_given = channel < tl.where(is_row, channels, 0)
    b = tl.load(row, mask=is_given, other=0)
    u = tl.load(row + 2 * channels, mask=is_given, other=0)
    product = (b.to(tl.float32) * u.to(tl.float32)).to(b.dtype)
    earlier = tl.maximum(index - tokens, 0)
    slot = tl.load(slots + earlier // COLUMNS).to(tl.int64)
    place = (slot * COLUMNS + earlier % COLUMNS) * channels + channel
    is_kept = channel < tl.where(is_row, 0, tl.where(slot < 0, 0, channels))
    kept = tl.load(state + place, mask=is_kept, other=0)
    return tl.where(is_row, product, kept)


@jit_for_any("tokens")
def convolve_row(
    projected: tl.tensor,  # [tokens, 3 * channels]
    weights: tl.tensor,  # [TAPS, channels]
    taps: tl.tensor,  # [TAPS, tokens]
    tails: tl.tensor,  # [chunks, TAPS - 1]
    slots: tl.tensor,  # [chunks]; negative: from zero state
    next_slots: tl.tensor,  # [chunks]; negative: padding, whose state is dropped
    state: tl.tensor,  # [slots, TAPS - 1, channels]
    out: tl.tensor,  # [tokens, channels]
    tokens: tl.tensor,
    channels: tl.tensor,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Compute a block of channels for one row, or for one column of an updated state.

    Along the grid's first axis, the first `tokens` programs compute the rows of the output. The
    programs after them write the columns of the states.
    """
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    if row < tokens:
        summed = tl.zeros([CHANNELS], tl.float32)
        for tap in tl.static_range(TAPS):
            index = tl.load(taps + tap * tokens + row)
            column = column_at(projected, state, slots, index, channel, tokens, channels, TAPS - 1)
            weight = tl.load(weights + tap * channels + channel, mask=exists, other=0)
            summed += column.to(tl.float32) * weight.to(tl.float32)
        at = row.to(tl.int64) * channels
        gate = tl.load(projected + 3 * at + channels + channel, mask=exists, other=0)
        result = summed * gate.to(tl.float32)
        tl.store(out + at + channel, result.to(out.dtype.element_ty), mask=exists)
    else:
        tail = row - tokens
        index = tl.load(tails + tail)
        kept = column_at(projected, state, slots, index, channel, tokens, channels, TAPS - 1)
        slot = tl.load(next_slots + tail // (TAPS - 1)).to(tl.int64)
        place = (slot * (TAPS - 1) + tail % (TAPS - 1)) * channels + channel
        tl.store(state + place, kept, mask=exists & (slot >= 0))


class FusedConvolution:
    """Computes the convolutions of one step. The indices are copied to the device only once."""

    def __init__(
        self, plan: ConvPlan, put: Put, projected: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Put the plan's index arrays on the device.

        Args:
            plan: inputs of each row's convolution.
            put: function that puts index arrays on the device.
            projected: inputs B, C and u, [tokens, 3 * channels].
            out: output, [tokens, channels].
        """
        self._projected = projected
        self._out = out
        self._taps, self._tails = put(plan.taps), put(plan.tails)
        self._slots, self._next_slots = put(plan.slots), put(plan.next_slots)

    def run(self, weights: torch.Tensor, state: torch.Tensor) -> None:
        """Compute the gated convolution of one layer, and the states after it.

        Args:
            weights: [kernel, channels], the oldest tap first.
            state: states of the layer, [slots, kernel - 1, channels]. They are updated.
        """
        tokens, channels = self._out.shape
        block = min(MAX_CHANNELS, power_of_two(channels))
        launch(
            convolve_row, (tokens + self._tails.numel(), -(-channels // block)),
            self._projected, weights, self._taps, self._tails, self._slots, self._next_slots,
            state, self._out, tokens, channels, TAPS=weights.shape[0], CHANNELS=block, num_warps=4,
        )  # fmt: skip
