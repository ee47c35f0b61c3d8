"""Admitted requests while they are scheduled: sequences, their table, and fork groups.

What a step computes of one sequence, and whether it ends then, are pure functions.
"""

import bisect
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from msgspec.structs import replace

from ullage_engine.kv_cache.radix_tree import Path
from ullage_engine.protocol.messages import EngineRequest, KvRead, KvSlot, TokenLogprobs
from ullage_engine.protocol.step_plan import Chunk, SampledToken

Finish = Literal["", "stop", "length"]


_FIRST_COMPARED = 16
"""Tokens of the first slices that are compared."""


def common_prefix(one: list[int], other: list[int]) -> int:
    """Return the length of the longest common prefix.

    It costs a multiple of that length, however long the lists are: slices are doubled until two
    differ, and the first difference is searched for in these two by halves.
    """
    low = 0
    end = min(len(one), len(other))
    size = _FIRST_COMPARED
    while low < end:
        high = min(low + size, end)
        if one[low:high] != other[low:high]:
            break
        low = high
        size *= 2
    else:
        return end

    # The first difference is in `low` to `high` - 1.
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Swapped:
    """KV of a preempted sequence that was copied to host memory."""

    first_block: int
    """Index of the first copied block; those before are in use by other sequences, too."""
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


@dataclass(frozen=True, slots=True)
class ConvState:
    """A sequence's convolution state: a function of its tokens from `since` to `num_tokens`."""

    slot: int
    num_tokens: int
    """Tokens that the state covers: the position of the next one."""
    since: int
    """Position at which the state began from zero."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and reservation of one request; only the scheduler changes it.

    A running sequence holds the blocks of what was computed. A waiting one has a reservation and
    with it holds the cached blocks of its prefix; or its reservation is deferred and it holds
    nothing.
    """

    request: EngineRequest
    arrival: int
    """Number of its submission; with the priority it orders all sequences."""
    serial: int
    """Order among sequences of one arrival: the samples of a prompt, the beams of a search."""
    priority: int
    limit: int
    """Longest that the engine lets it become, tokens."""
    expected_output: int
    """Output length that blocks are reserved for, tokens."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output so far."""
    num_computed: int = 0
    """Tokens whose KV is stored in `block_ids`; see `set_computed`."""
    is_decoding: bool = False
    """Whether all tokens but the last one are computed, so that this one gives the next."""
    block_ids: list[int] = field(default_factory=list)
    """Its block table; changed entries make another list of it, more entries do not."""
    num_cached_blocks: int = 0
    """Leading blocks of `block_ids` that are in the prefix cache."""
    window_block_ids: list[int] = field(default_factory=list)
    """Blocks of layers with sliding windows, where these have blocks of their own."""
    first_window_block: int = 0
    """Index of the first of them: those before were given back."""
    num_writable: int = 0
    """Tokens that its blocks hold of which it alone holds those behind `num_computed`: so many may
    be computed without another look at the blocks. 0: unknown."""
    num_reserved: int = 0
    """Blocks that are reserved and not yet allocated."""
    parent: "Sequence | None" = None
    """Sample of the same prompt that computes the first `num_shared_tokens` for this one."""
    num_shared_tokens: int = 0
    """Leading tokens that the parent computes for its children."""
    has_children: bool = False
    awaited_prefix: "tuple[Sequence, int] | None" = None
    """A running sequence that computes the same prefix, and the prefix' length in tokens."""
    swapped: Swapped | None = None
    state: ConvState | None = None
    """Convolution state; a waiting sequence keeps it until its slot is needed."""
    next_slot: int | None = None
    """Slot that the planned step writes the next state to."""
    keys: list[bytes] = field(default_factory=list)
    """Content keys of its first blocks, as many as were needed so far."""
    cached_path: Path = field(default_factory=list)
    """Cached blocks of its beginning, as they were found last."""
    num_stored_blocks: int = 0
    """Leading blocks that came from tiers outside the device."""
    cached_prompt_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None before it first starts."""
    num_preemptions: int = 0
    last_step: int = -1
    """Number of the step in which it was last computed."""
    is_running: bool = False
    backlog: "Backlog | None" = None
    """Counter of the table that the sequence is in."""
    request_id: str = field(init=False)
    max_length: int = field(init=False, default=0)
    """Length in tokens at which it ends, known when it is in a table."""

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of importance, smallest first: larger priority, then earlier arrival."""
        return (-self.priority, self.arrival, self.serial)

    def set_computed(self, num_tokens: int) -> None:
        """Set `num_computed` and what follows from it, which one more token of a decode and the
        next one behind it leave as it is."""
        before = self.num_prefill
        self.num_computed = num_tokens
        self.is_decoding = num_tokens > 0 and len(self.token_ids) - num_tokens == 1
        if self.backlog:
            self.backlog.num_tokens += self.num_prefill - before

    @property
    def num_prefill(self) -> int:
        """Tokens to compute before it decodes; 0 while it does."""
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
        """All blocks that it holds."""
        return self.block_ids + self.window_block_ids

    @property
    def num_window_covered(self) -> int:
        """Blocks of the sequence up to the last one in `window_block_ids`."""
        return self.first_window_block + len(self.window_block_ids)

    @property
    def expected_remaining(self) -> int:
        """Output tokens still expected, at least one."""
        return max(1, min(self.request.max_tokens, self.expected_output) - self.num_output)


