"""Predicts a request's device memory from the memory profile that the engine publishes.

The router places requests by this cost, the engine's admission control charges it, and the engine's
allocator allocates it. A sequence has a block table in each cache group. All groups allocate blocks
of the same size from one pool.

Full attention: for s samples with p prompt tokens and o output tokens, a cache group that grows
with the sequence holds

    shared = floor((p - 1) / block)
    blocks = shared + s * (ceil((p + o) / block) - shared) + (1 if s > 1 and p > 1)

Samples share the full blocks of their prompt before its last token. Each sample computes the last
token itself, and writes to its own copy of the block with that token. The original block remains
until all samples have copied it. Engines that recompute the block for each sample have no original
block (see `copies_shared_block`). Blocks in an engine's prefix cache are free, but only the
engine knows which blocks are cached.

Sliding windows: a cache group with a window frees a block once the window has moved past the block.
A step that computes c tokens needs blocks for these tokens and for the window before the first of
them. So if n tokens are computed in steps of at most c tokens, a group with a window of w tokens
holds at most

    window(n, c) = min(ceil(n / block), ceil((w + c - 2) / block) + 1)

blocks at a time. This is the maximum over all ways to split n tokens into steps. Prompts are
computed in steps of `prefill_chunk_tokens`. The output is computed in shorter steps, of
`decode_tokens`, while the other groups still grow. So a sample holds at most the larger of

    growing groups * ceil(p / block) + windows(p, prefill_chunk_tokens)
    growing groups * ceil((p + o) / block) + windows(p + o, decode_tokens)

Samples share the blocks of windows, too. Once a sample's window has moved past the prompt, however,
the sample has a full window of separate blocks. Each sample is therefore charged for a full window.

Recurrent states: a cache group of states holds `state_blocks` blocks per sample of any length.

    bytes = blocks of all groups * bytes per block

The cost excludes activations, and convolution states outside the blocks. Before an engine serves
requests, it reserves enough memory for these to cover everything that may run.
"""

import bisect
from functools import cached_property

import msgspec

UNBOUNDED_TOKENS = (1 << 31) - 1
"""Length returned when memory sets no limit, so that only the model limits the sequence."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers with the same kind of cache: full attention, a sliding window or recurrent states."""

    bytes_per_token: int
    """Bytes of one token's KV, summed over all layers and ranks.

    For recurrent states, the bytes of a block divided by the number of tokens in a KV block.
    """
    window_tokens: int = 0
    """Length of the sliding window in tokens (0 for a group without a window)."""
    state_blocks: int = 0
    """Blocks per sequence of any length for recurrent states (0 for attention)."""

    @property
    def grows(self) -> bool:
        """Return whether the group needs more blocks as the sequence grows."""
        return not self.window_tokens and not self.state_blocks


