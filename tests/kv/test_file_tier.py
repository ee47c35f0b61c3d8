"""The file tier on real files: random operations and faults, kills, restarts, and mounts that hang.

Only what a test cannot have of a file system (errors, calls that never return) is injected.
"""

import errno
import hashlib
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ullage_kv import Arena, Block, Result, Status, Store, Transfer, block_keys, file_io, file_tier
from ullage_kv.file_io import Calls, FileTierError, SlotFile
from ullage_kv.file_queue import Job, Lane
from ullage_kv.file_tier import FileTier

SPACE = hashlib.sha256(b"a model").digest()
SIZE = 10_000
SLOT = 12_288
"""Bytes that such a block takes in the file."""
TABLE = 4096


def quota(num_blocks: int) -> int:
    return TABLE + num_blocks * (SLOT + 128)


def keys_of(*tokens: int) -> list[bytes]:
    return block_keys(SPACE, tokens, 1)


def payload(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(SIZE)


def transfers(keys: Sequence[bytes]) -> list[Transfer]:
    """Copies to save, each continuing the one before it."""
    parents = [None, *keys]
    return [
        Transfer(key, memoryview(bytearray(payload(key))), parent)
        for key, parent in zip(keys, parents, strict=False)
    ]


def wait(future: "Future[list[Result]]") -> list[Status]:
    return [result.status for result in future.result(60)]


def save(tier: FileTier, keys: Sequence[bytes]) -> list[Status]:
    return wait(tier.save(transfers(keys)))


def load(tier: FileTier, keys: Sequence[bytes], deadline_s: float = 60) -> list[Status]:
    """Loads and checks the bytes of every hit."""
    into = [bytearray(SIZE + 1) for _ in keys]  # such memory begins anywhere
    wanted = [Transfer(k, memoryview(m)[1:]) for k, m in zip(keys, into, strict=True)]
    statuses = wait(tier.load(wanted, deadline_s))
    for key, memory, status in zip(keys, into, statuses, strict=True):
        assert status is not Status.HIT or memory[1:] == payload(key), "wrong bytes"
    return statuses


def expire_first(tier: FileTier) -> None:
    """Does what is done when the first deadline of what is under way is over."""
    deadlines = tier._deadlines
    with deadlines._condition:
        while deadlines._heap[0][2].future.done():
            deadlines._heap.pop(0)
        _, _, batch, on_expired = deadlines._heap.pop(0)
    assert batch.expire(Result(Status.TIMEOUT, "file"))
    on_expired()


def until(condition: Callable[[], bool]) -> None:
    """Waits for what threads do; a guard against hanging for ever, not a measurement."""
    done = threading.Event()
    for _ in range(6000):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it never came")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Faults:
    """Calls of the file system that fail or hang when a test says so."""

    def __init__(self) -> None:
        self.read_error = self.write_error = self.grow_error = 0
        self.refuses_direct = False
        self.go = threading.Event()
        self.go.set()
        self.num_hanging = 0
        self.num_passing = 0
        """Next calls that do not hang."""

    @property
    def calls(self) -> Calls:
        return Calls(self.preadv, self.pwritev, self.fallocate)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._meet(self.read_error)
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.refuses_direct and os.O_DIRECT & _flags(fd):
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        self._meet(self.write_error)
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, size: int) -> None:
        if self.grow_error:
            raise OSError(self.grow_error, os.strerror(self.grow_error))
        os.posix_fallocate(fd, offset, size)

    def _meet(self, error: int) -> None:
        if self.num_passing:
            self.num_passing -= 1
        elif not self.go.is_set():
            self.num_hanging += 1
            self.go.wait(60)
        if error:
            raise OSError(error, os.strerror(error))


def _flags(fd: int) -> int:
    [line] = [
        line
        for line in Path(f"/proc/self/fdinfo/{fd}").read_text("ascii").splitlines()
        if line.startswith("flags")
    ]
    return int(line.split()[1], 8)


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults()
    yield faults
    faults.go.set()


