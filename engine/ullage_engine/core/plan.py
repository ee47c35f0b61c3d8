"""What the scheduler tells the runner to compute, and what the runner answers."""

from dataclasses import dataclass, field

from ullage_engine.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to compute in one step; decode is a chunk of one token."""

    request_id: str
    token_ids: list[int]
    """Tokens whose KV this step computes and stores."""
    start: int
    """Position of the first of them."""
    block_ids: list[int]
    """Block table covering positions 0 to start + len(token_ids) - 1, in order."""
    sampling: SamplingParams | None
    """How to choose the next token after the last of `token_ids`; None: a prompt chunk with more
    prompt to come, nothing is sampled."""
    history: list[int]
    """Prompt and output so far including `token_ids` (penalties need it); never changed."""
    num_prompt_tokens: int
    state_slot: int = 0
    """Where the sequence's convolution state lies; only models with such layers read it."""
    num_replayed: int = 0
    """The first so many of `token_ids` have their KV already: they are computed again from zero
    state to rebuild the convolution state, and what they would store is thrown away."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies of whole blocks over all layers, done in this order before the step, once.

    They allocate nothing and cannot fail for lack of memory. No destination of a kind is given
    twice. A source of `copy` may be the destination of a `copy` after it, so these are done in
    their order, or all read before any is written.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(block, host slot)"""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, block)"""
    copy: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block)"""
    copy_state: list[tuple[int, int]] = field(default_factory=list)
    """(source slot, destination slot) of convolution states, in order"""

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copy or self.copy_state)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: at most one chunk a sequence; decodes first."""

    chunks: list[Chunk]
    moves: Moves = field(default_factory=Moves)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence."""

    request_id: str
    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
