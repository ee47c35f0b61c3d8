"""Slots, leases and eviction, by random operations against a plain model, and from many threads."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from ullage_kv.index import Lease, SlotIndex, SlotRef
from ullage_kv.keys import block_keys
from ullage_kv.results import Status

SPACE = bytes(32)


def chain(*tokens: int) -> list[bytes]:
    return block_keys(SPACE, tokens, 1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


NUM_SLOTS = 4
CHAINS = [chain(a, b, c) for a in range(2) for b in range(2) for c in range(2)]
KEYS = sorted({key for keys in CHAINS for key in keys})


class IndexMachine(RuleBasedStateMachine):
    """Slots hold the key that was written to them; a reader always finds its key's bytes."""

    reservations = Bundle("reservations")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.index = SlotIndex(NUM_SLOTS, num_shards=2)
        self.leases = [
            self.index.lease(),
            self.index.lease(1.0, self.clock),
            self.index.lease(3.0, self.clock),
        ]
        self.memory: dict[int, bytes] = {}
        self.committed: set[bytes] = set()
        self.writing: dict[bytes, SlotRef] = {}
        self.removed: set[SlotRef] = set()
        """Slots that were written to when their blocks were removed: nobody finds them."""

    @rule(
        target=reservations,
        keys=st.sampled_from(CHAINS),
        depth=st.integers(0, 2),
        lease=st.integers(0, 2),
    )
    def reserve(
        self, keys: list[bytes], depth: int, lease: int
    ) -> tuple[int, bytes, SlotRef | None]:
        parent = keys[depth - 1] if depth else None
        was_there = self.index.contains(keys[depth])
        reserved = self.leases[lease].reserve(keys[depth], parent)
        assert (reserved.ref is not None) == (reserved.status is Status.STORED)
        if was_there and not self.leases[lease].is_over:
            assert reserved.status is Status.EXISTS
        if reserved.ref is not None:
            self.memory[reserved.ref.slot] = keys[depth]
            self.writing[keys[depth]] = reserved.ref
        return lease, keys[depth], reserved.ref

    @rule(reservation=consumes(reservations))
    def commit(self, reservation: tuple[int, bytes, SlotRef | None]) -> None:
        number, key, ref = reservation
        if ref is None:
            return
        lease = self.leases[number]
        is_held = ref in lease.reserved and not lease.is_over and ref not in self.removed
        assert (lease.commit(ref) is Status.STORED) == is_held
        if is_held:
            assert self.index.contains(key)
            self.committed.add(key)
        assert lease.commit(ref) is Status.STALE

    @rule(reservation=consumes(reservations))
    def abort(self, reservation: tuple[int, bytes, SlotRef | None]) -> None:
        number, key, ref = reservation
        if ref is not None:
            was_there = self.index.contains(key)
            self.leases[number].abort(ref)
            assert self.index.contains(key) == was_there

    @rule(
        target=pins,
        keys=st.sampled_from(CHAINS),
        depth=st.integers(0, 2),
        lease=st.integers(0, 2),
    )
    def pin(self, keys: list[bytes], depth: int, lease: int) -> tuple[int, bytes, SlotRef | None]:
        ref = self.leases[lease].pin(keys[depth])
        if ref is None:
            assert self.leases[lease].is_over or not self.index.contains(keys[depth])
        else:
            assert keys[depth] in self.committed
        return lease, keys[depth], ref

    @rule(pin=consumes(pins))
    def unpin(self, pin: tuple[int, bytes, SlotRef | None]) -> None:
        number, key, ref = pin
        if ref is not None:
            if self.leases[number].pinned[ref]:
                assert self.memory[ref.slot] == key, "overwritten while it was read"
            self.leases[number].unpin(ref)

    @rule(keys=st.sampled_from(CHAINS), depth=st.integers(0, 2))
    def remove(self, keys: list[bytes], depth: int) -> None:
        was_there = self.index.contains(keys[depth])
        if (ref := self.writing.get(keys[depth])) is not None:
            self.removed.add(ref)
        assert self.index.remove(keys[depth]) == was_there
        assert not self.index.contains(keys[depth])

    @rule(keys=st.sampled_from(CHAINS))
    def touch(self, keys: list[bytes]) -> None:
        uses = self.index.uses_of_each(KEYS)
        self.index.touch(keys)
        used = [
            num_uses + (num_uses > 0 and key in keys)
            for key, num_uses in zip(KEYS, uses, strict=True)
        ]
        assert self.index.uses_of_each(KEYS) == used

    @rule(lease=st.integers(1, 2), seconds=st.sampled_from([0.5, 2.0]))
    def replace_lease(self, lease: int, seconds: float) -> None:
        self.clock.now += seconds
        if self.leases[lease].is_over:
            self.leases[lease].close()
            self.leases[lease] = self.index.lease(1.0, self.clock)

    @invariant()
    def is_whole(self) -> None:
        self.index.check_integrity(self.leases)
        readable = self.index.readable_keys()
        assert self.index.contains_each(KEYS) == [key in readable for key in KEYS]
        for key in readable:
            assert key in self.committed, "readable though nobody has written it"
        for lease in self.leases:
            for ref in lease.reserved:
                assert not any(ref in other.pinned for other in self.leases), "read half-written"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=60)


