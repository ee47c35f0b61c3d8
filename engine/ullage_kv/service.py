"""`KVStoreService`, through which peers read blocks from a store's host memory and add blocks.

A peer can hold slots only under a lease (see `PeerLeases`). Leases expire, so that the slots of a
peer that dies or hangs are freed. The lease is rechecked before each chunk of data is transferred,
on the same thread that ends leases. A chunk is therefore never read from or written to a slot that
now belongs to another block.
"""

import asyncio
import functools
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import xxhash

from ullage.kv.v1 import kv_pb2 as pb
from ullage.kv.v1 import kv_pb2_grpc
from ullage_common.wire.errors import ServiceError, abort, invalid
from ullage_kv.index import Lease, SlotIndex, SlotRef
from ullage_kv.keys import KEY_BYTES
from ullage_kv.peer import CHUNK_BYTES, MAX_CHUNK_BYTES, MAX_KEYS
from ullage_kv.results import Status
from ullage_kv.store import Block, Store

MAX_LEASE_S = 10.0
"""Maximum duration of a peer's lease, in seconds."""
MAX_LEASES = 64
"""Maximum number of concurrent leases per peer."""
PEER_SHARE = 4
"""Divisor N: one peer may hold 1/N of the slots, and all peers together may hold 2/N."""

log = logging.getLogger(__name__)

_ROOMS = {
    Status.STORED: pb.ROOM_RESERVED,
    Status.EXISTS: pb.ROOM_ALREADY_HAVE,
    Status.BUSY: pb.ROOM_BUSY,
}
_TIMER_SLACK_S = 0.01
"""Seconds to add to a lease's timer, so that clock rounding does not make it fire too early."""

Context = grpc.aio.ServicerContext[Any, Any]


class Served(NamedTuple):
    """The store that peers can currently read from and write to."""

    store: Store
    namespace: bytes
    """Namespace of the store's keys."""


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """How many blocks peers have read and written, and how many slots and leases they hold."""

    read_blocks: int
    """Number of blocks that were sent in full."""
    read_bytes: int
    written_blocks: int
    """Number of blocks that were received, verified and made readable."""
    written_bytes: int
    """Number of bytes received, including those of blocks that were dropped."""
    leases: int
    held_slots: int
    expired_leases: int
    """Number of leases that expired before their peer ended them."""


@dataclass(slots=True)
class NewBlock:
    """A block that a peer is writing sequentially to a reserved slot."""

    key: bytes
    parent: bytes | None
    ref: SlotRef
    num_written: int = 0


@dataclass(slots=True, eq=False)
class PeerLease:
    """A peer's lease: its pinned blocks by key, and its new blocks by index in the request."""

    number: int
    peer: str
    store: Store
    lease: Lease
    pinned: dict[bytes, SlotRef] = field(default_factory=dict)
    reserved: dict[int, NewBlock] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        return len(self.pinned) + len(self.reserved)


