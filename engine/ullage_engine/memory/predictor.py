"""What a sequence's memory costs: arithmetic on the model's published profile.

Admission and allocation call the same functions, so a price and a bill cannot differ. The router
computes the same from the profile it gets over the wire.
"""

from ullage_engine.core.request import EngineRequest
from ullage_engine.messages import Profile


def num_blocks(profile: Profile, num_tokens: int) -> int:
    """Blocks that hold the KV of `num_tokens` tokens."""
    return -(-num_tokens // profile.block_tokens)


def block_bytes(profile: Profile) -> int:
    """Bytes of one block over all cache groups.

    Every group is priced as growing, window or not: all groups share one block table.
    """
    return profile.block_tokens * sum(group.bytes_per_token for group in profile.groups)


def sequence_bytes(profile: Profile, num_tokens: int) -> int:
    """Bytes of a sequence of `num_tokens` tokens: whole blocks and its fixed state."""
    return num_blocks(profile, num_tokens) * block_bytes(profile) + profile.state_bytes_per_sequence


def expected_length(request: EngineRequest, expected_output: int, limit: int) -> int:
    """Tokens a request is charged for: its prompt and the output it is expected to produce.

    Output it already has counts, and one token more that it is going to produce. Never above
    `limit`, the longest sequence this engine can hold.
    """
    produced = len(request.token_ids) - request.num_prompt_tokens
    output = min(request.max_tokens, max(expected_output, produced + 1))
    return min(limit, request.num_prompt_tokens + output)
