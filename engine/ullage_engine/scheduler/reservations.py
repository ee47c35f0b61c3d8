"""Reservations of KV blocks in the prefix cache's pool.

An admitted sequence reserves blocks for its prompt and expected output, and allocates the reserved
blocks as it grows. Blocks of the prompt that are already cached need no reservation, because the
sequence holds them from admission on. At all times, in blocks,

    reserved and not yet allocated <= free + reclaimable

so that a sequence within its reservation never waits for memory. A sequence that outgrows its
reservation takes unreserved blocks. If there are none, it takes reserved blocks away from a less
important sequence.

A sequence whose blocks were revoked gets a deferred reservation for them. Deferred reservations are
granted before any new request is admitted, most important sequence first. A waiting sequence with a
deferred reservation holds nothing, so that no sequence waits for memory held by another waiting
sequence.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from ullage_common.request_cost import MemoryProfile, sample_blocks
from ullage_engine.kv_cache.prefix_cache import PrefixCache
from ullage_engine.scheduler.sequence import BlockTable, Sequence


@dataclass(frozen=True, slots=True)
class ReservationCost:
    """The blocks that a reservation needs: new blocks to reserve, and cached blocks to reuse."""

    hits: list[int]
    """Cached blocks that match the sequence's prefix."""
    num_reserved: int
    """Number of blocks that the sequence will allocate from its reservation."""
    num_reclaimable: int
    """Number of matching cached blocks that could be reclaimed if this sequence did not reuse
    them."""

    @property
    def total(self) -> int:
        """Return how many blocks the reservation makes unavailable to other sequences."""
        return self.num_reserved + self.num_reclaimable


