"""Swaps the KV of preempted sequences to host memory.

A preempted sequence's KV is either copied to host memory or recomputed later, whichever is faster.
Host memory is divided into slots of one block each. A `StepPlan` lists the copies as its moves.
"""

from ullage_engine.kv_cache.block_pool import BlockPool
from ullage_engine.kv_cache.prefix_cache import KvPolicy, PrefixCache
from ullage_engine.protocol.step_plan import Chunk, Moves
from ullage_engine.scheduler.estimates import ThroughputEstimator
from ullage_engine.scheduler.reservations import BlockReservations
from ullage_engine.scheduler.sequence import Sequence, Swapped


def is_swap_cheaper(num_bytes: int, recompute_s: float, bytes_per_second: float) -> bool:
    """Return whether copying KV to the host and back is faster than recomputing it."""
    return 2 * num_bytes / bytes_per_second < recompute_s


class SwapManager:
    """Collects block copies for the next plan, and owns the host slots.

    A plan performs all `swap_out` moves, then all `swap_in` moves, then all `copy` moves,
    regardless of the order in which they were requested. A move must therefore remain correct even
    if moves that were requested later are performed first.

    If possible, KV is copied back to the device one step early, while the device computes other
    sequences. A sequence whose copy has been requested but not yet handed to a plan is called
    arriving. Its host slots are not reused until `drain` hands the copy to a plan, so a sequence
    that is preempted before that simply stays swapped out.
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
        """Number of blocks that have been copied to host memory so far."""
        self.num_blocks_in = 0
        """Number of blocks that have been copied back to the device so far."""

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
        """Replace the shared block at `index` of a table with a writable copy, `block`.

        The next plan copies the KV of the shared block to `block`.

        Returns:
            A new table. The original is not modified.
        """
        shared = table[index]
        self._copies.append((shared, block))
        self._cache.free([shared])
        return [*table[:index], block, *table[index + 1 :]]

    def swap_out(self, sequence: Sequence) -> None:
        """Copy a running sequence's KV to host memory if there is room and recomputing is slower.

        The caller may free the sequence's blocks immediately, because the plan copies them before
        anything overwrites them.
        """
        if sequence in self._swapping_in:
            # Its KV is still on the host. Cancel the copy in rather than copy it out again.
            self._cancel_swap_in(sequence)
            return

        first = self._num_shared_blocks(sequence)
        size = self._cache.block_tokens
        # A step that was planned and not committed may have left blocks behind the computed ones.
        end = -(-sequence.num_computed // size)
        blocks = sequence.blocks.ids[first:end]
        first_window = sequence.windows.first
        windows = sequence.windows.ids[: end - first_window]

        count = len(blocks) + len(windows)
        num_bytes = count * self._block_bytes
        recompute_s = self._throughput.seconds_until(sequence.num_computed - first * size, 0)
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
        """Copy a starting sequence's KV back from host memory, unless it is still on the device."""
        swapped = sequence.swapped
        if swapped is None:
            return

        held = len(sequence.blocks.ids)
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
        sequence.blocks.ids = sequence.blocks.ids + blocks[:num_own]
        reservations.replace_windows(sequence, swapped.first_window_block, blocks[num_own:])
        sequence.set_computed(swapped.num_tokens)

    def free_slots(self, sequence: Sequence) -> None:
        """Free the host slots that hold a sequence's KV."""
        if sequence.swapped is None:
            return
        slots = set(sequence.swapped.all_slots)
        assert sequence not in self._swapping_in, "its swap_in is still to be drained"
        self._outs = [move for move in self._outs if move[1] not in slots]
        self._slots.free(slots)
        sequence.swapped = None

    @property
    def has_arriving(self) -> bool:
        """Whether any sequence is waiting for a plan to copy its KV back to the device."""
        return bool(self._swapping_in)

    def is_arriving(self, sequence: Sequence) -> bool:
        """Return whether the sequence is waiting for a plan to copy its KV back to the device."""
        return sequence in self._swapping_in

    def drain(self, computed: list[Chunk]) -> Moves:
        """Remove and return the pending moves, for the next plan to perform.

        `computed` contains the chunks of that plan.
        """
        if not (self._outs or self._swapping_in or self._copies):
            return Moves()

        arriving = {sequence.request_id for sequence in self._swapping_in}
        # KV goes in before the step if the step computes it, or has nothing else to do.
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
        """Assert that every host slot is free or holds KV of exactly one of `sequences`."""
        self._slots.check_integrity(each.swapped.all_slots for each in sequences if each.swapped)

    def _num_shared_blocks(self, sequence: Sequence) -> int:
        """Return how many leading blocks stay on the device because other sequences use them."""
        if not self._cache.has_cache:
            return 0
        count = 0
        for block in sequence.blocks.ids[: sequence.num_cached_blocks]:
            if self._cache.ref_count(block) < 2:
                break
            count += 1
        return count

    def _cancel_swap_in(self, sequence: Sequence) -> None:
        assert sequence.swapped is not None, "swaps in without host slots"
        slots = set(sequence.swapped.all_slots)
        self._ins = [move for move in self._ins if move[0] not in slots]
        self._swapping_in.remove(sequence)
