"""The state that scheduling, planning and admission share: sequences and all that they hold.

Convolution states: a state is a value, which a step reads in one slot while it writes the successor
to another. So a step that failed is computed again from what it began with, and sequences that
branch share a state. Each running sequence needs at most two slots, and there are two for each that
may run; those that wait keep their state until its slot is needed. The prefix cache and the host
hold KV and no states: computing tokens again from zero state, while attention reads their KV as
stored, makes the state exact after `replay_tokens` of them (or at the sequence's own beginning,
where zero is right). A replay may take several steps.

Swapping: the KV of a preempted sequence is copied to host memory or computed again, whichever is
cheaper. Host memory is counted in slots of one block each; the copies themselves are moves of a
`StepPlan`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ullage_common.request_cost import MemoryProfile
from ullage_engine.kv_cache.block_pool import BlockPool
from ullage_engine.kv_cache.prefix_cache import KvPolicy, PrefixCache
from ullage_engine.protocol.figures import Figures
from ullage_engine.protocol.messages import SchedulerStats
from ullage_engine.protocol.step_plan import Chunk, Moves, state_slots
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.reservations import BlockReservations
from ullage_engine.scheduler.sequence import (
    ConvState,
    ForkGroups,
    SchedulerLimits,
    Sequence,
    SequenceTable,
    Swapped,
    WalkLimiter,
    stored_tokens,
)
from ullage_engine.scheduler.speculation import Speculation


class ConvStatePool:
    """Assigns state slots to all sequences; without `replay_tokens` there are none."""

    def __init__(self, replay_tokens: int, max_sequences: int, sequences: SequenceTable) -> None:
        self.replay_tokens = replay_tokens
        num_slots = state_slots(max_sequences) if replay_tokens else 0
        self._slots = BlockPool(num_slots, block_tokens=1)
        self._sequences = sequences

    def next_position(self, sequence: Sequence) -> int:
        """Position of the first token to compute; before `num_computed` where the state is missing
        and tokens are replayed to rebuild it."""
        if not self.replay_tokens:
            return sequence.num_computed
        if sequence.state and self._is_usable(sequence.state, sequence.num_computed):
            return sequence.state.num_tokens
        return max(0, sequence.num_computed - self.replay_tokens)

    def assign_slots(self, sequence: Sequence) -> tuple[int | None, int]:
        """Assign a planned chunk's slots: of the state it reads, None for zero, and of the
        next."""
        if not self.replay_tokens:
            return None, 0
        if sequence.next_slot is None:
            self._free_a_slot()
            [sequence.next_slot] = self._slots.allocate(1)
        state = sequence.state
        is_usable = state is not None and self._is_usable(state, sequence.num_computed)
        return state.slot if state and is_usable else None, sequence.next_slot

    def commit(self, sequence: Sequence, chunk: Chunk) -> None:
        """Make the state that a computed chunk has written the sequence's own."""
        if sequence.next_slot is None:
            return
        previous = sequence.state
        slot = sequence.next_slot
        is_continued = previous is not None and chunk.state_slot is not None
        since = previous.since if previous and is_continued else chunk.start
        sequence.next_slot = None
        self._drop(sequence)
        sequence.state = ConvState(slot, chunk.end, since)

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Give a child that shares the parent's first `num_computed` tokens its state, too, unless
        that is already for later ones."""
        if parent.state and parent.state.num_tokens <= child.num_computed:
            self._slots.share([parent.state.slot])
            child.state = parent.state

    def release_next(self, sequence: Sequence) -> None:
        """Free the slot that the sequence would have written next."""
        if sequence.next_slot is not None:
            self._slots.free([sequence.next_slot])
            sequence.next_slot = None

    def release(self, sequence: Sequence) -> None:
        """Free all slots of a sequence that ends."""
        self.release_next(sequence)
        self._drop(sequence)

    def check_integrity(self) -> None:
        """Asserts that every slot is free or held, and that no state was written that is read."""
        states = [each.state.slot for each in self._sequences if each.state]
        written = [each.next_slot for each in self._sequences if each.next_slot is not None]
        self._slots.check_integrity([states, written])
        waiting = [each for each in self._sequences if not each.is_running]
        assert all(each.next_slot is None for each in waiting), "a waiting sequence has one"
        assert len(set(written)) == len(written), "two sequences write to one slot"
        assert not set(written) & set(states), "a state is overwritten"

    def _is_usable(self, state: ConvState, num_computed: int) -> bool:
        """Whether going on from the state makes one that is exact at `num_computed`, and computes
        no more tokens than beginning from zero would."""
        zero = max(0, num_computed - self.replay_tokens)
        return state.since <= zero <= state.num_tokens <= num_computed

    def _free_a_slot(self) -> None:
        """Drop states of waiting sequences, the least important first, until a slot is free."""
        for sequence in reversed(list(self._sequences)):
            if self._slots.num_free:
                return
            if not sequence.is_running:
                self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        if sequence.state:
            self._slots.free([sequence.state.slot])
            sequence.state = None


def is_swap_cheaper(num_bytes: int, recompute_s: float, bytes_per_second: float) -> bool:
    """Whether copying KV out and back takes less time than computing it again."""
    return 2 * num_bytes / bytes_per_second < recompute_s


class SwapManager:
    """Collects the block copies of the next plan and owns the host slots.

    A plan does swap_out before swap_in before copy, in whatever order they were requested; so no
    block or slot may be read after something requested later has overwritten it. KV is copied in
    beside the step before the one that needs it, where there is anything else to compute: until
    then its sequence is arriving. Slots read by a swap_in are therefore not used again before the
    plan is drained, and a sequence preempted before its swap_in is drained stays swapped.
    """

    def __init__(
        self,
        cache: PrefixCache,
        block_bytes: int,
        policy: KvPolicy,
        throughput: ThroughputEstimator,
    ) -> None:
        self.num_swaps = 0
        self.num_blocks_out = 0
        """Blocks copied to the host so far."""
        self.num_blocks_in = 0
        """Blocks copied back so far."""
        self._bytes_per_second = policy.swap_bytes_per_second
        self._cache = cache
        self._block_bytes = block_bytes
        self._slots = BlockPool(policy.host_slots, block_tokens=1)
        self._throughput = throughput
        self._outs: list[tuple[int, int]] = []
        self._ins: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._swapping_in: list[Sequence] = []

    def copy_shared(self, table: list[int], index: int, block: int) -> list[int]:
        """Copy a shared block of a table on the device; return the table with its copy."""
        shared = table[index]
        self._copies.append((shared, block))
        self._cache.free([shared])
        return [*table[:index], block, *table[index + 1 :]]

    def swap_out(self, sequence: Sequence) -> None:
        """Save a running sequence's KV to the host if that is possible and worth it.

        Its blocks may be freed at once: whatever is written to them comes later.
        """
        if sequence in self._swapping_in:
            # Its KV is still on the host; the copy in is dropped instead of being copied out again.
            self._cancel_swap_in(sequence)
            return
        first = self._num_shared_blocks(sequence)
        size = self._cache.block_tokens
        # A step that was planned and not committed may have left blocks behind what was computed.
        end = -(-sequence.num_computed // size)
        blocks = sequence.block_ids[first:end]
        recompute_s = self._throughput.seconds_until(sequence.num_computed - first * size, 0)
        first_window = sequence.first_window_block
        windows = sequence.window_block_ids[: end - first_window]
        count = len(blocks) + len(windows)
        num_bytes = count * self._block_bytes
        if not blocks or not is_swap_cheaper(num_bytes, recompute_s, self._bytes_per_second):
            return
        if count > self._slots.num_free:
            return
        slots = self._slots.allocate(count)
        self._outs += zip(blocks + windows, slots, strict=True)
        own = slots[: len(blocks)]
        of_windows = slots[len(blocks) :]
        sequence.swapped = Swapped(first, own, first_window, of_windows, sequence.num_computed)
        self.num_swaps += 1

    def swap_in(self, sequence: Sequence, reservations: BlockReservations) -> None:
        """Copy back what a starting sequence has on the host and not in its blocks already."""
        swapped = sequence.swapped
        if swapped is None:
            return
        held = len(sequence.block_ids)
        missing = swapped.slots[max(0, held - swapped.first_block) :]
        is_usable = held >= swapped.first_block and sequence.num_computed < swapped.num_tokens
        missing = missing + swapped.window_slots
        blocks = reservations.take(sequence, len(missing), ()) if is_usable else None
        if blocks is None:
            self.free_slots(sequence)
            return
        self._ins += zip(missing, blocks, strict=True)
        self._swapping_in.append(sequence)
        num_own = len(missing) - len(swapped.window_slots)
        sequence.block_ids = sequence.block_ids + blocks[:num_own]
        reservations.replace_windows(sequence, swapped.first_window_block, blocks[num_own:])
        sequence.set_computed(swapped.num_tokens)

    def free_slots(self, sequence: Sequence) -> None:
        """Free the host slots of a sequence."""
        if sequence.swapped is None:
            return
        slots = set(sequence.swapped.all_slots)
        assert sequence not in self._swapping_in, "its swap_in is still to be drained"
        self._outs = [move for move in self._outs if move[1] not in slots]
        self._slots.free(slots)
        sequence.swapped = None

    @property
    def has_arriving(self) -> bool:
        """Whether KV of any sequence is still to be copied in."""
        return bool(self._swapping_in)

    def is_arriving(self, sequence: Sequence) -> bool:
        """Whether the sequence's KV is still to be copied in."""
        return sequence in self._swapping_in

    def drain(self, computed: list[Chunk]) -> Moves:
        """Return the moves of the plan that computes these chunks; each move is returned once."""
        if not (self._outs or self._swapping_in or self._copies):
            return Moves()
        arriving = {sequence.request_id for sequence in self._swapping_in}
        # What is computed now, or is all there is to do, is copied in first.
        is_waited_for = not computed or any(chunk.request_id in arriving for chunk in computed)
        moves = Moves(
            swap_out=self._outs,
            swap_in=self._ins if is_waited_for else [],
            copy=self._copies,
            prefetch=[] if is_waited_for else self._ins,
        )
        self.num_blocks_out += len(self._outs)
        self.num_blocks_in += len(self._ins)
        swapped_in = self._swapping_in
        self._swapping_in = []
        self._outs = []
        self._ins = []
        self._copies = []
        for sequence in swapped_in:
            self.free_slots(sequence)
        return moves

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Asserts that every host slot is free or holds KV of one of `sequences`."""
        self._slots.check_integrity(each.swapped.all_slots for each in sequences if each.swapped)

    def _num_shared_blocks(self, sequence: Sequence) -> int:
        """Leading blocks that stay in the cache because other sequences use them."""
        if not self._cache.has_cache:
            return 0
        count = 0
        for block in sequence.block_ids[: sequence.num_cached_blocks]:
            if self._cache.ref_count(block) < 2:
                break
            count += 1
        return count

    def _cancel_swap_in(self, sequence: Sequence) -> None:
        assert sequence.swapped is not None, "swaps in without host slots"
        slots = set(sequence.swapped.all_slots)
        self._ins = [move for move in self._ins if move[0] not in slots]
        self._swapping_in.remove(sequence)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Every admitted sequence and every block, slot and reservation that it holds."""

    limits: SchedulerLimits
    cache: PrefixCache
    reservations: BlockReservations
    sequences: SequenceTable
    swap: SwapManager
    conv_states: ConvStatePool
    throughput: ThroughputEstimator
    output_lengths: OutputLengthEstimator
    clock: Callable[[], float]
    """Clock in seconds."""
    fork_groups: ForkGroups = field(default_factory=ForkGroups)

    def check_integrity(self) -> None:
        """Asserts that no block or slot is lost and nothing is reserved that does not exist."""
        self.reservations.check_integrity(self.sequences)
        self.swap.check_integrity(list(self.sequences))
        self.sequences.check_integrity()
        self.conv_states.check_integrity()
        assert self.sequences.num_running <= self.limits.max_sequences, "batch too large"
        for each in self.sequences:
            held = len(each.block_ids) * self.cache.block_tokens
            assert each.num_computed <= held, f"{each.request_id}: tokens outside its blocks"
            if self.cache.is_windowed:
                reach = self.cache.first_window_block(each.num_computed)
                assert each.first_window_block <= reach or not each.window_block_ids, "slid too far"
                assert each.num_window_covered == len(each.block_ids), "tables of two lengths"
            assert each.parent is None or not each.is_running, "runs before its parent"

    @classmethod
    def create(
        cls,
        profile: MemoryProfile,
        limits: SchedulerLimits,
        throughput: ThroughputEstimator,
        output_lengths: OutputLengthEstimator,
        policy: KvPolicy,
        clock: Callable[[], float],
    ) -> "SchedulerState":
        """Create the state of an engine without requests; `clock` in seconds."""
        size = profile.block_bytes
        num_blocks = profile.kv_pool_bytes // size
        window = profile.window_tokens
        cache = PrefixCache(num_blocks, profile.block_tokens, policy, clock, window)
        sequences = SequenceTable()
        return cls(
            limits=limits,
            cache=cache,
            reservations=BlockReservations(cache, profile),
            sequences=sequences,
            swap=SwapManager(cache, size, policy, throughput),
            conv_states=ConvStatePool(limits.replay_tokens, limits.max_sequences, sequences),
            throughput=throughput,
            output_lengths=output_lengths,
            clock=clock,
        )


