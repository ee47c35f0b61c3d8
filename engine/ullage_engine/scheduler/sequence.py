"""A sequence: the scheduling state of one admitted request, including its blocks and slots."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ullage_engine.kv_cache.radix_tree import Path
from ullage_engine.protocol.requests import EngineRequest


class Rank(NamedTuple):
    """Sort key by importance, the most important first: by priority, then by arrival."""

    negative_priority: int
    arrival: int
    """Number of the submission, counted by the scheduler in order of arrival."""
    serial: int
    """Order within one submission, such as of a prompt's samples or a search's beams."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks that a sequence holds for one kind of attention layer, in the order of its tokens."""

    ids: list[int] = field(default_factory=list)
    """Block ids. Appending extends the same list, while changing an entry creates a new list."""
    first: int = 0
    """Index in the sequence of the table's first block, or 0 without sliding windows.

    Earlier blocks have been freed, because every sliding window has moved past them.
    """

    @property
    def end(self) -> int:
        """Return the index, within the sequence, after the table's last block."""
        return self.first + len(self.ids)


@dataclass(frozen=True, slots=True)
class ConvState:
    """A sequence's convolution state, which is a function of its tokens `since` to `num_tokens`."""

    slot: int
    num_tokens: int
    """Number of tokens that the state covers, which is the position of the next token."""
    since: int
    """Position at which the state began as zero."""


@dataclass(slots=True, eq=False)
class ConvSlots:
    """Slots of the convolution states that a sequence holds."""

    state: ConvState | None = None
    """The current state. A waiting sequence keeps its state until another sequence needs the
    slot."""
    next_slot: int | None = None
    """Slot to which the planned step writes the next state."""


@dataclass(slots=True, eq=False)
class Fork:
    """A sequence's role in a fork group. See `ForkGroups`."""

    parent: "Sequence | None" = None
    """Sample of the same prompt that computes the shared tokens for this sequence."""
    num_shared_tokens: int = 0
    """Number of leading tokens that the parent computes for its children."""
    has_children: bool = False


@dataclass(slots=True, eq=False)
class PrefixLookup:
    """The known facts about a sequence's leading blocks, apart from its block table."""

    content_keys: list[bytes] = field(default_factory=list)
    """Content keys of the leading blocks, as far as they have been needed."""
    cached_path: Path = field(default_factory=list)
    """Cached blocks that the last prefix cache lookup has found."""
    num_stored_blocks: int = 0
    """Number of leading blocks that came from KV tiers outside the device."""
    awaited: "tuple[Sequence, int] | None" = None
    """A running sequence that computes the same prefix, and the prefix length in tokens."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """A preempted sequence's KV that was copied to host memory."""

    first_block: int
    """Index of the first copied block. Earlier blocks were not copied, because other sequences use
    them."""
    slots: list[int]
    """Host slot of each copied block, starting with `first_block`."""
    first_window_block: int
    window_slots: list[int]
    """Host slots of the sliding window blocks."""
    num_tokens: int
    """Number of tokens whose KV the sequence had when it was preempted."""

    @property
    def all_slots(self) -> list[int]:
        return self.slots + self.window_slots


@dataclass(slots=True)
class Backlog:
    """Counts the tokens that sequences must compute before they decode."""

    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens, blocks and reservation of one request. Only the scheduler changes a sequence.

    A running sequence holds the blocks of its computed tokens. A waiting sequence either has a
    reservation and holds the cached blocks of its prefix, or holds nothing because its reservation
    is deferred.
    """

    request: EngineRequest
    rank: Rank
    limit: int
    """Maximum length in tokens that the engine allows for the sequence."""
    expected_output: int
    """Expected output length in tokens, for which blocks are reserved."""

    token_ids: list[int] = field(default_factory=list)
    """Token ids of the prompt and the output so far."""
    num_computed: int = 0
    """Number of tokens whose KV is stored in `blocks`. See `set_computed`."""
    is_decoding: bool = False
    """Whether all tokens but the last are computed, so that computing the last yields the next
    token."""

    blocks: BlockTable = field(default_factory=BlockTable)
    """Block table of the layers with full attention."""
    windows: BlockTable = field(default_factory=BlockTable)
    """Block table of the layers with sliding windows, if they have separate blocks."""
    num_cached_blocks: int = 0
    """Number of leading entries of `blocks` that are in the prefix cache."""
    num_writable: int = 0
    """Length in tokens up to which steps may write without a further check, or 0 if unknown.

    The sequence has blocks up to this length, and no other sequence holds its blocks from
    `num_computed` on.
    """
    num_reserved: int = 0
    """Number of blocks that are reserved but not allocated yet."""

    fork: Fork = field(default_factory=Fork)
    conv: ConvSlots = field(default_factory=ConvSlots)
    prefix: PrefixLookup = field(default_factory=PrefixLookup)
    swapped: Swapped | None = None

    is_running: bool = False
    last_step: int = -1
    """Number of the step that last computed the sequence."""
    num_preemptions: int = 0
    cached_prompt_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache, or None before the sequence first starts.
    """
    backlog: Backlog | None = None
    """Backlog counter of the sequence table to which the sequence belongs."""
    request_id: str = field(init=False)
    max_length: int = field(init=False, default=0)
    """Length in tokens at which the sequence ends. A sequence table sets this when it adds the
    sequence."""

    def __post_init__(self) -> None:
        # Read for every sequence of every step, so not through the request.
        self.request_id = self.request.request_id

    def set_computed(self, num_tokens: int) -> None:
        """Set `num_computed` and everything derived from it.

        A decode adds one token and computes one token, which changes neither `is_decoding` nor the
        backlog. After a decode, the caller may set only `num_computed`.
        """
        before = self.num_prefill
        self.num_computed = num_tokens
        self.is_decoding = num_tokens > 0 and len(self.token_ids) - num_tokens == 1
        if self.backlog:
            self.backlog.num_tokens += self.num_prefill - before

    @property
    def num_prefill(self) -> int:
        """Return how many tokens to compute before the sequence decodes, or 0 while it decodes."""
        return 0 if self.is_decoding else self.num_remaining

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Return the number of tokens to compute before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def held_blocks(self) -> list[int]:
        """Return all blocks that the sequence holds in both of its tables."""
        return self.blocks.ids + self.windows.ids

    @property
    def expected_remaining(self) -> int:
        """Return the number of output tokens that are still expected, at least one."""
        return max(1, min(self.request.max_tokens, self.expected_output) - self.num_output)
