"""State shared by admission, planning and commits: all sequences and their resources."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ullage_common.request_cost import MemoryProfile
from ullage_engine.kv_cache.prefix_cache import KvPolicy, PrefixCache
from ullage_engine.scheduler.batch_plan import Planned, SchedulerLimits
from ullage_engine.scheduler.conv_states import ConvStatePool
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.fork_groups import ForkGroups
from ullage_engine.scheduler.reservations import BlockReservations
from ullage_engine.scheduler.sequence import Sequence
from ullage_engine.scheduler.sequence_table import SequenceTable
from ullage_engine.scheduler.speculation import Speculation
from ullage_engine.scheduler.swap import SwapManager
from ullage_engine.scheduler.tiers import TierTransfers

NewSpeculation = Callable[[SchedulerLimits, PrefixCache], Speculation]


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """All admitted sequences, and all blocks, slots and reservations that they hold."""

    profile: MemoryProfile
    limits: SchedulerLimits
    cache: PrefixCache
    reservations: BlockReservations
    sequences: SequenceTable
    swap: SwapManager
    conv_states: ConvStatePool
    tiers: TierTransfers | None
    """Transfers of KV to and from tiers outside the device, or None without tiers."""
    speculation: Speculation | None
    """Drafts tokens for speculative decoding, or None if speculative decoding is off."""
    throughput: ThroughputEstimator
    output_lengths: OutputLengthEstimator
    clock: Callable[[], float]
    """Function that returns the time in seconds, from any monotonic clock."""
    fork_groups: ForkGroups = field(default_factory=ForkGroups)
    in_flight: deque[Planned] = field(default_factory=deque)
    """Plans that have not been committed yet, oldest first."""

    @property
    def is_plain(self) -> bool:
        """Whether the model uses neither sliding window blocks nor convolution states.

        If so, a decode needs no preparation while its token fits into an allocated block.
        """
        return not (self.limits.replay_tokens or self.cache.is_windowed)

    def sequences_in_flight(self) -> set[Sequence]:
        """Return all sequences in plans that have not been committed yet."""
        return {sequence for planned in self.in_flight for sequence, _ in planned.entries.values()}

    def check_integrity(self) -> None:
        """Assert that no block or slot is leaked, and that the pool covers every reservation."""
        self.reservations.check_integrity(self.sequences)
        self.swap.check_integrity(list(self.sequences))
        self.sequences.check_integrity()
        self.conv_states.check_integrity()
        assert self.sequences.num_running <= self.limits.max_sequences, "batch too large"

        for each in self.sequences:
            held = len(each.blocks.ids) * self.cache.block_tokens
            assert each.num_computed <= held, f"{each.request_id}: tokens outside its blocks"
            if self.cache.is_windowed:
                reach = self.cache.first_window_block(each.num_computed)
                assert each.windows.first <= reach or not each.windows.ids, "slid too far"
                assert each.windows.end == each.blocks.end, "tables of two lengths"
            assert each.fork.parent is None or not each.is_running, "runs before its parent"

    @classmethod
    def create(
        cls,
        profile: MemoryProfile,
        limits: SchedulerLimits,
        throughput: ThroughputEstimator,
        output_lengths: OutputLengthEstimator,
        policy: KvPolicy,
        clock: Callable[[], float],
        new_speculation: NewSpeculation = Speculation,
    ) -> "SchedulerState":
        """Create the initial state, without requests.

        Args:
            clock: returns monotonic time in seconds.
            new_speculation: creates what drafts tokens, if the limits allow drafts.
        """
        num_blocks = profile.kv_pool_bytes // profile.block_bytes
        window = profile.window_tokens
        cache = PrefixCache(num_blocks, profile.block_tokens, policy, clock, window)
        reservations = BlockReservations(cache, profile)
        sequences = SequenceTable()

        tiers: TierTransfers | None = None
        if policy.kv_space:
            tiers = TierTransfers(cache, reservations, policy, throughput, clock)

        # A draft follows a token that is known, and rejected tokens leave no state or window to
        # restore.
        has_drafts = limits.num_speculative_tokens > 0 and limits.max_in_flight == 1
        has_drafts = has_drafts and not (limits.replay_tokens or cache.is_windowed)

        return cls(
            profile=profile,
            limits=limits,
            cache=cache,
            reservations=reservations,
            sequences=sequences,
            swap=SwapManager(cache, profile.block_bytes, policy, throughput),
            conv_states=ConvStatePool(limits.replay_tokens, limits.max_sequences, sequences),
            tiers=tiers,
            speculation=new_speculation(limits, cache) if has_drafts else None,
            throughput=throughput,
            output_lengths=output_lengths,
            clock=clock,
        )
