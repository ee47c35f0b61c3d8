"""Two processes that share blocks, killed or stopped at every state of a read or write; TLS."""

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from ullage_testing import kv_peer
from ullage_testing.certificates import Authority
from ullage_testing.kv_peer import SPACE, KvPeer, LoopThread, bytes_of, keys_of, until

from ullage_common.wire.tls import Material, read_material
from ullage_kv import Arena, Status, Store
from ullage_kv.remote_tier import RemoteTier
from ullage_kv.service import PeerLeases

SIZE = 1_500_000
"""Bytes of a block, which is three chunks."""


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


@contextlib.contextmanager
def process(*arguments: object, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """A process of `kv_peer.py`, which is killed at the end."""
    command = [sys.executable, kv_peer.__file__, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment}
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def line(of: "subprocess.Popen[str]") -> str:
    assert of.stdout
    return of.stdout.readline().strip()


@contextlib.contextmanager
def reading_store(address: str, deadline_s: float = 60.0) -> Iterator[tuple[Store, RemoteTier]]:
    """A store with room for eight blocks over that of a peer."""
    tier = RemoteTier([address], SPACE, SIZE, deadline_s=deadline_s, look_s=60.0, resolve_s=0.01)
    arena = Arena.create(8 * (SIZE + 4096), available_bytes=1 << 30)
    store = Store(arena, SIZE, [tier])
    until(lambda: tier.peers())
    yield store, tier
    store.close()
    arena.close()


def test_another_process_reads_the_same_bytes() -> None:
    keys = keys_of(*range(4))
    with process("serve", 4, SIZE) as source, reading_store(line(source)) as (store, tier):
        into = [bytearray(SIZE) for _ in keys]
        results = store.get_batch(keys, into, deadline_s=60)
        assert [(each.status, each.tier) for each in results] == [(Status.HIT, "remote")] * 4
        assert into == [bytes_of(key, SIZE) for key in keys]
        assert source.stdin
        source.stdin.write("\n")
        source.stdin.flush()
        sent = json.loads(line(source))
        assert sent["read_bytes"] == tier.stats().read_bytes == 4 * SIZE
        assert sent["read_blocks"] == 4
        assert store.contains(keys) == ["host"] * 4


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_ends_in_the_middle_of_a_read(end: signal.Signals) -> None:
    keys = keys_of(*range(4))
    # A stopped one is known by the deadline alone.
    deadline_s = 60.0 if end is signal.SIGKILL else 5.0
    with (
        process("serve", 4, SIZE, PAUSE_AFTER="5") as source,
        reading_store(line(source), deadline_s) as (store, _),
    ):
        store.look(keys).result(60)
        fetched = store.fetch(keys, deadline_s)
        assert line(source) == "paused"
        source.send_signal(end)
        results = fetched.result(60)
        status = Status.UNAVAILABLE if end is signal.SIGKILL else Status.TIMEOUT
        assert [each.status for each in results[1:]] == [status] * 3
        # What came before is whole, and nothing half-read can be found or takes a slot.
        num_hits = sum(each.status is Status.HIT for each in results)
        assert store.contains(keys) == ["host"] * num_hits + ["remote"] * (4 - num_hits)
        assert store.index.num_free == store.index.num_slots - num_hits
        if num_hits:
            into = bytearray(SIZE)
            store.get_batch(keys[:1], [into])
            assert into == bytes_of(keys[0], SIZE)


@pytest.mark.parametrize("state", ["reserved", "writing", "written"])
def test_a_writer_that_is_killed_leaves_nothing(loop: LoopThread, state: str) -> None:
    now = [0.0]
    keys = keys_of(0, 1)
    with contextlib.closing(KvPeer(loop, block_bytes=1 << 20)) as receiver:
        receiver.service.leases = leases = PeerLeases(lambda: now[0])
        with process("use", receiver.address, 1 << 20, state) as writer:
            assert line(writer) == state
        assert writer.returncode == -signal.SIGKILL
        assert receiver.store.contains(keys) == ["", ""]
        assert leases.num_slots == 2
        now[0] = 9.0

        async def end_expired() -> None:
            leases.end_expired()

        loop.run(end_expired())
        assert receiver.store.contains(keys) == ["", ""]
        assert receiver.store.index.num_free == receiver.store.index.num_slots
        assert receiver.service.stats().written_blocks == 0
        receiver.put(keys)  # whoever is next can write them


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_ends_holds_nothing_for_long(loop: LoopThread, end: signal.Signals) -> None:
    now = [0.0]
    keys = keys_of(0, 1)
    with contextlib.closing(KvPeer(loop, block_bytes=8 << 20, num_slots=8)) as source:
        source.put(keys)
        source.service.leases = leases = PeerLeases(lambda: now[0])
        with process("use", source.address, 8 << 20, "reading") as reader:
            assert line(reader) == "reading"
            reader.send_signal(end)
            assert leases.num_slots == 2
            now[0] = 9.0

            async def end_expired() -> None:
                leases.end_expired()

            loop.run(end_expired())
            assert not leases
            assert source.service.stats().expired_leases == 1
        # All slots are free to be given to others.
        store = source.store
        others = keys_of(*range(10, 18))
        results = store.put_batch(others, [bytes(8 << 20)] * 8)
        assert {each.status for each in results} == {Status.STORED}


# TLS ---------------------------------------------------------------------------------------------


def material(authority: Authority, folder: Path) -> Material:
    issued = authority.issue(folder, "engine.example")
    return read_material(issued, issued, datetime.datetime.now(datetime.UTC))


def test_peers_need_a_certificate_and_renew_it(loop: LoopThread, tmp_path: Path) -> None:
    authority = Authority()
    own = material(authority, tmp_path / "peer")
    credentials = grpc.ssl_server_credentials(
        [(own.key, own.certificate)], own.ca, require_client_auth=True
    )
    keys = keys_of(1)
    shown = material(Authority(), tmp_path / "stranger")
    options = {"deadline_s": 60.0, "look_s": 60.0, "resolve_s": 0.01}
    with contextlib.closing(KvPeer(loop, credentials=credentials)) as peer:
        peer.put(keys)
        size = peer.store.block_bytes

        def start(name: str) -> RemoteTier:
            return RemoteTier(
                [peer.address], SPACE, size, server_name=name, material=lambda: shown, **options
            )

        with (
            contextlib.closing(start("engine.example")) as tier,
            contextlib.closing(start("other.example")) as misnamed,
        ):
            until(lambda: tier.peers() and "Tls handshake failed" in tier.peers()[0].problem)
            shown = material(authority, tmp_path / "renewed")
            until(lambda: not tier.look(keys).result(60) and tier.holds(keys) == [True])
            assert not tier.peers()[0].problem
            until(lambda: misnamed.peers() and "Hostname" in misnamed.peers()[0].problem)
            assert misnamed.holds(keys) == [False]