@pytest.fixture
def opened(tmp_path: Path, faults: Faults) -> Iterator[Callable[..., FileTier]]:
    """Opens tiers, and closes those that a test leaves open."""
    tiers = []

    def open_tier(num_blocks: int = 8, space: bytes = SPACE, **more: object) -> FileTier:
        more = {"calls": faults.calls, **more}
        tiers.append(FileTier(tmp_path, space, SIZE, quota(num_blocks), **more))  # type: ignore[arg-type]
        return tiers[-1]

    yield open_tier
    faults.go.set()
    for tier in tiers:
        tier.close()


Open = Callable[..., FileTier]

NUM_BLOCKS = 5
CHAINS = [keys_of(a, b, c) for a in range(2) for b in range(2) for c in range(2)]
ERRORS = st.sampled_from([errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE])


class FileTierMachine(RuleBasedStateMachine):
    """Hits have the right bytes, files stay in their quota, and what is held without a fault is hit
    and found again after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="ullage-test-"))
        self.faults = Faults()
        self.clock = Clock()
        self.removed: set[bytes] = set()
        self.is_sound = True
        """Nothing was damaged since the tier was opened."""
        self.open()

    def open(self) -> None:
        self.tier = FileTier(
            self.root, SPACE, SIZE, quota(NUM_BLOCKS), calls=self.faults.calls, clock=self.clock
        )

    @property
    def volume(self) -> file_tier._Volume:
        return self.tier._volume

    @rule(keys=st.sampled_from(CHAINS), depth=st.integers(1, 3), error=st.just(0) | ERRORS)
    def save(self, keys: list[bytes], depth: int, error: int) -> None:
        keys = keys[:depth]
        wanted = self.tier.wants(keys)
        self.faults.write_error = error
        statuses = save(self.tier, keys)
        self.faults.write_error = 0
        for key, status, is_wanted in zip(keys, statuses, wanted, strict=True):
            if status is Status.STORED:
                assert is_wanted or not self.is_sound
                assert not error
                self.removed.discard(key)
            else:
                assert status is not Status.EXISTS or not is_wanted
                assert error or not self.is_sound or status is not Status.ERROR

    @rule(keys=st.sampled_from(CHAINS), error=st.just(0) | ERRORS)
    def load(self, keys: list[bytes], error: int) -> None:
        held = self.tier.holds(keys)
        self.faults.read_error = error
        statuses = load(self.tier, keys)
        self.faults.read_error = 0
        for key, status, is_held in zip(keys, statuses, held, strict=True):
            assert status is not Status.HIT or key not in self.removed
            if is_held and self.is_sound and not error:
                assert status is Status.HIT
            if status is Status.CORRUPT:
                assert not self.is_sound
                assert not self.volume.index.contains(key)

    @rule(keys=st.sampled_from(CHAINS), depth=st.integers(0, 2))
    def remove(self, keys: list[bytes], depth: int) -> None:
        self.tier.remove([keys[depth]])
        self.removed.add(keys[depth])

    @rule()
    def pause(self) -> None:
        self.clock.now += 120

    @rule()
    def restart(self) -> None:
        held = set(self.volume.index.readable_keys())
        self.tier.close()
        self.open()
        found = set(self.volume.index.readable_keys())
        assert not found & self.removed
        assert found == held or not self.is_sound
        self.is_sound = self.is_sound or not found

    @rule(name=st.sampled_from(["blocks", "table"]), place=st.floats(0, 1, exclude_max=True))
    def flip(self, name: str, place: float) -> None:
        path = self.volume.file.folder / name
        if path.exists() and (size := path.stat().st_size):
            with path.open("r+b") as file:
                file.seek(int(place * size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0x10]))
            self.is_sound = False

    @rule(name=st.sampled_from(["blocks", "table"]), share=st.floats(0, 1))
    def truncate(self, name: str, share: float) -> None:
        path = self.volume.file.folder / name
        if path.exists():
            os.truncate(path, int(share * path.stat().st_size))
            self.is_sound = False

    @rule()
    def remove_folder(self) -> None:
        shutil.rmtree(self.volume.file.folder, ignore_errors=True)
        self.is_sound = False

    @invariant()
    def is_bounded(self) -> None:
        sizes = [path.stat().st_size for path in self.root.rglob("*") if path.is_file()]
        assert sum(sizes) <= quota(NUM_BLOCKS)
        self.volume.index.check_integrity([self.volume.lease])
        assert self.tier.stats().used_bytes <= self.tier.stats().capacity_bytes

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.root, ignore_errors=True)


TestFileTier = FileTierMachine.TestCase
TestFileTier.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_restart_finds_the_blocks(opened: Open) -> None:
    keys = keys_of(1, 2, 3)
    tier = opened()
    assert save(tier, keys) == [Status.STORED] * 3
    assert save(tier, keys) == [Status.EXISTS] * 3
    tier.close()
    assert tier.holds(keys) == [False] * 3
    assert load(tier, keys) == [Status.UNAVAILABLE] * 3
    again = opened()
    assert load(again, [*keys, keys_of(9)[0]]) == [Status.HIT] * 3 + [Status.MISS]
    stats = again.stats()
    assert (stats.num_blocks, stats.hits, stats.misses) == (3, 3, 1)
    assert stats.used_bytes == 3 * SLOT
    assert stats.capacity_bytes == 8 * SLOT
    assert stats.read_bytes == 3 * SIZE
    assert stats.backend.startswith("threads, ")


def test_the_end_of_the_oldest_chain_makes_room(opened: Open) -> None:
    old = keys_of(1, 2)
    new = keys_of(3, 4)
    tier = opened(num_blocks=4)
    save(tier, old)
    save(tier, new)
    assert save(tier, keys_of(5)) == [Status.STORED]
    assert tier.holds([*old, *new]) == [True, False, True, True]
    tier.wants(old)  # the host uses it, so it stays
    save(tier, keys_of(6))
    assert tier.holds([*old, *new]) == [True, False, True, False]
    assert tier.stats().evictions == 2


def test_blocks_that_are_saved_at_once_know_what_they_continue(opened: Open) -> None:
    for first in range(20):
        tier = opened()
        chain = keys_of(*range(first, first + 8))
        assert save(tier, chain) == [Status.STORED] * 8
        assert [tier._volume.index.parent(key) for key in chain] == [None, *chain[:-1]]
        tier.close()


def test_after_a_restart_it_does_so_as_well(opened: Open) -> None:
    old = keys_of(1, 2)
    new = keys_of(3, 4)
    tier = opened(num_blocks=4)
    for keys in (old, new):  # in an order that is that of their saves, too
        for transfer in transfers(keys):
            assert wait(tier.save([transfer])) == [Status.STORED]
    tier.close()
    again = opened(num_blocks=4)
    save(again, keys_of(5))
    assert again.holds([*old, *new]) == [True, False, True, True]


def test_a_smaller_quota_keeps_what_fits(opened: Open, tmp_path: Path) -> None:
    keys = keys_of(1, 2, 3, 4)
    tier = opened(num_blocks=4)
    save(tier, keys)
    tier.close()
    again = opened(num_blocks=2)
    assert sum(again.holds(keys)) == 2
    assert set(load(again, keys)) == {Status.HIT, Status.MISS}
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) <= quota(2)


@pytest.mark.parametrize("size", [4096, 10_000, 12_288, 100])
@pytest.mark.parametrize("offset", [0, 1])
def test_memory_may_begin_and_end_anywhere(tmp_path: Path, size: int, offset: int) -> None:
    tier = FileTier(tmp_path, SPACE, size, 1 << 20)
    page = memoryview(mmap.mmap(-1, 5 * 4096))
    for number, key in enumerate(keys_of(1, 2, 3, 4, 5, 6)):
        page[offset : offset + size] = bytes([number + 1]) * size
        transfer = Transfer(key, page[offset : offset + size])
        assert wait(tier.save([transfer])) == [Status.STORED]
        transfer.memory[:] = bytes(size)
        assert wait(tier.load([transfer], 60)) == [Status.HIT]
        assert transfer.memory == bytes([number + 1]) * size
    tier.close()


def test_engines_share_a_folder_and_find_their_own_again(opened: Open, tmp_path: Path) -> None:
    first = opened()
    second = opened()
    save(first, keys_of(1))
    save(second, keys_of(2))
    assert first.holds(keys_of(2)) == [False]
    second.close()
    assert load(opened(), keys_of(2)) == [Status.HIT]
    opened(space=bytes(32))
    folders = sorted(str(p.parent.relative_to(tmp_path)) for p in tmp_path.rglob("table"))
    assert folders == ["0" * 16 + "/0", SPACE.hex()[:16] + "/0", SPACE.hex()[:16] + "/1"]


def test_a_thread_may_save_before_its_caller_goes_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Lane.put

    def put_slowly(lane: Lane, job: Job, **options: bool) -> list[int]:
        refused = put(lane, job, **options)
        threading.Event().wait(0.2)  # a thread has written the blocks meanwhile
        return refused

    tier = opened()
    monkeypatch.setattr(Lane, "put", put_slowly)
    assert save(tier, keys_of(1, 2)) == [Status.STORED] * 2
    assert load(tier, keys_of(1, 2)) == [Status.HIT] * 2


def test_blocks_that_find_no_room_in_the_queue_may_be_saved_later(
    opened: Open, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "_MAX_QUEUED_BYTES", 0)
    keys = keys_of(*range(32))
    tier = opened(num_blocks=64)
    faults.go.clear()
    saving = tier.save(transfers(keys))
    refused = tier.save(transfers(keys_of(100)))
    faults.go.set()
    assert wait(refused) == [Status.BUSY]
    first = wait(saving)
    assert {*first} == {Status.STORED, Status.BUSY}
    again = [key for key, status in zip(keys, first, strict=True) if status is Status.BUSY]
    assert tier.wants(again) == [True] * len(again)
    assert save(tier, again[:1]) == [Status.STORED]


def test_a_fault_that_nobody_foresaw_is_an_answer_at_once(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("unforeseen")

    keys = keys_of(1, 2)
    tier = opened()
    with monkeypatch.context() as patched:
        patched.setattr(SlotFile, "write", fail)
        results = tier.save(transfers(keys)).result(10)
    assert [each.status for each in results] == [Status.ERROR] * 2
    assert [each.error for each in results] == ["ValueError('unforeseen')"] * 2
    assert tier.wants(keys) == [True] * 2

    assert save(tier, keys) == [Status.STORED] * 2
    monkeypatch.setattr(SlotFile, "read", fail)
    into = [Transfer(key, memoryview(bytearray(SIZE))) for key in keys]
    assert [each.status for each in tier.load(into, 60).result(10)] == [Status.ERROR] * 2


SAVE_FOR_EVER = f"""
import itertools, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_file_tier import SPACE, SIZE, FileTier, keys_of, quota, save
tier = FileTier(sys.argv[1], SPACE, SIZE, quota(16))
for number in itertools.count():
    save(tier, keys_of(number, number + 1, number + 2))
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_rounds", [1, 9])  # while there is room, and while others are evicted
def test_a_killed_process_leaves_whole_blocks(
    opened: Open, tmp_path: Path, num_rounds: int
) -> None:
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        for _ in range(num_rounds):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    tier = opened(num_blocks=16)
    found = tier._volume.index.readable_keys()
    assert len(found) >= 3
    assert [p.name for p in tmp_path.glob("*/*")] == ["0"]
    assert load(tier, found) == [Status.HIT] * len(found)


