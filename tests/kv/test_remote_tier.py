"""Blocks from and to peers: real servers on loopback, and what peers may do wrong."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from grpc import _channel
from hypothesis import given
from hypothesis import strategies as st
from ullage_testing.kv_peer import SPACE, KvPeer, LoopThread, bytes_of, keys_of, until
from ullage_testing.ports import free_port
from ullage_testing.thread_limit import no_new_threads

from ullage_kv import Arena, Block, Result, Status, Store, Transfer
from ullage_kv.remote_tier import MAX_LOADS, Hints, RemoteTier
from ullage_kv.service import KVStoreService
from ullage_kv.tier import MAX_FAILURES

SIZE = 40_000
StartTier = Callable[..., RemoteTier]


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@pytest.fixture
def peer(loop: LoopThread) -> Iterator[KvPeer]:
    with contextlib.closing(KvPeer(loop)) as peer:
        yield peer


@pytest.fixture
def start_tier() -> Iterator[StartTier]:
    with contextlib.ExitStack() as stack:

        def start(*addresses: str, **options: Any) -> RemoteTier:
            options = {"deadline_s": 60.0, "look_s": 60.0, "resolve_s": 0.01, **options}
            tier = RemoteTier(addresses, SPACE, options.pop("block_bytes", SIZE), **options)
            stack.enter_context(contextlib.closing(tier))
            until(lambda: len(tier.peers()) == len(addresses))
            return tier

        yield start


def load(tier: RemoteTier, keys: Sequence[bytes], deadline_s: float = 60) -> list[Result]:
    """Looks blocks up, loads them, and holds those that came against what they must be."""
    tier.look(keys).result(60)
    memory = [bytearray(SIZE) for _ in keys]
    transfers = [Transfer(key, memoryview(each)) for key, each in zip(keys, memory, strict=True)]
    results = tier.load(transfers, deadline_s).result(60)
    for key, each, result in zip(keys, memory, results, strict=True):
        assert result.status is not Status.HIT or each == bytes_of(key, SIZE)
    return results


def statuses(results: Sequence[Result]) -> list[Status]:
    return [result.status for result in results]


def test_a_prefix_comes_from_several_peers(
    loop: LoopThread, peer: KvPeer, start_tier: StartTier
) -> None:
    keys = keys_of(*range(6))
    with contextlib.closing(KvPeer(loop)) as second:
        peer.put(keys[:3])
        second.put(keys[2:5])
        tier = start_tier(peer.address, second.address)
        assert tier.holds(keys) == [False] * 6
        assert statuses(load(tier, keys)) == [Status.HIT] * 5 + [Status.MISS]
        assert tier.holds(keys) == [True] * 5 + [False]
        read = [each.service.stats().read_bytes for each in (peer, second)]
        assert sum(read) == tier.stats().read_bytes == 5 * SIZE
        assert all(read)
        until(lambda: not peer.service.stats().leases and not second.service.stats().leases)


def test_more_than_one_peer_may_pin_comes_in_parts(peer: KvPeer, start_tier: StartTier) -> None:
    keys = keys_of(*range(14))
    peer.put(keys)
    tier = start_tier(peer.address)
    assert statuses(load(tier, keys)) == [Status.HIT] * 14
    assert peer.service.stats().expired_leases == 0


def test_a_wrong_hint_is_a_miss(peer: KvPeer, start_tier: StartTier) -> None:
    keys = keys_of(1, 2)
    peer.put(keys)
    tier = start_tier(peer.address)
    tier.look(keys).result(60)
    peer.store.remove(keys[1:])
    memory = [memoryview(bytearray(SIZE)) for _ in keys]
    transfers = [Transfer(key, each) for key, each in zip(keys, memory, strict=True)]
    assert statuses(tier.load(transfers, 60).result(60)) == [Status.HIT, Status.MISS]
    assert tier.holds(keys) == [True, False]


def test_an_engine_leaves_itself_out(peer: KvPeer, start_tier: StartTier) -> None:
    keys = keys_of(1)
    peer.put(keys)
    tier = start_tier(peer.address, instance=peer.service.instance, copies=True)
    tier.look(keys).result(60)
    assert tier.holds(keys) == [False]
    assert tier.peers()[0].is_self
    assert tier.wants(keys) == [False]


def test_what_is_removed_is_not_read_from_peers_either(peer: KvPeer, start_tier: StartTier) -> None:
    keys = keys_of(1)
    peer.put(keys)
    tier = start_tier(peer.address)
    tier.look(keys).result(60)
    tier.remove(keys)
    tier.look(keys).result(60)
    assert tier.holds(keys) == [False]


def test_peers_are_not_read_while_all_is_distrusted(
    peer: KvPeer, start_tier: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(1, 2)
    peer.put(keys)
    tier = start_tier(peer.address)
    tier.remove(keys[1:])
    assert tier.stats().backend == "gRPC"
    for _ in range(2):
        tier.remove_chains(None)
    assert statuses(load(tier, keys)) == [Status.MISS] * 2
    assert tier.stats().backend == "gRPC, distrusted"
    assert caplog.text.count("KV may be damaged") == 1
    tier.trust()
    assert statuses(load(tier, keys)) == [Status.HIT, Status.MISS]
    assert tier.stats().backend == "gRPC"


def test_a_store_copies_what_it_keeps_to_a_peer_and_finds_it_there(
    peer: KvPeer, start_tier: StartTier
) -> None:
    tier = start_tier(peer.address, copies=True)
    until(lambda: tier.wants(keys_of(1)) == [True])
    arena = Arena.create(4 * 40960, available_bytes=1 << 30)
    store = Store(arena, SIZE, [tier])
    keys = keys_of(*range(3))
    parents = [None, *keys]
    blocks = [Block(key, parent, True) for key, parent in zip(keys, parents, strict=False)]
    store.put_batch(blocks, [bytes_of(key, SIZE) for key in keys])
    until(lambda: peer.store.contains(keys) == ["host"] * 3)
    until(lambda: not tier.stats().queued)
    assert peer.service.stats().written_bytes == tier.stats().written_bytes == 3 * SIZE
    assert tier.wants(keys) == [False] * 3  # one copy is enough
    store.put_batch(keys_of(20, 21, 22, 23), [bytes(SIZE)] * 4)  # nothing else is left in the host
    into = [bytearray(SIZE) for _ in keys]
    results = store.get_batch(keys, into)
    assert [result.tier for result in results] == ["remote"] * 3
    assert into == [bytes_of(key, SIZE) for key in keys]
    until(lambda: not peer.service.stats().leases)
    assert not peer.service.stats().expired_leases
    # A prefix stays whole there: its end goes first.
    peer.store.put_batch(keys_of(*range(30, 44)), [bytes(SIZE)] * 14)
    assert peer.store.contains(keys) == ["host", "host", ""]
    store.close()
    arena.close()


def test_what_a_peer_has_or_has_no_room_for(peer: KvPeer, start_tier: StartTier) -> None:
    tier = start_tier(peer.address, copies=True)
    until(lambda: tier.wants(keys_of(1)) == [True])
    keys = keys_of(*range(7))
    peer.put(keys[:1])
    transfers = [Transfer(key, memoryview(bytearray(bytes_of(key, SIZE)))) for key in keys]
    results = statuses(tier.save(transfers).result(60))
    # One peer writes to a quarter of the slots at a time.
    assert results == [Status.EXISTS] + [Status.STORED] * 4 + [Status.FULL] * 2
    assert peer.store.contains(keys[1:5]) == ["host"] * 4
    assert tier.stats().failures == {"full": 2}


def test_nothing_is_copied_unless_it_is_wanted(peer: KvPeer, start_tier: StartTier) -> None:
    tier = start_tier(peer.address)
    assert tier.wants(keys_of(1)) == [False]
    transfer = Transfer(keys_of(1)[0], memoryview(bytearray(SIZE)))
    assert statuses(tier.save([transfer]).result(60)) == [Status.UNAVAILABLE]


# peers that are wrong ----------------------------------------------------------------------------


class WrongBytes(KVStoreService):
    async def _read(self, *args: Any) -> Any:
        async for chunk in super()._read(*args):
            chunk.data = bytes(len(chunk.data))
            yield chunk


class TooShort(KVStoreService):
    async def _read(self, *args: Any) -> Any:
        async for chunk in super()._read(*args):
            chunk.data = chunk.data[:-1]
            yield chunk


class TooLong(KVStoreService):
    async def _read(self, *args: Any) -> Any:
        async for chunk in super()._read(*args):
            chunk.data += b"x"
            yield chunk


class OtherPlace(KVStoreService):
    async def _read(self, *args: Any) -> Any:
        async for chunk in super()._read(*args):
            chunk.offset += 1
            yield chunk


class OtherBlock(KVStoreService):
    async def _read(self, *args: Any) -> Any:
        async for chunk in super()._read(*args):
            chunk.block += 7
            yield chunk


class ForEver(KVStoreService):
    async def _read(self, *args: Any) -> Any:
        async for chunk in super()._read(*args):
            while True:
                yield chunk


class OtherLength(KVStoreService):
    async def Lookup(self, request: Any, context: Any) -> Any:
        answer = await super().Lookup(request, context)
        if request.lease_ms:
            answer.held.append(True)
        return answer


@pytest.mark.parametrize(
    "service", [WrongBytes, TooShort, TooLong, OtherPlace, OtherBlock, OtherLength]
)
def test_wrong_bytes_are_never_hits_and_count_against_a_peer(
    loop: LoopThread, start_tier: StartTier, service: Callable[..., KVStoreService]
) -> None:
    keys = keys_of(1)
    with contextlib.closing(KvPeer(loop, service=service)) as liar:
        liar.put(keys)
        tier = start_tier(liar.address, resolve_s=60.0)
        tier.look(keys).result(60)
        transfers = [Transfer(keys[0], memoryview(bytearray(SIZE)))]
        for _ in range(MAX_FAILURES):
            tier._hints.learn(liar.address, keys, [True])
            assert statuses(tier.load(transfers, 60).result(60)) == [Status.CORRUPT]
        assert tier.stats().failures == {"corrupt": MAX_FAILURES}
        assert tier.peers()[0].problem
        assert tier.peers()[0].is_left_alone
        assert statuses(tier.load(transfers, 60).result(60)) == [Status.MISS]


def test_what_came_right_stays_when_a_peer_does_not_stop(
    loop: LoopThread, start_tier: StartTier
) -> None:
    with contextlib.closing(KvPeer(loop, service=ForEver)) as liar:
        keys = keys_of(1, 2)
        liar.put(keys)
        tier = start_tier(liar.address, resolve_s=60.0)
        assert statuses(load(tier, keys)) == [Status.HIT, Status.CORRUPT]
        assert "where 40000 of the 40000 bytes of a block had come" in tier.peers()[0].problem


def test_a_silent_peer_costs_a_deadline_and_then_nothing(start_tier: StartTier) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        tier = start_tier(address, deadline_s=0.2, look_s=0.2)
        until(lambda: not tier.look(keys_of(1)).result(60) and tier.peers()[0].is_left_alone)
        assert "DEADLINE_EXCEEDED" in tier.peers()[0].problem
        tier.look(keys_of(1)).result(60)
        assert tier.holds(keys_of(1)) == [False]


def test_a_peer_that_went_silent_costs_a_load_its_deadline(
    loop: LoopThread, start_tier: StartTier
) -> None:
    """Its load is cut short, and others are never begun once the breaker is open."""

    class Silent(KVStoreService):
        async def _read(self, *args: Any) -> Any:
            await asyncio.Event().wait()
            yield None

    keys = keys_of(1)
    with contextlib.closing(KvPeer(loop, service=Silent)) as silent:
        silent.put(keys)
        tier = start_tier(silent.address, deadline_s=0.2, look_s=60.0)
        assert statuses(load(tier, keys)) == [Status.TIMEOUT]


def test_a_peer_that_closes_is_left_alone_until_it_is_back(
    loop: LoopThread, start_tier: StartTier, caplog: pytest.LogCaptureFixture
) -> None:
    """Each change is one line of the log."""
    caplog.set_level("INFO", "ullage_kv.remote_tier")
    keys = keys_of(1, 2)
    port = free_port()
    with contextlib.closing(KvPeer(loop, port=port)) as peer:
        peer.put(keys)
        tier = start_tier(peer.address)
        assert statuses(load(tier, keys)) == [Status.HIT] * 2
        peer.stop()
        transfers = [Transfer(key, memoryview(bytearray(SIZE))) for key in keys]
        for _ in range(MAX_FAILURES):
            assert set(statuses(tier.load(transfers, 60).result(60))) == {Status.UNAVAILABLE}
        assert tier.holds(keys) == [False] * 2
        assert tier.peers()[0].is_left_alone
        with contextlib.closing(KvPeer(loop, port=port)) as again:
            again.put(keys)
            until(lambda: not tier.peers()[0].is_left_alone)
            assert statuses(load(tier, keys)) == [Status.HIT] * 2
            until(lambda: len(peer_lines(caplog)) >= 3)
    (reached, _), (still_reached, left_alone), (again_reached, _) = peer_lines(caplog)[:3]
    assert reached == again_reached == [peer.address]
    assert not still_reached
    assert left_alone[peer.address].startswith(f"{peer.address}: ")


def peer_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[Any, Any]]:
    return [
        (record.__dict__["peers"], record.__dict__["left_alone"])
        for record in caplog.records
        if record.getMessage() == "peers"
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"namespace": b"x" * 32}, "OTHER_NAMESPACE: namespace is not"),
        ({"block_bytes": 50_000}, "OTHER_BLOCK_SIZE: block_bytes is 40000 and here 50000"),
    ],
)
def test_engines_with_other_blocks_refuse(
    loop: LoopThread, start_tier: StartTier, options: dict[str, Any], reason: str
) -> None:
    with contextlib.closing(KvPeer(loop, **options)) as other:
        tier = start_tier(other.address)
        until(lambda: not tier.look(keys_of(1)).result(60) and tier.peers()[0].is_left_alone)
        assert reason in tier.peers()[0].problem


def test_an_engine_without_a_store_says_so(peer: KvPeer, start_tier: StartTier) -> None:
    peer.served = None
    tier = start_tier(peer.address)
    until(lambda: not tier.look(keys_of(1)).result(60) and "NO_STORE" in tier.peers()[0].problem)
    assert "set memory.tiers.host.size" in tier.peers()[0].problem


def test_more_loads_than_there_are_threads_are_refused_at_once(
    loop: LoopThread, start_tier: StartTier
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = start_tier(f"127.0.0.1:{silent.getsockname()[1]}")
        tier._hints.learn(tier.peers()[0].address, keys_of(1), [True])
        transfers = [Transfer(keys_of(1)[0], memoryview(bytearray(SIZE)))]
        loads = [tier.load(transfers, 60) for _ in range(17)]
        assert statuses(loads[-1].result(60)) == [Status.BUSY]
        assert tier.stats().queued == 16
        tier.close()  # ends what is under way
        for each in loads[:-1]:
            assert statuses(each.result(60)) == [Status.UNAVAILABLE]
        assert statuses(tier.load(transfers, 60).result(60)) == [Status.UNAVAILABLE]
        assert tier.look(keys_of(1)).done()


# hints -------------------------------------------------------------------------------------------

_ANSWERS = st.tuples(
    st.sampled_from(["a", "b", "c"]), st.integers(0, 7), st.booleans(), st.floats(0, 5)
)


@given(st.lists(_ANSWERS, max_size=40))
def test_hints_are_the_newest_answers_of_each_peer_and_bounded(
    answers: list[tuple[str, int, bool, float]],
) -> None:
    now = 0.0
    hints = Hints(max_keys=4, ttl_s=6.0, clock=lambda: now)
    newest: dict[tuple[str, int], float | None] = {}
    for peer, number, is_held, pause in answers:
        hints.learn(peer, [bytes([number])], [is_held])
        newest[peer, number] = now + 6.0 if is_held else None
        assert len(hints) <= 4
        assert (peer in hints.peers(bytes([number]))) == is_held
        now += pause
        for other in range(8):
            for said in hints.peers(bytes([other])):
                until_s = newest[said, other]
                assert until_s is not None
                assert now < until_s
    hints.forget([bytes([number]) for number in range(8)])
    assert len(hints) == 0


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        UnicodeError("label empty or too long"),
        RuntimeError("unforeseen"),
    ],
)
def test_peers_are_looked_for_again_after_any_error(
    peer: KvPeer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    resolve = socket.getaddrinfo
    port = peer.address.rpartition(":")[2]
    errors = [error, error]

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "peers.test" and errors:
            raise errors.pop()
        return resolve("127.0.0.1" if host == "peers.test" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    tier = RemoteTier([f"peers.test:{port}"], SPACE, SIZE, deadline_s=60.0, resolve_s=0.01)
    with contextlib.closing(tier):
        until(lambda: len(tier.peers()) == 1)
    assert not errors


def test_a_name_that_no_dns_server_accepts_is_logged(
    peer: KvPeer, caplog: pytest.LogCaptureFixture
) -> None:
    tier = RemoteTier(["a..b:9000", peer.address], SPACE, SIZE, deadline_s=60.0, resolve_s=0.01)
    with contextlib.closing(tier):
        until(lambda: len(tier.peers()) == 1)
    [record, *_] = [each for each in caplog.records if each.message == "cannot resolve"]
    assert vars(record)["target"] == "a..b:9000"


def test_a_load_without_a_thread_fails_and_leaves_no_trace(
    peer: KvPeer, start_tier: StartTier
) -> None:
    keys = keys_of(1)
    peer.put(keys)
    tier = start_tier(peer.address)
    tier.look(keys).result(60)
    transfers = [Transfer(keys[0], memoryview(bytearray(SIZE)))]

    with no_new_threads():
        for _ in range(MAX_LOADS + 1):
            assert statuses(tier.load(transfers, 60).result(60)) == [Status.UNAVAILABLE]
    assert tier.stats().queued == 0
    assert statuses(tier.load(transfers, 60).result(60)) == [Status.HIT]


def test_a_look_without_a_thread_is_unanswered_and_the_next_one_is_answered(
    peer: KvPeer, start_tier: StartTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC starts a thread for the calls of a channel that has none."""
    keys = keys_of(1)
    peer.put(keys)
    tier = start_tier(peer.address)
    refusals = 1
    start = _channel._run_channel_spin_thread

    def start_later(state: object) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise RuntimeError("can't start new thread")
        start(state)

    monkeypatch.setattr(_channel, "_run_channel_spin_thread", start_later)
    # While the channel's first call runs, it has its thread.
    until(lambda: tier.look(keys_of(2)).result(60) is None and not refusals)
    tier.look(keys).result(60)
    assert tier.holds(keys) == [True]
    assert statuses(tier.load([Transfer(keys[0], memoryview(bytearray(SIZE)))], 60).result(60)) == [
        Status.HIT
    ]
