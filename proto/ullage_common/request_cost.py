"""What a request will hold in device memory, from the profile that its engine publishes.

The router decides with this price, the engine's admission charges it and its allocator hands it
out. For s samples of p prompt and o output tokens

    shared = floor((p - 1) / block)
    blocks = shared + s * (ceil((p + o) / block) - shared) + (1 if s > 1 and p > 1)
    bytes = blocks * block * bytes per token

because samples share the whole blocks of their prompt before its last token, which each computes
for what follows it, and write to copies of the block with it, whose original is there until all
have copied it. What an engine finds in its prefix cache costs nothing and is known only there.

Layers whose attention sees a sliding window are a cache group of their own, with a block table of
its own. Blocks of both groups are of one size and come from one pool. A sequence returns a block
when the last window has slid past it, so of w tokens and chunks of c tokens the group holds at most

    ceil((w - 1 + c) / block) + 1

blocks at a time. Samples share blocks of that group too, but each comes to hold as many of its own
once its window has slid past the prompt, and is charged for them. Convolution states and
activations are not priced: engines reserve them for all that may run before they serve.
"""

import bisect
from functools import cached_property

import msgspec


class CacheGroup(msgspec.Struct, frozen=True):
    """Attention layers whose KV is kept in the same way."""

    bytes_per_token: int
    """Bytes of one token over all layers and ranks of the group."""
    window_tokens: int = 0
    """Length of the sliding window in tokens; 0 for a group that grows with the sequence."""


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
    """Most prompt tokens computed in one step."""
    kv_pool_bytes: int = 0
    session_kv_bytes: int = 0
    """Most KV of one session; 0: no bound of its own."""

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block on all ranks; it holds tokens of one cache group, whichever it is."""
        return self.block_tokens * max((group.bytes_per_token for group in self.groups), default=0)

    @cached_property
    def window_blocks(self) -> int | None:
        """Most blocks that a sequence holds of its window's group; None without such a group."""
        window = max((group.window_tokens for group in self.groups), default=0)
        if not window:
            return None
        return -(-(window - 1 + self.prefill_chunk_tokens) // self.block_tokens) + 1

    @cached_property
    def window_tokens(self) -> int:
        """Length of the sliding window; 0 where all layers keep all their KV."""
        return max((group.window_tokens for group in self.groups), default=0)

    def decode_read_bytes(self, num_tokens: int) -> int:
        """Bytes of KV that computing one more token of a sequence of so many reads."""
        return sum(
            group.bytes_per_token * min(num_tokens, group.window_tokens or num_tokens)
            for group in self.groups
        )

    @property
    def growing_bytes_per_token(self) -> int:
        """Bytes of a token in the groups without a window, which alone grow without end."""
        return sum(group.bytes_per_token for group in self.groups if not group.window_tokens)


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
    """Returns the output tokens that a request is charged: what is expected, and at least one more
    than it has `produced`, but never more than `max_tokens`."""
    return min(max_tokens, max(expected_output, produced + 1))


def request_blocks(
    profile: MemoryProfile, prompt_tokens: int, num_tokens: int, samples: int = 1
) -> int:
    """Blocks of `samples` sequences of `num_tokens` tokens that begin with the same prompt."""
    shared_tokens = max(0, prompt_tokens - 1)
    leads = samples > 1 and shared_tokens > 0
    first = sample_blocks(profile, num_tokens, leads=leads)
    other = sample_blocks(profile, num_tokens, shared_tokens=shared_tokens)
    return first + (samples - 1) * other


def sample_blocks(
    profile: MemoryProfile, num_tokens: int, *, shared_tokens: int = 0, leads: bool = False
) -> int:
    """Blocks that one sample of `num_tokens` tokens takes.

    The whole blocks of the `shared_tokens` that it begins with are its leader's. Samples write to
    copies of the block in which they part, and until the last has its own the original is one block
    more, which the leader is charged.
    """
    size = profile.block_tokens
    own = -(-num_tokens // size) - shared_tokens // size + leads
    most = profile.window_blocks
    if most is None:
        return own
    # A window that never slides shares as much as the other group does.
    slides = num_tokens > profile.window_tokens
    return own + (min(most, -(-num_tokens // size)) + leads if slides else own)


def most_tokens(
    profile: MemoryProfile, available: int, prompt_tokens: int = 0, samples: int = 1
) -> int:
    """The longest sequence, prompt included, whose predicted bytes are at most `available`.

    All samples get as long; less than `prompt_tokens` when not even the prompt fits.
    """
    if not profile.block_bytes:
        return 0
    blocks = max(0, available // profile.block_bytes)
    if profile.window_blocks is not None:
        return _most_windowed(profile, blocks, prompt_tokens, samples)
    shared_tokens = max(0, prompt_tokens - 1)
    original = 1 if samples > 1 and shared_tokens > 0 else 0
    shared = shared_tokens // profile.block_tokens
    blocks = max(0, blocks - original)
    return (shared + (blocks - shared) // samples) * profile.block_tokens


def _most_windowed(profile: MemoryProfile, blocks: int, prompt_tokens: int, samples: int) -> int:
    """The longest sequence whose price, which grows with its length, is at most so many blocks."""
    size = profile.block_tokens

    def price(num_blocks: int) -> int:
        return request_blocks(profile, prompt_tokens, num_blocks * size, samples)

    return (bisect.bisect_right(range(blocks + 1), blocks, key=price) - 1) * size