def test_what_waits_to_be_saved_is_written_before_the_end(opened: Open, faults: Faults) -> None:
    keys = keys_of(1, 2, 3, 4, 5)
    tier = opened()
    faults.go.clear()
    saving = tier.save(transfers(keys))
    closing = threading.Thread(target=tier.close)
    closing.start()
    until(lambda: tier.wants(keys_of(9)) == [False])
    faults.go.set()
    closing.join(60)
    assert wait(saving) == [Status.STORED] * 5
    assert load(opened(), keys) == [Status.HIT] * 5


def test_the_end_does_not_wait_for_a_mount_that_hangs(
    opened: Open, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "_CLOSE_S", 0.05)
    tier = opened()
    faults.go.clear()
    saving = tier.save(transfers(keys_of(1, 2, 3)))
    tier.close()
    assert wait(saving) == [Status.UNAVAILABLE] * 3


def test_a_load_that_hangs_times_out_and_later_writes_nowhere(opened: Open, faults: Faults) -> None:
    clock = Clock()
    tier = opened(clock=clock)
    [key] = keys_of(1)
    save(tier, [key])
    faults.go.clear()
    memory = bytearray(b"\xaa" * SIZE)
    assert wait(tier.load([Transfer(key, memoryview(memory))], 0.01)) == [Status.TIMEOUT]
    for _ in range(2):
        load(tier, [key], 0.01)
    # Left alone: no caller waits for it any more.
    assert tier.holds([key]) == [False]
    assert load(tier, [key]) == [Status.UNAVAILABLE]
    faults.go.set()
    until(lambda: tier.stats().queued == 0)
    assert memory == b"\xaa" * SIZE
    assert load(tier, [key]) == [Status.UNAVAILABLE]
    clock.now += 1
    assert tier.holds([key]) == [True]
    assert load(tier, [key]) == [Status.HIT]
    assert load(tier, [key]) == [Status.HIT]
    assert tier.stats().failures == {"timeout": 3, "unavailable": 2}


