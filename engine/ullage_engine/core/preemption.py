"""What becomes of the KV of a preempted sequence: copied to the host, or computed again."""

from ullage_engine.core.pace import Pace
from ullage_engine.core.plan import Moves
from ullage_engine.core.sequence import Sequence, Swapped
from ullage_engine.kv.slots import HostSlots
from ullage_engine.kv.store import KvStore
from ullage_engine.memory.promises import Promises

SWAP_BYTES_PER_SECOND = 4 << 30
"""Assumed between device and host: what a PCIe 3 link or one core's copy reaches at the least. Too
low only means that short sequences are computed again."""


def is_swap_cheaper(num_bytes: int, recompute_s: float) -> bool:
    """Whether copying KV out and back takes less time than computing it again."""
    return 2 * num_bytes / SWAP_BYTES_PER_SECOND < recompute_s


class Mover:
    """Collects the copies of blocks that the next plan carries, and owns the host slots.

    A plan does swap_out before swap_in before copy, whatever order they were asked for in; so no
    block or slot may be read after something asked for later has overwritten it. Slots left by a
    swap_in are therefore not used again before the plan has gone, and a sequence preempted before
    its swap_in has gone simply stays swapped.
    """

    def __init__(self, store: KvStore, block_bytes: int, num_slots: int, pace: Pace) -> None:
        self.num_swaps = 0
        self._store = store
        self._block_bytes = block_bytes
        self._slots = HostSlots(num_slots)
        self._pace = pace
        self._outs: list[tuple[int, int]] = []
        self._ins: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int]] = []
        self._arriving: list[Sequence] = []

    def copy(self, source: int, destination: int) -> None:
        self._copies.append((source, destination))

    def swap_out(self, sequence: Sequence) -> None:
        """Saves a running sequence's KV to the host if that is possible and worth it.

        Its blocks may be freed at once: whatever is written to them comes later.
        """
        if sequence in self._arriving:
            self._stay(sequence)
            return
        first, size = self._num_kept(sequence), self._store.block_tokens
        blocks = sequence.block_ids[first : -(-sequence.num_computed // size)]
        recompute_s = self._pace.seconds_until(sequence.num_computed - first * size, 0)
        if not blocks or not is_swap_cheaper(len(blocks) * self._block_bytes, recompute_s):
            return
        slots = self._slots.take(len(blocks))
        if slots is None:
            return
        self._outs += zip(blocks, slots, strict=True)
        sequence.swapped = Swapped(first, slots, sequence.num_computed)
        self.num_swaps += 1

    def swap_in(self, sequence: Sequence, promises: Promises) -> None:
        """Brings back what of a starting sequence is on the host and not in its blocks already."""
        swapped = sequence.swapped
        if swapped is None:
            return
        held = len(sequence.block_ids)
        missing = swapped.slots[max(0, held - swapped.first_block) :]
        is_usable = held >= swapped.first_block and sequence.num_computed < swapped.num_tokens
        blocks = promises.take(sequence, len(missing), ()) if is_usable else None
        if blocks is None:
            self.forget(sequence)
            return
        self._ins += zip(missing, blocks, strict=True)
        self._arriving.append(sequence)
        sequence.block_ids = sequence.block_ids + blocks
        sequence.num_computed = swapped.num_tokens

    def forget(self, sequence: Sequence) -> None:
        """Gives back the host slots of a sequence."""
        if sequence.swapped is None:
            return
        slots = set(sequence.swapped.slots)
        assert sequence not in self._arriving, "the plan with its swap_in has not gone"
        self._outs = [move for move in self._outs if move[1] not in slots]
        self._slots.free(slots)
        sequence.swapped = None

    def drain(self) -> Moves:
        """The moves of the plan that goes now; none of them is given twice."""
        moves = Moves(swap_out=self._outs, swap_in=self._ins, copy=self._copies)
        arrived, self._arriving = self._arriving, []
        self._outs, self._ins, self._copies = [], [], []
        for sequence in arrived:
            self.forget(sequence)
        return moves

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Asserts that every host slot is free or holds KV of one of `sequences`."""
        swapped = [each.swapped for each in sequences if each.swapped]
        self._slots.check_integrity(slot for each in swapped for slot in each.slots)

    def _num_kept(self, sequence: Sequence) -> int:
        """Leading blocks that stay in the cache because other sequences use them."""
        if not self._store.has_cache:
            return 0
        kept = 0
        for block in sequence.block_ids[: sequence.num_cached_blocks]:
            if self._store.num_holders(block) < 2:
                break
            kept += 1
        return kept

    def _stay(self, sequence: Sequence) -> None:
        assert sequence.swapped is not None, "arrives from nowhere"
        slots = set(sequence.swapped.slots)
        self._ins = [move for move in self._ins if move[0] not in slots]
        self._arriving.remove(sequence)
