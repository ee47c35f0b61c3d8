"""A client that looks up blocks on one peer and copies them from and to the peer's host memory.

The client uses blocking gRPC and is meant for use in threads. gRPC itself enforces the deadline of
each RPC, even if the peer hangs. A circuit breaker stops RPCs to a peer that keeps failing.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import xxhash

from ullage.kv.v1 import kv_pb2 as pb
from ullage.kv.v1 import kv_pb2_grpc
from ullage_common.wire.channels import open_blocking_channel
from ullage_common.wire.errors import from_rpc_error
from ullage_common.wire.tls import Material, channel_credentials
from ullage_kv.results import MISS, Result, Status
from ullage_kv.tier import CircuitBreaker, Transfer

REMOTE = "remote"
"""Name of the tier in peers' host memory."""
CHUNK_BYTES = 1 << 19
"""Number of bytes of a block to send per message.

In measurements, messages of half the maximum size doubled the throughput, because copies of smaller
messages stay in the heap and in the CPU caches.
"""
MAX_CHUNK_BYTES = 1 << 20
"""Maximum number of bytes of a block that one message may contain."""
MAX_KEYS = 4096
"""Maximum number of keys in one request."""

_END_LEASE_S = 1.0
"""Deadline in seconds for the RPC that ends a lease. Leases expire soon even if it fails."""
_STATUSES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Status.TIMEOUT,
    grpc.StatusCode.UNAVAILABLE: Status.UNAVAILABLE,
    grpc.StatusCode.CANCELLED: Status.UNAVAILABLE,
    grpc.StatusCode.NOT_FOUND: Status.STALE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Status.BUSY,
}
_HEALTHY = {Status.STALE, Status.BUSY}
"""Statuses with which even a healthy peer refuses a request. They do not count as peer failures."""
_ROOMS = {
    pb.ROOM_ALREADY_HAVE: Status.EXISTS,
    pb.ROOM_FULL: Status.FULL,
    pb.ROOM_BUSY: Status.BUSY,
}
_COMMITTED = {pb.COMMITTED_STORED: Status.STORED, pb.COMMITTED_STALE: Status.STALE}

log = logging.getLogger(__name__)

_Method = Callable[["kv_pb2_grpc.KVStoreServiceStub"], Callable[..., Any]]
"""Function that returns a stub's method that starts an RPC without waiting for it."""

_broken_channels: list[grpc.Channel | None] = []
"""Channels that can be neither used nor closed."""


class _WrongAnswer(Exception):
    """Raised if a peer's response violates the protocol. The message explains how."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that an engine presents to its peers."""

    geometry: pb.Geometry
    instance: str
    """This process's id, by which it recognises itself among its peers."""
    material: Callable[[], Material | None]
    """Function that returns the newest client certificate, or None if peers use plaintext."""


