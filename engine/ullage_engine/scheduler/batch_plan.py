"""Building blocks of a step plan: limits, the prompt token budget and chunks of tokens.

The functions depend only on sequences and limits. They allocate neither blocks nor slots.
"""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

from msgspec.structs import replace

from ullage_engine.protocol.messages import KvRead, KvSlot
from ullage_engine.protocol.step_plan import Chunk, PromptTargets
from ullage_engine.scheduler.sequence import Sequence

MIN_DECODES = 8
"""Number of decodes that a step may always include, regardless of context length.

Decoding so few sequences takes about as long as decoding a single one, because every step has to
read all model weights.
"""

_last_step_of = operator.attrgetter("last_step")


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Estimates how much work prompt tokens are, in units of a token at the beginning of a prompt.

    A token costs 1, plus 1 per `even_context` tokens of context that it attends to.
    """

    even_context: float = math.inf
    """Context length in tokens at which a token's attention costs as much as the rest of its work.

    If infinite, the context length does not affect the cost.
    """
    step_budget: float = math.inf
    """Maximum total cost of a step's prompt tokens, but at least one token is always allowed."""

    def of(self, start: int, count: int) -> float:
        """Return the cost of `count` prompt tokens that begin at position `start`."""
        return count * (1.0 + (start + count / 2) / self.even_context)

    def tokens_within(self, budget: float, start: int, most: int) -> int:
        """Return how many tokens from position `start` fit into `budget`, at most `most`."""
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
    """Limits of a scheduler step and of the worker that computes it."""

    max_model_len: int
    """Maximum sequence length in tokens."""
    max_sequences: int
    prompt_tokens: int
    """Maximum number of prompt tokens that one step computes."""
    is_chunked: bool
    """Whether prompts are split across steps. If not, `prompt_tokens` must fit a whole prompt."""
    decode_tokens: int
    """Maximum total context in tokens that the decodes of one step may read.

    `MIN_DECODES` sequences may decode in any case.
    """
    replay_tokens: int = 0
    """Number of tokens to recompute in order to rebuild a convolution state from zero.

    The number accounts for all layers of the model on all ranks. It is 0 if the model has no
    convolutions.
    """
    max_decodes: int = 1 << 30
    """Maximum number of sequences that one step decodes."""
    max_in_flight: int = 1
    """Maximum number of step plans in flight, which equals the number of pipeline stages."""
    num_speculative_tokens: int = 0
    """Maximum number of draft tokens that one step verifies per sequence, or 0 for no drafts.

    Drafts require that only one plan is in flight, and that the model has neither convolution
    states nor sliding windows.
    """
    prompt_cost: PromptCost = PromptCost()
    """Cost of prompt tokens depending on their position, and maximum total cost per step."""

    def as_json(self) -> dict[str, object]:
        """Return the limits as JSON values. Infinite ones, which JSON lacks, are left out."""
        cost = {k: v for k, v in asdict(self.prompt_cost).items() if math.isfinite(v)}
        return {**asdict(self), "prompt_cost": cost}


class PromptBudget:
    """Tracks how many more prompt tokens one step may compute."""

    def __init__(self, tokens: int, is_chunked: bool, cost: PromptCost) -> None:
        """Create a budget of `tokens`. Prompts may be split into chunks only if `is_chunked`."""
        self._tokens = tokens
        self._is_chunked = is_chunked
        self._cost = cost
        self._left = cost.step_budget
        self._is_untouched = True

    def share(self, start: int, remaining: int) -> int:
        """Return how many of a prompt's `remaining` tokens fit into the rest of the budget.

        `start` is the position of the first remaining token.
        """
        if not self._is_chunked:
            return remaining if remaining <= self._tokens else 0

        most = min(remaining, max(0, self._tokens))
        count = self._cost.tokens_within(self._left, start, most)
        # The first prompt of a step advances by a token at least, or one with a deep context would
        # never end.
        return max(count, min(most, 1)) if self._is_untouched else count

    def take(self, start: int, count: int) -> None:
        """Deduct `count` tokens that the step computes from the budget."""
        self._tokens -= count
        self._left -= self._cost.of(start, count)
        self._is_untouched = False


