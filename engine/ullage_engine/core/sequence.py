"""One admitted request while it is scheduled."""

from dataclasses import dataclass, field

from ullage_engine.core.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Swapped:
    """KV of a preempted sequence in host memory."""

    first_block: int
    """Blocks before this one were in use by others, too, and were not copied."""
    slots: list[int]
    """Host slot of each block from there on."""
    num_tokens: int
    """Tokens whose KV was stored."""


@dataclass(frozen=True, slots=True)
class ConvState:
    """A sequence's convolution state; a function of its tokens from `since` to `num_tokens`."""

    slot: int
    num_tokens: int
    """Tokens behind it: the position it is for."""
    since: int
    """Where it began from zero state."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and promise of one request; only the scheduler changes it.

    A running sequence holds the blocks of what was computed. One that waits holds a promise, and
    with it the cached blocks of its beginning; or it is owed its promise and holds nothing.
    """

    request: EngineRequest
    arrival: int
    """Grows by one a submission; with the priority it orders all sequences."""
    serial: int
    """Orders those of one arrival: the samples of a prompt, the hypotheses of a search."""
    priority: int
    limit: int
    """Length at which it ends, tokens."""
    expected_output: int
    """Output length it is charged for, tokens."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output so far."""
    num_computed: int = 0
    """Tokens whose KV is stored in `block_ids`."""
    block_ids: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    """Of them, the leading ones that the prefix cache knows."""
    reserved: int = 0
    """Blocks it was promised and has not allocated."""
    leader: "Sequence | None" = None
    """Sample of the same prompt that computes the first `num_shared` tokens for this one."""
    num_shared: int = 0
    has_followers: bool = False
    awaits: "tuple[Sequence, int] | None" = None
    """A running sequence that computes the same prefix, and the prefix' length."""
    swapped: Swapped | None = None
    state: ConvState | None = None
    """Convolution state; one that waits keeps it until its slot is needed."""
    next_slot: int | None = None
    """Where the planned step writes the next one."""
    cached_prompt_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None before it first starts."""
    num_preemptions: int = 0
    last_step: int = -1
    """Step in which it was last computed."""
    is_running: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of importance, smallest first: larger priority, then earlier arrival."""
        return (-self.priority, self.arrival, self.serial)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be stored before the next token can be chosen."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1 and self.num_computed > 0

    @property
    def expected_remaining(self) -> int:
        """Output tokens still expected, at least one."""
        return max(1, min(self.request.max_tokens, self.expected_output) - self.num_output)
