"""A sequence: one admitted request while it is scheduled, with its blocks and slots."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ullage_engine.kv_cache.radix_tree import Path
from ullage_engine.protocol.requests import EngineRequest


class Rank(NamedTuple):
    """Order of importance, smallest first: higher priority, then earlier arrival."""

    negative_priority: int
    arrival: int
    """Number of the submission."""
    serial: int
    """Order within one arrival: the samples of a prompt, the beams of a search."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks that a sequence holds for the attention layers of one kind, in order."""

    ids: list[int] = field(default_factory=list)
    """Block ids. A changed entry makes another list. New entries at the end do not."""
    first: int = 0
    """Index in the sequence of the first of them. Blocks before it were freed because every
    sliding window has passed them. 0 without windows."""

    @property
    def end(self) -> int:
        """Index in the sequence behind the last block."""
        return self.first + len(self.ids)


@dataclass(frozen=True, slots=True)
class ConvState:
    """A sequence's convolution state: a function of its tokens from `since` to `num_tokens`."""

    slot: int
    num_tokens: int
    """Tokens that the state covers: the position of the next one."""
    since: int
    """Position at which the state began from zero."""


@dataclass(slots=True, eq=False)
class ConvSlots:
    """Slots of the convolution states that a sequence holds."""

    state: ConvState | None = None
    """Current state. A waiting sequence keeps it until another sequence needs its slot."""
    next_slot: int | None = None
    """Slot that the planned step writes the next state to."""


@dataclass(slots=True, eq=False)
class Fork:
    """A sequence's place in a fork group. See `ForkGroups`."""

    parent: "Sequence | None" = None
    """Sample of the same prompt that computes the shared tokens for this one."""
    num_shared_tokens: int = 0
    """Leading tokens that the parent computes for its children."""
    has_children: bool = False


@dataclass(slots=True, eq=False)
class PrefixLookup:
    """The known state of a sequence's leading blocks outside its own block table."""

    content_keys: list[bytes] = field(default_factory=list)
    """Content keys of the first blocks, as many as were needed so far."""
    cached_path: Path = field(default_factory=list)
    """Cached blocks that the last lookup in the prefix cache found."""
    num_stored_blocks: int = 0
    """Leading blocks that came from tiers outside the device."""
    awaited: "tuple[Sequence, int] | None" = None
    """A running sequence that computes the same prefix, and the prefix' length in tokens."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """KV of a preempted sequence that was copied to host memory."""

    first_block: int
    """Index of the first copied block. Other sequences use those before it, too."""
    slots: list[int]
    """Host slot of each block from there on."""
    first_window_block: int
    window_slots: list[int]
    """Host slots of the blocks of layers with sliding windows."""
    num_tokens: int
    """Tokens whose KV was stored."""

    @property
    def all_slots(self) -> list[int]:
        return self.slots + self.window_slots


@dataclass(slots=True)
class Backlog:
    """Tokens that sequences have to compute before they decode."""

    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and reservation of one request. Only the scheduler changes it.

    A running sequence holds the blocks of its computed tokens. A waiting one either has a
    reservation and holds the cached blocks of its prefix, or its reservation is deferred and it
    holds nothing.
    """

    request: EngineRequest
    rank: Rank
    limit: int
    """Longest that the engine lets it become, tokens."""
    expected_output: int
    """Output length that blocks are reserved for, tokens."""

    token_ids: list[int] = field(default_factory=list)
    """Prompt and output so far."""
    num_computed: int = 0
    """Tokens whose KV is stored in `blocks`. See `set_computed`."""
    is_decoding: bool = False
    """Whether all tokens but the last one are computed, so that computing it gives the next."""

    blocks: BlockTable = field(default_factory=BlockTable)
    """Block table of the layers that attend to all tokens."""
    windows: BlockTable = field(default_factory=BlockTable)
    """Block table of the layers with sliding windows, where these have blocks of their own."""
    num_cached_blocks: int = 0
    """Leading blocks of `blocks` that are in the prefix cache."""
    num_writable: int = 0
    """Tokens that its blocks have room for, where it alone holds the blocks from `num_computed` on:
    steps may write up to there without another check. 0: unknown."""
    num_reserved: int = 0
    """Blocks that are reserved and not yet allocated."""

    fork: Fork = field(default_factory=Fork)
    conv: ConvSlots = field(default_factory=ConvSlots)
    prefix: PrefixLookup = field(default_factory=PrefixLookup)
    swapped: Swapped | None = None

    is_running: bool = False
    last_step: int = -1
    """Number of the step in which it was last computed."""
    num_preemptions: int = 0
    cached_prompt_tokens: int | None = None
    """Prompt tokens found in the prefix cache, or None before the sequence first starts."""
    backlog: Backlog | None = None
    """Counter of the table that the sequence is in."""
    request_id: str = field(init=False)
    max_length: int = field(init=False, default=0)
    """Length in tokens at which it ends, known when it is in a table."""

    def __post_init__(self) -> None:
        # Read for every sequence of every step, so not through the request.
        self.request_id = self.request.request_id

    def set_computed(self, num_tokens: int) -> None:
        """Set `num_computed` and all that follows from it.

        A decode adds one token and computes one, which changes neither `is_decoding` nor the
        backlog. Its caller may set `num_computed` alone.
        """
        before = self.num_prefill
        self.num_computed = num_tokens
        self.is_decoding = num_tokens > 0 and len(self.token_ids) - num_tokens == 1
        if self.backlog:
            self.backlog.num_tokens += self.num_prefill - before

    @property
    def num_prefill(self) -> int:
        """Tokens to compute before the sequence decodes, or 0 while it decodes."""
        return 0 if self.is_decoding else self.num_remaining

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be stored before the next token can be chosen."""
        return len(self.token_ids) - self.num_computed

    @property
    def held_blocks(self) -> list[int]:
        """All blocks that it holds, of both tables."""
        return self.blocks.ids + self.windows.ids

    @property
    def expected_remaining(self) -> int:
        """Output tokens still expected, at least one."""
        return max(1, min(self.request.max_tokens, self.expected_output) - self.num_output)
