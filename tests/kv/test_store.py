"""The store over host memory and over lower tiers that are made of dictionaries."""

import os
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from ullage_kv import Arena, ArenaError, Block, Result, Status, Store, Transfer, block_keys
from ullage_kv.futures import done
from ullage_kv.tier import TierCounter, TierStats

SIZE = 10_000
SPACE = bytes(32)


def keys_of(*tokens: int) -> list[bytes]:
    return block_keys(SPACE, tokens, 1)


def block_of(number: int) -> bytearray:
    return bytearray([number % 256]) * SIZE


class DictTier:
    """A lower tier that keeps copies; while `is_held` what was asked for waits."""

    name = "file"

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.counter = TierCounter()
        self.waiting: list[threading.Event] = []
        self.go = threading.Event()
        self.go.set()
        self.num_loads = 0
        self.looked_for: list[bytes] = []

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        self.looked_for += keys
        return done(None)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.blocks for key in keys]

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        return [key not in self.blocks for key in keys]

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        future = Future[list[Result]]()
        self.num_loads += len(transfers)
        blocks = {transfer.key: self.blocks[transfer.key] for transfer in transfers}

        def work() -> None:
            self.go.wait(60)
            results = []
            for key, memory, _ in transfers:
                if blocks[key] == b"":
                    results.append(Result(Status.CORRUPT, self.name))
                    continue
                memory[:] = blocks[key]
                results.append(Result(Status.HIT, self.name, len(memory)))
            self.counter.loaded(results)
            future.set_result(results)

        threading.Thread(target=work).start()
        return future

    def save(self, transfers: Sequence[Transfer]) -> "Future[list[Result]]":
        for key, memory, parent in transfers:
            self.blocks[key] = bytes(memory)
            self.parents[key] = parent
        future = Future[list[Result]]()
        future.set_result([Result(Status.STORED, self.name, SIZE) for _ in transfers])
        return future

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def remove_chains(self, chains: Collection[bytes] | None) -> None:
        self.remove([key for key in self.blocks if chains is None or key[:2] in chains])

    def stats(self) -> TierStats:
        return self.counter.stats(self.name, "a dictionary", num_blocks=len(self.blocks))

    def close(self) -> None:
        self.go.set()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(4 * 12288, available_bytes=1 << 30)
    yield arena
    arena.close()


@pytest.fixture
def tier() -> DictTier:
    return DictTier()


@pytest.fixture
def store(arena: Arena, tier: DictTier) -> Iterator[Store]:
    store = Store(arena, SIZE, [tier])
    yield store
    store.close()


def statuses(results: Sequence[Result]) -> list[Status]:
    return [result.status for result in results]