class SchedulerStatistics:
    """Counts what was scheduled, and reports it together with what is held."""

    def __init__(self, profile: MemoryProfile, state: SchedulerState) -> None:
        self.figures = Figures()
        self.num_steps = 0
        """Steps with work that were committed."""
        self.num_preemptions = 0
        self.prefix_lookup_tokens = 0
        self.prefix_hit_tokens = 0
        self.prefix_merged_tokens = 0
        self._profile = profile
        self._state = state
        self._walks = WalkLimiter(state.clock)
        self._num_tail_tokens = 0
        """Tokens in blocks outside the prefix cache, when they were last counted."""

    def collect(self, speculation: Speculation | None) -> SchedulerStats:
        """Collect the statistics.

        Of many sequences `kv_used_bytes` may be a moment old; all else is counted as it changes.
        """
        cache = self._state.cache
        sequences = self._state.sequences
        swap = self._state.swap
        block_bytes = self._profile.block_bytes
        size = cache.block_tokens
        if self._walks.is_due(len(sequences)):
            self._num_tail_tokens = stored_tokens(
                sequences, size, cache.is_cached, cache.is_private
            )
        num_used_tokens = cache.num_cached_used * size + self._num_tail_tokens
        num_committed = cache.num_available - self._state.reservations.num_available
        return SchedulerStats(
            kv_pool_bytes=self._profile.kv_pool_bytes,
            kv_free_bytes=cache.num_free * block_bytes,
            kv_reclaimable_bytes=cache.num_reclaimable * block_bytes,
            kv_committed_bytes=num_committed * block_bytes,
            kv_used_bytes=num_used_tokens * block_bytes // size,
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