def store(lease: Lease, keys: list[bytes]) -> None:
    for place, key in enumerate(keys):
        reserved = lease.reserve(key, keys[place - 1] if place else None)
        assert reserved.ref is not None, reserved
        assert lease.commit(reserved.ref) is Status.STORED


def test_ends_of_chains_are_evicted_first() -> None:
    index = SlotIndex(4)
    lease = index.lease()
    old = chain(1, 2)
    new = chain(3, 4)
    store(lease, old)
    store(lease, new)
    store(lease, chain(5))
    assert [index.contains(key) for key in [*old, *new]] == [True, False, True, True]
    store(lease, chain(6))
    assert [index.contains(key) for key in [*old, *new]] == [False, False, True, True]
    assert index.num_evicted == 2


def test_what_is_used_stays() -> None:
    index = SlotIndex(4)
    lease = index.lease()
    old = chain(1, 2)
    new = chain(3, 4)
    store(lease, old)
    store(lease, new)
    index.touch(old)
    store(lease, chain(5))
    assert [index.contains(key) for key in [*old, *new]] == [True, True, True, False]


def test_full_of_pins_refuses() -> None:
    index = SlotIndex(2)
    lease = index.lease()
    keys = chain(1, 2)
    store(lease, keys)
    assert lease.pin(keys[1]) is not None
    assert lease.reserve(chain(9)[0]).status is Status.FULL
    lease.close()
    other = index.lease()
    assert other.reserve(chain(9)[0]).status is Status.STORED


def test_removed_while_it_is_read() -> None:
    index = SlotIndex(1)
    lease = index.lease()
    [key] = chain(1)
    store(lease, [key])
    ref = lease.pin(key)
    assert ref is not None
    index.remove(key)
    assert lease.reserve(key).status is Status.FULL
    lease.unpin(ref)
    again = lease.reserve(key)
    assert again.ref is not None
    assert again.ref.generation > ref.generation
    index.check_integrity([lease])


@pytest.mark.parametrize("num_slots", [8, 64])
def test_threads_do_not_lose_slots(num_slots: int) -> None:
    index = SlotIndex(num_slots)
    failures: list[BaseException] = []
    memory: dict[int, bytes] = {}

    def work(number: int) -> None:
        lease = index.lease()
        try:
            for turn in range(400):
                keys = chain(number % 3, turn % 7, turn % 2)
                for place, key in enumerate(keys):
                    reserved = lease.reserve(key, keys[place - 1] if place else None)
                    if reserved.ref is not None:
                        memory[reserved.ref.slot] = key
                        lease.commit(reserved.ref)
                ref = lease.pin(keys[turn % 3])
                if ref is not None:
                    assert memory[ref.slot] == keys[turn % 3]
                    lease.unpin(ref)
                if turn % 50 == 0:
                    index.remove(keys[1])
        except BaseException as error:
            failures.append(error)
        lease.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    index.check_integrity([])


def test_slots_are_added_with_blocks_of_before() -> None:
    first, second, other = *chain(1, 2), chain(3)[0]
    index = SlotIndex(0)
    lease = index.lease()
    assert lease.reserve(other).status is Status.FULL
    index.add_slots(3, [(2, first, None), (0, second, first)])
    assert index.contains(first)
    assert index.contains(second)
    assert index.num_free == 1
    assert index.parent(second) == first
    assert index.parent(first) is None
    ref = lease.pin(first)
    assert ref is not None
    assert ref.slot == 2
    lease.unpin(ref)
    store(lease, [other])
    index.add_slots(1)
    store(lease, chain(4))
    index.check_integrity([lease])
    store(lease, chain(5))  # the end of the oldest chain makes room
    assert not index.contains(second)
    assert index.contains(first)
    index.check_integrity([lease])
