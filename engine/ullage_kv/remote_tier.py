"""The remote tier, which reads blocks from peers' host memory and copies blocks to it.

The tier keeps hints about which peer has which block: `look` queries all peers, and `holds` relies
on the resulting hints. A hint may be wrong, so a read first asks the peer to pin the blocks. If a
peer is dead or slow, or violates the protocol, a few RPCs fail or time out. The peer's circuit
breaker then opens until the peer answers a look-up again.
"""

import itertools
import logging
import random
import socket
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ullage.kv.v1 import kv_pb2 as pb
from ullage_common.process.addresses import NO_RECORDS, by_best_family, is_ip
from ullage_common.wire.tls import Material
from ullage_kv.futures import all_done, done
from ullage_kv.keys import CHAIN_BYTES
from ullage_kv.peer import MAX_KEYS, REMOTE, Identity, PeerClient
from ullage_kv.results import MISS, Result, Status
from ullage_kv.tier import TierCounter, TierStats, Transfer

MAX_HINTS = 1 << 16
"""Maximum number of blocks for which hints are kept."""
HINT_S = 30.0
"""Seconds for which a hint is valid."""
LOOK_SHARE = 4
"""Divisor N: a look-up may take only 1/N of a load's deadline, because requests wait for it."""
RESOLVE_S = 5.0
"""Interval in seconds at which peer names are resolved and unresponsive peers are retried."""
MAX_LOADS = 16
"""Maximum number of concurrent loads."""
MAX_LOOKS = 64
"""Maximum number of concurrent look-ups."""
MAX_QUEUED = 256
"""Maximum number of blocks waiting to be copied to a peer. Waiting blocks are pinned."""
BATCH_BYTES = 32 << 20
"""Number of bytes after which no more blocks are added to a batch of copies."""

_NOT_THERE = {Status.MISS, Status.CORRUPT}
"""Statuses of reads which show that a hint was wrong."""

log = logging.getLogger(__name__)


