"""Step plans for the warm-up and for the probe.

The warm-up runs every matmul shape that can occur, as well as the largest steps. The probe is a few
fixed steps whose results prove that the started engine computes correctly.
"""

from collections.abc import Callable, Iterator

import msgspec

from ullage_engine.kernels.arena import MAX_TILE_ROWS, MIN_TILE_ROWS, StepLimits
from ullage_engine.protocol.requests import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, PromptTargets, StepPlan
from ullage_engine.runner.batched_sampler import SORT_ROWS
from ullage_engine.runner.logits_edits import PENALTIES_AT_ONCE

EVERYTHING = SamplingParams(
    # The distribution is so flat that the nucleus is most of the vocabulary for any logits.
    temperature=1000.0,
    top_p=0.999999,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    top_logprobs=20,
)
"""The sampling parameters that need the most memory.

They require penalties, biases, a mask, a sort of the vocabulary and alternatives.
"""

EVERY_TOKEN = b"\xff" * (1 << 17)
"""Mask that allows every token of any vocabulary of up to 2**20 tokens."""

GREEDY = SamplingParams(temperature=0.0)
"""Sampling parameters for greedy sampling, which always picks the likeliest token."""

_PROBE_TOKENS = (24, 8)
"""Number of prompt tokens in each of the probe's two sequences."""
_PROBE_STRIDE = 7919
"""Difference between successive token ids of the probe.

It is prime, so that the token ids spread over the vocabulary and are routed to different experts.
"""


