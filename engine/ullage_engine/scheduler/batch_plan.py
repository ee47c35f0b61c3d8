"""The contents of one step: its limits, its budget of prompt tokens, and its chunks.

Pure functions of sequences and limits, without the blocks and slots that chunks need.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from ullage_engine.protocol.messages import KvRead, KvSlot
from ullage_engine.protocol.step_plan import Chunk
from ullage_engine.scheduler.sequence import Sequence

MIN_DECODES = 8
"""Decodes that a step always computes, however long their contexts are. So few decodes take about
as long as one, because every step reads all weights."""

_last_step_of = operator.attrgetter("last_step")


@dataclass(frozen=True, slots=True)
class PromptCost:
    """The cost of prompt tokens. The unit is a token at a prompt's beginning.

    A token costs 1, and 1 more for every `even_context` tokens of context that it attends to.
    """

    even_context: float = math.inf
    """Tokens of context whose attention costs as much as the rest of a token's computation. With
    infinity, context costs nothing."""
    step_budget: float = math.inf
    """Cost of all prompt tokens of one step. One token is always computed."""

    def of(self, start: int, count: int) -> float:
        """Return the cost of `count` tokens from the position `start` on."""
        return count * (1.0 + (start + count / 2) / self.even_context)

    def tokens_within(self, budget: float, start: int, most: int) -> int:
        """Return how many tokens from `start` on cost no more than a budget, and at most `most`."""
        if self.of(start, most) <= budget:
            return most
        if budget <= 0.0:
            return 0

        # The cost is quadratic in the count. Solve for the positive root.
        per_token = 1.0 + start / self.even_context
        fitting = (
            2.0 * budget / (per_token + math.sqrt(per_token**2 + 2.0 * budget / self.even_context))
        )
        return min(most, int(fitting))


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one step and of the worker."""

    max_model_len: int
    """Longest sequence, tokens."""
    max_sequences: int
    prompt_tokens: int
    """Prompt tokens computed in one step."""
    is_chunked: bool
    """Whether prompts are split over steps. Otherwise `prompt_tokens` must hold a whole one."""
    decode_tokens: int
    """Tokens of context that the decodes of one step read together. `MIN_DECODES` sequences may
    always decode."""
    replay_tokens: int = 0
    """Tokens that rebuild a convolution state from zero, over all layers of the whole model on all
    ranks, or 0 if the model has no convolutions."""
    max_decodes: int = 1 << 30
    """Most sequences that one step decodes."""
    max_in_flight: int = 1
    """Plans that may be computed at the same time: as many as the pipeline has stages."""
    num_speculative_tokens: int = 0
    """Most draft tokens of a sequence that one step checks, or 0 for none. They require one plan in
    flight, and a model without states and windows."""
    prompt_cost: PromptCost = PromptCost()
    """Cost of the prompt tokens of one step by their position, and its budget."""


class PromptBudget:
    """The prompt tokens that one step may still compute."""

    def __init__(self, tokens: int, is_chunked: bool, cost: PromptCost) -> None:
        """`tokens`: most of them. Without chunking only whole prompts are computed."""
        self._tokens = tokens
        self._is_chunked = is_chunked
        self._cost = cost
        self._left = cost.step_budget
        self._is_untouched = True

    def share(self, start: int, remaining: int) -> int:
        """Return how many of a sequence's remaining tokens, from `start` on, have room."""
        if not self._is_chunked:
            return remaining if remaining <= self._tokens else 0

        most = min(remaining, max(0, self._tokens))
        count = self._cost.tokens_within(self._left, start, most)
        # The first prompt of a step advances by a token at least, or one with a deep context would
        # never end.
        return max(count, min(most, 1)) if self._is_untouched else count

    def take(self, start: int, count: int) -> None:
        """Count tokens that are computed."""
        self._tokens -= count
        self._left -= self._cost.of(start, count)
        self._is_untouched = False


class Transfers(NamedTuple):
    """Copies to and from tiers outside the device, which are reported when they are done."""

    stored: tuple[KvSlot, ...] = ()
    read: tuple[KvRead, ...] = ()

    def and_those_of(self, other: "Transfers") -> "Transfers":
        """Return these copies and the others'."""
        return Transfers(self.stored + other.stored, self.read + other.read)