def test_any_number_of_loads_waits_until_their_deadline(opened: Open, faults: Faults) -> None:
    tier = opened()
    [key] = keys_of(1)
    save(tier, [key])
    faults.go.clear()
    memory = memoryview(bytearray(SIZE))
    loading = tier.load([Transfer(key, memory)] * 5000, 60)
    until(lambda: faults.num_hanging == file_tier.NUM_LOADING)
    assert wait(tier.load([Transfer(key, memory)] * 5000, 0.01)) == [Status.TIMEOUT] * 5000
    until(lambda: tier.stats().queued == 5000)  # what nobody waits for is not kept
    faults.go.set()
    assert wait(loading) == [Status.HIT] * 5000


def test_what_answers_but_is_slow_is_not_left_alone(opened: Open, faults: Faults) -> None:
    tier = opened()
    keys = keys_of(1, 2)
    save(tier, keys)
    for is_answering in [True] * 4 + [False] * 3:
        faults.go.clear()
        faults.num_hanging = 0
        slow = tier.load([Transfer(keys[0], memoryview(bytearray(SIZE)))], 60)
        until(lambda: faults.num_hanging == 1)
        if is_answering:
            faults.num_passing = 1
            assert load(tier, keys[1:]) == [Status.HIT]
        assert tier.holds(keys) == [True] * 2
        expire_first(tier)
        faults.go.set()
        assert wait(slow) == [Status.TIMEOUT]
        until(lambda: tier.stats().queued == 0)
    assert tier.holds(keys) == [False] * 2


