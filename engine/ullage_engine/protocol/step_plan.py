"""Step plans: what the scheduler has the runner compute, and the tokens that come back."""

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from ullage_engine.protocol.requests import SamplingParams


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one sequence to compute in one step; a decode is a chunk of one token, and of draft
    tokens behind it."""

    request_id: str
    token_ids: list[int]
    """Tokens whose KV this step computes and stores."""
    start: int
    """Position of the first token."""
    block_ids: list[int]
    """Block table covering positions 0 to end - 1, in order, and perhaps some behind them. A
    sequence's steps have the same list as long as no entry changes; it grows between them."""
    sampling: SamplingParams | None
    """Parameters of choosing the token after the last of `token_ids`; None: a prompt chunk with
    more prompt to come, nothing is sampled."""
    history: list[int]
    """Prompt and output so far including `token_ids`; only grows. Only penalties read it: other
    ranks get none without them."""
    num_prompt_tokens: int
    num_replayed: int = 0
    """The first so many of `token_ids` have their KV already: they are computed again to rebuild
    the convolution state, and the KV they would store is thrown away."""
    state_slot: int | None = None
    """Slot of the convolution state before `start`; None: the chunk begins from zero state."""
    next_state_slot: int = 0
    """Where the state after the last token goes: never a slot that a chunk of the same step reads,
    so that computing a plan again gives the same. Models without convolutions have no slots."""
    allowed: bytes | None = None
    """Tokens that may be chosen, a bit each, the lowest of a byte first; None: any."""
    banned: list[int] = msgspec.field(default_factory=list)
    """Tokens that may not be chosen."""
    window_block_ids: list[int] = msgspec.field(default_factory=list)
    """Block table of the layers with sliding windows, where these have blocks of their own, as long
    as `block_ids`. In place of blocks that every window has slid past stands the first held one."""
    history_start: int = 0
    """Between ranks, the number of tokens before `history` that the other rank has already."""
    num_sampled: int = 1
    """With `sampling`, the number of `token_ids`, the last ones, behind which a token is chosen:
    more than one where all but the first of these are draft tokens."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether a token is chosen behind each of `token_ids`; so it is of a prompt's last token,
        if that comes alone."""
        return self.sampling is not None and len(self.token_ids) == self.num_sampled

    def sampled_parts(self) -> "list[Chunk]":
        """Return the chunk up to each of its tokens behind which one is chosen."""
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
    """Slots of convolution states: the one that a sequence's step reads and the one it writes.

    There are never more, so the ledger reserves them all before serving starts.
    """
    return 2 * max_sequences


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies of whole blocks over all layers, done in this order before the step, once.

    They allocate nothing and cannot fail for lack of memory. No destination of a kind is given
    twice. A source of `copy` may be the destination of a `copy` after it, so these are done in
    their order, or all read before any is written.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (block, host slot) to copy."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (host slot, block) to copy."""
    copy: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (source block, destination block) to copy."""
    prefetch: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (host slot, block) to copy beside the step, which neither reads nor writes these
    blocks; they are done when it is."""

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
    """One step: at most one chunk a sequence; decodes first."""

    chunks: list[Chunk]
    moves: Moves = field(default_factory=Moves)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def prompts(self) -> list[Chunk]:
        """The chunks that are no decodes."""
        return [chunk for chunk in self.chunks if not chunk.is_decode]

    def sampled_parts(self) -> list[Chunk]:
        """Return the chunks that are sampled, each as often as tokens are chosen for it."""
        sampled = [chunk for chunk in self.chunks if chunk.sampling is not None]
        return [part for chunk in sampled for part in chunk.sampled_parts()]


NO_TOKEN = -1
"""Token id of a sequence whose logits are NaN or infinite, so that none was chosen."""

NOTHING_ALLOWED = -3
"""Token id of a sequence of which masks, biases and bans rule out every token."""


class SampledToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that may come next in one sequence."""

    request_id: str
    token_id: int
    """The token; `NO_TOKEN` or `NOTHING_ALLOWED` where there is none."""
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
