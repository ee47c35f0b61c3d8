"""Finds common prefixes of prompts, so that requests can share their KV."""

from collections.abc import Iterable

from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.scheduler.sequence import Sequence

_FIRST_COMPARED = 16
"""Length in tokens of the first two slices to compare."""


def common_prefix(one: list[int], other: list[int]) -> int:
    """Return the length of the longest common prefix of two token lists.

    The time is proportional to the length of the prefix, however long the lists are. Slices of
    doubling size are compared until a pair differs, and a binary search then finds the first
    difference.
    """
    low = 0
    end = min(len(one), len(other))
    size = _FIRST_COMPARED

    while low < end:
        high = min(low + size, end)
        if one[low:high] != other[low:high]:
            break
        low = high
        size *= 2
    else:
        return end

    # The first difference is in `low` to `high` - 1.
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def shared_tokens(requests: list[EngineRequest]) -> int:
    """Return the length in tokens of the prefix that all of these requests have in common.

    The last token of each request is excluded, because each request must compute it to get its
    logits.
    """
    first, *others = [request.token_ids for request in requests]
    shared = min(len(tokens) for tokens in [first, *others]) - 1
    return min([shared, *(common_prefix(first, tokens) for tokens in others)])


def prefix_under_way(
    sequence: Sequence, running: Iterable[Sequence], block_tokens: int
) -> tuple[Sequence, int] | None:
    """Find a running sequence that will compute blocks that a waiting sequence could reuse.

    Only more important sequences are considered, so that no sequence waits for a less important
    one, and no two sequences wait for each other.

    Returns:
        The running sequence and the length of the common prefix in tokens, rounded down to whole
        blocks. None if there is no such sequence.
    """
    longest = len(sequence.token_ids) - 1

    for other in running:
        if other.rank > sequence.rank or other.num_remaining <= 1:
            continue
        if other.request.cache_salt != sequence.request.cache_salt:
            continue

        common = min(common_prefix(sequence.token_ids, other.token_ids), longest)
        whole = common // block_tokens * block_tokens
        if whole > max(sequence.num_computed, other.num_computed):
            return other, whole
    return None