@dataclass(slots=True)
class Backlog:
    """Tokens that sequences have to compute before they decode."""

    num_tokens: int = 0


def _rank_of(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank


class SequenceTable:
    """All admitted sequences, running and waiting, by id; iterates from the most important on.

    What every report and step asks for is counted as it changes, however many sequences wait.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._by_rank: list[Sequence] = []
        self._running: list[Sequence] = []
        self._backlog = Backlog()

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_rank)

    def __len__(self) -> int:
        return len(self._by_rank)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> Sequence:
        return self._by_id[request_id]

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    @property
    def running(self) -> list[Sequence]:
        """Sequences in the batch, the most important first."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._by_rank) - len(self._running)

    @property
    def newest_running(self) -> Sequence | None:
        """The least important running sequence."""
        return self._running[-1] if self._running else None

    @property
    def num_backlog_tokens(self) -> int:
        """Tokens that all sequences have to compute before they decode."""
        return self._backlog.num_tokens

    def add(self, sequence: Sequence) -> None:
        self._by_id[sequence.request_id] = sequence
        most = sequence.request.num_prompt_tokens + sequence.request.max_tokens
        sequence.max_length = min(sequence.limit, most)
        bisect.insort(self._by_rank, sequence, key=_rank_of)
        sequence.backlog = self._backlog
        self._backlog.num_tokens += sequence.num_prefill

    def start(self, sequence: Sequence) -> None:
        """Take a sequence into the batch."""
        sequence.is_running = True
        bisect.insort(self._running, sequence, key=_rank_of)

    def stop(self, sequence: Sequence) -> None:
        """Take a sequence out of the batch, if it is in it."""
        if sequence.is_running:
            sequence.is_running = False
            self._running.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        self.stop(sequence)
        del self._by_id[sequence.request_id]
        self._by_rank.remove(sequence)
        self._backlog.num_tokens -= sequence.num_prefill
        sequence.backlog = None

    def check_integrity(self) -> None:
        assert len(self._by_rank) == len(self._by_id), "sequences lost or doubled"
        running = [sequence for sequence in self._by_rank if sequence.is_running]
        assert running == self._running, "running sequences lost or doubled"
        for each in self._by_rank:
            is_decoding = each.num_computed > 0 and each.num_remaining == 1
            assert each.is_decoding == is_decoding, f"{each.request_id}: decodes or does not"
        num_prefill = sum(sequence.num_prefill for sequence in self._by_rank)
        assert num_prefill == self._backlog.num_tokens, f"{num_prefill} tokens to compute"
        ranks = [sequence.rank for sequence in self._by_rank]
        assert ranks == sorted(set(ranks)), "sequences out of order"


class Transfers(NamedTuple):
    """Copies to and from tiers outside the device, which are reported when they are done."""

    stored: tuple[KvSlot, ...] = ()
    read: tuple[KvRead, ...] = ()

    def and_those_of(self, other: "Transfers") -> "Transfers":
        return Transfers(self.stored + other.stored, self.read + other.read)


class Planned(NamedTuple):
    """A plan that is not committed yet."""

    entries: dict[str, tuple[Sequence, Chunk]]
    """Its sequences by their request's id, each with the chunk of it that the plan computes."""
    cancelled: list[Sequence]
    """Sequences that it computes and that were dropped since."""
    transfers: Transfers = Transfers()
    """What it copies to and from tiers outside the device."""


@dataclass(frozen=True, slots=True)
class PromptCost:
    """The cost of prompt tokens, in tokens at a prompt's beginning.

    A token costs 1, and 1 more for every `even_context` tokens of context that it attends to.
    """

    even_context: float = math.inf
    """Tokens of context whose reading costs as much as all else of a token; inf: nothing that is
    seen."""
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

        # The cost is a quadratic function of the count, whose positive root this is.
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
    """Whether prompts are split over steps; otherwise `prompt_tokens` must hold a whole one."""
    decode_tokens: int
    """Tokens of context that the decodes of one step read together, as far as it can be helped:
    `MIN_DECODES` may always decode."""
    replay_tokens: int = 0
    """Tokens that rebuild a convolution state from zero, over all layers of the whole model whoever
    computes them; 0: the model has no convolutions."""
    max_decodes: int = 1 << 30
    """Most sequences that one step decodes."""
    max_in_flight: int = 1
    """Plans that may be computed at the same time: as many as the pipeline has stages."""
    num_speculative_tokens: int = 0
    """Most draft tokens of a sequence that one step checks; 0: none. Only with one plan in flight,
    and for models without states and windows."""
    prompt_cost: PromptCost = PromptCost()
    """What the prompt tokens of one step cost by their position, and how much they may cost."""


_FREELY_WALKED = 64
"""Number of sequences that each report may look at, one by one."""
_WALKED_PER_S = 1000
"""Sequences looked at for reports in a second where there are more: about 1 % of the time."""


class WalkLimiter:
    """Says when all sequences may be looked at again for figures that no counter gives."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._walked_at = -math.inf

    @property
    def age_s(self) -> float:
        """Seconds since the last walk."""
        return self._clock() - self._walked_at

    def is_due(self, num_sequences: int) -> bool:
        """Whether to look at so many sequences now, which then counts as a walk."""
        now = self._clock()
        interval_s = 0.0 if num_sequences <= _FREELY_WALKED else num_sequences / _WALKED_PER_S
        if now - self._walked_at < interval_s:
            return False
        self._walked_at = now
        return True


class ForkGroups:
    """Samples of one prompt: a parent computes the tokens all share, its children fork from it.

    A child waits until its parent has computed the shared tokens. When the parent is removed
    before that, the most important child takes its place.
    """

    def __init__(self) -> None:
        self._children: dict[Sequence, list[Sequence]] = {}

    def __bool__(self) -> bool:
        return bool(self._children)

    def form(self, parent: Sequence, children: list[Sequence], num_shared_tokens: int) -> None:
        """Make `children` wait until the parent has computed its first `num_shared_tokens`."""
        parent.has_children = bool(children)
        for child in children:
            child.parent = parent
            child.num_shared_tokens = num_shared_tokens
        if children:
            self._children[parent] = children

    def children(self, parent: Sequence) -> list[Sequence]:
        """Sequences that wait for the parent, the most important first."""
        return list(self._children.get(parent, ()))

    def take_ready(self, parent: Sequence) -> list[Sequence]:
        """Release the children that can fork from the parent now; they are independent from then
        on."""
        ready = self._children.get(parent)
        if not ready or parent.num_computed < ready[0].num_shared_tokens:
            return []
        del self._children[parent]
        parent.has_children = False
        for child in ready:
            child.parent = None
        return ready

    def remove(self, sequence: Sequence) -> list[Sequence]:
        """Remove a sequence; return the children that lose it, the first of them their new
        parent."""
        if sequence.parent:
            self._detach(sequence, sequence.parent)
        orphans = self._children.pop(sequence, [])
        if orphans:
            new_parent, *others = orphans
            new_parent.parent = None
            self.form(new_parent, others, new_parent.num_shared_tokens)
        return orphans

    def _detach(self, child: Sequence, parent: Sequence) -> None:
        remaining = [each for each in self._children[parent] if each is not child]
        child.parent = None
        parent.has_children = bool(remaining)
        if remaining:
            self._children[parent] = remaining
        else:
            del self._children[parent]


def shared_tokens(requests: list[EngineRequest]) -> int:
    """Count the leading tokens that all of these requests have in common.

    The last token of each is excluded, because each request needs its logits.
    """
    first, *others = [request.token_ids for request in requests]
    shared = min(len(tokens) for tokens in [first, *others]) - 1
    return min([shared, *(common_prefix(first, tokens) for tokens in others)])


MIN_DECODES = 8
"""Decodes that a step computes whatever they read: so many take about as long as one, because every
step reads all weights."""


def postponed_decodes(
    ready: list[Sequence],
    max_decodes: int,
    max_read_bytes: int,
    read_bytes: Callable[[int], int],
) -> set[str]:
    """Lists whose decodes have no place in a step, longest unserved first, within the KV they read
    together.

    `read_bytes` gives the bytes that a decode reads by the length of its sequence: never fewer for
    a longer one, and never more for each further token than for those before (windows bound it).
    """
    count = len(ready)
    if count <= max_decodes:
        # As it is concave, sequences of so many tokens read most if all are of one length.
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


_last_step_of = operator.attrgetter("last_step")


class PromptBudget:
    """What one step may still compute of prompts."""

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
        # However deep its context, a prompt goes on.
        return max(count, min(most, 1)) if self._is_untouched else count

    def take(self, start: int, count: int) -> None:
        """Count tokens that are computed."""
        self._tokens -= count
        self._left -= self._cost.of(start, count)
        self._is_untouched = False


def make_chunk(
    sequence: Sequence,
    start: int,
    count: int,
    slots: tuple[int | None, int] = (None, 0),
    draft: list[int] | None = None,
) -> Chunk:
    """Make the chunk of `count` tokens from `start` on; the sequence has the blocks for them.

    Tokens before `num_computed` are replayed. `slots`: of the convolution states before and after.
    `draft`: tokens to check behind a decode's.
    """
    tokens = sequence.token_ids
    end = start + count
    windows = sequence.window_block_ids
    if windows:
        # What a window has slid past is never read; any block of its own stands for it.
        windows = windows[:1] * sequence.first_window_block + windows
    is_sampled = end == len(tokens)
    return Chunk(
        request_id=sequence.request_id,
        token_ids=tokens[start:end] + (draft or []),
        start=start,
        block_ids=sequence.block_ids,
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
    """Make the chunk of a decode without states and windows: what `make_chunk` would, in a third
    of the time."""
    tokens = sequence.token_ids
    request = sequence.request
    chunk = Chunk(
        sequence.request_id,
        tokens[-1:],
        sequence.num_computed,
        sequence.block_ids,
        request.sampling,
        tokens,
        request.num_prompt_tokens,
    )
    return replace(chunk, banned=banned_tokens(sequence)) if request.min_tokens else chunk


def banned_tokens(sequence: Sequence) -> list[int]:
    """List the tokens that may not come next: those that end an answer which is too short."""
    request = sequence.request
    return request.stop_token_ids if sequence.num_output < request.min_tokens else []


def logprobs_of(sampled: SampledToken, before: list[SampledToken] | None) -> list[TokenLogprobs]:
    """Return what is reported of a sampled token and of those before it."""
    return [
        TokenLogprobs(each.logprob, each.top_ids, each.top_logprobs)
        for each in [*(before or []), sampled]
    ]


def prefix_under_way(
    sequence: Sequence, running: Iterable[Sequence], block_tokens: int
) -> tuple[Sequence, int] | None:
    """Find a running sequence that computes more of a waiting one's prefix than that one holds.

    Returns it and the length of the common prefix in tokens, in whole blocks. Only more important
    sequences count: those never wait for this one, so no two wait for each other.
    """
    longest = len(sequence.token_ids) - 1
    for other in running:
        if other.rank > sequence.rank or other.num_remaining <= 1:
            continue
        if other.request.cache_salt != sequence.request.cache_salt:
            continue
        common = min(common_prefix(sequence.token_ids, other.token_ids), longest)
        whole = common // block_tokens * block_tokens
        if whole > max(sequence.num_computed, other.num_computed):
            return other, whole
    return None


def stored_tokens(
    sequences: Iterable[Sequence],
    block_tokens: int,
    is_cached: Callable[[int], bool],
    is_private: Callable[[int], bool],
) -> int:
    """Count tokens in blocks outside the prefix cache, those of a shared block once.

    `is_private`: whether one sequence holds the block, and not the cache. Then it alone holds all
    blocks behind it, too, so that these need not be looked at.
    """
    num_tokens = 0
    shared: dict[int, int] = {}
    for sequence in sequences:
        table = sequence.block_ids
        first = sequence.num_cached_blocks
        private = bisect.bisect_left(
            range(len(table)), True, lo=first, key=lambda index: is_private(table[index])
        )
        for index in range(first, private):
            tokens = max(0, min(block_tokens, sequence.num_computed - index * block_tokens))
            if not is_cached(table[index]):
                shared[table[index]] = max(tokens, shared.get(table[index], 0))
        num_tokens += max(0, sequence.num_computed - private * block_tokens)
        for index, block in enumerate(sequence.window_block_ids, sequence.first_window_block):
            if not is_cached(block):
                tokens = max(0, min(block_tokens, sequence.num_computed - index * block_tokens))
                shared[block] = max(tokens, shared.get(block, 0))
    return num_tokens + sum(shared.values())


def holder_shares(block_ids: list[int], ref_count: Callable[[int], int]) -> float:
    """Count a sequence's blocks, each divided by the sequences that hold it.

    Whoever holds a block holds all before it, so there are few runs of equally shared blocks.
    """
    shares = 0.0
    start = 0
    while start < len(block_ids):
        count = ref_count(block_ids[start])
        end = len(block_ids)
        if count > 1:
            end = bisect.bisect_left(
                range(end), True, lo=start, key=lambda index: ref_count(block_ids[index]) < count
            )
        shares += (end - start) / count
        start = end
    return shares
