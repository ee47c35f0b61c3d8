"""What a request will hold in device memory, from the profile that its engine publishes.

The engine prices with the same formula (`ullage_engine.memory.predictor`): there it is what
admission charges and what the allocator hands out. For s samples of p prompt and o output tokens

    shared = floor((p - 1) / block)
    blocks = shared + s * (ceil((p + o) / block) - shared) + (1 if s > 1 and p > 1)
    bytes = blocks * block * sum of bytes per token over cache groups

because samples share the whole blocks of their prompt before its last token, and write to copies of
the block with it, whose original is there until all have copied it. A sliding window is priced as
if it grew, because all groups share one block table. The fixed state of a sequence is not priced:
engines reserve it for all that may run. What an engine finds in its prefix cache is not known here,
so nothing is subtracted.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything a prediction needs to know of a model on an engine."""

    block_tokens: int
    bytes_per_token: int
    """Summed over the cache groups, all layers and ranks."""

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Demand:
    """Predicted bytes of one request."""

    tokens: int
    """Tokens charged for one sample: the prompt and the expected output."""
    kv_bytes: int
    """In whole blocks."""

    @property
    def total(self) -> int:
        """What the engine's admission charges."""
        return self.kv_bytes


def predict(
    profile: Profile,
    prompt_tokens: int,
    max_tokens: int,
    expected_output: int,
    samples: int = 1,
) -> Demand:
    """The bytes of a prompt and of the output expected of each sample: at least 1 token, at most
    `max_tokens`."""
    tokens = prompt_tokens + min(max_tokens, max(1, expected_output))
    shared = _shared_blocks(profile, prompt_tokens)
    own = -(-tokens // profile.block_tokens) - shared
    blocks = shared + samples * own + _originals(prompt_tokens, samples)
    return Demand(tokens, blocks * profile.block_bytes)


def most_tokens(profile: Profile, available: int, prompt_tokens: int = 0, samples: int = 1) -> int:
    """The longest sequence, prompt included, whose predicted bytes are at most `available`.

    All samples get as long; less than `prompt_tokens` when not even the prompt fits.
    """
    block_bytes = profile.block_bytes
    if not block_bytes:
        return 0
    blocks = max(0, available // block_bytes - _originals(prompt_tokens, samples))
    shared = _shared_blocks(profile, prompt_tokens)
    return (shared + (blocks - shared) // samples) * profile.block_tokens


def _shared_blocks(profile: Profile, prompt_tokens: int) -> int:
    """Blocks of a prompt that all its samples share; each computes the last token for itself."""
    return (prompt_tokens - 1) // profile.block_tokens if prompt_tokens else 0


def _originals(prompt_tokens: int, samples: int) -> int:
    """Blocks that stay until every sample has copied them."""
    return 1 if samples > 1 and prompt_tokens > 1 else 0