class BlockReservations:
    """Reserves and allocates the KV blocks of all admitted sequences."""

    def __init__(self, cache: PrefixCache, profile: MemoryProfile) -> None:
        self._cache = cache
        self._profile = profile
        self._num_reserved = 0
        self._deferred: dict[str, int] = {}
        """Upper bound on the number of blocks in each deferred reservation, by request id."""
        self.num_deferred = 0
        """Upper bound on the total number of blocks in all deferred reservations."""
        self.num_withheld = 0
        """Number of blocks withheld from new requests even if available. See
        `Scheduler.withhold`."""

    @property
    def num_unreserved(self) -> int:
        """Return how many blocks are free or reclaimable, and not reserved by any sequence."""
        return self._cache.num_available - self._num_reserved

    @property
    def num_available(self) -> int:
        """Return the number of blocks that a new request may reserve.

        These are the unreserved blocks, minus those needed for deferred reservations and those
        withheld from new requests.
        """
        return max(0, self.num_unreserved - self.num_deferred - self.num_withheld)

    def is_granted(self, sequence: Sequence) -> bool:
        """Return whether the sequence's reservation is granted in full."""
        return sequence.request_id not in self._deferred

    def cost(self, sequence: Sequence) -> ReservationCost:
        """Compute the cost of a reservation for a sequence that does not hold any blocks."""
        hits = [] if sequence.fork.parent else self._match(sequence)
        windows = self._cache.window_blocks(hits)
        num_reserved = self._blocks_needed(sequence) - len(hits) - len(windows)
        return ReservationCost(
            hits, max(0, num_reserved), self._cache.count_reclaimable(hits + windows)
        )

    def defer(self, sequence: Sequence) -> None:
        """Release a sequence's blocks and reservation, and defer the reservation until later."""
        self.release(sequence)
        self._set_deferred(sequence, self._blocks_needed(sequence))

    def grant_deferred(self, by_rank: Iterable[Sequence]) -> None:
        """Grant deferred reservations, most important first, until one cannot be met in full."""
        if not self._deferred:
            return
        for sequence in by_rank:
            if not self.is_granted(sequence) and not self._grant(sequence):
                # No other reservation overtakes it, or small ones would starve a large one.
                return

    def add_cached(self, sequence: Sequence) -> None:
        """Let a starting sequence reuse blocks that were cached after it reserved its memory."""
        held = len(sequence.blocks.ids)
        if sequence.num_computed != held * self._cache.block_tokens:
            return

        hits = self._match(sequence)
        if hits[:held] == sequence.blocks.ids and len(hits) > held:
            num_taken = len(hits) - held + len(self._cache.window_blocks(hits))
            if num_taken <= sequence.num_reserved:
                self._reserve(sequence, -num_taken)
                self._add_hits(sequence, hits)

    def fork(
        self, parent: Sequence, child: Sequence, num_tokens: int, by_rank: Iterable[Sequence]
    ) -> bool:
        """Share the blocks of the parent's first `num_tokens` tokens with a waiting child.

        Returns:
            Whether the blocks are shared. If not, the child's reservation is deferred. This happens
            if there is not enough memory for the child, even after revoking reservations of less
            important sequences, or if the parent's sliding windows have moved past the fork point.
        """
        size = self._cache.block_tokens
        first = self._cache.first_window_block(num_tokens)
        num_reserved = self._blocks_needed(child, num_tokens)
        # The parent's windows may have slid past. The child then computes, or finds cached blocks.
        is_covered = not self._cache.is_windowed or parent.windows.first <= first
        if not is_covered or not self._make_room(child, num_reserved, by_rank):
            self.defer(child)
            return False

        self._set_deferred(child, 0)
        child.blocks.ids = parent.blocks.ids[: -(-num_tokens // size)]
        child.set_computed(num_tokens)
        child.num_cached_blocks = min(parent.num_cached_blocks, num_tokens // size)
        if self._cache.is_windowed:
            skipped = first - parent.windows.first
            end = child.blocks.end - parent.windows.first
            child.windows.first = first
            child.windows.ids = parent.windows.ids[skipped:end]
        self._cache.share(child.held_blocks)

        # Both now hold shared blocks, which must be copied before they are written.
        parent.num_writable = 0
        child.num_writable = 0
        return True

    def slide_window(self, sequence: Sequence, position: int) -> None:
        """Free blocks that precede the sliding window of the token at `position`.

        The freed memory stays reserved for the window's next blocks.
        """
        if self._cache.is_windowed:
            first = self._cache.first_window_block(position)
            self._free_windows(sequence, max(0, first - sequence.windows.first))

    def replace_windows(self, sequence: Sequence, first: int, blocks: list[int]) -> None:
        """Replace a sequence's sliding window blocks with `blocks`, and free the old ones.

        `first` is the index of the first new block within the sequence.
        """
        self._free_windows(sequence, len(sequence.windows.ids))
        sequence.windows.first = first
        sequence.windows.ids = blocks

    def _free_windows(self, sequence: Sequence, count: int) -> None:
        blocks = sequence.windows.ids[:count]
        sequence.windows.ids = sequence.windows.ids[count:]
        sequence.windows.first += len(blocks)
        if blocks:
            self._cache.free(blocks)
            self._reserve(sequence, sum(self._cache.ref_count(block) == 0 for block in blocks))

    def cache_blocks(self, sequence: Sequence, first: int, full: int) -> int:
        """Add a sequence's full blocks with indices `first` to `full` - 1 to the prefix cache.

        Returns:
            The number of blocks that were already cached. The sequence now uses the cached copies
            of these blocks instead of its own.
        """
        own = sequence.blocks.ids
        salt = sequence.request.cache_salt
        table = self._cache.insert(sequence.token_ids, own, first, full, salt)
        num_merged = 0
        if table is not own:
            num_merged = sum(map(operator.ne, own[first:full], table[first:full]))
            sequence.blocks.ids = table
        sequence.num_cached_blocks = full

        if self._cache.is_windowed:
            skipped = max(0, first - sequence.windows.first)
            held = sequence.windows.ids
            windows = held[skipped:]
            self._cache.insert_windows(table[:full], windows, sequence.windows.first + skipped)
            sequence.windows.ids = held[:skipped] + windows
        return num_merged

    def take(self, sequence: Sequence, count: int, by_rank: Iterable[Sequence]) -> list[int] | None:
        """Allocate `count` blocks and return their ids.

        Return None if another sequence must be preempted first.
        """
        if count == 0:
            return []
        if count > sequence.num_reserved:
            num_deferred = self._deferred.get(sequence.request_id, 0)
            beyond = count - sequence.num_reserved
            if not self._make_room(sequence, count, by_rank):
                return None
            # Blocks beyond its reservation count against those revoked from it before.
            self._set_deferred(sequence, num_deferred - beyond)

        self._reserve(sequence, -count)
        last = sequence.blocks.ids[-1] if sequence.blocks.ids else None
        return self._cache.allocate(count, after=last)

    def release(self, sequence: Sequence) -> None:
        """Release all blocks that the sequence holds, and its reservation."""
        self._reserve(sequence, -sequence.num_reserved)
        self._set_deferred(sequence, 0)
        self._cache.free(sequence.held_blocks)

        sequence.blocks = BlockTable()
        sequence.windows = BlockTable()
        sequence.set_computed(0)
        sequence.num_cached_blocks = 0
        sequence.num_writable = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that the pool covers all reservations, and that the totals match the sequences."""
        present = list(sequences)
        self._cache.check_integrity(sequence.held_blocks for sequence in present)
        for each in present:
            self._check_writable(each)

        num_reserved = sum(each.num_reserved for each in present)
        assert all(each.num_reserved >= 0 for each in present), "allocated without a reservation"
        assert num_reserved == self._num_reserved, (
            f"{num_reserved} reserved, not {self._num_reserved}"
        )
        assert self._num_reserved <= self._cache.num_available, "reserved more than there is"

        assert self.num_deferred == sum(self._deferred.values()), "deferred blocks lost"
        assert self._deferred.keys() <= {each.request_id for each in present}, (
            "deferred for a sequence that has ended"
        )
        for each in present:
            if not each.is_running and not self.is_granted(each):
                assert not each.held_blocks, "waits and holds memory"
                assert not each.num_reserved, "waits and holds memory"

    def _check_writable(self, sequence: Sequence) -> None:
        size = self._cache.block_tokens
        assert sequence.num_writable <= len(sequence.blocks.ids) * size, "more than its blocks hold"
        written = range(sequence.num_computed // size, sequence.num_writable // size)
        is_shared = any(self._cache.is_shared(sequence.blocks.ids[index]) for index in written)
        assert not is_shared, f"{sequence.request_id} would write to a shared block"

    def _blocks_needed(self, sequence: Sequence, num_shared: int = 0) -> int:
        """Return how many blocks a sequence needs for its expected length, besides shared blocks.

        If the sequence has a parent, the blocks that the parent computes are shared, and
        `num_shared` is ignored. Otherwise, the blocks of its first `num_shared` tokens are shared.
        """
        if sequence.fork.parent:
            num_shared = sequence.fork.num_shared_tokens
        length = sequence.request.charged_tokens(sequence.expected_output, sequence.limit)
        blocks = sample_blocks(
            self._profile, length, shared_tokens=num_shared, leads=sequence.fork.has_children
        )
        return min(self._cache.num_blocks, blocks)

    def _grant(self, sequence: Sequence) -> bool:
        """Grant a deferred reservation if enough blocks are free. Return whether it was granted."""
        if sequence.is_running:
            num_deferred = self._deferred[sequence.request_id]
            if num_deferred > self.num_unreserved:
                return False
            self._reserve(sequence, num_deferred)
        else:
            # Checked before the cost, which walks the radix tree over the whole prompt.
            if self.num_unreserved <= 0:
                return False
            cost = self.cost(sequence)
            if cost.total > self.num_unreserved:
                return False
            self._reserve(sequence, cost.num_reserved)
            self._add_hits(sequence, cost.hits)
        self._set_deferred(sequence, 0)
        return True

    def _match(self, sequence: Sequence) -> list[int]:
        salt = sequence.request.cache_salt
        hits = self._cache.match(sequence.token_ids, salt, sequence.prefix.cached_path)
        if sequence.is_scoring:
            # Only rows that are computed give log-probabilities. That of token i is in row i - 1.
            return hits[: (sequence.num_scored - 1) // self._cache.block_tokens]
        return hits

    def _add_hits(self, sequence: Sequence, hits: list[int]) -> None:
        """Make a sequence use all cached blocks in `hits`, which match its prefix.

        The sequence may already hold the first of these blocks.
        """
        windows = self._cache.window_blocks(hits)
        self._cache.share(hits[len(sequence.blocks.ids) :] + windows)
        sequence.blocks.ids = hits
        self.replace_windows(sequence, len(hits) - len(windows), windows)
        sequence.num_cached_blocks = len(sequence.blocks.ids)
        sequence.set_computed(len(sequence.blocks.ids) * self._cache.block_tokens)

    def _reserve(self, sequence: Sequence, count: int) -> None:
        sequence.num_reserved += count
        self._num_reserved += count

    def _set_deferred(self, sequence: Sequence, num_blocks: int) -> None:
        self.num_deferred -= self._deferred.pop(sequence.request_id, 0)
        if num_blocks > 0:
            self._deferred[sequence.request_id] = num_blocks
            self.num_deferred += num_blocks

    def _make_room(self, sequence: Sequence, count: int, by_rank: Iterable[Sequence]) -> bool:
        """Increase a reservation to at least `count` blocks. Return False if this is impossible.

        If necessary, reservations of less important sequences are revoked.
        """
        beyond = count - sequence.num_reserved

        # The least important first. None as important as the sequence is a victim, so no two
        # sequences revoke from each other.
        for victim in reversed(list(by_rank)):
            if beyond <= self.num_unreserved or victim.rank <= sequence.rank:
                break
            self._revoke(victim, beyond - self.num_unreserved)

        if beyond > self.num_unreserved:
            return False
        self._reserve(sequence, max(0, beyond))
        return True

    def _revoke(self, victim: Sequence, count: int) -> None:
        """Revoke up to `count` reserved blocks of a less important sequence.

        A waiting sequence loses all of its blocks, because it could not start with only some of
        them, and keeping the rest would prevent other sequences from starting.
        """
        if not victim.is_running:
            self.defer(victim)
            return
        revoked = min(count, victim.num_reserved)
        if revoked:
            self._reserve(victim, -revoked)
            num_deferred = self._deferred.get(victim.request_id, 0)
            self._set_deferred(victim, num_deferred + revoked)