class MemoryProfile(msgspec.Struct, frozen=True, dict=True):
    """The memory requirements of a loaded model (see `ullage.inference.v1.MemoryProfile`)."""

    block_tokens: int
    """Tokens per KV block."""
    groups: tuple[CacheGroup, ...]
    state_bytes_per_sequence: int = 0
    """Bytes per sequence for convolution states, over all layers and ranks."""
    activation_bytes_per_token: int = 0
    sampler_bytes_per_sequence: int = 0
    prefill_chunk_tokens: int = 0
    """Maximum prompt tokens computed in one step, or in all steps in flight."""
    kv_pool_bytes: int = 0
    session_kv_bytes: int = 0
    """Maximum KV bytes of one session (0 for no limit)."""
    copies_shared_block: bool = True
    """Whether samples copy the block in which they diverge, instead of recomputing the block."""
    decode_tokens: int = 0
    """Maximum output tokens of a sequence in one step, or in all steps in flight.

    0 means the same maximum as for prompt tokens.
    """

    @cached_property
    def block_bytes(self) -> int:
        """Bytes per block, summed over all ranks. A block can hold tokens of any cache group."""
        return self.block_tokens * max((group.bytes_per_token for group in self.groups), default=0)

    @cached_property
    def num_growing(self) -> int:
        """Number of cache groups that need more blocks as the sequence grows."""
        return sum(group.grows for group in self.groups)

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """For each sliding window, its length in tokens and its maximum blocks during prefill.

        The number of blocks is per sequence.
        """
        return self._windows(self.prefill_chunk_tokens)

    @cached_property
    def decode_windows(self) -> tuple[tuple[int, int], ...]:
        """For each sliding window, its length in tokens and its maximum blocks during decoding.

        The number of blocks is per sequence.
        """
        return self._windows(self.decode_tokens or self.prefill_chunk_tokens)

    def _windows(self, step_tokens: int) -> tuple[tuple[int, int], ...]:
        return tuple(
            (window, -(-(window - 2 + step_tokens) // self.block_tokens) + 1)
            for window in (group.window_tokens for group in self.groups)
            if window
        )

    @cached_property
    def state_blocks(self) -> int:
        """Return the number of blocks that each sequence needs for recurrent states."""
        return sum(group.state_blocks for group in self.groups)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the number of blocks follows from the formula for full attention alone.

        This is the case if the only cache group uses full attention, and samples copy shared
        blocks.
        """
        return self.num_growing == len(self.groups) == 1 and self.copies_shared_block

    @cached_property
    def window_tokens(self) -> int:
        """Length of the longest sliding window in tokens (0 without a window)."""
        return max((group.window_tokens for group in self.groups), default=0)

    def decode_read_bytes(self, num_tokens: int) -> int:
        """Return the KV bytes that one decode step reads for a sequence of `num_tokens` tokens."""
        return sum(
            group.bytes_per_token * min(num_tokens, group.window_tokens or num_tokens)
            for group in self.groups
            if not group.state_blocks
        )

    @property
    def growing_bytes_per_token(self) -> int:
        """Bytes per token in the cache groups that grow with the sequence."""
        return sum(group.bytes_per_token for group in self.groups if group.grows)


class Demand(msgspec.Struct, frozen=True):
    """Predicted memory of one request."""

    tokens: int
    """Tokens charged for one sample: the prompt plus the expected output."""
    kv_bytes: int
    """Bytes in the request's blocks, which the engine's admission control charges."""


def predict(
    profile: MemoryProfile,
    prompt_tokens: int,
    max_tokens: int,
    expected_output: int,
    samples: int = 1,
) -> Demand:
    """Predict how much memory a request needs for its prompt and each sample's expected output."""
    tokens = prompt_tokens + charged_output(max_tokens, expected_output)
    blocks = request_blocks(profile, prompt_tokens, tokens, samples)
    return Demand(tokens, blocks * profile.block_bytes)


def charged_output(max_tokens: int, expected_output: int, produced: int = 0) -> int:
    """Return the number of output tokens that a request is charged for.

    This is the expected output length, but at least `produced` + 1 and at most `max_tokens`.
    """
    return min(max_tokens, max(expected_output, produced + 1))


def request_blocks(
    profile: MemoryProfile, prompt_tokens: int, num_tokens: int, samples: int = 1
) -> int:
    """Return the number of blocks that all samples of one prompt need together.

    Args:
        prompt_tokens: number of prompt tokens.
        num_tokens: number of tokens per sample, including the prompt.
        samples: number of samples.
    """
    if samples == 1:
        return sample_blocks(profile, num_tokens, prompt_tokens)
    shared_tokens = max(0, prompt_tokens - 1)
    first = sample_blocks(profile, num_tokens, prompt_tokens, leads=shared_tokens > 0)
    other = sample_blocks(profile, num_tokens, prompt_tokens, shared_tokens=shared_tokens)
    return first + (samples - 1) * other


def sample_blocks(
    profile: MemoryProfile,
    num_tokens: int,
    prompt_tokens: int | None = None,
    *,
    shared_tokens: int = 0,
    leads: bool = False,
) -> int:
    """Return the number of blocks that one sample of `num_tokens` tokens needs.

    Args:
        prompt_tokens: number of tokens computed by prefill (0 if the prompt is already computed).
            None if prefill may compute all tokens, as after preemption.
        shared_tokens: number of leading tokens that this sample shares with another sample of the
            prompt, the leader. The leader is charged for the full blocks of these tokens.
        leads: whether this sample is the leader. The leader is charged for one extra block: each
            sample writes to its own copy of the block in which samples diverge, and the original is
            kept until the last sample has copied it.
    """
    size = profile.block_tokens
    if profile.is_plain:
        return -(-num_tokens // size) - shared_tokens // size + leads
    original = leads and profile.copies_shared_block
    shared = shared_tokens // size
    most = _most_held(profile, num_tokens, profile.decode_windows, shared, original)
    if profile.decode_tokens and prompt_tokens != 0:
        prompt = num_tokens
        if prompt_tokens is not None:
            # The first steps of the output may be in flight with the last one of the prompt.
            prompt = min(num_tokens, prompt_tokens + profile.decode_tokens - 1)
        most = max(most, _most_held(profile, prompt, profile.windows, shared, original))
    return most


def _most_held(
    profile: MemoryProfile,
    num_tokens: int,
    windows: tuple[tuple[int, int], ...],
    shared: int,
    original: int,
) -> int:
    """Return the peak number of blocks that a sample holds while computing `num_tokens` tokens.

    Args:
        shared: number of blocks in each block table that are charged to another sample.
        original: 1 if the sample is also charged for the shared block that all samples copy,
            otherwise 0.
    """
    whole = -(-num_tokens // profile.block_tokens)
    own = whole - shared + original
    blocks = profile.num_growing * own + profile.state_blocks
    for window_tokens, most in windows:
        # A window that never slides shares as much as a group that grows.
        blocks += min(most, whole) + original if num_tokens > window_tokens else own
    return blocks


def most_tokens(
    profile: MemoryProfile, available: int, prompt_tokens: int | None = None, samples: int = 1
) -> int:
    """Return the length of the longest sequence that is predicted to fit in `available` bytes.

    Args:
        available: available memory in bytes.
        prompt_tokens: number of prompt tokens, or None if prefill may compute the whole sequence,
            as after preemption.
        samples: number of sequences of that length.

    Returns:
        The number of tokens, including the prompt. It is less than `prompt_tokens` if not even the
        prompt fits, and `UNBOUNDED_TOKENS` if a sequence of any length fits.
    """
    if not profile.block_bytes:
        return UNBOUNDED_TOKENS
    blocks = max(0, available // profile.block_bytes)
    if not profile.is_plain:
        if profile.windows or not profile.num_growing:
            return _most_windowed(profile, blocks, prompt_tokens, samples)
        blocks = (blocks - samples * profile.state_blocks) // profile.num_growing

    shared_tokens = max(0, (prompt_tokens or 0) - 1)
    original = 1 if samples > 1 and shared_tokens > 0 and profile.copies_shared_block else 0
    shared = shared_tokens // profile.block_tokens
    blocks = max(0, blocks - original)
    return (shared + (blocks - shared) // samples) * profile.block_tokens


def _most_windowed(
    profile: MemoryProfile, blocks: int, prompt_tokens: int | None, samples: int
) -> int:
    """Return the length in tokens of the longest sequence that fits in `blocks` blocks.

    The function searches by bisection. The result is UNBOUNDED_TOKENS if a sequence of any
    length fits.
    """
    size = profile.block_tokens

    def price(num_blocks: int) -> int:
        num_tokens = num_blocks * size
        prompt = num_tokens if prompt_tokens is None else min(prompt_tokens, num_tokens)
        return request_blocks(profile, prompt, num_tokens, samples)

    longest = blocks
    if not profile.num_growing:
        # The price stops growing when every window has slid, at its largest number of blocks.
        longest = max(
            (max(most, window // size + 1) for window, most in profile.windows), default=0
        )
        if price(longest) <= blocks:
            return UNBOUNDED_TOKENS
    return max(0, bisect.bisect_right(range(longest + 1), blocks, key=price) - 1) * size