def test_a_save_that_hangs_gives_its_memory_back(opened: Open, faults: Faults) -> None:
    tier = opened(save_deadline_s=600)
    faults.go.clear()
    # As many as there are threads hang; the others wait for them.
    keys = keys_of(*range(file_tier.NUM_SAVING + 2))
    saving = tier.save(transfers(keys))
    until(lambda: faults.num_hanging == file_tier.NUM_SAVING)
    expire_first(tier)
    assert wait(saving) == [Status.TIMEOUT] * len(keys)
    assert not tier.wants(keys)[0], "its thread is not back"
    faults.go.set()
    until(lambda: tier.stats().queued == 0)
    assert not any(tier.holds(keys)), "its memory may have had other bytes meanwhile"
    tier.close()
    assert not any(opened().holds(keys))


def test_saves_beyond_the_queue_are_dropped_and_counted(
    opened: Open, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tier, "_MAX_QUEUED_BYTES", 5 * SLOT)
    tier = opened(num_blocks=16)
    faults.go.clear()
    hanging = file_tier.NUM_SAVING
    first = tier.save(transfers(keys_of(*range(100, 100 + hanging))))
    until(lambda: faults.num_hanging == hanging)
    second = tier.save(transfers(keys_of(1, 2, 3, 4, 5, 6, 7)))
    assert tier.wants(keys_of(8)) == [False]
    assert tier.stats().queued == hanging + 5
    # A load does not wait behind them.
    assert load(tier, keys_of(8)) == [Status.MISS]
    faults.go.set()
    assert wait(first) == [Status.STORED] * hanging
    assert wait(second) == [Status.STORED] * 5 + [Status.BUSY] * 2
    assert tier.stats().failures["busy"] == 2


