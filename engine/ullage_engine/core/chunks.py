"""What a step computes of which sequence: pure functions over sequences."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from ullage_engine.core.plan import Chunk, SampledToken
from ullage_engine.core.sequence import Sequence
from ullage_engine.messages import TokenLogprobs

Finish = Literal["", "stop", "length"]


def pick_decodes(ready: Iterable[Sequence], max_context_tokens: int) -> set[str]:
    """Decodes of a step, those that waited longest first, within the context they read together."""
    picked: set[str] = set()
    room = max_context_tokens
    for sequence in sorted(ready, key=lambda each: each.last_step):
        room -= len(sequence.token_ids)
        if room < 0 and picked:
            break
        picked.add(sequence.request_id)
    return picked


def prompt_share(remaining: int, budget: int, is_chunked: bool) -> int:
    """Prompt tokens of one sequence computed within what the step has left."""
    if is_chunked:
        return min(remaining, max(0, budget))
    return remaining if remaining <= budget else 0


def make_chunk(
    sequence: Sequence, start: int, count: int, block_tokens: int, slots: tuple[int | None, int]
) -> Chunk:
    """`count` tokens of a sequence that has the blocks for them.

    Those before `num_computed` are replayed. `slots`: of the convolution states before and after.
    """
    end, request = start + count, sequence.request
    is_sampled = end == len(sequence.token_ids)
    is_short = is_sampled and sequence.num_output < request.min_tokens
    return Chunk(
        request_id=sequence.request_id,
        token_ids=sequence.token_ids[start:end],
        start=start,
        block_ids=sequence.block_ids[: -(-end // block_tokens)],
        sampling=request.sampling if is_sampled else None,
        history=sequence.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_replayed=min(count, sequence.num_computed - start),
        state_slot=slots[0],
        next_state_slot=slots[1],
        banned=request.stop_token_ids if is_short else [],
    )


def finish_of(sequence: Sequence, token_id: int) -> Finish:
    """Whether the token just appended ends the sequence, and why."""
    if token_id in sequence.request.stop_token_ids:
        return "stop"
    is_full = len(sequence.token_ids) >= sequence.limit
    return "length" if is_full or sequence.num_output >= sequence.request.max_tokens else ""


def logprobs_of(sequence: Sequence, sampled: SampledToken) -> list[TokenLogprobs] | None:
    if sequence.request.sampling.top_logprobs is None:
        return None
    return [TokenLogprobs(sampled.logprob, sampled.top_ids, sampled.top_logprobs)]


def common_prefix(one: list[int], other: list[int]) -> int:
    """Length of the longest common beginning; compares each element about once."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def prefix_under_way(
    sequence: Sequence, running: Iterable[Sequence], block_tokens: int
) -> tuple[Sequence, int] | None:
    """Who is computing more of the beginning of a waiting sequence than it holds, and how much.

    Only a more important sequence counts: those never wait for this one, so no two wait for one
    another.
    """
    for other in running:
        if other.rank > sequence.rank or other.num_remaining <= 1:
            continue
        common = common_prefix(sequence.token_ids[:-1], other.token_ids)
        whole = common // block_tokens * block_tokens
        if whole > max(sequence.num_computed, other.num_computed):
            return other, whole
    return None


def stored_tokens(
    sequences: Iterable[Sequence], block_tokens: int, is_cached: Callable[[int], bool]
) -> int:
    """Tokens in blocks that the prefix cache does not know, those of a shared block once."""
    filled: dict[int, int] = {}
    for sequence in sequences:
        for block, tokens in _tail(sequence, block_tokens):
            if not is_cached(block):
                filled[block] = max(tokens, filled.get(block, 0))
    return sum(filled.values())


def _tail(sequence: Sequence, block_tokens: int) -> Iterator[tuple[int, int]]:
    """Blocks that the sequence itself did not cache, and how many of its tokens each holds."""
    for index in range(sequence.num_cached_blocks, len(sequence.block_ids)):
        tokens = min(block_tokens, sequence.num_computed - index * block_tokens)
        yield sequence.block_ids[index], max(0, tokens)