class Planned(NamedTuple):
    """A plan that is not committed yet."""

    entries: dict[str, tuple[Sequence, Chunk]]
    """The plan's sequences by request id, each with the chunk that the plan computes."""
    cancelled: list[Sequence]
    """Sequences that the plan computes and that were dropped since."""
    transfers: Transfers = Transfers()
    """The plan's copies to and from tiers outside the device."""


def postponed_decodes(
    ready: list[Sequence],
    max_decodes: int,
    max_read_bytes: int,
    read_bytes: Callable[[int], int],
) -> set[str]:
    """List the decodes without a place in a step, which takes the longest unserved first.

    Args:
        ready: sequences that can decode.
        max_decodes: most decodes of the step.
        max_read_bytes: KV bytes that the step's decodes may read together. `MIN_DECODES` of them
            run in any case.
        read_bytes: bytes that a decode reads by the length of its sequence. The function must be
            nondecreasing and concave, as sliding windows make it.

    Returns:
        The request ids of the postponed decodes.
    """
    count = len(ready)
    if count <= max_decodes:
        # As `read_bytes` is concave, sequences of one total length read most if all are equally
        # long. So most steps are decided by a sum, without sorting.
        mean = -(-sum([len(each.token_ids) for each in ready]) // max(1, count))
        if count <= MIN_DECODES or count * read_bytes(mean) <= max_read_bytes:
            return set()

    by_service = sorted(ready, key=_last_step_of)
    num_picked = 0
    remaining = max_read_bytes
    for sequence in by_service[:max_decodes]:
        remaining -= read_bytes(len(sequence.token_ids))
        if remaining < 0 and num_picked >= MIN_DECODES:
            break
        num_picked += 1
    return {each.request_id for each in by_service[num_picked:]}


def make_chunk(
    sequence: Sequence,
    start: int,
    count: int,
    slots: tuple[int | None, int] = (None, 0),
    draft: list[int] | None = None,
) -> Chunk:
    """Make the chunk of `count` tokens from `start`, for which the sequence has the blocks.

    Args:
        sequence: the sequence to compute.
        start: position of the first token. Tokens before `num_computed` are replayed.
        count: number of tokens, without the draft.
        slots: slots of the convolution states before and after.
        draft: tokens to check behind a decode's token.
    """
    tokens = sequence.token_ids
    end = start + count
    windows = sequence.windows.ids
    if windows:
        # Positions that the window has passed are never read. Any block of the sequence's own may
        # fill their entries.
        windows = windows[:1] * sequence.windows.first + windows
    is_sampled = end == len(tokens)

    return Chunk(
        request_id=sequence.request_id,
        token_ids=tokens[start:end] + (draft or []),
        start=start,
        block_ids=sequence.blocks.ids,
        sampling=sequence.request.sampling if is_sampled else None,
        history=tokens,
        num_prompt_tokens=sequence.request.num_prompt_tokens,
        num_replayed=min(count, sequence.num_computed - start),
        state_slot=slots[0],
        next_state_slot=slots[1],
        banned=banned_tokens(sequence) if is_sampled else [],
        window_block_ids=windows,
        num_sampled=1 + len(draft or []),
    )


def make_decode(sequence: Sequence) -> Chunk:
    """Make the chunk of a decode without states and windows.

    The chunk equals that of `make_chunk` and takes a third of the time.
    """
    tokens = sequence.token_ids
    request = sequence.request
    chunk = Chunk(
        sequence.request_id,
        tokens[-1:],
        sequence.num_computed,
        sequence.blocks.ids,
        request.sampling,
        tokens,
        request.num_prompt_tokens,
    )
    return replace(chunk, banned=banned_tokens(sequence)) if request.min_tokens else chunk


def banned_tokens(sequence: Sequence) -> list[int]:
    """List the tokens that may not come next: stop tokens before `min_tokens` of output."""
    request = sequence.request
    return request.stop_token_ids if sequence.num_output < request.min_tokens else []