def test_errors_are_misses_and_then_leave_it_alone(opened: Open, faults: Faults) -> None:
    clock = Clock()
    tier = opened(clock=clock)
    keys = keys_of(1)
    save(tier, keys)
    faults.read_error = errno.EIO
    for _ in range(3):
        assert load(tier, keys) == [Status.ERROR]
    assert load(tier, keys) == [Status.UNAVAILABLE]
    faults.read_error = 0
    faults.write_error = errno.EROFS
    for number in range(3):
        assert save(tier, keys_of(10 + number)) == [Status.ERROR]
    assert tier.wants(keys_of(20)) == [False]
    assert save(tier, keys_of(20)) == [Status.UNAVAILABLE]
    clock.now += 1
    assert load(tier, keys) == [Status.HIT], "what cannot be written can be read"
    faults.write_error = 0
    assert save(tier, keys_of(20)) == [Status.STORED]


def test_a_full_device_is_met_when_the_file_grows(opened: Open, faults: Faults) -> None:
    faults.grow_error = errno.ENOSPC
    clock = Clock()
    tier = opened(clock=clock)
    assert save(tier, keys_of(1)) == [Status.FULL]
    faults.grow_error = 0
    assert save(tier, keys_of(1)) == [Status.FULL], "it is not tried at every block"
    clock.now += 60
    assert save(tier, keys_of(1)) == [Status.STORED]
    faults.write_error = errno.ENOSPC  # of a file system that does not keep its promise
    for number in range(10, 20):
        assert save(tier, keys_of(number)) == [Status.FULL]
    assert load(tier, keys_of(1)) == [Status.HIT]


def test_a_full_device_leaves_as_many_slots_as_it_has_room_for(
    opened: Open, faults: Faults
) -> None:
    def fallocate(fd: int, offset: int, size: int) -> None:
        if offset + size > 3 * SLOT:
            raise OSError(errno.ENOSPC, "full")
        os.posix_fallocate(fd, offset, size)

    tier = opened(calls=faults.calls._replace(fallocate=fallocate))
    keys = [keys_of(number)[0] for number in range(4)]
    for key in keys:
        assert save(tier, [key]) == [Status.STORED]
    assert tier.holds(keys) == [False, True, True, True]


def test_where_o_direct_is_refused_the_page_cache_is_used(opened: Open, faults: Faults) -> None:
    tier = opened()
    save(tier, keys_of(1))
    tier.close()
    faults.refuses_direct = True
    again = opened()
    assert again.stats().backend == "threads, buffered"
    assert save(again, keys_of(2)) == [Status.STORED]
    assert load(again, [*keys_of(1), *keys_of(2)]) == [Status.HIT] * 2