class PeerLeases:
    """The leases of all peers. Threads other than the event loop's may only read the counters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, PeerLease] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_slots(self) -> int:
        """Number of slots that all peers together hold."""
        return sum(each.num_slots for each in list(self._open.values()))

    def open(self, store: Store, peer: str, ttl_s: float) -> PeerLease:
        """Open an empty lease.

        Raises:
            ServiceError: the peer already has the maximum number of leases.
        """
        self.end_expired()
        if sum(each.peer == peer for each in self._open.values()) >= MAX_LEASES:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_LEASES",
                f"this peer has {MAX_LEASES} open leases; end some, or wait until they end",
                retry_after_s=1.0,
            )
        number = 0
        while not number or number in self._open:
            number = secrets.randbits(64)
        opened = PeerLease(number, peer, store, store.index.lease(ttl_s, self._clock))
        self._open[number] = opened
        return opened

    def room(self, index: SlotIndex, peer: str) -> int:
        """Return how many more slots the peer may hold."""
        share = max(1, index.num_slots // PEER_SHARE)
        own = sum(each.num_slots for each in self._open.values() if each.peer == peer)
        return max(0, min(share - own, 2 * share - self.num_slots))

    def find(self, number: int) -> PeerLease:
        """Return the open lease with this number.

        Raises:
            ServiceError: the lease has ended or never existed.
        """
        held = self._open.get(number)
        if held is None or held.lease.is_over:
            raise _lease_over()
        return held

    def end(self, number: int) -> None:
        """End a lease. Do nothing if the lease has already ended."""
        if held := self._open.pop(number, None):
            held.lease.close()

    def end_expired(self) -> None:
        """End the leases that have expired."""
        for number in [each.number for each in self._open.values() if each.lease.is_over]:
            self.num_expired += 1
            self.end(number)

    def close(self) -> None:
        """End all leases."""
        for number in list(self._open):
            self.end(number)


def _aborts(
    method: Callable[[Any, Any, Context], Awaitable[Any]],
) -> Callable[[Any, Any, Context], Awaitable[Any]]:
    """Decorate a unary-response method so that a ServiceError aborts the RPC with its status."""

    @functools.wraps(method)
    async def respond(self: Any, request: Any, context: Context) -> Any:
        try:
            return await method(self, request, context)
        except ServiceError as error:
            await abort(context, error)

    return respond


class KVStoreService(kv_pb2_grpc.KVStoreServiceServicer):
    """A process's KV store service. All RPCs run on a single event loop."""

    def __init__(self, served: Callable[[], Served | None]) -> None:
        """Serve the store that `served` returns, or refuse requests while it returns None."""
        self._served = served
        self.instance = uuid.uuid4().hex
        """Unique id with which peers identify this process."""
        self.leases = PeerLeases()
        self._read_blocks = 0
        self._read_bytes = 0
        self._written_blocks = 0
        self._written_bytes = 0

    def stats(self) -> PeerTraffic:
        """Return the traffic since the process started, and the leases that are currently open."""
        return PeerTraffic(
            read_blocks=self._read_blocks,
            read_bytes=self._read_bytes,
            written_blocks=self._written_blocks,
            written_bytes=self._written_bytes,
            leases=len(self.leases),
            held_slots=self.leases.num_slots,
            expired_leases=self.leases.num_expired,
        )

    # reading -------------------------------------------------------------------------------------

    @_aborts
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        store = self._store(request.geometry)
        _check_keys("keys", request.keys)
        response = pb.LookupResponse(instance=self.instance, free_blocks=store.index.num_free)
        if not request.lease_ms:
            response.held.extend(store.index.contains(key) for key in request.keys)
            return response

        held = self._open_lease(store, context, request.lease_ms)
        room = self.leases.room(store.index, held.peer)
        for key in request.keys:
            if len(held.pinned) == room:
                response.held.append(store.index.contains(key))
                continue
            if (ref := held.lease.pin(key)) is not None:
                held.pinned[key] = ref
            response.held.append(ref is not None)

        response.num_pinned = len(held.pinned)
        response.lease, response.lease_ms = self._grant(held, request.lease_ms)
        return response

    async def Read(
        self, request: pb.ReadRequest, context: Context
    ) -> AsyncIterator[pb.ReadResponse]:
        try:
            _check_keys("keys", request.keys)
            held = self._find(request.lease)
            for number, key in enumerate(request.keys):
                if key not in held.pinned:
                    raise invalid("keys", f"block {number} is not pinned by the lease")
                async for chunk in self._read(held, number, key):
                    yield chunk
                self._read_blocks += 1
        except ServiceError as error:
            await abort(context, error)

    async def _read(
        self, held: PeerLease, number: int, key: bytes
    ) -> AsyncIterator[pb.ReadResponse]:
        size = held.store.block_bytes
        ref = held.pinned[key]
        memory = held.store.arena.slot(ref.slot, size)
        checksum = xxhash.xxh3_128()
        for offset in range(0, size, CHUNK_BYTES):
            self._find(held.number)  # else the slot may hold another block by now
            if not held.store.index.is_readable(ref):  # removed: its bytes may be damaged
                raise _lease_over()
            data = bytes(memory[offset : offset + CHUNK_BYTES])
            checksum.update(data)
            is_last = offset + len(data) == size
            yield pb.ReadResponse(
                block=number,
                offset=offset,
                data=data,
                checksum=checksum.digest() if is_last else b"",
            )
            self._read_bytes += len(data)

    @_aborts
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self.leases.end(request.lease)
        return pb.ReleaseResponse()

    # writing -------------------------------------------------------------------------------------

    @_aborts
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        store = self._store(request.geometry)
        _check_keys("blocks", [block.key for block in request.blocks])
        if not request.lease_ms:
            raise invalid("lease_ms", "lease_ms is 0; name the time in which you write")

        response = pb.ReserveResponse(instance=self.instance)
        held = self._open_lease(store, context, request.lease_ms)
        room = self.leases.room(store.index, held.peer)
        for number, block in enumerate(request.blocks):
            if store.index.contains(block.key):
                response.rooms.append(pb.ROOM_ALREADY_HAVE)
                continue
            if len(held.reserved) >= room:
                response.rooms.append(pb.ROOM_FULL)
                continue
            parent = block.parent or None
            reserved = held.lease.reserve(block.key, parent)
            if reserved.ref is not None:
                held.reserved[number] = NewBlock(block.key, parent, reserved.ref)
            response.rooms.append(_ROOMS.get(reserved.status, pb.ROOM_FULL))

        response.lease, response.lease_ms = self._grant(held, request.lease_ms)
        return response

    async def Write(
        self, request_iterator: AsyncIterator[pb.WriteRequest], context: Context
    ) -> pb.WriteResponse:
        num_bytes = 0
        try:
            async for request in request_iterator:
                num_bytes += self._write(request)
        except ServiceError as error:
            await abort(context, error)
        return pb.WriteResponse(num_bytes=num_bytes)

    def _write(self, request: pb.WriteRequest) -> int:
        held = self._find(request.lease)
        block = held.reserved.get(request.block)
        if block is None:
            raise invalid("block", f"block {request.block} is not reserved by the lease")
        if request.offset != block.num_written:
            raise invalid("offset", f"offset is {request.offset}; next is {block.num_written}")
        data = request.data
        end = request.offset + len(data)
        if not 0 < len(data) <= MAX_CHUNK_BYTES or end > held.store.block_bytes:
            raise invalid(
                "data",
                f"data has {len(data)} bytes; send 1 to {MAX_CHUNK_BYTES}, and none beyond the "
                f"block's end at {held.store.block_bytes}",
            )
        held.store.arena.slot(block.ref.slot)[request.offset : end] = data
        block.num_written = end
        self._written_bytes += len(data)
        return len(data)

    @_aborts
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        held = self._find(request.lease)
        response = pb.CommitResponse()
        try:
            for written in request.blocks:
                block = held.reserved.pop(written.block, None)
                response.outcomes.append(self._commit(held, block, written.checksum))
                await asyncio.sleep(0)  # other calls run between two blocks
        finally:
            self.leases.end(held.number)
        return response

    def _commit(self, held: PeerLease, block: NewBlock | None, checksum: bytes) -> pb.Committed:
        if block is None:
            return pb.COMMITTED_STALE
        size = held.store.block_bytes
        memory = held.store.arena.slot(block.ref.slot, size)
        if block.num_written != size or xxhash.xxh3_128_digest(memory) != checksum:
            held.lease.abort(block.ref)
            return pb.COMMITTED_CORRUPT
        own = Block(block.key, block.parent)
        [result] = held.store.committed(held.lease, [block.ref], [own])
        if result.status is not Status.STORED:
            return pb.COMMITTED_STALE
        self._written_blocks += 1
        return pb.COMMITTED_STORED

    @_aborts
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self.leases.end(request.lease)
        return pb.AbortResponse()

    # both ----------------------------------------------------------------------------------------

    def _store(self, geometry: pb.Geometry) -> Store:
        """Return the served store, after checking that it is compatible with the peer's store.

        Raises:
            ServiceError: there is no store, or its namespace or block size differs from the peer's.
        """
        served = self._served()
        if served is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "NO_STORE",
                "this engine has no host memory for KV; set memory.tiers.host.size",
                retry_after_s=10.0,
            )
        if geometry.namespace != served.namespace:
            # With the namespace a peer could make keys, so the error does not name it.
            log.debug(
                "a peer has another namespace",
                extra={"peer": geometry.namespace.hex()[:8], "own": served.namespace.hex()[:8]},
            )
            raise _other(
                "NAMESPACE",
                "namespace is not the one of this engine; peers must serve the same model, "
                "revision, dtype and layout",
            )
        if geometry.block_bytes != served.store.block_bytes:
            raise _other(
                "BLOCK_SIZE",
                f"block_bytes is {geometry.block_bytes} and here {served.store.block_bytes}; peers "
                "must have blocks of one size",
            )
        return served.store

    def _find(self, number: int) -> PeerLease:
        """Return an open lease of the current store.

        A lease of an earlier store is ended, because the current store uses the same memory.

        Raises:
            ServiceError: the current store has no such lease.
        """
        held = self.leases.find(number)
        served = self._served()
        if served is None or held.store is not served.store:
            self.leases.end(number)
            raise _lease_over()
        return held

    def _open_lease(self, store: Store, context: Context, lease_ms: int) -> PeerLease:
        address, _, _ = (context.peer() or "").rpartition(":")  # each connection has a port
        return self.leases.open(store, address, _ttl_s(lease_ms))

    def _grant(self, held: PeerLease, lease_ms: int) -> tuple[int, int]:
        """Grant a lease to a peer, and return the lease's id and its duration in milliseconds.

        The lease is scheduled to end after this duration. A lease that holds no slots is ended
        immediately, and both its id and its duration are returned as 0.
        """
        if not held.num_slots:
            self.leases.end(held.number)
            return 0, 0
        ttl_s = _ttl_s(lease_ms)
        loop = asyncio.get_running_loop()
        loop.call_later(ttl_s + _TIMER_SLACK_S, self.leases.end_expired)
        return held.number, int(ttl_s * 1000)


def _ttl_s(lease_ms: int) -> float:
    return min(lease_ms / 1000, MAX_LEASE_S)


def _check_keys(name: str, keys: Sequence[bytes]) -> None:
    if len(keys) > MAX_KEYS:
        raise invalid(name, f"{name} has {len(keys)} entries; send at most {MAX_KEYS}")
    for key in keys:
        if len(key) != KEY_BYTES:
            raise invalid(name, f"a key has {len(key)} bytes; keys have {KEY_BYTES}")


def _lease_over() -> ServiceError:
    message = "the lease has ended; begin again"
    return ServiceError(grpc.StatusCode.NOT_FOUND, "LEASE_OVER", message)


def _other(what: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, f"OTHER_{what}", message)
