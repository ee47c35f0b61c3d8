"""The scheduler's statistics: work counters and memory usage.

Some statistics require iterating over all sequences. A `WalkLimiter` limits how often this happens.
"""

import bisect
import math
from collections.abc import Callable, Iterable

from ullage_common.request_cost import MemoryProfile
from ullage_engine.protocol.figures import Figures
from ullage_engine.protocol.worker_state import SchedulerStats
from ullage_engine.scheduler.sequence import Sequence
from ullage_engine.scheduler.state import SchedulerState

_FREELY_WALKED = 64
"""Up to this number of sequences, every report may iterate over all of them."""
_WALKED_PER_S = 1000
"""Maximum number of sequences to visit per second if there are more than `_FREELY_WALKED`. At this
rate, iterating takes about 1 % of the time."""


class WalkLimiter:
    """Limits how often reports iterate over all sequences, which is slow if there are many."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create a limiter. `clock` returns the time in seconds."""
        self._clock = clock
        self._walked_at = -math.inf

    @property
    def age_s(self) -> float:
        """Return the number of seconds since the last recorded pass over all sequences."""
        return self._clock() - self._walked_at

    def is_due(self, num_sequences: int) -> bool:
        """Return whether to iterate over this many sequences now. If so, record the time."""
        now = self._clock()
        interval_s = 0.0 if num_sequences <= _FREELY_WALKED else num_sequences / _WALKED_PER_S
        if now - self._walked_at < interval_s:
            return False
        self._walked_at = now
        return True


class SchedulerStatistics:
    """Counts the scheduler's work, and reports these counts and the memory usage."""

    def __init__(self, profile: MemoryProfile, state: SchedulerState) -> None:
        self.figures = Figures()
        self.num_steps = 0
        """Number of committed steps that computed at least one chunk."""
        self.num_preemptions = 0
        self.prefix_lookup_tokens = 0
        self.prefix_hit_tokens = 0
        self.prefix_merged_tokens = 0

        self._profile = profile
        self._state = state
        self._walks = WalkLimiter(state.clock)
        self._num_tail_tokens = 0
        """Number of tokens in blocks outside the prefix cache, as of the last pass."""
        self._least_available = state.cache.num_available
        """Fewest blocks that were free or reclaimable in any step."""
        self._least_promisable = state.reservations.num_available
        """Fewest blocks that a new request could have reserved."""

    def observe_memory(self) -> None:
        """Take the blocks into account that are held and reserved now, for the peaks.

        Reports are too rare to see a peak, which may last for only one step.
        """
        self._least_available = min(self._least_available, self._state.cache.num_available)
        promisable = self._state.reservations.num_available
        self._least_promisable = min(self._least_promisable, promisable)

    def collect(self) -> SchedulerStats:
        """Collect the statistics.

        If there are many sequences, `kv_used_bytes` may be slightly out of date. All other
        statistics are current.
        """
        self.observe_memory()
        cache = self._state.cache
        sequences = self._state.sequences
        swap = self._state.swap
        speculation = self._state.speculation
        block_bytes = self._profile.block_bytes
        size = cache.block_tokens

        if self._walks.is_due(len(sequences)):
            self._num_tail_tokens = stored_tokens(
                sequences, size, cache.is_cached, cache.is_private
            )
        num_used_tokens = cache.num_cached_used * size + self._num_tail_tokens
        pool_bytes = self._profile.kv_pool_bytes
        num_committed = cache.num_available - self._state.reservations.num_available

        return SchedulerStats(
            kv_pool_bytes=pool_bytes,
            kv_free_bytes=cache.num_free * block_bytes,
            kv_reclaimable_bytes=cache.num_reclaimable * block_bytes,
            kv_committed_bytes=num_committed * block_bytes,
            kv_used_bytes=num_used_tokens * block_bytes // size,
            kv_peak_bytes=max(0, pool_bytes - self._least_available * block_bytes),
            kv_peak_promised_bytes=pool_bytes - self._least_promisable * block_bytes,
            num_running=sequences.num_running,
            num_waiting=sequences.num_waiting,
            num_steps=self.num_steps,
            expected_output_tokens=self._state.output_lengths.estimate,
            prefill_backlog_tokens=sequences.num_backlog_tokens,
            num_preemptions=self.num_preemptions,
            num_swaps=swap.num_swaps,
            swap_out_bytes=swap.num_blocks_out * block_bytes,
            swap_in_bytes=swap.num_blocks_in * block_bytes,
            prefix_lookup_tokens=self.prefix_lookup_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            prefix_merged_tokens=self.prefix_merged_tokens,
            num_draft_tokens=speculation.num_draft_tokens if speculation else 0,
            num_accepted_tokens=speculation.num_accepted_tokens if speculation else 0,
            num_sessions=len(cache.sessions),
            session_bytes=cache.num_session_blocks * block_bytes,
            figures=self.figures.copy(),
        )


def stored_tokens(
    sequences: Iterable[Sequence],
    block_tokens: int,
    is_cached: Callable[[int], bool],
    is_private: Callable[[int], bool],
) -> int:
    """Count the tokens in blocks outside the prefix cache, counting shared blocks only once.

    Args:
        sequences: the sequences whose blocks are counted.
        block_tokens: tokens per block.
        is_cached: returns whether the prefix cache has a block.
        is_private: returns whether a block is held by exactly one sequence and not by the cache.
            All later blocks of that sequence are then private as well, so a binary search finds the
            first private block.
    """
    num_tokens = 0
    shared: dict[int, int] = {}

    for sequence in sequences:
        table = sequence.blocks.ids
        first = sequence.num_cached_blocks
        private = bisect.bisect_left(
            range(len(table)), True, lo=first, key=lambda index: is_private(table[index])
        )
        for index in range(first, private):
            tokens = max(0, min(block_tokens, sequence.num_computed - index * block_tokens))
            if not is_cached(table[index]):
                shared[table[index]] = max(tokens, shared.get(table[index], 0))
        num_tokens += max(0, sequence.num_computed - private * block_tokens)

        for index, block in enumerate(sequence.windows.ids, sequence.windows.first):
            if not is_cached(block):
                tokens = max(0, min(block_tokens, sequence.num_computed - index * block_tokens))
                shared[block] = max(tokens, shared.get(block, 0))

    return num_tokens + sum(shared.values())


def holder_shares(block_ids: list[int], ref_count: Callable[[int], int]) -> float:
    """Count the blocks that a sequence holds. A block shared by n sequences counts as 1/n.

    A sequence that holds a block also holds all blocks before it, so reference counts never
    increase along a block table. They change only a few times, and binary searches find where.
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
