"""Step plans: the tokens that a step computes, the blocks that it copies and what it samples."""

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ullage_engine.protocol.requests import SamplingParams

NO_TOKEN = -1
"""Placeholder for a token that was not sampled because its logits are NaN or infinite."""

NOTHING_ALLOWED = -3
"""Placeholder for a token that was not sampled because every token is masked or banned."""


class PromptTargets(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive prompt tokens whose log-probabilities a step reports.

    The log-probability of a token follows from the row of the token before it.
    """

    start: int
    """Position of the first of the tokens, at least 1."""
    token_ids: list[int]
    num_alternatives: int
    """Number of likeliest tokens to report for each position."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of one sequence to compute in one step.

    A decode is a chunk of a single token, or of a single token followed by draft tokens.
    """

    request_id: str
    token_ids: list[int]
    """Tokens whose KV is computed and stored by this step."""
    start: int
    """Position of the first token."""
    block_ids: list[int]
    """Block table for positions 0 to `end` - 1, in order. It may include later blocks.

    All steps of a sequence share the same list object until an entry changes. The list may grow
    between steps.
    """
    sampling: SamplingParams | None
    """Parameters for sampling the token after the last of `token_ids`.

    None if no token is sampled, because the prompt continues in a later chunk.
    """
    history: list[int]
    """Prompt and output tokens so far, including `token_ids`. The list only grows.

    Only penalties need the history, so other ranks receive it only for requests with penalties.
    """
    num_prompt_tokens: int
    num_replayed: int = 0
    """Number of leading `token_ids` whose KV is already stored.

    These tokens are recomputed to rebuild the convolution state, and their new KV is discarded.
    """
    state_slot: int | None = None
    """Slot that stores the convolution state before `start`, or None to start from a zero state."""
    next_state_slot: int = 0
    """Slot that receives the state after the last token. Models without convolutions ignore it.

    No chunk of the same step reads this slot, so that the same plan can be recomputed.
    """
    allowed: bytes | None = None
    """Bit mask of the tokens that may be sampled, or None to allow all tokens.

    Each token has one bit, starting from the lowest bit of each byte.
    """
    banned: list[int] = msgspec.field(default_factory=list)
    """Ids of tokens that must not be sampled."""
    window_block_ids: list[int] = msgspec.field(default_factory=list)
    """Block table of the sliding-window layers, if they have separate blocks.

    The table has the same length as `block_ids`. Entries for blocks outside every window repeat the
    first block that is still held.
    """
    history_start: int = 0
    """In messages between ranks: number of history tokens that the receiver already has."""
    num_sampled: int = 1
    """Number of tokens to sample, one after each of the last `token_ids`, if `sampling` is set.

    It exceeds 1 only for a decode with draft tokens.
    """
    targets: PromptTargets | None = None
    """Prompt tokens to score, or None. Of a chunk that is a part of another, also other parts'."""

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Return whether a token is sampled after each of `token_ids`.

        A chunk that contains only the last token of a prompt also counts as a decode.
        """
        return self.sampling is not None and len(self.token_ids) == self.num_sampled

    def scored_range(self) -> range:
        """Return the positions of the targets whose preceding token is one of `token_ids`."""
        if self.targets is None:
            return range(0)
        first = self.targets.start
        stop = first + len(self.targets.token_ids)
        return range(max(first, self.start + 1), min(stop, self.end + 1))

    def sampled_parts(self) -> "list[Chunk]":
        """Return one chunk for each token that this chunk samples.

        Each returned chunk is a prefix of this chunk, and samples the token that follows the
        prefix.
        """
        if self.num_sampled == 1:
            return [self]

        count = len(self.token_ids)
        ends = range(count - self.num_sampled + 1, count + 1)
        return [replace(self, token_ids=self.token_ids[:end], num_sampled=1) for end in ends]

    @property
    def first_stored(self) -> int:
        """Position of the first token whose newly computed KV is kept.

        Any tokens of the chunk before this position are only replayed, to rebuild the convolution
        state. Their KV is already stored.
        """
        return self.start + self.num_replayed


def state_slots(max_sequences: int) -> int:
    """Return the number of convolution state slots for a batch of `max_sequences`.

    Each step of a sequence reads one slot and writes another. The number of slots never grows, so
    the ledger reserves all of them before serving starts.
    """
    return 2 * max_sequences


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies of whole blocks in all layers, made once before the step, in the order of the fields.

    The copies allocate nothing and cannot run out of memory. All destinations within one field are
    distinct. However, the source of one `copy` may be the destination of a later `copy`. These
    copies must therefore be made in order, or all sources must be read before any destination is
    written.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (block, host slot) to copy from the device to host memory."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (host slot, block) to copy from host memory to the device."""
    copy: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (source block, destination block) to copy on the device."""
    prefetch: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (host slot, block) to copy while the step runs.

    The step neither reads nor writes these blocks. The copies are complete when the step ends.
    """

    def __add__(self, other: "Moves") -> "Moves":
        return Moves(
            self.swap_out + other.swap_out,
            self.swap_in + other.swap_in,
            self.copy + other.copy,
            self.prefetch + other.prefetch,
        )

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copy or self.prefetch)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan for one step. Each sequence has at most one chunk, and decodes come first."""

    chunks: list[Chunk]
    moves: Moves = field(default_factory=Moves)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def prompts(self) -> list[Chunk]:
        """The chunks that compute prompts rather than decodes."""
        return [chunk for chunk in self.chunks if not chunk.is_decode]

    def sampled_parts(self) -> list[Chunk]:
        """Return one chunk for each token that the step samples. See `Chunk.sampled_parts`."""
        sampled = [chunk for chunk in self.chunks if chunk.sampling is not None]
        return [part for chunk in sampled for part in chunk.sampled_parts()]


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The token sampled for one sequence."""

    request_id: str
    token_id: int
    """The token's id, or `NO_TOKEN` or `NOTHING_ALLOWED` if no token could be sampled."""
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
