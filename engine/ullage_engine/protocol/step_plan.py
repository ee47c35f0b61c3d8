"""Step plans: the chunks and copies of one step, and the tokens that the step samples."""

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ullage_engine.protocol.requests import SamplingParams

NO_TOKEN = -1
"""Token id of a sequence whose logits are NaN or infinite, so that no token was sampled."""

NOTHING_ALLOWED = -3
"""Token id of a sequence whose masks, biases and bans rule out every token."""


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one sequence to compute in one step.

    A decode is a chunk of one token, or of one token and the draft tokens after it.
    """

    request_id: str
    token_ids: list[int]
    """Tokens whose KV this step computes and stores."""
    start: int
    """Position of the first token."""
    block_ids: list[int]
    """Block table for positions 0 to end - 1, in order. It may include later blocks.

    All steps of a sequence share the same list object until an entry changes. The list may grow
    between steps.
    """
    sampling: SamplingParams | None
    """Sampling parameters for the token after the last of `token_ids`.

    The value is None if nothing is sampled, because more of the prompt follows.
    """
    history: list[int]
    """Prompt and output so far, including `token_ids`. The list only grows.

    Only penalties read the history, so other ranks receive it only for requests with penalties.
    """
    num_prompt_tokens: int
    num_replayed: int = 0
    """Number of leading `token_ids` whose KV is already stored.

    These tokens are computed again to rebuild the convolution state, and their new KV is dropped.
    """
    state_slot: int | None = None
    """Slot of the convolution state before `start`, or None if the chunk begins from zeros."""
    next_state_slot: int = 0
    """Slot for the state after the last token, unused by models without convolutions.

    No chunk of the same step reads this slot, so that a plan can be computed again.
    """
    allowed: bytes | None = None
    """Mask of the tokens that may be sampled, or None for any token.

    Each token has one bit, and the lowest bit of a byte comes first.
    """
    banned: list[int] = msgspec.field(default_factory=list)
    """Tokens that must not be sampled."""
    window_block_ids: list[int] = msgspec.field(default_factory=list)
    """Block table of the layers with sliding windows, if they have separate blocks.

    The table is as long as `block_ids`. Entries that every window has moved past repeat the first
    block that is still held.
    """
    history_start: int = 0
    """In messages between ranks, the number of history tokens that the receiver already has."""
    num_sampled: int = 1
    """With `sampling`, the number of trailing `token_ids` after each of which a token is sampled.

    The number is greater than 1 for a decode with a draft.
    """

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Return whether a token is sampled after each of `token_ids`.

        A chunk with only the last token of a prompt is a decode, too.
        """
        return self.sampling is not None and len(self.token_ids) == self.num_sampled

    def sampled_parts(self) -> "list[Chunk]":
        """Return, for each token to sample, the chunk truncated after the preceding token."""
        if self.num_sampled == 1:
            return [self]

        count = len(self.token_ids)
        ends = range(count - self.num_sampled + 1, count + 1)
        return [replace(self, token_ids=self.token_ids[:end], num_sampled=1) for end in ends]

    @property
    def first_stored(self) -> int:
        """Position of the first token whose KV is stored."""
        return self.start + self.num_replayed


def state_slots(max_sequences: int) -> int:
    """Return the number of convolution state slots for a batch of `max_sequences`.

    Each step of a sequence reads one slot and writes another. The number never grows, so the ledger
    reserves all slots before serving starts.
    """
    return 2 * max_sequences


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies of whole blocks in all layers, executed once before the step, in field order.

    The copies allocate nothing and cannot run out of memory. All destinations of one kind are
    distinct. The source of one `copy` may be the destination of a later `copy`. So these copies
    must be executed in order, or all sources must be read before any destination is written.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (block, host slot) to copy from the device to host memory."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (host slot, block) to copy from host memory to the device."""
    copy: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (source block, destination block) to copy on the device."""
    prefetch: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (host slot, block) to copy while the step runs.

    The step neither reads nor writes these blocks. The copies are complete when the step is.
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
    """The plan of one step, with at most one chunk per sequence. Decodes come first."""

    chunks: list[Chunk]
    moves: Moves = field(default_factory=Moves)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def prompts(self) -> list[Chunk]:
        """The chunks that are not decodes."""
        return [chunk for chunk in self.chunks if not chunk.is_decode]

    def sampled_parts(self) -> list[Chunk]:
        """Return the `Chunk.sampled_parts` of all chunks, one for each token to sample."""
        sampled = [chunk for chunk in self.chunks if chunk.sampling is not None]
        return [part for chunk in sampled for part in chunk.sampled_parts()]


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that was sampled for one sequence."""

    request_id: str
    token_id: int
    """The token, or `NO_TOKEN` or `NOTHING_ALLOWED` if there is none."""
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