class PeerClient:
    """A client for another engine at a single address. Thread-safe."""

    def __init__(self, address: str, server_name: str, own: Identity) -> None:
        """Create a client for a peer whose certificate must match `server_name`."""
        self.address = address
        self.breaker = CircuitBreaker()
        self.instance = ""
        """Id of the peer's process, or "" until the peer has answered."""
        self.free_blocks = 0
        """Number of free slots that the peer reported in its last answer."""
        self.num_reads = 0
        """Number of reads in progress."""
        self.problem = ""
        """Human-readable description of the last failure, or "" if the peer has answered since."""
        self._server_name = server_name
        self._own = own
        self._lock = threading.RLock()
        self._channel: grpc.Channel | None = None
        self._stub: kv_pb2_grpc.KVStoreServiceStub | None = None
        self._material: Material | None = None
        self._retired: list[tuple[float, grpc.Channel]] = []
        self._is_closed = False

    @property
    def is_other(self) -> bool:
        """Whether the peer has answered and is not this process itself."""
        return self.instance not in ("", self._own.instance)

    @property
    def is_self(self) -> bool:
        return self.instance == self._own.instance

    def look(
        self, keys: Sequence[bytes], timeout_s: float, on_held: Callable[[list[bool]], None]
    ) -> None:
        """Ask the peer, without blocking, which of the blocks it has.

        Args:
            keys: keys of the blocks.
            timeout_s: deadline in seconds.
            on_held: called once, from any thread, before the deadline. Its argument says for each
                key whether the peer has the block, or is empty if the peer did not answer.
        """
        request = pb.LookupRequest(geometry=self._own.geometry, keys=keys)
        try:
            call = self._begin(lambda stub: stub.Lookup.future, request, timeout_s)
        except ValueError:  # closed
            on_held([])
            return
        except RuntimeError as error:  # no thread can be started
            self._fail(error)
            on_held([])
            return

        def finish(call: Any) -> None:
            held = list[bool]()
            try:
                held = self._take_answer(call.result(), len(keys))
                self._succeed()
            except (grpc.RpcError, grpc.FutureCancelledError, _WrongAnswer) as error:
                self._fail(error)
            finally:
                on_held(held)

        call.add_done_callback(finish)

    def read(self, transfers: Sequence[Transfer], ends_at: float) -> list[Result]:
        """Copy blocks from the peer.

        The call returns by the monotonic time `ends_at`. After that, nothing is written to the
        transfers' memory.
        """
        arriving = _Arriving(transfers)
        with self._lock:
            self.num_reads += 1
        try:
            self._read(transfers, arriving, ends_at)
        except (grpc.RpcError, RuntimeError, ValueError, _WrongAnswer) as error:
            return arriving.results(self._fail(error))
        finally:
            with self._lock:
                self.num_reads -= 1

        results = arriving.results(MISS)
        if damaged := next((each for each in results if each.status is Status.CORRUPT), None):
            self._fail(_WrongAnswer(damaged.error))
        else:
            self._succeed()
        return results

    def _read(self, transfers: Sequence[Transfer], arriving: "_Arriving", ends_at: float) -> None:
        """Read blocks in several rounds, because the peer pins only a limited number at a time."""
        stub = self._connect()
        places = list(range(len(transfers)))
        while places:
            timeout_s = _remaining_s(ends_at)
            answer = stub.Lookup(
                pb.LookupRequest(
                    geometry=self._own.geometry,
                    keys=[transfers[place].key for place in places],
                    lease_ms=max(1, int(timeout_s * 1000)),
                ),
                timeout=timeout_s,
            )
            try:
                here = self._take_answer(answer, len(places))
                held = list(itertools.compress(places, here))
                pinned = held[: answer.num_pinned]
                # The peer pins no more at a time. The next turn of the loop asks for the others.
                places = held[answer.num_pinned :]
                if not pinned:
                    arriving.refuse(places)
                    return

                keys = [transfers[place].key for place in pinned]
                request = pb.ReadRequest(lease=answer.lease, keys=keys)
                chunks = self._begin(lambda stub: stub.Read, request, _remaining_s(ends_at))
                arriving.take(pinned, chunks)
            finally:
                release = pb.ReleaseRequest(lease=answer.lease)
                released = self._end_lease(lambda stub: stub.Release.future, release)
            if places and released is not None:
                released.result()

    def write(self, transfers: Sequence[Transfer], ends_at: float) -> list[Result]:
        """Copy blocks to the peer, stopping at the monotonic time `ends_at`.

        Returns:
            For each block, STORED, EXISTS if the peer already had the block, or the reason why the
            block was not copied.
        """
        results = [Result(Status.ERROR, REMOTE)] * len(transfers)
        try:
            self._write(transfers, results, ends_at)
        except (grpc.RpcError, RuntimeError, ValueError, _WrongAnswer) as error:
            failure = self._fail(error)
            return [failure if each.status is Status.ERROR else each for each in results]
        self._succeed()
        return results

    def _write(self, transfers: Sequence[Transfer], results: list[Result], ends_at: float) -> None:
        stub = self._connect()
        timeout_s = _remaining_s(ends_at)
        blocks = [pb.NewBlock(key=each.key, parent=each.parent or b"") for each in transfers]
        answer = stub.Reserve(
            pb.ReserveRequest(
                geometry=self._own.geometry, blocks=blocks, lease_ms=max(1, int(timeout_s * 1000))
            ),
            timeout=timeout_s,
        )

        is_committed = False
        try:
            self.instance = answer.instance
            if self.is_self or len(answer.rooms) != len(transfers):
                raise _WrongAnswer("it is this engine itself, or answers for other blocks")

            reserved = []
            for number, room in enumerate(answer.rooms):
                results[number] = Result(_ROOMS.get(room, Status.ERROR), REMOTE)
                if room == pb.ROOM_RESERVED:
                    reserved.append(number)
            if not reserved:
                return

            self.free_blocks = max(0, self.free_blocks - len(reserved))
            stub.Write(_chunks(answer.lease, transfers, reserved), timeout=_remaining_s(ends_at))
            written = [_written(number, transfers[number]) for number in reserved]
            request = pb.CommitRequest(lease=answer.lease, blocks=written)
            committed = stub.Commit(request, timeout=_remaining_s(ends_at))
            is_committed = True
            for number, outcome in zip(reserved, committed.outcomes, strict=False):
                status = _COMMITTED.get(outcome, Status.CORRUPT)
                size = len(transfers[number].memory) if status is Status.STORED else 0
                results[number] = Result(status, REMOTE, size)
        finally:
            if not is_committed:
                abort = pb.AbortRequest(lease=answer.lease)
                self._end_lease(lambda stub: stub.Abort.future, abort)

    def close_retired(self, after_s: float) -> None:
        """Close channels whose client certificate was replaced at least `after_s` seconds ago."""
        with self._lock:
            due = [each for each in self._retired if time.monotonic() >= each[0] + after_s]
            self._retired = [each for each in self._retired if each not in due]
        for _, channel in due:
            channel.close()

    def close(self) -> None:
        """Cancel all RPCs. Later calls fail immediately."""
        with self._lock:
            self._is_closed = True
            channels = [channel for _, channel in self._retired]
            channels += [self._channel] if self._channel else []
            self._retired = []
            self._channel = None
        for channel in channels:
            channel.close()

    def _end_lease(self, method: _Method, request: pb.ReleaseRequest | pb.AbortRequest) -> Any:
        """Send the RPC that ends a lease, without waiting for the response.

        Returns:
            The RPC, or None if there is no lease, or if the RPC cannot be sent. Leases expire.
        """
        if not request.lease:
            return None
        with contextlib.suppress(RuntimeError, ValueError):
            call = self._begin(method, request, _END_LEASE_S)
            call.add_done_callback(lambda _: None)  # gRPC cancels a call without references
            return call
        return None

    def _begin(self, method: _Method, request: Any, timeout_s: float) -> Any:
        """Start an RPC that a thread of gRPC completes, and return the call.

        Raises:
            ValueError: the tier is closed.
            RuntimeError: the thread cannot be started.
        """
        with self._lock:
            stub = self._connect()
            try:
                return method(stub)(request, timeout=timeout_s)
            except RuntimeError:
                # From now on this channel completes no call (grpc 1.85), not even `close`.
                _broken_channels.append(self._channel)
                self._channel = None
                self._stub = None
                raise

    def _connect(self) -> "kv_pb2_grpc.KVStoreServiceStub":
        """Return a stub for a channel that uses the newest certificate.

        Raises:
            ValueError: the tier is closed.
        """
        material = self._own.material()
        with self._lock:
            if self._is_closed:
                raise ValueError("the tier is closed")
            if self._stub is None or material is not self._material:
                if self._channel is not None:  # running calls go on over the old channel
                    self._retired.append((time.monotonic(), self._channel))
                credentials = channel_credentials(material) if material else None
                self._channel = open_blocking_channel(self.address, credentials, self._server_name)
                self._stub = kv_pb2_grpc.KVStoreServiceStub(self._channel)
                self._material = material
            return self._stub

    def _take_answer(self, answer: pb.LookupResponse, num_keys: int) -> list[bool]:
        if len(answer.held) != num_keys:
            raise _WrongAnswer(f"it answered for {len(answer.held)} of {num_keys} blocks")
        self.instance = answer.instance
        self.free_blocks = answer.free_blocks
        return [] if self.is_self else list(answer.held)

    def _succeed(self) -> None:
        self.breaker.succeeded()
        self.problem = ""

    def _fail(self, error: Exception) -> Result:
        """Report a failed RPC to the circuit breaker, and convert the failure to a `Result`.

        If the peer is healthy and merely refused the request, the breaker counts a success.
        """
        if isinstance(error, grpc.Call):
            refusal = from_rpc_error(error)
            status = _STATUSES.get(refusal.code, Status.ERROR)
            message = f"{self.address}: {refusal.reason}: {refusal.message}"
        else:
            status = Status.CORRUPT if isinstance(error, _WrongAnswer) else Status.UNAVAILABLE
            message = f"{self.address}: {error}"
        if not self._is_closed:
            self.problem = message
            if status in _HEALTHY:
                self.breaker.succeeded()
            elif self.breaker.failed():
                log.warning("peer left alone", extra={"peer": self.address, "reason": message})
        return Result(status, REMOTE, error=message)


