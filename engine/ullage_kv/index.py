"""The index that maps block keys to slots. It manages slot states, leases and eviction.

    FREE -> WRITING -> READY -> FREE      evicted: the least recently used block that is not pinned
                         |                and has no child block
                         +--> EVICTING -> FREE   removed while pinned: no longer found, and freed
                                                 when its last reader unpins it
            WRITING -> FREE               aborted, or its lease ended

A slot's generation increases each time the slot is allocated, so that stale references have no
effect. The consecutive blocks of one text form a chain, and all keys in a chain begin with the same
bytes. The index is sharded by these bytes, with one lock per shard. This module does not access the
blocks' contents.
"""

import enum
import itertools
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from ullage_kv.keys import CHAIN_BYTES
from ullage_kv.results import Status

_NUM_SHARDS = 16
_CHAIN = itemgetter(slice(CHAIN_BYTES))


class SlotState(enum.Enum):
    """The state of one slot."""

    FREE = "free"
    WRITING = "writing"
    READY = "ready"
    EVICTING = "evicting"


class SlotRef(NamedTuple):
    """A slot number, together with the slot's generation when it was allocated."""

    slot: int
    generation: int


class Reserved(NamedTuple):
    """The outcome of reserving a slot for writing."""

    status: Status
    """STORED if a slot was reserved, which the caller must now write and commit.

    If it is EXISTS, BUSY, FULL or STALE, no slot was reserved.
    """
    ref: SlotRef | None = None


@dataclass(slots=True, eq=False)
class _Entry:
    key: bytes
    ref: SlotRef
    parent: "_Entry | None"
    shard: "_Shard"
    state: SlotState = SlotState.WRITING
    num_pins: int = 0
    num_children: int = 0
    last_used: int = 0
    """Logical clock tick of the block's last use."""
    is_removed: bool = False
    """Whether the block was removed while it was being written. If so, it is dropped on commit."""
    num_uses: int = 0
    """Number of times the block was stored or read."""


@dataclass(slots=True)
class _Shard:
    lock: threading.RLock = field(default_factory=threading.RLock)
    by_key: dict[bytes, _Entry] = field(default_factory=dict)
    evictable: OrderedDict[bytes, _Entry] = field(default_factory=OrderedDict)
    """Blocks in state READY without pins or child blocks, least recently used first."""
    num_ready: int = 0