def test_a_folder_that_is_removed_begins_empty(opened: Open, tmp_path: Path) -> None:
    clock = Clock()
    tier = opened(clock=clock)
    save(tier, keys_of(1))
    shutil.rmtree(tmp_path / SPACE.hex()[:16])
    clock.now += 1
    assert save(tier, keys_of(2)) == [Status.STORED]
    assert load(tier, [*keys_of(1), *keys_of(2)]) == [Status.MISS, Status.HIT]
    tier.close()
    assert load(opened(), keys_of(2)) == [Status.HIT]


def test_what_is_removed_while_it_is_saved_is_not_stored(opened: Open, faults: Faults) -> None:
    tier = opened()
    keys = keys_of(1, 2)
    faults.go.clear()
    saving = tier.save(transfers(keys))
    assert wait(tier.save(transfers(keys))) == [Status.BUSY] * 2
    until(lambda: faults.num_hanging == 2)
    tier.remove(keys[:1])
    faults.go.set()
    assert wait(saving) == [Status.STALE, Status.STORED]
    tier.close()
    assert opened().holds(keys) == [False, True]


def test_a_damaged_block_is_a_miss_once_and_then_gone(opened: Open, tmp_path: Path) -> None:
    tier = opened()
    keys = keys_of(1, 2)
    save(tier, keys)
    [blocks] = tmp_path.rglob("blocks")
    data = bytearray(blocks.read_bytes())
    place = data.index(payload(keys[0])[:64]) + SIZE - 1
    data[place] ^= 1
    blocks.write_bytes(data)
    assert load(tier, keys) == [Status.CORRUPT, Status.HIT]
    assert load(tier, keys) == [Status.MISS, Status.HIT]
    tier.close()
    assert opened().holds(keys) == [False, True]


