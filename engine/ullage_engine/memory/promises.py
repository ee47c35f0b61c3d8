"""Who may take which blocks: promises of memory over a store of KV blocks.

An admitted sequence is promised the blocks of its prompt and expected output, less those of its
prompt that are cached, which it holds from then on; it allocates the rest as it grows. At every
moment, in blocks,

    promised and not yet allocated <= free + reclaimable

so a sequence within its promise never waits for memory. One that outgrows it takes blocks nobody
was promised, else the promise of a less important sequence. A promise taken away is owed: it is
given back, the most important first, before anything new is admitted. Whoever waits and is owed
anything holds nothing at all, so nobody waits for memory that another one holds while waiting.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ullage_engine.core.sequence import Sequence
from ullage_engine.kv.store import KvStore
from ullage_engine.memory.predictor import expected_length, sample_blocks


@dataclass(frozen=True, slots=True)
class Price:
    """What it takes to promise a sequence its memory, in blocks."""

    hits: list[int]
    """Cached blocks of its beginning."""
    reserved: int
    """Blocks it is going to allocate."""
    num_pinned: int
    """Of the hits, those that are reclaimable until it holds them."""

    @property
    def total(self) -> int:
        """By how much others can have less."""
        return self.reserved + self.num_pinned


class Promises:
    """Promises and allocations of all admitted sequences, in blocks."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._committed = 0
        self._owed: dict[str, int] = {}

    @property
    def num_owed(self) -> int:
        """Blocks of promises that are to be given back, at most."""
        return sum(self._owed.values())

    @property
    def num_unpromised(self) -> int:
        """Available blocks that nobody was promised."""
        return self._store.num_available - self._committed

    @property
    def num_available(self) -> int:
        """Blocks that a new request may be promised."""
        return max(0, self.num_unpromised - self.num_owed)

    def is_kept(self, sequence: Sequence) -> bool:
        """Nothing is owed to the sequence."""
        return sequence.request_id not in self._owed

    def price(self, sequence: Sequence) -> Price:
        """What a sequence that holds nothing would have to be promised now."""
        hits = [] if sequence.leader else self._store.match(sequence.token_ids)
        return Price(hits, self._wanted(sequence) - len(hits), self._store.num_idle(hits))

    def owe(self, sequence: Sequence) -> None:
        """Takes back all that the sequence holds and promises it anew; `restore` keeps that."""
        self.release(sequence)
        self._owed[sequence.request_id] = self._wanted(sequence)

    def restore(self, by_rank: Iterable[Sequence]) -> None:
        """Gives what is owed, the most important sequence first and in full."""
        if not self._owed:
            return
        for sequence in by_rank:
            if not self.is_kept(sequence) and not self._restore(sequence):
                return

    def extend(self, sequence: Sequence) -> None:
        """Gives a sequence about to start what was cached since it was promised its memory."""
        held = len(sequence.block_ids)
        if sequence.num_computed != held * self._store.block_tokens:
            return
        hits = self._store.match(sequence.token_ids)
        if hits[:held] == sequence.block_ids and len(hits) > held:
            self._reserve(sequence, held - len(hits))
            self._hold(sequence, hits[held:])

    def fork(
        self, parent: Sequence, child: Sequence, num_tokens: int, by_rank: Iterable[Sequence]
    ) -> bool:
        """Shares the parent's blocks of its first `num_tokens` tokens with a waiting child.

        False: the child's promise cannot be kept beside those of more important sequences; it is
        owed it, and nothing is shared.
        """
        size = self._store.block_tokens
        reserved = self._wanted(child) - num_tokens // size
        if not self._secure(child, reserved, by_rank):
            self.owe(child)
            return False
        self._owed.pop(child.request_id, None)
        child.block_ids = parent.block_ids[: -(-num_tokens // size)]
        child.num_computed = num_tokens
        child.num_cached_blocks = min(parent.num_cached_blocks, num_tokens // size)
        self._store.share(child.block_ids)
        return True

    def take(self, sequence: Sequence, count: int, by_rank: Iterable[Sequence]) -> list[int] | None:
        """Allocates `count` blocks for the sequence; None: others must be preempted first."""
        if count == 0:
            return []
        if count > sequence.reserved:
            owed = self._owed.get(sequence.request_id, 0)
            beyond = count - sequence.reserved
            if not self._secure(sequence, count, by_rank):
                return None
            self._owe_rest(sequence, owed - beyond)
        self._reserve(sequence, -count)
        last = sequence.block_ids[-1] if sequence.block_ids else None
        return self._store.allocate(count, after=last)

    def release(self, sequence: Sequence) -> None:
        """Takes back all blocks and the promise."""
        self._reserve(sequence, -sequence.reserved)
        self._owed.pop(sequence.request_id, None)
        self._store.free(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = sequence.num_cached_blocks = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts the invariant of the module and that the counts are those of `sequences`."""
        present = list(sequences)
        self._store.check_integrity(sequence.block_ids for sequence in present)
        reserved = sum(each.reserved for each in present)
        assert all(each.reserved >= 0 for each in present), "allocated unpromised"
        assert reserved == self._committed, f"{reserved} promised, {self._committed} counted"
        assert self._committed <= self._store.num_available, "promised more than there is"
        assert self._owed.keys() <= {each.request_id for each in present}, "owed to the dead"
        for each in present:
            if not each.is_running and not self.is_kept(each):
                assert not each.block_ids and not each.reserved, "holds memory that it waits for"

    def _wanted(self, sequence: Sequence) -> int:
        """Blocks of the whole sequence, less those that its leader's make unnecessary."""
        length = expected_length(sequence.request, sequence.expected_output, sequence.limit)
        blocks = sample_blocks(
            self._store.block_tokens,
            length,
            shared_tokens=sequence.num_shared if sequence.leader else 0,
            leads=sequence.has_followers,
        )
        return min(self._store.num_blocks, blocks)

    def _restore(self, sequence: Sequence) -> bool:
        if sequence.is_running:
            owed = self._owed[sequence.request_id]
            if owed > self.num_unpromised:
                return False
            self._reserve(sequence, owed)
        else:
            if self.num_unpromised <= 0:
                return False
            price = self.price(sequence)
            if price.total > self.num_unpromised:
                return False
            self._reserve(sequence, price.reserved)
            self._hold(sequence, price.hits)
        del self._owed[sequence.request_id]
        return True

    def _hold(self, sequence: Sequence, hits: list[int]) -> None:
        self._store.share(hits)
        sequence.block_ids = sequence.block_ids + hits
        sequence.num_cached_blocks = len(sequence.block_ids)
        sequence.num_computed = len(sequence.block_ids) * self._store.block_tokens

    def _reserve(self, sequence: Sequence, count: int) -> None:
        sequence.reserved += count
        self._committed += count

    def _owe_rest(self, sequence: Sequence, owed: int) -> None:
        self._owed.pop(sequence.request_id, None)
        if owed > 0:
            self._owed[sequence.request_id] = owed

    def _secure(self, sequence: Sequence, count: int, by_rank: Iterable[Sequence]) -> bool:
        """Sets `count` blocks aside for the sequence, if need be those of less important ones."""
        beyond = count - sequence.reserved
        for victim in reversed(list(by_rank)):
            if beyond <= self.num_unpromised or victim.rank <= sequence.rank:
                break
            self._rob(victim, beyond - self.num_unpromised)
        if beyond > self.num_unpromised:
            return False
        self._reserve(sequence, max(0, beyond))
        return True

    def _rob(self, victim: Sequence, count: int) -> None:
        """Takes a promise away.

        One that waits loses all it holds: it could not start with the rest, and the rest would keep
        others from starting.
        """
        if not victim.is_running:
            self.owe(victim)
            return
        taken = min(count, victim.reserved)
        if taken:
            self._reserve(victim, -taken)
            owed = self._owed.get(victim.request_id, 0)
            self._owed[victim.request_id] = owed + taken