class SlotIndex:
    """Tracks which block each slot holds, and finds blocks by key. Thread-safe."""

    def __init__(self, num_slots: int, num_shards: int = _NUM_SHARDS) -> None:
        self.num_slots = num_slots
        self._shards = [_Shard() for _ in range(num_shards)]
        self._free = deque(range(num_slots))
        self._generations = [0] * num_slots
        self._entries: dict[int, _Entry] = {}
        self._ticks = itertools.count(1)
        self._counting = threading.Lock()
        self.num_evicted = 0
        """Number of blocks that have been evicted to make room for others."""

    def __len__(self) -> int:
        """Return the number of blocks that can be read."""
        return sum(shard.num_ready for shard in self._shards)

    def add_slots(
        self, num_slots: int, blocks: Sequence[tuple[int, bytes, bytes | None]] = ()
    ) -> None:
        """Add slots after the existing ones.

        Args:
            num_slots: number of new slots.
            blocks: slot, key and parent of each block that the new slots already contain, least
                recently used first. These blocks become readable.
        """
        first = self.num_slots
        self.num_slots = self.num_slots + num_slots
        self._generations += [0] * num_slots
        for slot, key, parent in blocks:
            shard = self._shard(key)
            with shard.lock:
                above = self._hold_parent(shard, parent)
                self._place(slot, key, above, shard).state = SlotState.READY
                shard.num_ready += 1
                self._queue_if_evictable(shard.by_key[key])
        held = {slot for slot, _, _ in blocks}
        self._free.extend(slot for slot in range(first, self.num_slots) if slot not in held)

    def parent(self, key: bytes) -> bytes | None:
        """Return the key of a block's parent, or None if either block is not in the index."""
        entry = self._shard(key).by_key.get(key)
        return entry.parent.key if entry and entry.parent else None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def contains(self, key: bytes) -> bool:
        """Return whether the block is stored and readable."""
        entry = self._shard(key).by_key.get(key)
        return entry is not None and entry.state is SlotState.READY

    def contains_each(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each block is readable. This is faster than one call per block."""
        ready = SlotState.READY
        return [entry is not None and entry.state is ready for entry in self._find(keys)]

    def uses_of_each(self, keys: Sequence[bytes]) -> list[int]:
        """Return how often each block has been stored or read since it was added (0 if missing)."""
        return [0 if entry is None else entry.num_uses for entry in self._find(keys)]

    def is_readable(self, ref: SlotRef) -> bool:
        """Return whether the slot still holds the block for which it was allocated."""
        entry = self._entry(ref)
        return entry is not None and entry.state is SlotState.READY

    def readable_keys(self) -> list[bytes]:
        """Return the keys of all readable blocks, in no particular order."""
        return [
            entry.key
            for shard in self._shards
            for entry in _values(shard)
            if entry.state is SlotState.READY
        ]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count one use of each block in a chain's prefix. Unknown blocks are skipped."""
        # The last block first, so that the end of a chain is always older than its beginning.
        for chain, group in itertools.groupby(reversed(keys), _CHAIN):
            shard = self._shard(chain)
            with shard.lock:
                for entry in filter(None, map(shard.by_key.get, group)):
                    self._use(entry)

    def remove(self, key: bytes) -> bool:
        """Drop a block so that readers no longer find it. Return whether it was readable.

        The block's slot is freed once all readers have unpinned it. If a block with this key is
        currently being written, it is dropped on commit.
        """
        shard = self._shard(key)
        with shard.lock:
            return self._remove(shard, key)

    def remove_chains(self, chains: Collection[bytes] | None) -> None:
        """Drop all blocks of the given chains, or all blocks if `chains` is None.

        A chain is identified by the first `CHAIN_BYTES` bytes of its keys.
        """
        for shard in self._shards:
            with shard.lock:
                for key in list(shard.by_key):
                    if chains is None or key[:CHAIN_BYTES] in chains:
                        self._remove(shard, key)

    def _remove(self, shard: _Shard, key: bytes) -> bool:
        entry = shard.by_key.pop(key, None)
        if entry is None:
            return False
        if entry.state is SlotState.WRITING:
            entry.is_removed = True
            return False
        shard.evictable.pop(key, None)
        shard.num_ready -= 1
        entry.state = SlotState.EVICTING
        self._free_if_unused(entry)
        return True

    def lease(
        self, ttl_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> "Lease":
        """Open a lease, which tracks one client's reservations and pins.

        Args:
            ttl_s: seconds after which the lease expires, or None if it never does.
            clock: returns the time in seconds.
        """
        return Lease(self, None if ttl_s is None else clock() + ttl_s, clock)

    def check_integrity(self, leases: Sequence["Lease"]) -> None:
        """Assert that every slot is free or holds exactly one block, and that counts are correct.

        The index must not be used concurrently.

        Args:
            leases: all open leases.
        """
        entries = list(self._entries.values())
        slots = [entry.ref.slot for entry in entries]
        assert sorted([*slots, *self._free]) == list(range(self.num_slots)), "slots lost or doubled"

        pins = Counter[SlotRef]()
        reserved = list[SlotRef]()
        for lease in leases:
            pins.update(lease.pinned)
            reserved += lease.reserved

        num_ready = sum(entry.state is SlotState.READY for entry in entries)
        assert num_ready == len(self), "readable blocks miscounted"
        writing = [entry.ref for entry in entries if entry.state is SlotState.WRITING]
        assert sorted(reserved) == sorted(writing), "reservations lost or doubled"

        children = Counter(id(entry.parent) for entry in entries if entry.parent)
        for entry in entries:
            assert entry.num_pins == pins[entry.ref], "pins miscounted"
            assert entry.num_children == children[id(entry)], "children miscounted"
            assert self._generations[entry.ref.slot] == entry.ref.generation, "wrong generation"
            is_listed = entry.shard.by_key.get(entry.key) is entry
            is_gone = entry.state is SlotState.EVICTING or entry.is_removed
            assert is_listed == (not is_gone), "found in a wrong state"
            is_evictable = entry.shard.evictable.get(entry.key) is entry
            assert is_evictable == _is_evictable(entry), "evictable in a wrong state"
            assert entry.state is not SlotState.EVICTING or entry.num_pins, "kept for nobody"

    # for leases ----------------------------------------------------------------------------------

    def _reserve(self, key: bytes, parent: bytes | None) -> Reserved:
        shard = self._shard(key)
        with shard.lock:
            if (status := self._refusal(shard, key)) is not None:
                return Reserved(status)
            above = self._hold_parent(shard, parent)

        # Without this shard's lock, since the evicted block may be another shard's. Another thread
        # may have reserved the key meanwhile.
        slot = self._take_slot()
        with shard.lock:
            status = self._refusal(shard, key) if slot is not None else Status.FULL
            if status is not None or slot is None:
                self._lose_child(above)
                if slot is not None:
                    self._free.append(slot)
                return Reserved(status or Status.FULL)
            return Reserved(Status.STORED, self._place(slot, key, above, shard).ref)

    def _hold_parent(self, shard: _Shard, parent: bytes | None) -> _Entry | None:
        """Count a new child of the parent block, so that the parent is not evicted first.

        Return the parent's entry, or None if the index has no such block.
        """
        above = None if parent is None else shard.by_key.get(parent)
        if above is not None:
            above.num_children += 1
            shard.evictable.pop(above.key, None)
        return above

    def _place(self, slot: int, key: bytes, above: _Entry | None, shard: _Shard) -> _Entry:
        self._generations[slot] += 1
        entry = _Entry(key, SlotRef(slot, self._generations[slot]), above, shard)
        self._use(entry)
        shard.by_key[key] = self._entries[slot] = entry
        return entry

    def _refusal(self, shard: _Shard, key: bytes) -> Status | None:
        entry = shard.by_key.get(key)
        if entry is None:
            return None
        if entry.state is SlotState.WRITING:
            return Status.BUSY
        self._use(entry)
        return Status.EXISTS

    def _end_writing(self, ref: SlotRef, *, is_stored: bool) -> bool:
        entry = self._entry(ref)
        if entry is None:
            return False
        with entry.shard.lock:
            if self._entry(ref) is not entry or entry.state is not SlotState.WRITING:
                return False
            is_stored = is_stored and not entry.is_removed
            if is_stored:
                entry.state = SlotState.READY
                entry.shard.num_ready += 1
                self._queue_if_evictable(entry)
            else:
                if not entry.is_removed:
                    del entry.shard.by_key[entry.key]
                entry.state = SlotState.EVICTING
                self._free_if_unused(entry)
        return is_stored

    def _pin(self, key: bytes) -> SlotRef | None:
        shard = self._shard(key)
        with shard.lock:
            entry = shard.by_key.get(key)
            if entry is None or entry.state is not SlotState.READY:
                return None
            entry.num_pins += 1
            shard.evictable.pop(key, None)
            return entry.ref

    def _unpin(self, ref: SlotRef) -> None:
        entry = self._entry(ref)
        assert entry is not None, f"slot {ref.slot} was given to another while it was pinned"
        with entry.shard.lock:
            entry.num_pins -= 1
            if entry.state is SlotState.EVICTING:
                self._free_if_unused(entry)
            else:
                self._queue_if_evictable(entry)

    # the slots -----------------------------------------------------------------------------------

    def _shard(self, key: bytes) -> _Shard:
        return self._shards[int.from_bytes(key[:2], "little") % len(self._shards)]

    def _find(self, keys: Iterable[bytes]) -> Iterator[_Entry | None]:
        for chain, group in itertools.groupby(keys, _CHAIN):
            yield from map(self._shard(chain).by_key.get, group)

    def _entry(self, ref: SlotRef) -> _Entry | None:
        entry = self._entries.get(ref.slot)
        return entry if entry is not None and entry.ref == ref else None

    def _use(self, entry: _Entry) -> None:
        entry.last_used = next(self._ticks)
        entry.num_uses += 1
        if entry.key in entry.shard.evictable:
            entry.shard.evictable.move_to_end(entry.key)

    def _take_slot(self) -> int | None:
        while True:
            try:
                return self._free.popleft()
            except IndexError:
                pass
            oldest = self._oldest()
            if oldest is None:
                return None
            self._evict_first(oldest)

    def _oldest(self) -> _Shard | None:
        """Return the shard that holds the next block to evict, or None if no block is evictable."""
        oldest = None
        last_used = 0
        for shard in self._shards:
            if not shard.evictable:
                continue
            with shard.lock:
                first = next(iter(shard.evictable.values()), None)
            if first is not None and (oldest is None or first.last_used < last_used):
                oldest = shard
                last_used = first.last_used
        return oldest

    def _evict_first(self, shard: _Shard) -> None:
        with shard.lock:
            if not shard.evictable:  # another thread was faster
                return
            _, entry = shard.evictable.popitem(last=False)
            del shard.by_key[entry.key]
            shard.num_ready -= 1
            entry.state = SlotState.EVICTING
            self._free_if_unused(entry)
        with self._counting:
            self.num_evicted += 1

    def _free_if_unused(self, entry: _Entry) -> None:
        if entry.num_pins:
            return
        entry.state = SlotState.FREE
        del self._entries[entry.ref.slot]
        self._free.append(entry.ref.slot)
        self._lose_child(entry.parent)

    def _lose_child(self, parent: _Entry | None) -> None:
        if parent is not None:
            parent.num_children -= 1
            self._queue_if_evictable(parent, is_first=True)

    def _queue_if_evictable(self, entry: _Entry, *, is_first: bool = False) -> None:
        if not _is_evictable(entry):
            return
        queue = entry.shard.evictable
        queue[entry.key] = entry
        # A use of a child is one of its parent, too. So the parent goes next, unless it was used
        # alone since.
        if is_first:
            second = next(iter(queue.values()))
            queue.move_to_end(entry.key, last=second.last_used < entry.last_used)


def _is_evictable(entry: _Entry) -> bool:
    return entry.state is SlotState.READY and not entry.num_pins and not entry.num_children


def _values(shard: _Shard) -> list[_Entry]:
    with shard.lock:
        return list(shard.by_key.values())


class Lease:
    """One client's reservations and pins, which are released when the lease ends.

    Only one thread at a time may use a lease, except that any thread may call `close`.
    """

    def __init__(self, index: SlotIndex, ends_at: float | None, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._lock = threading.Lock()
        self._ends_at = ends_at
        self._is_closed = False
        self._reserved: set[SlotRef] = set()
        self._pinned = Counter[SlotRef]()

    @property
    def is_over(self) -> bool:
        """Whether the lease is closed or has expired."""
        return self._is_closed or (self._ends_at is not None and self._clock() >= self._ends_at)

    @property
    def reserved(self) -> list[SlotRef]:
        return list(self._reserved)

    @property
    def pinned(self) -> Counter[SlotRef]:
        """Number of pins that this lease holds on each slot."""
        return Counter(self._pinned)

    def reserve(self, key: bytes, parent: bytes | None = None) -> Reserved:
        """Reserve a slot for writing a block.

        Args:
            key: key of the block.
            parent: key of the previous block in the chain. It is not evicted before this block.
        """
        with self._lock:
            if self.is_over:
                return Reserved(Status.STALE)
            reserved = self._index._reserve(key, parent)
            if reserved.ref is not None:
                self._reserved.add(reserved.ref)
            return reserved

    def commit(self, ref: SlotRef) -> Status:
        """Make a written block readable. Return STORED, or STALE if it has since been dropped."""
        return Status.STORED if self._end(ref, is_stored=True) else Status.STALE

    def abort(self, ref: SlotRef) -> None:
        """Free a reserved slot without storing a block. Do nothing if the slot is not reserved."""
        self._end(ref, is_stored=False)

    def pin(self, key: bytes) -> SlotRef | None:
        """Protect a block from eviction and return its slot, or None if the block is missing."""
        with self._lock:
            ref = None if self.is_over else self._index._pin(key)
            if ref is not None:
                self._pinned[ref] += 1
            return ref

    def unpin(self, ref: SlotRef) -> None:
        """Undo one call to `pin`. Do nothing if the lease has already released the pin."""
        with self._lock:
            if self._pinned[ref] <= 0:
                del self._pinned[ref]
                return
            self._pinned[ref] -= 1
            if not self._pinned[ref]:
                del self._pinned[ref]
        self._index._unpin(ref)

    def close(self) -> None:
        """Abort all reservations and release all pins."""
        with self._lock:
            self._is_closed = True
            reserved = self._reserved
            self._reserved = set()
            pinned = self._pinned
            self._pinned = Counter()
        for ref in reserved:
            self._index._end_writing(ref, is_stored=False)
        for ref in pinned.elements():
            self._index._unpin(ref)

    def _end(self, ref: SlotRef, *, is_stored: bool) -> bool:
        with self._lock:
            if ref not in self._reserved:
                return False
            self._reserved.discard(ref)
            is_stored = is_stored and not self.is_over
        return self._index._end_writing(ref, is_stored=is_stored)
