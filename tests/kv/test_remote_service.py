"""What one peer may hold here, and what the service answers to wrong requests."""

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from ullage_testing.kv_peer import SPACE, KvPeer, LoopThread, bytes_of, keys_of, until

from ullage.kv.v1 import kv_pb2 as pb
from ullage.kv.v1 import kv_pb2_grpc
from ullage_common.wire.channels import open_blocking_channel
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_kv import Arena, Store
from ullage_kv.peer import MAX_CHUNK_BYTES
from ullage_kv.service import MAX_LEASE_S, MAX_LEASES, NewBlock, PeerLeases, Served

SIZE = 4096
GEOMETRY = pb.Geometry(namespace=SPACE, block_bytes=SIZE)


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture
def peer(loop: LoopThread) -> Iterator[KvPeer]:
    with contextlib.closing(KvPeer(loop, block_bytes=SIZE)) as peer:
        yield peer


@pytest.fixture
def stub(peer: KvPeer) -> Iterator[Any]:
    with open_blocking_channel(peer.address) as channel:
        yield kv_pb2_grpc.KVStoreServiceStub(channel)


def reserve(stub: Any, keys: list[bytes], lease_ms: int = 9000) -> pb.ReserveResponse:
    blocks = [pb.NewBlock(key=key) for key in keys]
    return stub.Reserve(pb.ReserveRequest(geometry=GEOMETRY, blocks=blocks, lease_ms=lease_ms))


def lookup(stub: Any, keys: list[bytes], lease_ms: int = 0) -> pb.LookupResponse:
    return stub.Lookup(pb.LookupRequest(geometry=GEOMETRY, keys=keys, lease_ms=lease_ms))


def refusal(call: Any, *arguments: Any) -> ServiceError:
    with pytest.raises(grpc.RpcError) as raised:
        answer = call(*arguments)
        if hasattr(answer, "__next__"):
            list(answer)
    return from_rpc_error(raised.value)


def test_a_block_is_readable_when_it_is_committed_and_not_before(peer: KvPeer, stub: Any) -> None:
    whole, _, short = keys = keys_of(1, 2, 3)
    lease = reserve(stub, keys).lease
    for number, key in enumerate(keys):
        data = bytes_of(key, SIZE)[: 1000 if key == short else SIZE]
        stub.Write(iter([pb.WriteRequest(lease=lease, block=number, data=data)]))
    assert lookup(stub, keys).held == [False] * 3
    assert [each == pb.ROOM_BUSY for each in reserve(stub, keys).rooms] == [True] * 3
    checksums = [xxhash.xxh3_128_digest(bytes_of(key, SIZE)) for key in keys]
    checksums[1] = bytes(16)
    written = [
        pb.WrittenBlock(block=number, checksum=each) for number, each in enumerate(checksums)
    ]
    request = pb.CommitRequest(lease=lease, blocks=[*written, written[0]])
    corrupt = pb.COMMITTED_CORRUPT
    assert stub.Commit(request).outcomes == [
        pb.COMMITTED_STORED,
        corrupt,
        corrupt,
        pb.COMMITTED_STALE,
    ]
    assert lookup(stub, keys).held == [True, False, False]
    assert reserve(stub, [whole]).rooms == [pb.ROOM_ALREADY_HAVE]
    assert peer.store.index.num_free == 15
    assert not peer.service.stats().held_slots
    assert refusal(stub.Commit, request).reason == "LEASE_OVER"


def test_leases_end_by_themselves(peer: KvPeer, stub: Any) -> None:
    keys = keys_of(1, 2)
    peer.put(keys[:1])
    held = lookup(stub, keys[:1], lease_ms=20)
    reserved = reserve(stub, keys[1:], lease_ms=20)
    assert held.lease_ms == reserved.lease_ms == 20
    until(lambda: peer.service.stats().expired_leases == 2)
    assert not peer.service.stats().held_slots
    assert refusal(stub.Read, pb.ReadRequest(lease=held.lease, keys=keys[:1])).reason == (
        "LEASE_OVER"
    )
    request = pb.WriteRequest(lease=reserved.lease, data=bytes(SIZE))
    assert refusal(stub.Write, iter([request])).reason == "LEASE_OVER"
    assert peer.store.index.num_free == 15


def test_leases_end_with_their_store(peer: KvPeer, stub: Any) -> None:
    """Another one may have begun in the same memory."""
    peer.put(keys_of(1))
    held = lookup(stub, keys_of(1), lease_ms=9000)
    reserved = reserve(stub, keys_of(2))
    before = peer.store
    after = Store(peer.arena, SIZE)
    peer.served = Served(after, SPACE)
    read = pb.ReadRequest(lease=held.lease, keys=keys_of(1))
    assert refusal(stub.Read, read).reason == "LEASE_OVER"
    write = pb.WriteRequest(lease=reserved.lease, data=b"x" * SIZE)
    assert refusal(stub.Write, iter([write])).reason == "LEASE_OVER"
    assert not peer.service.stats().leases
    assert not any(bytes(peer.arena.slot(1)))
    before.close()
    after.close()


def test_a_block_that_is_removed_is_sent_no_further(peer: KvPeer, stub: Any) -> None:
    peer.put(keys_of(1))
    held = lookup(stub, keys_of(1), lease_ms=9000)
    peer.store.remove(keys_of(1))
    peer.put(keys_of(1))  # in another slot
    read = pb.ReadRequest(lease=held.lease, keys=keys_of(1))
    assert refusal(stub.Read, read).reason == "LEASE_OVER"


def test_no_lease_is_longer_than_the_longest(stub: Any) -> None:
    reserved = reserve(stub, keys_of(1), lease_ms=1 << 31)
    assert reserved.lease_ms == 1000 * MAX_LEASE_S
    stub.Abort(pb.AbortRequest(lease=reserved.lease))
    assert reserve(stub, keys_of(1)).rooms == [pb.ROOM_RESERVED]