class Transfers(NamedTuple):
    """The copies that one step makes between the device and other KV tiers.

    Once they are complete, they are reported to the server.
    """

    stored: tuple[KvSlot, ...] = ()
    read: tuple[KvRead, ...] = ()

    def and_those_of(self, other: "Transfers") -> "Transfers":
        """Return a new `Transfers` that contains the copies of both objects."""
        return Transfers(self.stored + other.stored, self.read + other.read)


class Planned(NamedTuple):
    """A step plan in flight: it has been made, but its results are not committed yet."""

    entries: dict[str, tuple[Sequence, Chunk]]
    """Sequences of the plan by request id, each with the chunk of tokens to compute."""
    cancelled: list[Sequence]
    """Sequences that were dropped after the plan was made."""
    transfers: Transfers = Transfers()
    """The plan's copies to and from KV tiers outside the device."""
    scores: bool = False
    """Whether the plan computes log-probabilities of prompt tokens."""


def postponed_decodes(
    ready: list[Sequence],
    max_decodes: int,
    max_read_bytes: int,
    read_bytes: Callable[[int], int],
) -> set[str]:
    """Choose which decodes to postpone, so that those that have waited longest run in this step.

    Args:
        ready: sequences that can decode.
        max_decodes: maximum number of decodes in the step.
        max_read_bytes: maximum total KV bytes that the step's decodes may read. `MIN_DECODES`
            decodes are exempt from this limit.
        read_bytes: returns how many bytes a decode reads if its sequence has this many tokens. The
            function must be nondecreasing and concave, as it is even with sliding windows.

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
    """Make a chunk of `count` tokens from `start`. Blocks must have been allocated already.

    Args:
        sequence: the sequence to compute.
        start: position of the first token. Tokens before `num_computed` are recomputed.
        count: number of tokens, excluding the draft.
        slots: slots of the convolution states before and after the chunk.
        draft: draft tokens to verify after the decoded token.
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
        targets=prompt_targets(sequence, end) if sequence.is_scoring else None,
    )


def prompt_targets(sequence: Sequence, end: int) -> PromptTargets:
    """Return the prompt tokens that a chunk up to position `end` scores.

    The chunk's last row scores the token at `end`, unless this is the first output token.
    """
    request = sequence.request
    assert request.prompt_logprobs is not None, "nothing to score"
    stop = min(end + 1, request.num_prompt_tokens)
    tokens = sequence.token_ids[sequence.num_scored : stop]
    return PromptTargets(sequence.num_scored, tokens, request.prompt_logprobs)


def make_decode(sequence: Sequence) -> Chunk:
    """Make a decode chunk for a model without convolution states and sliding windows.

    `make_chunk` would return the same result but takes three times as long.
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
    has_bans = request.min_tokens or request.bad_words
    return replace(chunk, banned=banned_tokens(sequence)) if has_bans else chunk


def banned_tokens(sequence: Sequence) -> list[int]:
    """List the tokens that must not be sampled next.

    Until the output has `min_tokens` tokens, these are the stop tokens. The last token of each bad
    word is banned behind the word's other tokens.
    """
    request = sequence.request
    banned = request.stop_token_ids if sequence.num_output < request.min_tokens else []
    if not request.bad_words:
        return banned
    return sorted({*banned, *_last_of_bad_words(sequence)})


def _last_of_bad_words(sequence: Sequence) -> Iterator[int]:
    """Yield the tokens that would complete a bad word in the output."""
    tokens = sequence.token_ids
    num_output = sequence.num_output
    for *before, last in sequence.request.bad_words:
        count = len(before)
        if count <= num_output and tokens[len(tokens) - count :] == before:
            yield last