def shape_plans(limits: StepLimits, num_blocks: int) -> Iterator[StepPlan]:
    """Yield plans that cover every matmul shape. See `ullage_engine.kernels.arena`."""
    longest = min(limits.max_tokens, limits.max_model_len)
    for tokens in _largest_of_each(limits.product_rows, longest):
        yield StepPlan([make_chunk(0, tokens, 0, limits, num_blocks, None)])
    for rows in _largest_of_each(limits.product_rows, min(limits.max_rows, limits.max_tokens)):
        yield StepPlan([make_chunk(row, 1, 0, limits, num_blocks, GREEDY) for row in range(rows)])

    max_blocks = -(-limits.max_model_len // limits.block_tokens)
    for blocks in _largest_of_each(limits.context_blocks, max_blocks):
        context = min(blocks * limits.block_tokens, limits.max_model_len)
        yield from _decodes(context, blocks, limits, num_blocks)
        yield from _tiles(context, limits, num_blocks)


def largest_plans(limits: StepLimits, num_blocks: int, vocab: int) -> Iterator[StepPlan]:
    """Yield the largest plans: the longest prompt chunk of the longest sequence, and a full batch.

    The chunk is at the end of its sequence. Both plans use the sampling parameters that need the
    most memory.
    """
    longest = min(limits.max_tokens, limits.max_model_len)
    prompt = make_chunk(0, longest, limits.max_model_len - longest, limits, num_blocks, EVERYTHING)
    # A full buffer of logits is scored, whatever the length of the chunk.
    scored = min(limits.max_rows, longest)
    targets = PromptTargets(prompt.start + 1, [0] * scored, EVERYTHING.top_logprobs or 0)
    prompt = msgspec.structs.replace(prompt, targets=targets)
    yield StepPlan(list(_penalised([prompt], limits.max_model_len, vocab)))

    rows = min(limits.max_rows, limits.max_tokens)
    context = max(1, min(limits.max_gather_tokens // rows, limits.max_model_len))
    decodes = [
        make_chunk(row, 1, context - 1, limits, num_blocks, EVERYTHING) for row in range(rows)
    ]
    yield StepPlan(list(_penalised(decodes, limits.max_model_len, vocab)))


def decode_plans(limits: StepLimits, num_blocks: int) -> Iterator[StepPlan]:
    """Yield a decode plan for each number of rows that matmuls are padded to, largest first."""
    most = min(limits.max_rows, limits.max_tokens)
    for rows in reversed(_largest_of_each(limits.product_rows, most)):
        chunks = [make_chunk(row, 1, 0, limits, num_blocks, GREEDY) for row in range(rows)]
        yield StepPlan(chunks)


def probe_plans(limits: StepLimits, num_blocks: int, vocab: int) -> list[StepPlan]:
    """Return the steps of the probe (a few dozen fixed tokens) in the order they are computed.

    The steps are a prompt, a decode combined with another prompt, and decodes of both sequences.
    There are fewer steps if the limits or the KV pool are too small for all of them.
    """
    block = limits.block_tokens
    longest = min(limits.max_model_len, num_blocks * limits.block_tokens)
    first = max(1, min(_PROBE_TOKENS[0], limits.max_tokens, longest - 2))
    first_blocks = -(-min(first + 2, longest) // block)
    second = _PROBE_TOKENS[1]
    blocks = first_blocks + -(-(second + 1) // block)
    is_paired = limits.max_rows > 1 and blocks <= num_blocks
    is_paired = is_paired and second < min(limits.max_tokens, limits.max_model_len)
    tables = (list(range(first_blocks)), list(range(first_blocks, blocks)))

    def part(sequence: int, start: int, tokens: int, slot: int) -> Chunk:
        own = range(sequence * first + start, sequence * first + start + tokens)
        return Chunk(
            request_id=f"probe-{sequence}",
            token_ids=[(1 + number) * _PROBE_STRIDE % vocab for number in own],
            start=start,
            block_ids=tables[sequence],
            window_block_ids=tables[sequence] if limits.windowed else [],
            sampling=GREEDY,
            history=[],
            num_prompt_tokens=0,
            state_slot=slot ^ 1 if start else None,
            next_state_slot=slot,
        )

    steps = [[part(0, 0, first, 0)]]
    if first + 1 <= longest:
        steps.append([part(0, first, 1, 1)])
    if first + 2 <= longest:
        steps.append([part(0, first + 1, 1, 0)])
        if is_paired:
            steps[1].append(part(1, 0, second, 2))
            steps[2].append(part(1, second, 1, 3))
    return [StepPlan(chunks) for chunks in steps]


def _penalised(chunks: list[Chunk], max_model_len: int, vocab: int) -> Iterator[Chunk]:
    """Yield the chunks with token histories added, so that penalties change many logits.

    In total, at least `PENALTIES_AT_ONCE` logits are penalised, or fewer if `max_model_len` or
    `vocab` is too small for this.
    """
    tokens = min(max_model_len, vocab, -(-PENALTIES_AT_ONCE // len(chunks)))
    for chunk in chunks:
        yield msgspec.structs.replace(chunk, history=list(range(tokens)))


def _decodes(context: int, blocks: int, limits: StepLimits, num_blocks: int) -> Iterator[StepPlan]:
    """Yield plans of 1, 2, 4 and so on decodes at this context length.

    The number doubles as long as the contexts of that many decodes fit into the gather workspace
    together. It is capped at `limits.max_rows`.
    """
    gathered = max(
        1, limits.max_gather_tokens // (limits.context_blocks(blocks) * limits.block_tokens)
    )
    rows = 1
    while rows <= min(gathered, 2 * limits.max_rows - 1):
        decodes = min(rows, limits.max_rows)
        yield StepPlan(
            [make_chunk(row, 1, context - 1, limits, num_blocks, GREEDY) for row in range(decodes)]
        )
        rows *= 2


def _tiles(context: int, limits: StepLimits, num_blocks: int) -> Iterator[StepPlan]:
    rows = MIN_TILE_ROWS
    while rows <= min(MAX_TILE_ROWS, limits.max_tokens, context):
        yield StepPlan([make_chunk(0, rows, context - rows, limits, num_blocks, None)])
        rows *= 2


def _largest_of_each(bucket: Callable[[int], int], limit: int) -> list[int]:
    """Return the largest of the sizes 1 to `limit` in each bucket.

    `bucket` returns the bucket that a size belongs to.
    """
    largest = {bucket(size): size for size in range(1, limit + 1)}
    return list(largest.values())


def make_chunk(
    index: int,
    tokens: int,
    start: int,
    limits: StepLimits,
    num_blocks: int,
    sampling: SamplingParams | None,
) -> Chunk:
    """Create a chunk of a warm-up or probe plan.

    Chunks share KV blocks if the pool has too few blocks for the whole step.
    """
    end = start + tokens
    table = [(block + index) % num_blocks for block in range(-(-end // limits.block_tokens))]
    return Chunk(
        request_id=f"warm-up-{index}",
        token_ids=[0] * tokens,
        start=start,
        block_ids=table,
        window_block_ids=table if limits.windowed else [],
        sampling=sampling,
        history=[0] * end,
        num_prompt_tokens=0,
        next_state_slot=index,
        allowed=_mask(index) if sampling is EVERYTHING else None,
    )


def _mask(index: int) -> bytes:
    # A sort of the vocabulary is slow, and the first rows already fill one pass of sorting.
    return EVERY_TOKEN if index < SORT_ROWS else b"\xff"
