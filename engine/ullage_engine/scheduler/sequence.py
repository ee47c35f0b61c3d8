"""A sequence: the scheduling state of one admitted request, including its blocks and slots."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ullage_engine.kv_cache.radix_tree import Path
from ullage_engine.protocol.requests import EngineRequest


class Rank(NamedTuple):
    """Sort key that puts the most important sequence first: by priority, then by arrival."""

    negative_priority: int
    arrival: int
    """Number of the submission, counted in order of arrival."""
    serial: int
    """Order within one submission, for example of a prompt's samples or a search's beams."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks that a sequence holds for full or sliding window attention layers, in token order."""

    ids: list[int] = field(default_factory=list)
    """Block ids.

    New blocks are appended in place. To replace an entry, a new list is created.
    """
    first: int = 0
    """Index in the sequence of the table's first block, or 0 without sliding windows.

    Earlier blocks have been freed, because every sliding window has moved past them.
    """

    @property
    def end(self) -> int:
        """Return the index, within the sequence, of the block after this table's last block."""
        return self.first + len(self.ids)


@dataclass(frozen=True, slots=True)
class ConvState:
    """Where a sequence's convolution state is stored, and from which tokens it was computed.

    The state was computed from the tokens at positions `since` to `num_tokens` - 1.
    """

    slot: int
    num_tokens: int
    """Number of tokens that the state covers, and thus the position of the next token."""
    since: int
    """Position of the token at which the computation started from a zero state."""


@dataclass(slots=True, eq=False)
class ConvSlots:
    """Convolution state slots that a sequence holds."""

    state: ConvState | None = None
    """The current state. A waiting sequence keeps its state until another sequence needs the
    slot."""
    next_slot: int | None = None
    """Slot to which the planned step writes the next state, or None if no step is planned."""


@dataclass(slots=True, eq=False)
class Fork:
    """Links a sequence to the other samples of its prompt, which share its prefix.

    One sample, the parent, computes the common prefix. The others, its children, wait for it and
    then fork from it. See `ForkGroups`.
    """

    parent: "Sequence | None" = None
    """Sample of the same prompt that computes the common prefix for this one.

    None if there is no such sample, or once this sequence has forked from it.
    """
    num_shared_tokens: int = 0
    """Number of leading tokens that the parent computes for its children."""
    has_children: bool = False


@dataclass(slots=True, eq=False)
class PrefixLookup:
    """Results of looking up a sequence's leading blocks in the prefix cache and other KV tiers."""

    content_keys: list[bytes] = field(default_factory=list)
    """Content keys of the leading blocks, as far as they have been computed."""
    cached_path: Path = field(default_factory=list)
    """Cached blocks found by the last prefix cache lookup."""
    num_stored_blocks: int = 0
    """Number of blocks up to the last one that was loaded from KV tiers outside the device."""
    awaited: "tuple[Sequence, int] | None" = None
    """Sequence to wait for, and the length in tokens of the prefix that it is computing.

    This is a more important running sequence with the same prefix, or None if there is none.
    """


@dataclass(frozen=True, slots=True)
class Swapped:
    """A preempted sequence's KV that was copied to host memory."""

    first_block: int
    """Index of the first copied block. Earlier blocks stay on the device, because other sequences
    use them."""
    slots: list[int]
    """Host slot of each copied block, starting with `first_block`."""
    first_window_block: int
    window_slots: list[int]
    """Host slots of the sliding window blocks."""
    num_tokens: int
    """Number of tokens whose KV had been computed when the sequence was preempted."""

    @property
    def all_slots(self) -> list[int]:
        return self.slots + self.window_slots


@dataclass(slots=True)
class Backlog:
    """Running total of the tokens that must be computed before all sequences can decode.

    All sequences share one instance and update it, so that reading the total is fast.
    """

    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens, blocks and reservation of one request. Only the scheduler changes a sequence.

    A running sequence holds the blocks of its computed tokens. A waiting sequence holds the cached
    blocks of its prefix if its reservation is granted, and nothing if the reservation is deferred.
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
    """Whether only the last token is left to compute, so that the next step yields a new token."""

    blocks: BlockTable = field(default_factory=BlockTable)
    """Block table of layers with full attention."""
    windows: BlockTable = field(default_factory=BlockTable)
    """Block table of layers with sliding windows, if they have separate blocks."""
    num_cached_blocks: int = 0
    """Number of leading entries of `blocks` that are in the prefix cache."""
    num_writable: int = 0
    """Length in tokens up to which steps may write KV without further checks, or 0 if unknown.

    Up to this length, the sequence has blocks, and it shares none of those from `num_computed` on.
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
    """Number of prompt tokens found in the prefix cache, or None until the sequence first
    starts."""
    num_scored: int = field(init=False)
    """Number of leading prompt tokens whose log-probabilities are reported. The first has none."""
    backlog: Backlog | None = None
    """Counter of tokens to compute, shared by all sequences of a sequence table."""
    request_id: str = field(init=False)
    max_length: int = field(init=False, default=0)
    """Length in tokens at which the sequence ends. Set when the sequence is added to a sequence
    table."""

    def __post_init__(self) -> None:
        # Read for every sequence of every step, so not through the request.
        self.request_id = self.request.request_id
        self.num_scored = max(1, self.request.num_scored)

    def set_computed(self, num_tokens: int) -> None:
        """Record that the KV of the first `num_tokens` tokens is computed.

        This sets `num_computed`, and updates `is_decoding` and the backlog. After a decode, callers
        may set `num_computed` directly instead, because computing one token and appending one
        changes neither `is_decoding` nor the backlog.
        """
        before = self.num_prefill
        self.num_computed = num_tokens
        self.is_decoding = num_tokens > 0 and len(self.token_ids) - num_tokens == 1
        if self.backlog:
            self.backlog.num_tokens += self.num_prefill - before

    @property
    def num_prefill(self) -> int:
        """Return how many tokens are left to compute before decoding, or 0 if it has begun."""
        return 0 if self.is_decoding else self.num_remaining

    @property
    def is_scoring(self) -> bool:
        """Return whether log-probabilities of prompt tokens are left to compute."""
        request = self.request
        return request.prompt_logprobs is not None and self.num_scored < request.num_prompt_tokens

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Return the number of tokens to compute before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def held_blocks(self) -> list[int]:
        """Return the blocks in both of the sequence's block tables."""
        return self.blocks.ids + self.windows.ids

    @property
    def expected_remaining(self) -> int:
        """Return the expected number of further output tokens, at least one."""
        return max(1, min(self.request.max_tokens, self.expected_output) - self.num_output)