class _Arriving:
    """Receives blocks in chunks and verifies each block once it is complete."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self._transfers = transfers
        self._num_written = [0] * len(transfers)
        self._results: list[Result | None] = [None] * len(transfers)

    def results(self, otherwise: Result) -> list[Result]:
        """Return the results of all blocks, using `otherwise` for blocks that did not arrive."""
        return [result or otherwise for result in self._results]

    def refuse(self, places: Sequence[int]) -> None:
        """Set the result BUSY for blocks that the peer has but currently refuses to send."""
        for place in places:
            self._results[place] = Result(Status.BUSY, REMOTE)

    def take(self, places: Sequence[int], chunks: Any) -> None:
        """Receive the blocks at these indices from a stream of response messages.

        Raises:
            _WrongAnswer: a chunk is out of order or does not belong to any of these blocks, or a
                block is incomplete.
        """
        try:
            for chunk in chunks:
                if chunk.block >= len(places):
                    raise _WrongAnswer(f"it sent block {chunk.block} of {len(places)}")
                self._take_chunk(places[chunk.block], chunk)
        finally:
            chunks.cancel()  # a peer may send too many chunks
        if missing := [place for place in places if self._results[place] is None]:
            raise _WrongAnswer(f"{len(missing)} of {len(places)} blocks are incomplete")

    def _take_chunk(self, place: int, chunk: pb.ReadResponse) -> None:
        memory = self._transfers[place].memory
        data = chunk.data
        start = self._num_written[place]
        if chunk.offset != start or not 0 < len(data) <= len(memory) - start:
            raise _WrongAnswer(
                f"it sent {len(data)} bytes at {chunk.offset}, where {start} of the {len(memory)} "
                "bytes of a block had come"
            )
        memory[start : start + len(data)] = data
        self._num_written[place] += len(data)
        if self._num_written[place] == len(memory):
            is_right = xxhash.xxh3_128_digest(memory) == chunk.checksum
            self._results[place] = (
                Result(Status.HIT, REMOTE, len(memory))
                if is_right
                else Result(Status.CORRUPT, REMOTE, error="a block has another checksum")
            )


def _chunks(
    lease: int, transfers: Sequence[Transfer], numbers: Sequence[int]
) -> Iterator[pb.WriteRequest]:
    for number in numbers:
        memory = transfers[number].memory
        for offset in range(0, len(memory), CHUNK_BYTES):
            data = bytes(memory[offset : offset + CHUNK_BYTES])
            yield pb.WriteRequest(lease=lease, block=number, offset=offset, data=data)


def _written(number: int, transfer: Transfer) -> pb.WrittenBlock:
    return pb.WrittenBlock(block=number, checksum=xxhash.xxh3_128_digest(transfer.memory))


def _remaining_s(ends_at: float) -> float:
    return max(0.0, ends_at - time.monotonic())
