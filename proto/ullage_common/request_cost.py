"""What a request will hold in device memory, from the profile that its engine publishes.

The router decides with this price, the engine's admission charges it and its allocator hands it
out. A sequence has a block table in each cache group, and all groups take blocks of one size from
one pool. Of s samples of p prompt and o output tokens a group that grows with the sequence holds

    shared = floor((p - 1) / block)
    blocks = shared + s * (ceil((p + o) / block) - shared) + (1 if s > 1 and p > 1)

because samples share the whole blocks of their prompt before its last token, which each computes
for what follows it, and write to copies of the block with it, whose original is there until all
have copied it. Engines that compute that block again for each sample have no original
(`copies_shared_block`). What an engine finds in its prefix cache costs nothing and is known only
there.

A group whose attention sees a sliding window returns a block when the last window has slid past it.
A step that computes c tokens needs its blocks for them and the window before the first of them, so
of n tokens computed in steps of at most c, and a window of w, it holds at most

    window(n, c) = min(ceil(n / block), ceil((w + c - 2) / block) + 1)

blocks at a time: the most of all ways to split n tokens into steps, and held by one of them while
the last of the n tokens' blocks is begun. Prompts are computed in steps of
`prefill_chunk_tokens` and the output in steps of `decode_tokens`, which are fewer, while the other
groups still grow; so a sample holds at most the larger of

    growing groups * ceil(p / block) + windows(p, prefill_chunk_tokens)
    growing groups * ceil((p + o) / block) + windows(p + o, decode_tokens)

Samples share blocks of windows too, but each comes to hold as many of its own once its window has
slid past the prompt, and is charged for them. A group of recurrent states holds `state_blocks` of
each sample, however long it is.

    bytes = blocks of all groups * bytes of a block

Convolution states outside the blocks and activations are not priced: engines reserve them for all
that may run before they serve.
"""

import bisect
from functools import cached_property

import msgspec

UNBOUNDED_TOKENS = (1 << 31) - 1
"""Length of a sequence that memory does not bound; the model's length does."""


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers whose KV or states are kept in the same way: it grows, or has a window, or states."""

    bytes_per_token: int
    """Bytes of one token over all layers and ranks of the group; of states, a block's share."""
    window_tokens: int = 0
    """Length of the sliding window in tokens; 0 for a group without one."""
    state_blocks: int = 0
    """Blocks that each sequence takes for its states, whatever its length; 0 for attention."""

    @property
    def grows(self) -> bool:
        """Whether it takes blocks as long as the sequence grows."""
        return not self.window_tokens and not self.state_blocks


