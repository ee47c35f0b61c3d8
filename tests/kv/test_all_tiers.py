"""Host, remote and file tier under one store: whatever is done and damaged, what is read under a
key is what was stored under it."""

import contextlib
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ullage_testing.kv_peer import SPACE, KvPeer, LoopThread, bytes_of, keys_of, until
from ullage_testing.ports import hold, port_of

from ullage_kv import Arena, Block, FileTier, Status, Store
from ullage_kv.index import Lease, SlotRef
from ullage_kv.remote_tier import RemoteTier

SIZE = 6_000
SLOT = 8_192
CHAINS = [keys_of(a, b, c) for a in range(2) for b in range(2) for c in range(1)]
MAX_BYTES = 4096 + 6 * (SLOT + 128)
"""Of the file tier: six blocks."""


class TiersMachine(RuleBasedStateMachine):
    """One engine's store, with a peer and files below it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ullage-test-"))
        self.loop = LoopThread()
        self.held = hold()
        self.peer = self.new_peer()
        self.is_up = True
        self.arena = Arena.create(4 * SLOT, available_bytes=1 << 30)
        self.open()

    def new_peer(self) -> KvPeer:
        return KvPeer(self.loop, num_slots=32, block_bytes=SIZE, port=port_of(self.held))

    def open(self) -> None:
        self.remote = RemoteTier(
            [self.peer.address], SPACE, SIZE, deadline_s=30.0, look_s=5.0, resolve_s=0.01
        )
        until(self.remote.peers)
        files = FileTier(self.folder, SPACE, SIZE, MAX_BYTES)
        self.store = Store(self.arena, SIZE, [self.remote, files])
        self.lease: Lease = self.store.index.lease()
        self.reserved: list[tuple[bytes, SlotRef]] = []
        self.removed: set[SlotRef] = set()
        """Slots that were reserved when their blocks were removed: nobody finds them."""

    @rule(
        keys=st.sampled_from(CHAINS),
        depth=st.just(3) | st.integers(1, 3),
        is_kept=st.just(True) | st.booleans(),
    )
    def put(self, keys: list[bytes], depth: int, is_kept: bool) -> None:
        parents = [None, *keys]
        blocks = [
            Block(key, parent, is_kept) for key, parent in zip(keys[:depth], parents, strict=False)
        ]
        results = self.store.put_batch(blocks, [bytes_of(each.key, SIZE) for each in blocks])
        # All slots may be reserved by who writes them itself, or be read to be copied down.
        expected = {Status.STORED, Status.EXISTS, Status.FULL, Status.BUSY}
        assert {result.status for result in results} <= expected

    @rule(keys=st.sampled_from(CHAINS))
    def get(self, keys: list[bytes]) -> None:
        into = [bytearray(SIZE) for _ in keys]
        for key, memory, result in zip(keys, into, self.store.get_batch(keys, into), strict=True):
            if result.status is Status.HIT:
                assert result.tier in ("host", "remote", "file")
                assert bytes(memory) == bytes_of(key, SIZE), result

    @rule(keys=st.sampled_from(CHAINS), depth=st.integers(0, 2))
    def begin_to_write(self, keys: list[bytes], depth: int) -> None:
        block = Block(keys[depth], keys[depth - 1] if depth else None)
        [ref] = self.store.offer(self.lease, [block])
        if ref is not None:
            self.arena.slot(ref.slot, SIZE)[: SIZE // 2] = bytes_of(keys[depth], SIZE)[: SIZE // 2]
            self.reserved.append((keys[depth], ref))

    @rule()
    def end_writing(self) -> None:
        if not self.reserved:  # no precondition: threads decide whether there was a slot
            return
        key, ref = self.reserved.pop()
        self.arena.slot(ref.slot, SIZE)[:] = bytes_of(key, SIZE)
        expected = Status.STALE if ref in self.removed else Status.STORED
        [result] = self.store.committed(self.lease, [ref], [Block(key)])
        assert result.status is expected

    @rule()
    def lose_writer(self) -> None:
        """Whoever was writing is gone; nobody reads what it has left."""
        self.lease.close()
        self.lease = self.store.index.lease()
        self.reserved = []

    @rule(keys=st.sampled_from(CHAINS), depth=st.integers(1, 3))
    def put_at_peer(self, keys: list[bytes], depth: int) -> None:
        self.peer.put(keys[:depth])

    @rule(keys=st.sampled_from(CHAINS))
    def forget_at_peer(self, keys: list[bytes]) -> None:
        self.peer.store.remove(keys)

    @rule()
    def lose_peer(self) -> None:
        if self.is_up:
            self.peer.stop()
            self.is_up = False

    @rule()
    def replace_peer(self) -> None:
        if not self.is_up:
            self.peer.store.close()
            self.peer = self.new_peer()
            self.is_up = True

    @rule(keys=st.sampled_from(CHAINS), depth=st.integers(0, 2))
    def remove(self, keys: list[bytes], depth: int) -> None:
        self.removed |= {ref for key, ref in self.reserved if key == keys[depth]}
        self.store.remove([keys[depth]])
        assert self.store.contains([keys[depth]]) == [""]

    @rule(
        place=st.integers(1 << 12, 1 << 16) | st.integers(0, 1 << 12),
        is_cut=st.sampled_from([False, False, True]),
    )
    def damage_files(self, place: int, is_cut: bool) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file() and (size := path.stat().st_size):
                with path.open("r+b") as file:
                    file.seek(place % size)
                    byte = file.read(1)
                    file.seek(place % size)
                    file.write(bytes([byte[0] ^ 0x55]))
                    if is_cut:
                        file.truncate(place % size)

    @rule()
    def restart(self) -> None:
        """The engine ends and another one begins with its files; host memory is lost."""
        self.lease.close()
        self.store.close()
        self.open()

    @invariant()
    def files_keep_their_bound(self) -> None:
        used = sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*"))
        assert used <= MAX_BYTES + (64 << 10), "more than the quota and its folders"
        half_written = {key for key, ref in self.reserved if ref not in self.removed}
        assert not half_written & set(self.store.index.readable_keys()), "read half-written"

    def teardown(self) -> None:
        self.lease.close()
        self.store.close()
        if self.is_up:
            self.peer.close()
        self.held.close()
        self.loop.close()
        with contextlib.suppress(BufferError):
            self.arena.close()
        shutil.rmtree(self.folder)


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=50)
