"""Who may take which blocks: promises of memory over a block pool.

An admitted sequence is promised the blocks of its prompt and expected output, and allocates them as
it grows. At every moment, for the blocks of the pool,

    allocated + promised and not yet allocated <= all

so a sequence within its promise never waits for memory. One that outgrows it takes blocks nobody
was promised, else the promise of a less important sequence. A promise taken away is owed: it is
given back, the most important first, before anything new is admitted.
"""

from collections.abc import Iterable

from ullage_engine.core.sequence import Sequence
from ullage_engine.kv.blocks import BlockPool


class Promises:
    """Promises and allocations of all admitted sequences, in blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._committed = 0
        self._owed: dict[str, int] = {}

    @property
    def num_committed(self) -> int:
        """Blocks promised and not allocated."""
        return self._committed

    @property
    def num_owed(self) -> int:
        """Blocks of promises that are to be given back."""
        return sum(self._owed.values())

    @property
    def num_unpromised(self) -> int:
        """Free blocks that nobody was promised."""
        return self._pool.num_free - self._committed

    @property
    def num_available(self) -> int:
        """Blocks that a new request may be promised."""
        return max(0, self.num_unpromised - self.num_owed)

    def is_kept(self, sequence: Sequence) -> bool:
        """Nothing is owed to the sequence."""
        return sequence.request_id not in self._owed

    def owe(self, sequence: Sequence, num_blocks: int) -> None:
        """Admits a sequence that is to have `num_blocks`; `restore` gives them."""
        missing = num_blocks - sequence.promised
        if missing > 0:
            self._owed[sequence.request_id] = missing

    def restore(self, by_rank: Iterable[Sequence]) -> None:
        """Gives what is owed, the most important sequence first and in full."""
        if not self._owed:
            return
        for sequence in by_rank:
            owed = self._owed.get(sequence.request_id, 0)
            if owed > self.num_unpromised:
                return
            if owed:
                del self._owed[sequence.request_id]
                self._promise(sequence, owed)

    def grow(self, sequence: Sequence, num_blocks: int, by_rank: Iterable[Sequence]) -> bool:
        """Allocates until the sequence has `num_blocks`; False: others must be preempted first."""
        beyond = num_blocks - sequence.promised
        if beyond > self.num_unpromised:
            self._rob(beyond - self.num_unpromised, sequence, by_rank)
        if beyond > self.num_unpromised:
            return False
        if beyond > 0:
            self._outgrow(sequence, beyond)
        self._allocate(sequence, num_blocks - len(sequence.block_ids))
        return True

    def release(self, sequence: Sequence) -> None:
        """Takes back all blocks and the promise."""
        self._committed -= sequence.promised - len(sequence.block_ids)
        self._owed.pop(sequence.request_id, None)
        self._pool.free(sequence.block_ids)
        sequence.promised = 0
        sequence.block_ids = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts the invariant of the module and that the counts are those of `sequences`."""
        present = list(sequences)
        self._pool.check_integrity(sequence.block_ids for sequence in present)
        unallocated = sum(each.promised - len(each.block_ids) for each in present)
        assert all(each.promised >= len(each.block_ids) for each in present), "grew unpromised"
        assert unallocated == self._committed, f"{unallocated} promised, {self._committed} counted"
        assert self._committed <= self._pool.num_free, "promised more than there is"
        assert self._owed.keys() <= {each.request_id for each in present}, "owed to the dead"

    def _promise(self, sequence: Sequence, count: int) -> None:
        sequence.promised += count
        self._committed += count

    def _outgrow(self, sequence: Sequence, beyond: int) -> None:
        self._promise(sequence, beyond)
        owed = self._owed.pop(sequence.request_id, 0) - beyond
        if owed > 0:
            self._owed[sequence.request_id] = owed

    def _allocate(self, sequence: Sequence, count: int) -> None:
        if count <= 0:
            return
        last = sequence.block_ids[-1] if sequence.block_ids else None
        sequence.block_ids += self._pool.allocate(count, after=last)
        self._committed -= count

    def _rob(self, count: int, sequence: Sequence, by_rank: Iterable[Sequence]) -> None:
        """Takes promises away, from the least important sequence up to those after `sequence`.

        One that waits loses all of its promise: it could not start with the rest, and the rest
        would keep others from starting.
        """
        for victim in reversed(list(by_rank)):
            if count <= 0 or victim.rank <= sequence.rank:
                return
            left = victim.promised - len(victim.block_ids)
            taken = min(count, left) if victim.is_running else left
            if taken > 0:
                self._promise(victim, -taken)
                self._owed[victim.request_id] = self._owed.get(victim.request_id, 0) + taken
                count -= taken