class MemoryProfile(msgspec.Struct, frozen=True, dict=True):
    """The memory needs of a loaded model; see `ullage.inference.v1.MemoryProfile`."""

    block_tokens: int
    """Tokens of one KV block."""
    groups: tuple[CacheGroup, ...]
    state_bytes_per_sequence: int = 0
    """Bytes of one sequence's convolution states over all layers and ranks."""
    activation_bytes_per_token: int = 0
    sampler_bytes_per_sequence: int = 0
    prefill_chunk_tokens: int = 0
    """Most prompt tokens computed in one step, or in steps in flight."""
    kv_pool_bytes: int = 0
    session_kv_bytes: int = 0
    """Most KV of one session; 0: no bound of its own."""
    copies_shared_block: bool = True
    """Whether samples copy the block in which they part; else each computes its own."""
    decode_tokens: int = 0
    """Most tokens of a sequence in one step, or in steps in flight, when its prompt is computed;
    0: as many as of a prompt."""

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block on all ranks; it holds tokens of one cache group, whichever it is."""
        return self.block_tokens * max((group.bytes_per_token for group in self.groups), default=0)

    @cached_property
    def num_growing(self) -> int:
        """Number of groups that take blocks as long as the sequence grows."""
        return sum(group.grows for group in self.groups)

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Of each group with a window its length in tokens and the most blocks of a sequence."""
        return self._windows(self.prefill_chunk_tokens)

    @cached_property
    def decode_windows(self) -> tuple[tuple[int, int], ...]:
        """The same of sequences whose prompts are computed."""
        return self._windows(self.decode_tokens or self.prefill_chunk_tokens)

    def _windows(self, step_tokens: int) -> tuple[tuple[int, int], ...]:
        return tuple(
            (window, -(-(window - 2 + step_tokens) // self.block_tokens) + 1)
            for window in (group.window_tokens for group in self.groups)
            if window
        )

    @cached_property
    def state_blocks(self) -> int:
        """Blocks that each sequence takes for states, whatever its length."""
        return sum(group.state_blocks for group in self.groups)

    @cached_property
    def is_plain(self) -> bool:
        """Whether all layers keep all their KV in one group, whose samples copy blocks."""
        return self.num_growing == len(self.groups) == 1 and self.copies_shared_block

    @cached_property
    def window_tokens(self) -> int:
        """Length of the longest sliding window; 0 without one."""
        return max((group.window_tokens for group in self.groups), default=0)

    def decode_read_bytes(self, num_tokens: int) -> int:
        """Bytes of KV that computing one more token of a sequence of so many reads."""
        return sum(
            group.bytes_per_token * min(num_tokens, group.window_tokens or num_tokens)
            for group in self.groups
            if not group.state_blocks
        )

    @property
    def growing_bytes_per_token(self) -> int:
        """Bytes of a token in the groups that grow with the sequence."""
        return sum(group.bytes_per_token for group in self.groups if group.grows)


class Demand(msgspec.Struct, frozen=True):
    """Predicted bytes of one request."""

    tokens: int
    """Tokens charged for one sample: the prompt and the expected output."""
    kv_bytes: int
    """Bytes of its blocks, which the engine's admission charges."""


def predict(
    profile: MemoryProfile,
    prompt_tokens: int,
    max_tokens: int,
    expected_output: int,
    samples: int = 1,
) -> Demand:
    """Prices a prompt and the output that is expected of each sample."""
    tokens = prompt_tokens + charged_output(max_tokens, expected_output)
    blocks = request_blocks(profile, prompt_tokens, tokens, samples)
    return Demand(tokens, blocks * profile.block_bytes)


def charged_output(max_tokens: int, expected_output: int, produced: int = 0) -> int:
    """Return the output tokens that a request is charged: what is expected, and at least one more
    than it has `produced`, but never more than `max_tokens`."""
    return min(max_tokens, max(expected_output, produced + 1))


def request_blocks(
    profile: MemoryProfile, prompt_tokens: int, num_tokens: int, samples: int = 1
) -> int:
    """Blocks of `samples` sequences of `num_tokens` tokens that begin with the same prompt."""
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
    """Blocks that one sample of `num_tokens` tokens takes.

    The first `prompt_tokens` are computed as a prompt: None where all may be, as of a sequence that
    goes on after it was preempted, and 0 when the prompt is computed.

    The whole blocks of the `shared_tokens` that it begins with are its leader's. Samples write to
    copies of the block in which they part, and until the last has its own the original is one block
    more, which the leader is charged.
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
    """Most blocks that a sample holds while its first `num_tokens` tokens are computed, less
    `shared` ones of each table, and with the original of a copied block."""
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
    """The longest sequence, prompt included, whose predicted bytes are at most `available`.

    All samples get as long; less than `prompt_tokens` when not even the prompt fits, and
    `UNBOUNDED_TOKENS` when a sequence of any length fits. Where no prompt is given, all of the
    sequence may be one, as when it goes on after it was preempted.
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
    """The longest sequence whose price, which grows with its length, is at most so many blocks."""
    size = profile.block_tokens

    def price(num_blocks: int) -> int:
        num_tokens = num_blocks * size
        prompt = num_tokens if prompt_tokens is None else min(prompt_tokens, num_tokens)
        return request_blocks(profile, prompt, num_tokens, samples)

    longest = blocks
    if not profile.num_growing:
        # The price grows until every window slides and holds all that it ever does.
        longest = max(
            (max(most, window // size + 1) for window, most in profile.windows), default=0
        )
        if price(longest) <= blocks:
            return UNBOUNDED_TOKENS
    return max(0, bisect.bisect_right(range(longest + 1), blocks, key=price) - 1) * size
