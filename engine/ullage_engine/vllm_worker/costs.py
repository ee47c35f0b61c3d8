"""Computes how long sequences can get, and how many KV blocks they need."""

from ullage_common.request_cost import MemoryProfile, most_tokens, sample_blocks
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.scheduler.common_prefix import shared_tokens
from ullage_engine.vllm_worker.sequence import EngineLimits, VllmSequence


class BlockCosts:
    """Computes sequences' maximum lengths and KV block counts from a memory profile and limits."""

    def __init__(self, profile: MemoryProfile, limits: EngineLimits) -> None:
        self._profile = profile
        self._limits = limits

    def longest(self, request: EngineRequest, num_samples: int) -> int:
        """Return the maximum length in tokens of each of a request's `num_samples` samples."""
        profile = self._profile
        longest = self._limits.max_model_len
        if not profile.block_bytes:
            return longest

        lookahead = self._limits.lookahead_tokens
        longest = min(longest, most_tokens(profile, profile.kv_pool_bytes) - lookahead)

        limit = profile.session_kv_bytes if request.session_id else 0
        if limit:
            num_prompt = request.num_prompt_tokens
            most = most_tokens(profile, limit, num_prompt, num_samples) - lookahead
            longest = min(longest, most)
        return longest

    def charged_blocks(self, sequence: VllmSequence) -> int:
        """Return how many KV blocks to reserve for a sequence.

        The blocks have room for `charged_tokens` tokens. Blocks shared with the sequence's parent
        are not counted.
        """
        return self.num_blocks(sequence, sequence.charged_tokens)

    def num_blocks(self, sequence: VllmSequence, num_tokens: int, *, resumed: bool = False) -> int:
        """Return how many KV blocks a sequence needs, not counting blocks shared with its parent.

        Args:
            sequence: the sequence.
            num_tokens: length of the sequence in tokens.
            resumed: whether the sequence resumes after a preemption, in which case vLLM treats all
                `num_tokens` as its prompt.
        """
        shared = 0
        if sequence.parent is not None:
            shared = shared_tokens([sequence.parent.request, sequence.request])
        stored = num_tokens + self._limits.lookahead_tokens
        prompt = None if resumed else 0 if sequence.has_token else len(sequence.token_ids)
        return sample_blocks(self._profile, stored, prompt, shared_tokens=shared)