def test_what_is_put_is_got(store: Store) -> None:
    keys = keys_of(1, 2)
    first = block_of(1)
    second = torch.full((SIZE,), 2, dtype=torch.uint8)
    assert statuses(store.put_batch(keys, [first, second])) == [Status.STORED] * 2
    assert statuses(store.put_batch(keys, [first, second])) == [Status.EXISTS] * 2
    into = [bytearray(SIZE), np.zeros(SIZE // 4, np.float32), bytearray(SIZE)]
    results = store.get_batch([*keys, keys_of(9)[0]], into)
    assert statuses(results) == [Status.HIT, Status.HIT, Status.MISS]
    assert [result.tier for result in results] == ["host", "host", ""]
    assert into[0] == first
    assert bytes(into[1]) == bytes(block_of(2))
    host = store.stats()[0]
    assert (host.hits, host.misses, host.num_blocks) == (2, 1, 2)


def test_memory_is_made_in_steps_that_hold_up_no_other_thread(arena: Arena) -> None:
    sizes = []
    reports = []

    class Mapping:
        def madvise(self, option: int, start: int = 0, size: int = 0) -> None:
            sizes.append(size)

    num_bytes = arena.num_bytes
    mapping = arena._mapping
    arena.num_bytes, arena._mapping = (1 << 30) + 1, Mapping()  # type: ignore[assignment]
    try:
        arena.make_resident(lambda done, total: reports.append(done))
    finally:
        arena.num_bytes = num_bytes
        arena._mapping = mapping
    assert max(sizes) <= 16 << 20
    assert sum(sizes) == (1 << 30) + 1
    assert reports == [step << 28 for step in range(5)] + [(1 << 30) + 1]


def test_memory_that_cannot_be_written_pins_nothing(store: Store) -> None:
    keys = keys_of(1, 2)
    store.put_batch(keys, [block_of(1), block_of(2)])
    with pytest.raises(ValueError, match="read-only"):
        store.get_batch(keys, [bytes(SIZE), bytes(SIZE)])
    assert statuses(store.put_batch(keys_of(3, 4, 5, 6), [block_of(3)] * 4)) == [Status.STORED] * 4


def test_a_prefix_ends_where_nothing_is_stored(store: Store) -> None:
    keys = keys_of(1, 2, 3)
    store.put_batch([keys[0], keys[2]], [block_of(1), block_of(3)])
    assert store.lookup_prefix(keys) == ["host"]
    assert store.contains(keys) == ["host", "", "host"]


def test_what_is_pinned_is_read_in_place_and_stays(store: Store) -> None:
    first, second, *others = keys_of(1), keys_of(2), *(keys_of(n) for n in range(3, 9))
    store.put_batch([*first, *second], [block_of(1), block_of(2)])
    with store.pin([*first, *keys_of(99)]) as [memory, absent]:
        for key in others:
            store.put_batch(key, [block_of(7)])
        assert absent is None
        assert memory is not None
        assert memory == block_of(1)
        assert memory.readonly
        assert store.contains([*first, *second]) == ["host", ""]
    for key in others:
        store.put_batch(key, [block_of(7)])
    assert store.contains(first) == [""]


def test_wrong_sizes_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="9 bytes, and blocks have 10000"):
        store.put_batch(keys_of(1), [bytes(9)])
    with pytest.raises(ValueError):
        store.put_batch(keys_of(1, 2), [block_of(1)])
    assert store.index.num_free == store.index.num_slots


def test_what_is_used_twice_is_copied_down_and_comes_back(store: Store, tier: DictTier) -> None:
    twice = keys_of(1)[0]
    once = keys_of(2)[0]
    kept = keys_of(3)[0]
    store.put_batch([twice, once, Block(kept, None, True)], [block_of(n) for n in (1, 2, 3)])
    assert set(tier.blocks) == {kept}
    store.get_batch([twice], [bytearray(SIZE)])
    assert set(tier.blocks) == {kept, twice}
    store.put_batch(keys_of(10, 11, 12, 13), [block_of(n) for n in range(4)])
    assert store.contains([twice, once, kept]) == ["file", "", "file"]
    into = [bytearray(SIZE) for _ in range(3)]
    results = store.get_batch([twice, once, kept], into)
    assert [result.tier for result in results] == ["file", "", "file"]
    assert into[0] == block_of(1)
    assert into[2] == block_of(3)
    assert store.contains([twice]) == ["host"]


def test_a_tier_is_told_which_block_each_continues(store: Store, tier: DictTier) -> None:
    first, second = keys_of(1, 2)
    store.put_batch(
        [Block(first, None, True), Block(second, first, True)], [block_of(1), block_of(2)]
    )
    assert tier.parents == {first: None, second: first}


def test_lower_tiers_are_asked_for_what_the_host_has_not(
    arena: Arena, store: Store, tier: DictTier
) -> None:
    keys = keys_of(1, 2)
    store.put_batch(keys[:1], [block_of(1)])
    store.look(keys).result(60)
    store.get_batch(keys, [bytearray(SIZE) for _ in keys])
    assert tier.looked_for == [keys[1], keys[1]]
    asked = Future[None]()
    tier.look = lambda keys: asked  # type: ignore[method-assign]
    both = Store(arena, SIZE, [tier, DictTier()])
    looking = both.look(keys)
    assert not looking.done()
    asked.set_result(None)
    looking.result(60)
    assert both.look([]).done()


def test_two_who_ask_wait_for_one_load(store: Store, tier: DictTier) -> None:
    keys = keys_of(1, 2)
    tier.blocks = {keys[0]: bytes(block_of(1)), keys[1]: bytes(block_of(2))}
    tier.go.clear()
    futures = [store.fetch(keys), store.fetch(keys)]
    assert not any(future.done() for future in futures)
    tier.go.set()
    assert [each.tier for future in futures for each in future.result(60)] == ["file"] * 4
    assert tier.num_loads == 2


def test_who_joins_a_load_waits_no_longer_than_its_own_deadline(
    store: Store, tier: DictTier
) -> None:
    keys = keys_of(1, 2)
    tier.blocks = {key: bytes(block_of(7)) for key in keys}
    tier.go.clear()
    first = store.fetch(keys, 3600.0)
    late = [Result(Status.TIMEOUT, "file")] * 2
    for _ in range(2):
        assert store.fetch(keys, 0.01).result(60) == late
    assert store.get_batch(keys, [bytearray(SIZE) for _ in keys], 0.01) == late
    longer = store.fetch(keys, 1800.0)
    assert not first.done()
    assert not longer.done()
    tier.go.set()
    assert statuses([*first.result(60), *longer.result(60)]) == [Status.HIT] * 4
    assert tier.num_loads == 2
    assert store.contains(keys) == ["host"] * 2


def test_a_look_up_takes_no_longer_than_a_deadline(store: Store, tier: DictTier) -> None:
    keys = keys_of(1)
    asked = Future[None]()
    tier.blocks = {keys[0]: bytes(block_of(7))}
    tier.look = lambda keys: asked  # type: ignore[method-assign]
    reading = threading.Thread(target=store.get_batch, args=(keys, [bytearray(SIZE)], 0.01))
    reading.start()
    reading.join(60)
    is_late = reading.is_alive()
    asked.set_result(None)
    reading.join(60)
    assert not is_late


def test_where_nothing_comes_the_rest_is_not_asked_for(arena: Arena, tier: DictTier) -> None:
    keys = keys_of(*range(1000))
    tier.blocks = dict.fromkeys(keys, bytes(SIZE))
    store = Store(arena, SIZE, [tier])
    # No later block takes the slot of an earlier one, though nobody has pinned that.
    assert statuses(store.fetch(keys).result(60)) == [Status.HIT] * 4 + [Status.FULL] * 996
    assert store.contains(keys[:5]) == ["host"] * 4 + ["file"]
    with store.pin(keys[:4]):
        assert statuses(store.fetch(keys).result(60)) == [Status.HIT] * 4 + [Status.FULL] * 996
    assert tier.num_loads == 4
    store.close()


def test_a_tier_that_is_busy_is_asked_for_one_part(tier: DictTier) -> None:
    keys = keys_of(*range(300))
    tier.blocks = dict.fromkeys(keys, bytes(SIZE))
    num_asked = []

    def load(transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        num_asked.append(len(transfers))
        return done([Result(Status.BUSY, tier.name)] * len(transfers))

    tier.load = load  # type: ignore[method-assign]
    arena = Arena.create(300 * 12288, available_bytes=1 << 30)
    store = Store(arena, SIZE, [tier])
    assert store.fetch(keys).result(60) == [Result(Status.BUSY, tier.name)] * 300
    assert num_asked == [128]
    assert store.index.num_free == 300
    store.close()
    arena.close()


def test_many_who_fetch_the_same_blocks_leave_nothing_behind(arena: Arena, tier: DictTier) -> None:
    keys = keys_of(*range(4))
    tier.blocks = {key: b"" if place % 2 else bytes(SIZE) for place, key in enumerate(keys)}
    store = Store(arena, SIZE, [tier])
    expected = {Status.HIT, Status.CORRUPT, Status.MISS}  # none is left to somebody else
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(60):
                chosen = keys[seed % 2 :] if turn % 2 else keys[: seed % 4 + 1]
                assert {each.status for each in store.fetch(chosen).result(60)} <= expected
                store.index.remove(keys[turn % 4])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not store.num_pending
    store.index.remove_chains(None)
    assert store.index.num_free == store.index.num_slots
    store.close()


def test_what_is_damaged_below_is_a_miss_and_not_tried_for_ever(
    store: Store, tier: DictTier
) -> None:
    [key] = keys_of(1)
    tier.blocks = {key: b""}
    [result] = store.get_batch([key], [bytearray(SIZE)])
    assert result.status is Status.CORRUPT
    assert not result.is_usable
    assert store.index.num_free == store.index.num_slots


def test_removed_from_all_tiers(store: Store, tier: DictTier) -> None:
    [key] = keys_of(1)
    store.put_batch([Block(key, None, True)], [block_of(1)])
    store.remove([key])
    assert store.contains([key]) == [""]
    assert not tier.blocks


def test_whole_chains_are_removed_with_what_is_being_written(store: Store, tier: DictTier) -> None:
    damaged = keys_of(1, 2, 3)
    sound = keys_of(4)
    store.put_batch([Block(damaged[0], None, True), Block(sound[0], None, True)], [block_of(1)] * 2)
    tier.blocks[damaged[2]] = bytes(block_of(3))
    lease = store.index.lease()
    [ref] = store.offer(lease, [Block(damaged[1], damaged[0])])
    assert ref is not None
    tier.go.clear()
    fetched = store.fetch(damaged[2:])
    store.remove_chains([damaged[0][:2]])
    tier.go.set()
    assert statuses(fetched.result(60)) == [Status.MISS]
    assert statuses(store.committed(lease, [ref], [Block(damaged[1])])) == [Status.STALE]
    assert store.contains([*damaged, *sound]) == ["", "", "", "host"]
    assert set(tier.blocks) == set(sound)
    store.remove_chains(None)
    assert store.contains(sound) == [""]
    assert not tier.blocks
    lease.close()


def test_another_process_reads_and_writes_the_same_slots(arena: Arena) -> None:
    arena.cut(SIZE)
    arena.slot(1)[:5] = b"hello"
    program = (
        "import sys; from ullage_kv import Arena; a = Arena.attach(sys.argv[1], int(sys.argv[2]));"
        f"a.cut({SIZE}); a.slot(2)[:5] = a.slot(1)[:5].tobytes().upper()"
    )
    command = [sys.executable, "-c", program, arena.path, str(arena.num_bytes)]
    subprocess.run(command, check=True, timeout=60)
    assert bytes(arena.slot(2)[:5]) == b"HELLO"


def test_all_memory_is_resident_at_once(arena: Arena) -> None:
    resident = Path(f"/proc/self/fdinfo/{arena.fd}").exists() and os.fstat(arena.fd).st_blocks
    assert resident * 512 >= arena.num_bytes
    assert 0 <= arena.huge_page_bytes() <= arena.num_bytes


def test_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ArenaError, match="64 MiB of host memory are more than the 1 MiB"):
        Arena.create(64 << 20, available_bytes=1 << 20)
    with pytest.raises(ArenaError, match="owner has ended"):
        Arena.attach("/proc/self/fd/9999", 1)


def test_nothing_is_left_of_an_owner_that_is_killed() -> None:
    before = set(Path("/dev/shm").iterdir())
    program = (
        "import os, signal; from ullage_kv import Arena; Arena.create(1 << 20);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == -9
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "ullage" in path.name]
    assert not os.path.exists("/dev/shm/ullage-kv")