class Hints:
    """Remembers which peers probably have a block, for a limited time and number of blocks."""

    def __init__(
        self,
        max_keys: int = MAX_HINTS,
        ttl_s: float = HINT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_keys = max_keys
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._until: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def learn(self, peer: str, keys: Iterable[bytes], held: Iterable[bool]) -> None:
        """Record a peer's answer about which of the blocks it has."""
        until = self._clock() + self._ttl_s
        with self._lock:
            for key, is_held in zip(keys, held, strict=True):
                if is_held:
                    self._until.setdefault(key, {})[peer] = until
                    self._until.move_to_end(key)
                elif key in self._until:
                    self._until[key].pop(peer, None)
                    if not self._until[key]:
                        del self._until[key]
            while len(self._until) > self._max_keys:
                self._until.popitem(last=False)

    def peers(self, key: bytes) -> list[str]:
        """Return the addresses of the peers that probably have the block."""
        now = self._clock()
        with self._lock:
            return [peer for peer, until in self._until.get(key, {}).items() if now < until]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop all hints about these blocks."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)


@dataclass(frozen=True, slots=True)
class PeerState:
    """One peer's state, for statistics and logs."""

    address: str
    is_self: bool
    is_left_alone: bool
    free_blocks: int
    problem: str
    """Description of the last failure, or "" if the peer has answered since."""


class _Copies(NamedTuple):
    """The blocks of one `save` call that are waiting to be copied to a peer."""

    transfers: Sequence[Transfer]
    future: "Future[list[Result]]"


class RemoteTier:
    """Reads and writes blocks in the host memory of peers, over `KVStoreService`."""

    name = REMOTE

    def __init__(
        self,
        targets: Sequence[str],
        namespace: bytes,
        block_bytes: int,
        *,
        instance: str = "",
        deadline_s: float = 1.0,
        copies: bool = False,
        server_name: str = "",
        material: Callable[[], Material | None] = lambda: None,
        look_s: float | None = None,
        resolve_s: float = RESOLVE_S,
    ) -> None:
        """Start the tier's threads, which begin to look for peers.

        Args:
            targets: `host:port` of peers. A name may have several addresses, which may change.
            namespace: namespace of the keys. Peers with a different namespace refuse requests.
            block_bytes: size of every block.
            instance: `KVStoreService.instance` of this process, by which the tier recognises its
                own address among the peers.
            deadline_s: maximum seconds for one load, and for one batch of copies.
            copies: whether to copy blocks to peers.
            server_name: name in the peers' certificates, or "" to expect the target's host name.
            material: returns the newest client certificate, or None if peers use plaintext.
            look_s: maximum seconds for a look-up, or None for a quarter of the deadline.
            resolve_s: seconds between name resolutions.
        """
        self._targets = targets
        geometry = pb.Geometry(namespace=namespace, block_bytes=block_bytes)
        self._own = Identity(geometry, instance or uuid.uuid4().hex, material)
        self._block_bytes = block_bytes
        self._deadline_s = deadline_s
        self._copies = copies
        self._server_name = server_name
        self._look_s = deadline_s / LOOK_SHARE if look_s is None else look_s
        self._resolve_s = resolve_s

        self._counter = TierCounter()
        self._hints = Hints()
        self._peers: dict[str, PeerClient] = {}
        self._removed: OrderedDict[bytes, None] = OrderedDict()
        self._removed_chains = set[bytes]()
        self._is_distrusted = False
        """Whether reads from peers are suspended until `trust` is called."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._num_loads = 0
        self._num_looks = 0

        self._loads = ThreadPoolExecutor(MAX_LOADS, "kv-remote")
        self._queue: deque[_Copies] = deque()
        self._queued: set[bytes] = set()
        self._has_copies = threading.Condition()
        threads = [self._keep_resolving, self._keep_copying] if copies else [self._keep_resolving]
        self._threads = [
            threading.Thread(target=each, name="kv-remote", daemon=True) for each in threads
        ]
        for thread in self._threads:
            thread.start()

    def peers(self) -> list[PeerState]:
        """Return the state of all peers."""
        return [
            PeerState(
                address=peer.address,
                is_self=peer.is_self,
                is_left_alone=peer.breaker.is_open,
                free_blocks=peer.free_blocks,
                problem=peer.problem,
            )
            for peer in self._peers.values()
        ]

    # the directory -------------------------------------------------------------------------------

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        asked = [key for key in keys if not self._holders(key)]
        peers = [each for each in self._peers.values() if not each.is_self]
        with self._lock:
            if not asked or not peers or self._num_looks >= MAX_LOOKS:
                return done(None)
            self._num_looks += 1
        parts = [asked[start : start + MAX_KEYS] for start in range(0, len(asked), MAX_KEYS)]
        answered = all_done(
            [self._ask(peer, part) for peer, part in itertools.product(peers, parts)]
        )
        answered.add_done_callback(self._end_look)
        return answered

    def _end_look(self, _: object) -> None:
        with self._lock:
            self._num_looks -= 1

    def _ask(self, peer: PeerClient, keys: Sequence[bytes]) -> "Future[None]":
        """Ask a peer which of the blocks it has, unless its circuit breaker is open.

        Returns:
            A future that completes once the peer's answer has been added to the hints.
        """
        if not peer.breaker.allows():
            return done(None)

        answered = Future[None]()

        def learn(held: list[bool]) -> None:
            if held:
                self._hints.learn(peer.address, keys, held)
            answered.set_result(None)

        peer.look(keys, self._look_s, learn)
        return answered

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return [bool(self._holders(key)) for key in keys]

    def _holders(self, key: bytes) -> list[PeerClient]:
        """Return the peers that probably have a block, according to the hints.

        Peers whose circuit breaker is open are skipped.
        """
        if self._is_removed(key):
            return []
        peers = [self._peers.get(address) for address in self._hints.peers(key)]
        return [peer for peer in peers if peer is not None and not peer.breaker.is_open]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Never read these blocks from peers again, because peers' copies may be damaged."""
        self._hints.forget(keys)
        with self._lock:
            self._removed.update(dict.fromkeys(keys))
            while len(self._removed) > MAX_HINTS:
                self._removed.popitem(last=False)

    def remove_chains(self, chains: Collection[bytes] | None) -> None:
        """Never read these chains from peers again, because peers' copies may be damaged.

        If `chains` is None, no block is read from peers until `trust` is called.
        """
        with self._lock:
            is_new = chains is None and not self._is_distrusted
            self._is_distrusted = self._is_distrusted or is_new
            self._removed_chains.update(chains or ())
        if is_new:
            log.error(
                "KV may be damaged: nothing is read from peers or copied to them until another "
                "worker is served"
            )

    def trust(self) -> None:
        """Resume reads from peers after `remove_chains(None)` has suspended them.

        This is safe, for example, once the worker that damaged blocks has exited. Blocks and chains
        that were removed individually are still not read.
        """
        with self._lock:
            was_distrusted = self._is_distrusted
            self._is_distrusted = False
        if was_distrusted:
            log.info("peers are read again")

    def _is_removed(self, key: bytes) -> bool:
        is_of_chain = self._is_distrusted or key[:CHAIN_BYTES] in self._removed_chains
        return is_of_chain or key in self._removed

    # reading -------------------------------------------------------------------------------------

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        ends_at = time.monotonic() + min(deadline_s, self._deadline_s)
        with self._lock:
            if self._closing.is_set():
                status = Status.UNAVAILABLE
            elif self._num_loads < MAX_LOADS:
                loaded = Future[list[Result]]()
                try:
                    self._loads.submit(self._load, transfers, ends_at, loaded)
                except RuntimeError:  # no thread can be started, but one may have taken the load
                    status = Status.UNAVAILABLE
                    is_taken = not loaded.cancel()
                else:
                    is_taken = True
                if is_taken:
                    self._num_loads += 1
                    return loaded
            else:
                status = Status.BUSY

        results = [Result(status, self.name)] * len(transfers)
        self._counter.loaded(results)
        return done(results)

    def _load(
        self, transfers: Sequence[Transfer], ends_at: float, loaded: "Future[list[Result]]"
    ) -> None:
        """Load blocks and complete `loaded`, unless it has been cancelled."""
        if not loaded.set_running_or_notify_cancel():
            return
        results = [MISS] * len(transfers)
        try:
            with self._counter.reading:
                self._read(transfers, results, ends_at)
        except Exception as error:  # the callers wait for results
            log.exception("load failed")
            failed = Result(Status.ERROR, self.name, error=repr(error))
            results = [each if each.status is Status.HIT else failed for each in results]
        finally:
            with self._lock:
                self._num_loads -= 1
        self._counter.loaded(results)
        loaded.set_result(results)

    def _read(self, transfers: Sequence[Transfer], results: list[Result], ends_at: float) -> None:
        """Read blocks from one peer at a time.

        The next peer is the one that, according to the hints, has the largest number of the blocks
        that are still missing.
        """
        tried = set[str]()
        missing = list(range(len(transfers)))
        while missing:
            peer, places = self._best_peer(transfers, missing, tried)
            if peer is None:
                return
            if time.monotonic() >= ends_at:
                for place in places:
                    results[place] = Result(Status.TIMEOUT, self.name)
                return

            tried.add(peer.address)
            read = peer.read([transfers[place] for place in places], ends_at)
            for place, result in zip(places, read, strict=True):
                results[place] = result
            gone = [transfers[place].key for place in places if results[place].status in _NOT_THERE]
            self._hints.learn(peer.address, gone, [False] * len(gone))
            missing = [place for place in missing if results[place].status is not Status.HIT]

    def _best_peer(
        self, transfers: Sequence[Transfer], missing: Sequence[int], tried: set[str]
    ) -> tuple[PeerClient | None, list[int]]:
        held: dict[PeerClient, list[int]] = {}
        for place in missing:
            for holder in self._holders(transfers[place].key):
                if holder.address not in tried:
                    held.setdefault(holder, []).append(place)
        if not held:
            return None, []
        best = max(held, key=lambda each: (len(held[each]), -each.num_reads, random.random()))
        return best, held[best][:MAX_KEYS]

    # copying -------------------------------------------------------------------------------------

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        if not self._copies or not any(self._usable()):
            return [False] * len(keys)
        return [
            key not in self._queued and not self._is_removed(key) and not self._holders(key)
            for key in keys
        ]

    def save(self, transfers: Sequence[Transfer]) -> "Future[list[Result]]":
        keys = [transfer.key for transfer in transfers]
        with self._has_copies:
            if self._closing.is_set() or not self._copies:
                status = Status.UNAVAILABLE
            elif len(self._queued) + len(keys) > MAX_QUEUED:
                status = Status.BUSY
            else:
                future = Future[list[Result]]()
                self._queue.append(_Copies(transfers, future))
                self._queued.update(keys)
                self._has_copies.notify()
                return future
        results = [Result(status, self.name)] * len(transfers)
        self._counter.saved(results)
        return done(results)

    def _keep_copying(self) -> None:
        while batch := self._next_batch():
            transfers = [transfer for copies in batch for transfer in copies.transfers]
            try:
                results = self._copy(transfers)
            except Exception as error:  # blocks are pinned until they have results
                log.exception("copies failed")
                results = [Result(Status.ERROR, self.name, error=repr(error))] * len(transfers)
            self._counter.saved(results)
            with self._has_copies:
                self._queued.difference_update(transfer.key for transfer in transfers)
            start = 0
            for copies in batch:
                end = start + len(copies.transfers)
                copies.future.set_result(results[start:end])
                start = end

    def _next_batch(self) -> list[_Copies]:
        """Wait for blocks to copy, and return them.

        Return [] once the tier is closed and no blocks are left.
        """
        batch = list[_Copies]()
        num_bytes = 0
        with self._has_copies:
            self._has_copies.wait_for(lambda: self._queue or self._closing.is_set())
            while self._queue and num_bytes < BATCH_BYTES:
                copies = self._queue.popleft()
                num_bytes += len(copies.transfers) * self._block_bytes
                batch.append(copies)
        return batch

    def _copy(self, transfers: Sequence[Transfer]) -> list[Result]:
        results = [Result(Status.UNAVAILABLE, self.name)] * len(transfers)
        if self._closing.is_set():
            return results
        places_of: dict[str, list[int]] = {}
        for place, transfer in enumerate(transfers):
            if (peer := self._peer_for(transfer)) is not None:
                places_of.setdefault(peer.address, []).append(place)

        with self._counter.writing:
            for address, places in places_of.items():
                other = self._peers.get(address)
                if other is None:
                    continue
                ends_at = time.monotonic() + self._deadline_s
                written = other.write([transfers[place] for place in places], ends_at)
                for place, result in zip(places, written, strict=True):
                    results[place] = result
                there = [transfers[place].key for place in places if results[place].is_usable]
                self._hints.learn(address, there, [True] * len(there))
        return results

    def _peer_for(self, transfer: Transfer) -> PeerClient | None:
        """Choose the peer to which a block is copied.

        A peer that has the previous block in the chain is preferred, then the peer with the most
        free slots. Ties, for example if no peer has free slots, are broken by rendezvous hashing,
        which distributes chains evenly.

        Returns:
            The peer, or None if no peer is usable.
        """
        usable = self._usable()
        if transfer.parent is not None:
            before = set(self._hints.peers(transfer.parent))
            usable = [peer for peer in usable if peer.address in before] or usable
        chain = transfer.key[:CHAIN_BYTES]

        def rank(peer: PeerClient) -> tuple[int, int]:
            return peer.free_blocks, xxhash.xxh3_64_intdigest(chain + peer.address.encode())

        return max(usable, key=rank, default=None)

    def _usable(self) -> list[PeerClient]:
        """Return all peers, other than this process itself, whose circuit breaker is closed."""
        return [
            peer
            for peer in list(self._peers.values())
            if peer.is_other and not peer.breaker.is_open
        ]

    # peers ---------------------------------------------------------------------------------------

    def _keep_resolving(self) -> None:
        resolved: dict[str, set[str]] = {}
        logged: list[PeerState] = []
        failure = ""
        while not self._closing.is_set():
            try:
                self._find_peers(resolved)
                logged = self._log_peers(logged)
                failure = ""
            except Exception as error:  # without this thread no new peer would ever be used
                if repr(error) != failure:
                    failure = repr(error)
                    log.exception("cannot look for peers; retrying")
            self._closing.wait(self._resolve_s)

    def _find_peers(self, resolved: dict[str, set[str]]) -> None:
        """Resolve all targets, use their addresses as peers, and ask idle peers for their state.

        Args:
            resolved: the addresses of each target, which this method updates. They stay in use
                while the DNS server does not answer.
        """
        for target in self._targets:
            current = _resolve(target)
            if current is not None:
                resolved[target] = current
        self._use(resolved)
        for peer in list(self._peers.values()):
            peer.close_retired(self._deadline_s)
            if not peer.instance or peer.breaker.is_open:
                self._ask(peer, [])

    def _log_peers(self, before: Sequence[PeerState]) -> list[PeerState]:
        """Return all other peers' states, and log them if the list or a state has changed."""
        peers = [each for each in self.peers() if not each.is_self]
        if _standing(peers) != _standing(before):
            facts = {each.address: each.problem for each in peers if each.is_left_alone}
            others = [each.address for each in peers if not each.is_left_alone]
            log.info("peers", extra={"peers": others, "left_alone": facts})
        return peers

    def _use(self, resolved: dict[str, set[str]]) -> None:
        """Create clients for new addresses, and close those whose address no longer exists."""
        peers = dict[str, PeerClient]()
        for target, current in resolved.items():
            host = target.rpartition(":")[0]
            server_name = self._server_name or ("" if is_ip(host) else host)
            for address in current:
                peer = self._peers.get(address) or peers.get(address)
                peers[address] = peer or PeerClient(address, server_name, self._own)
        with self._lock:
            before = self._peers
            self._peers = {} if self._closing.is_set() else peers
        for address in (before.keys() | peers.keys()) - self._peers.keys():
            (before.get(address) or peers[address]).close()

    def stats(self) -> TierStats:
        queued = self._num_loads + len(self._queued)
        backend = "gRPC, distrusted" if self._is_distrusted else "gRPC"
        return self._counter.stats(self.name, backend, queued=queued)

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            peers = self._peers
            self._peers = {}
        with self._has_copies:
            self._has_copies.notify()
        for peer in peers.values():
            peer.close()
        self._loads.shutdown(wait=True)
        for thread in self._threads[1:]:
            thread.join()


def _standing(peers: Sequence[PeerState]) -> dict[str, bool]:
    return {each.address: each.is_left_alone for each in peers}


def _resolve(target: str) -> set[str] | None:
    """Resolve a target to its addresses, or return None if it cannot be resolved now."""
    host, _, port = target.rpartition(":")
    if is_ip(host):
        return {target}
    try:
        return by_best_family(socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM), port)
    except socket.gaierror as error:
        if error.errno in NO_RECORDS:
            return set()
        reason = error.strerror
    except (OSError, UnicodeError) as error:  # no file can be opened, or the name is invalid
        reason = str(error)
    log.warning("cannot resolve", extra={"target": target, "reason": reason})
    return None
