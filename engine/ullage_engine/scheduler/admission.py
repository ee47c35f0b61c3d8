"""Admission control: compares each request's KV cost with free memory to admit or refuse it.

Samples of one prompt are admitted together or not at all. The module `refusals` defines the rules
for refusals.
"""

from collections.abc import Iterator

from ullage_common.request_cost import MemoryProfile, most_tokens, sample_blocks
from ullage_engine.protocol.messages import Rejected
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.protocol.worker_state import ReleaseState
from ullage_engine.scheduler.common_prefix import prefix_under_way, shared_tokens
from ullage_engine.scheduler.refusals import (
    refuse_duplicates,
    refuse_never_fits,
    refuse_now,
    soonest_releases,
)
from ullage_engine.scheduler.sequence import Rank, Sequence
from ullage_engine.scheduler.state import SchedulerState
from ullage_engine.scheduler.stats import WalkLimiter, holder_shares

_QUEUE_BATCHES = 4
"""Maximum length of the waiting queue, as a multiple of the maximum batch size. Further requests
should queue in the router."""


class AdmissionControl:
    """Turns each request into a sequence with reserved KV blocks, or refuses the request."""

    def __init__(self, profile: MemoryProfile, state: SchedulerState) -> None:
        self._profile = profile
        self._limits = state.limits
        self._cache = state.cache
        self._reservations = state.reservations
        self._sequences = state.sequences
        self._fork_groups = state.fork_groups
        self._throughput = state.throughput
        self._output_lengths = state.output_lengths
        self._num_submitted = 0
        self._walks = WalkLimiter(state.clock)
        self._releases: list[ReleaseState] = []
        """Expected memory releases as of the last pass over all sequences."""

    def submit(self, requests: list[EngineRequest], resumed: bool) -> Rejected | None:
        """Admit all samples of one prompt together, or refuse them all without changing any state.

        Resumed requests, which an earlier worker had admitted, are only refused if they are
        invalid. If memory is short, they wait.

        Returns:
            The refusal, or None if the samples are admitted.
        """
        group = self._group(requests)
        if not resumed or not all(request.token_ids for request in requests):
            refusal = self._refusal(requests, group)
            if refusal:
                return refusal
        self._admit(group)
        return None

    def refuse_duplicates(self, requests: list[EngineRequest]) -> Rejected | None:
        """Return a refusal if a request id is already in use or occurs twice, otherwise None."""
        return refuse_duplicates(requests, self._sequences, self._profile.kv_pool_bytes)

    def can_start(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may start.

        Its reservation must have been granted. If a running sequence is about to compute further
        blocks of the same prefix, the waiting sequence is held back, so that it can share these
        blocks instead of recomputing them.
        """
        if sequence.fork.parent or not self._reservations.is_granted(sequence):
            return False
        # Of a sequence that computes its whole prompt anyway, shared blocks spare nothing.
        is_sharing = self._cache.has_cache and not (sequence.swapped or sequence.is_scoring)
        if sequence.prefix.awaited is None and is_sharing:
            size = self._cache.block_tokens
            sequence.prefix.awaited = prefix_under_way(sequence, self._sequences.running, size)

        if sequence.prefix.awaited is None:
            return True
        other, num_tokens = sequence.prefix.awaited
        if other.is_running and other.num_computed < num_tokens:
            return False
        sequence.prefix.awaited = None
        return True

    def is_complete(self, request: EngineRequest, resumed: bool) -> bool:
        """Return whether a request that an earlier worker admitted has nothing left to generate."""
        return request.is_complete(self.longest(request), resumed)

    def new_sequence(self, request: EngineRequest, rank: Rank) -> Sequence:
        """Create a request's sequence, and set its place in the scheduling order.

        The sequence takes its priority and arrival number from `rank`, but gets a new serial
        number. It therefore ranks behind all earlier sequences with the same priority and arrival
        number.
        """
        self._num_submitted += 1
        return Sequence(
            request=request,
            rank=rank._replace(serial=self._num_submitted),
            limit=self.max_sequence_tokens,
            expected_output=self._output_lengths.estimate,
            token_ids=list(request.token_ids),
        )

    @property
    def max_sequence_tokens(self) -> int:
        """Return the maximum sequence length in tokens that the block pool and the model allow."""
        pool_tokens = most_tokens(self._profile, self._profile.kv_pool_bytes)
        return min(self._limits.max_model_len, pool_tokens)

    def longest(self, request: EngineRequest, num_samples: int = 1) -> int:
        """Return the maximum total length, in tokens, of each of a request's `num_samples` samples.

        If the request belongs to a session with a KV limit, all samples together must stay within
        that limit.
        """
        longest = self.max_sequence_tokens
        limit = self._profile.session_kv_bytes
        if not (request.session_id and limit):
            return longest
        num_prompt = request.num_prompt_tokens
        return min(longest, most_tokens(self._profile, limit, num_prompt, num_samples))

    def releases(self) -> list[ReleaseState]:
        """Estimate when sequences will release memory, and how much. See `soonest_releases`.

        If there are many sequences, the list may be slightly out of date.
        """
        if self._walks.is_due(len(self._sequences)):
            self._releases = soonest_releases(self._expected_releases())
            return self._releases

        age_s = self._walks.age_s
        return [
            ReleaseState(after_s=max(0.0, each.after_s - age_s), num_bytes=each.num_bytes)
            for each in self._releases
        ]

    def _soonest_releases(self) -> Iterator[tuple[float, int]]:
        for each in self.releases():
            yield each.after_s, each.num_bytes

    def _expected_releases(self) -> Iterator[tuple[float, int]]:
        """Yield each sequence's expected memory release, as (seconds from now, bytes).

        The prompts of all sequences delay each of them: those ahead are computed before its own
        prompt, and those behind it share the steps in which it decodes.
        """
        num_prompt = self._sequences.num_backlog_tokens
        for each in self._sequences:
            blocks = each.num_reserved + self._num_held(each)
            if blocks:
                after = self._throughput.seconds_until(num_prompt, each.expected_remaining)
                yield after, round(blocks * self._profile.block_bytes)

    def _refusal(self, requests: list[EngineRequest], group: list[Sequence]) -> Rejected | None:
        size = self._profile.block_bytes
        has_output = any(len(each.token_ids) > each.num_prompt_tokens for each in requests)
        # Samples whose outputs already differ may run one after another.
        min_blocks = (max if has_output else sum)(map(self._min_blocks, group))
        min_bytes = min_blocks * size
        max_model_len = self._limits.max_model_len
        refusal = refuse_never_fits(requests, self._profile, max_model_len, min_bytes)
        if refusal:
            return refusal

        # Samples that do not fit together take turns, so they never need more than the pool.
        blocks = sum(self._reservations.cost(each).total for each in group)
        needed = min(blocks, self._cache.num_blocks) * size
        available = self._reservations.num_available * size
        session = self._session_bytes(requests[0].session_key)
        queue_slots = self._queue_slots(len(group))
        releases = self._soonest_releases()
        return refuse_now(requests, needed, available, session, queue_slots, releases)

    def _session_bytes(self, session: str) -> int | None:
        """Return how many more bytes of KV a session may use, or None if it has no KV limit."""
        limit = self._profile.session_kv_bytes if session else 0
        if not limit:
            return None
        own = (each for each in self._sequences if each.request.session_key == session)
        blocks = sum(each.num_reserved + self._num_held(each) for each in own)
        return max(0, limit - round(blocks * self._profile.block_bytes))

    def _num_held(self, sequence: Sequence) -> float:
        """Return how many blocks a sequence holds. A block shared by n sequences counts as 1/n."""
        shares = holder_shares(sequence.blocks.ids, self._cache.ref_count)
        # Window blocks are few, and their counts may rise along the table.
        windows = sequence.windows.ids
        return shares + sum(1 / self._cache.ref_count(block) for block in windows)

    def _queue_slots(self, num_requests: int) -> int:
        """Return how many more requests may wait in the queue.

        An empty queue always has room for the next `num_requests` requests, even if they exceed its
        maximum length.
        """
        num_waiting = self._sequences.num_waiting
        free = self._limits.max_sequences * _QUEUE_BATCHES - num_waiting
        return free if num_waiting else max(free, num_requests)

    def _min_blocks(self, sequence: Sequence) -> int:
        """Return the minimum number of blocks that this sample needs to generate its next token.

        Blocks that the sample shares with the parent of its group are not counted.
        """
        return sample_blocks(
            self._profile,
            len(sequence.token_ids) + 1,
            shared_tokens=sequence.fork.num_shared_tokens,
            leads=sequence.fork.has_children,
        )

    def _group(self, requests: list[EngineRequest]) -> list[Sequence]:
        """Create a sequence for each sample of a prompt.

        If the samples have a common prefix, the first sequence becomes the parent of the others,
        and computes the prefix for them.
        """
        rank = Rank(-requests[0].priority, arrival=self._num_submitted, serial=0)
        parent, *others = [self.new_sequence(request, rank) for request in requests]
        for sequence in (parent, *others):
            sequence.limit = self.longest(sequence.request, len(requests))

        shared = shared_tokens(requests) if others else 0
        if shared > 0:
            parent.fork.has_children = True
            for child in others:
                child.fork.parent = parent
                child.fork.num_shared_tokens = shared
        return [parent, *others]

    def _admit(self, group: list[Sequence]) -> None:
        parent, *others = group
        if parent.fork.has_children:
            self._fork_groups.form(parent, others, others[0].fork.num_shared_tokens)

        # Deferred first and granted together, so that the group competes by rank like any other.
        for sequence in group:
            self._sequences.add(sequence)
            self._reservations.defer(sequence)
            self._cache.sessions.use(sequence.request.session_key)
        self._reservations.grant_deferred(self._sequences)