def test_one_peer_holds_a_quarter_at_most(peer: KvPeer, stub: Any) -> None:
    keys = keys_of(*range(6))
    peer.put(keys)
    first = lookup(stub, keys, lease_ms=9000)
    assert list(first.held) == [True] * 6
    assert first.num_pinned == 4
    assert lookup(stub, keys, lease_ms=9000).num_pinned == 0
    assert reserve(stub, keys_of(10)).rooms == [pb.ROOM_FULL]
    stub.Release(pb.ReleaseRequest(lease=first.lease))
    stub.Release(pb.ReleaseRequest(lease=first.lease))  # may be repeated
    assert lookup(stub, keys, lease_ms=9000).num_pinned == 4


def test_a_peer_has_so_many_leases(loop: LoopThread) -> None:
    with contextlib.closing(KvPeer(loop, block_bytes=SIZE, num_slots=4 * MAX_LEASES + 4)) as peer:
        peer.put(keys_of(1))
        with open_blocking_channel(peer.address) as channel:
            stub = kv_pb2_grpc.KVStoreServiceStub(channel)
            for _ in range(MAX_LEASES):
                assert lookup(stub, keys_of(1), lease_ms=9000).num_pinned == 1
            request = pb.LookupRequest(geometry=GEOMETRY, keys=keys_of(1), lease_ms=9000)
            refused = refusal(stub.Lookup, request)
            assert refused.reason == "TOO_MANY_LEASES"
            assert refused.retry_after_s == 1.0
            assert lookup(stub, keys_of(1)).held == [True]


def test_wrong_requests_name_what_is_wrong(peer: KvPeer, stub: Any) -> None:
    keys = keys_of(1)
    request = pb.LookupRequest(geometry=GEOMETRY, keys=[b"short"])
    assert "5 bytes" in refusal(stub.Lookup, request).message
    request = pb.LookupRequest(geometry=GEOMETRY, keys=keys * 4097)
    assert "at most 4096" in refusal(stub.Lookup, request).message
    reserved = pb.ReserveRequest(geometry=GEOMETRY, blocks=[pb.NewBlock(key=keys[0])])
    assert "lease_ms is 0" in refusal(stub.Reserve, reserved).message
    lease = reserve(stub, keys).lease
    refused = {
        "block": pb.WriteRequest(lease=lease, block=1, data=b"x"),
        "offset": pb.WriteRequest(lease=lease, offset=1, data=b"x"),
        "data": pb.WriteRequest(lease=lease, data=bytes(MAX_CHUNK_BYTES + 1)),
    }
    for field, write in refused.items():
        assert refusal(stub.Write, iter([write])).metadata == {"field": field}
    for data in (b"", bytes(SIZE + 1)):
        write = pb.WriteRequest(lease=lease, data=data)
        assert refusal(stub.Write, iter([write])).metadata == {"field": "data"}
    read = pb.ReadRequest(lease=lease, keys=keys)
    assert "not pinned" in refusal(stub.Read, read).message
    assert peer.service.stats().written_bytes == 0


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["pin", "reserve", "end", "wait"]),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 15),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(_STEPS, st.integers(1, 24))
def test_peers_never_hold_more_than_their_shares(
    steps: list[tuple[str, str, int]], num_slots: int
) -> None:
    arena = Arena.create(num_slots * SIZE, available_bytes=1 << 30)
    store = Store(arena, SIZE)
    keys = keys_of(*range(16))
    new = keys_of(*range(20, 36))
    store.put_batch(keys, [bytes(SIZE)] * 16)
    now = 0.0
    leases = PeerLeases(lambda: now)
    share = max(1, num_slots // 4)
    opened = []
    for step, peer, number in steps:
        if step in ("pin", "reserve"):
            held = leases.open(store, peer, 5.0)
            opened.append(held)
            for key in (keys if step == "pin" else new)[number:][: leases.room(store.index, peer)]:
                if step == "pin" and (ref := held.lease.pin(key)):
                    held.pinned[key] = ref
                elif step == "reserve" and (ref := held.lease.reserve(key).ref):
                    held.reserved[len(held.reserved)] = NewBlock(key, None, ref)
        elif step == "end" and opened:
            leases.end(opened.pop(number % len(opened)).number)
        else:
            now += number / 4
            leases.end_expired()
        own = [each for each in opened if not each.lease.is_over and each.peer == peer]
        assert sum(each.num_slots for each in own) <= share
        assert leases.num_slots <= 2 * share
    leases.close()
    assert not leases.num_slots
    store.index.check_integrity([])
    store.close()
    arena.close()


def test_leases_that_end_while_they_are_counted_are_no_error() -> None:
    """Metrics are read by a thread of their own."""
    arena = Arena.create(2 * SIZE, available_bytes=1 << 30)
    store = Store(arena, SIZE)
    leases = PeerLeases()

    class Ending(dict[bytes, Any]):
        def __len__(self) -> int:
            leases.end(last.number)
            return 0

    leases.open(store, "a", 5.0).pinned = Ending()
    last = leases.open(store, "b", 5.0)
    assert leases.num_slots == 0
    assert len(leases) == 1
    leases.close()
    store.close()
    arena.close()


def test_who_has_another_namespace_is_not_told_the_one_here(peer: KvPeer, stub: Any) -> None:
    geometry = pb.Geometry(namespace=b"x" * 32, block_bytes=SIZE)
    refused = refusal(stub.Lookup, pb.LookupRequest(geometry=geometry))
    assert refused.reason == "OTHER_NAMESPACE"
    assert SPACE.hex()[:8] not in refused.message
