"""What a request will hold in device memory, from the profile that its engine publishes.

The engine prices with the same formula (`ullage_engine.memory.predictor`): there it is what
admission charges and what the allocator hands out. For a sequence of n tokens

    bytes(n) = ceil(n / block) * block * sum of bytes per token over cache groups + state

A sliding window is priced as if it grew, because all groups share one block table.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything a prediction needs to know of a model on an engine."""

    block_tokens: int
    bytes_per_token: int
    """Summed over the cache groups, all layers and ranks."""
    state_bytes: int = 0
    """Fixed state of one sequence."""

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class Demand:
    """Predicted bytes of one request."""

    tokens: int
    """Tokens charged: the prompt and the expected output."""
    kv_bytes: int
    """In whole blocks."""
    state_bytes: int

    @property
    def total(self) -> int:
        return self.kv_bytes + self.state_bytes


def predict(profile: Profile, prompt_tokens: int, max_tokens: int, expected_output: int) -> Demand:
    """The bytes of a prompt and of the output expected of it: at least 1 token, at most
    `max_tokens`."""
    tokens = prompt_tokens + min(max_tokens, max(1, expected_output))
    blocks = -(-tokens // profile.block_tokens)
    return Demand(tokens, blocks * profile.block_bytes, profile.state_bytes)


def most_tokens(profile: Profile, available: int) -> int:
    """The longest sequence whose predicted bytes are no more than `available`."""
    if not profile.block_bytes:
        return 0
    return max(0, available - profile.state_bytes) // profile.block_bytes * profile.block_tokens
