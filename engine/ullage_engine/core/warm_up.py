"""The largest steps an engine can meet, as plans."""

from collections.abc import Iterator

from ullage_engine.core.plan import Chunk, StepPlan
from ullage_engine.core.request import SamplingParams
from ullage_engine.memory.arena import StepLimits, padded_tokens

EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.999999,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    top_logprobs=20,
)
"""Sampling that takes the most memory: every penalty, a sort of the vocabulary, alternatives."""


def warm_up_plans(limits: StepLimits, num_blocks: int, vocab: int) -> Iterator[StepPlan]:
    """Plans that touch every buffer and every number of rows that matrix products see.

    They use whatever blocks exist, sharing them where the pool is smaller than the step.
    """
    longest = min(limits.max_tokens, limits.max_model_len)
    yield StepPlan([_chunk(0, longest, limits.max_model_len - longest, limits, num_blocks)])
    rows = min(limits.max_rows, limits.max_tokens)
    context = min(limits.max_gather_tokens // rows, limits.max_model_len)
    decodes = [_chunk(index, 1, context - 1, limits, num_blocks) for index in range(rows)]
    yield StepPlan(decodes)
    for tokens in sorted({padded_tokens(count) for count in range(1, min(longest, 512) + 1)}):
        yield StepPlan([_chunk(0, min(tokens, longest), 0, limits, num_blocks)])


def _chunk(index: int, tokens: int, start: int, limits: StepLimits, num_blocks: int) -> Chunk:
    end = start + tokens
    blocks = range(-(-end // limits.block_tokens))
    return Chunk(
        request_id=f"warm-up-{index}",
        token_ids=[0] * tokens,
        start=start,
        block_ids=[(block + index) % num_blocks for block in blocks],
        sampling=EVERYTHING,
        history=[0] * end,
        num_prompt_tokens=0,
    )
