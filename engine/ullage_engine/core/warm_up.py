"""The largest steps an engine can meet, as plans."""

from collections.abc import Callable, Iterator

from ullage_engine.core.plan import Chunk, StepPlan
from ullage_engine.core.request import SamplingParams
from ullage_engine.memory.arena import StepLimits
from ullage_engine.memory.rungs import MAX_TILE_ROWS, MIN_TILE_ROWS

EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.999999,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    top_logprobs=20,
)
"""Sampling that takes the most memory: penalties, biases and a mask, a sort of the
vocabulary, alternatives."""


GREEDY = SamplingParams(temperature=0.0)


def shape_plans(limits: StepLimits, num_blocks: int) -> Iterator[StepPlan]:
    """One plan for every shape a matrix product can have; see `ullage_engine.memory.rungs`."""
    longest = min(limits.max_tokens, limits.max_model_len)
    for tokens in _largest_of_each(limits.product_rows, longest):
        yield StepPlan([_chunk(0, tokens, 0, limits, num_blocks, None)])
    for rows in _largest_of_each(limits.product_rows, min(limits.max_rows, limits.max_tokens)):
        yield StepPlan([_chunk(row, 1, 0, limits, num_blocks, GREEDY) for row in range(rows)])
    most_blocks = -(-limits.max_model_len // limits.block_tokens)
    for blocks in _largest_of_each(limits.context_blocks, most_blocks):
        context = min(blocks * limits.block_tokens, limits.max_model_len)
        yield from _decodes(context, blocks, limits, num_blocks)
        yield from _tiles(context, limits, num_blocks)


def largest_plans(limits: StepLimits, num_blocks: int) -> Iterator[StepPlan]:
    """The longest prompt chunk at the end of the longest sequence; the fullest batch."""
    longest = min(limits.max_tokens, limits.max_model_len)
    yield StepPlan([_chunk(0, longest, limits.max_model_len - longest, limits, num_blocks)])
    rows = min(limits.max_rows, limits.max_tokens)
    context = max(1, min(limits.max_gather_tokens // rows, limits.max_model_len))
    yield StepPlan([_chunk(row, 1, context - 1, limits, num_blocks) for row in range(rows)])


def _decodes(context: int, blocks: int, limits: StepLimits, num_blocks: int) -> Iterator[StepPlan]:
    """Every number of rows that sequences of this length can be attended in."""
    gathered = max(
        1, limits.max_gather_tokens // (limits.context_blocks(blocks) * limits.block_tokens)
    )
    rows = 1
    while rows <= min(gathered, 2 * limits.max_rows - 1):
        decodes = min(rows, limits.max_rows)
        yield StepPlan(
            [_chunk(row, 1, context - 1, limits, num_blocks, GREEDY) for row in range(decodes)]
        )
        rows *= 2


def _tiles(context: int, limits: StepLimits, num_blocks: int) -> Iterator[StepPlan]:
    rows = MIN_TILE_ROWS
    while rows <= min(MAX_TILE_ROWS, limits.max_tokens, context):
        yield StepPlan([_chunk(0, rows, context - rows, limits, num_blocks, None)])
        rows *= 2


def _largest_of_each(rung: Callable[[int], int], most: int) -> list[int]:
    """The largest size up to `most` of each rung."""
    largest = {rung(size): size for size in range(1, most + 1)}
    return list(largest.values())


def _chunk(
    index: int,
    tokens: int,
    start: int,
    limits: StepLimits,
    num_blocks: int,
    sampling: SamplingParams | None = EVERYTHING,
) -> Chunk:
    """A chunk in whatever blocks exist, shared where the pool is smaller than the step."""
    end = start + tokens
    return Chunk(
        request_id=f"warm-up-{index}",
        token_ids=[0] * tokens,
        start=start,
        block_ids=[(block + index) % num_blocks for block in range(-(-end // limits.block_tokens))],
        sampling=sampling,
        history=[0] * end,
        num_prompt_tokens=0,
        allowed=b"\xff" if sampling is EVERYTHING else None,
    )