def test_a_damaged_table_is_an_empty_tier_and_a_line(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened()
    save(tier, keys_of(1))
    tier.close()
    [table] = tmp_path.rglob("table")
    table.write_bytes(b"something else" * 1000)
    again = opened()
    assert again.holds(keys_of(1)) == [False]
    assert "damaged" in caplog.text
    assert save(again, keys_of(1)) == [Status.STORED]


def test_what_engines_left_goes_when_room_is_needed(opened: Open, tmp_path: Path) -> None:
    clock = Clock()
    other = bytes(32)
    foreign = tmp_path / "mine" / "0"
    foreign.mkdir(parents=True)
    (foreign / "table").write_bytes(b"of somebody else")
    old = opened(space=other)
    held = opened(space=other)
    save(old, keys_of(1))
    save(held, keys_of(2))
    old.close()
    tier = opened(clock=clock)
    folders = [tmp_path / other.hex()[:16] / number for number in "01"]
    save(tier, keys_of(3))
    clock.now += 599
    save(tier, keys_of(4))
    assert folders[0].exists(), "its engine may only be restarting"
    clock.now += 61
    save(tier, keys_of(5))
    assert not folders[0].exists()
    assert folders[1].exists()
    assert foreign.exists()
    assert load(held, keys_of(2)) == [Status.HIT]


def test_nothing_is_evicted_while_files_can_grow(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_io, "_EXTENT_BYTES", 3 * SLOT)
    tier = opened(num_blocks=640)
    keys = keys_of(*range(300))
    assert save(tier, keys) == [Status.STORED] * 300
    assert (tier.stats().evictions, tier.stats().num_blocks) == (0, 300)


def test_what_engines_left_stays_while_there_is_room(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_io, "_EXTENT_BYTES", 4 * SLOT)
    clock = Clock()
    old = opened(space=bytes(32), num_blocks=2)
    save(old, keys_of(1))
    old.close()
    tier = opened(clock=clock, num_blocks=64)
    for _ in range(2):
        save(tier, keys_of(len(tier._volume.index)))
        clock.now += 601
    assert load(opened(space=bytes(32), num_blocks=2), keys_of(1)) == [Status.HIT]


@pytest.mark.parametrize("place", ["a file", "/proc/nowhere"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_bytes(b"")
    with pytest.raises(FileTierError, match=f"{place} cannot keep KV: .*name a folder"):
        FileTier(tmp_path / place, SPACE, SIZE, quota(1))
    with pytest.raises(FileTierError, match="hold no block of 10000 bytes"):
        FileTier(tmp_path, SPACE, SIZE, SLOT)


def test_a_store_finds_its_blocks_in_files_after_a_restart(opened: Open) -> None:
    keys = keys_of(1, 2)
    for expected in ("", "file"):
        arena = Arena.create(4 * SLOT, available_bytes=1 << 30)
        store = Store(arena, SIZE, [opened()])
        assert store.contains(keys) == [expected] * 2
        if not expected:
            blocks = [Block(keys[0], None, True), Block(keys[1], keys[0], True)]
            store.put_batch(blocks, [payload(key) for key in keys])
        into = [bytearray(SIZE) for _ in keys]
        results = store.get_batch(keys, into)
        assert [(each.status, each.tier) for each in results] == [
            (Status.HIT, expected or "host")
        ] * 2
        assert into == [payload(key) for key in keys]
        store.close()
        arena.close()


def test_a_prompt_that_is_longer_than_a_part_comes_whole_and_in_parts(
    tmp_path: Path, faults: Faults
) -> None:
    keys = keys_of(*range(1000))
    arena = Arena.create(1000 * 4096, available_bytes=1 << 30)
    tier = FileTier(tmp_path, SPACE, 100, 1 << 24, calls=faults.calls)
    clock = Clock()
    store = Store(arena, 100, [tier], clock)
    faults.go.clear()
    blocks = [Block(key, before, True) for key, before in zip(keys, [None, *keys], strict=False)]
    store.put_batch(blocks, [payload(key)[:100] for key in keys])
    until(lambda: faults.num_hanging == file_tier.NUM_SAVING)
    assert tier.stats().queued == 128, "others wait until these are saved"
    faults.go.set()
    until(lambda: tier.holds(keys) == [True] * 1000)
    store.index.remove_chains(None)

    faults.num_hanging = 0
    faults.go.clear()
    late = store.fetch(keys, 60)
    until(lambda: faults.num_hanging == file_tier.NUM_LOADING)
    clock.now = 60
    expire_first(tier)
    expire_first(tier)
    assert {result.status for result in late.result(60)} == {Status.TIMEOUT}
    assert tier.stats().failures == {"timeout": 256}, "others are not begun"
    until(lambda: store.index.num_free == 1000)
    fetching = [store.fetch(keys, 60), store.fetch(keys[500:], 60)]
    assert store.index.num_free == 1000 - 2 * 256, "others wait until these are there"
    faults.go.set()
    for each in fetching:
        assert {(result.status, result.tier) for result in each.result(60)} <= {
            (Status.HIT, "file"),
            (Status.HIT, "host"),
        }
    into = [bytearray(100) for _ in keys]
    assert {result.tier for result in store.get_batch(keys, into)} == {"host"}
    assert into == [payload(key)[:100] for key in keys]
    assert tier.stats().hits == 1000, "none is loaded twice"
    store.close()
    arena.close()


def test_many_threads_load_save_and_remove(opened: Open) -> None:
    tier = opened(num_blocks=6)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(40):
                chain = CHAINS[(seed + number) % len(CHAINS)]
                save(tier, chain)
                load(tier, chain)
                if number % 5 == seed % 5:
                    tier.remove(chain[2:])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    tier._volume.index.check_integrity([tier._volume.lease])
    assert not set(tier.stats().failures) - {"busy", "full", "stale"}
