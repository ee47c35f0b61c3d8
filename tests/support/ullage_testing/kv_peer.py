"""An engine's KV store as its peers see it: served over gRPC in a thread, or in a process.

As a program, `serve NUM_BLOCKS BLOCK_BYTES` serves blocks whose bytes follow from their keys, says
its address, and answers each line of its input with its figures. With PAUSE_AFTER it stops in a
read after so many chunks. `use ADDRESS BLOCK_BYTES STATE` is a client that stops in a state.
"""

import asyncio
import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc

from ullage.kv.v1 import kv_pb2 as pb
from ullage.kv.v1 import kv_pb2_grpc
from ullage_common.wire.channels import open_blocking_channel
from ullage_common.wire.servers import bind, new_server
from ullage_kv import Arena, Store, block_keys
from ullage_kv.service import KVStoreService, Served

SPACE = bytes(32)
Service = Callable[[Callable[[], Served | None]], KVStoreService]


def keys_of(*tokens: int) -> list[bytes]:
    """Keys of a chain of blocks with one token each."""
    return block_keys(SPACE, tokens, 1)


def bytes_of(key: bytes, num_bytes: int) -> bytes:
    """The bytes of a block, by its key."""
    return hashlib.shake_128(key).digest(num_bytes)


def until(condition: Callable[[], object]) -> None:
    """Waits for a condition, a minute at most."""
    ends_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends_at, "it did not come about"
        time.sleep(0.005)


class LoopThread:
    """An event loop that runs in a thread, as gRPC's servers need one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class KvPeer:
    """A store with slots for `num_slots` blocks, and its service on a port of loopback."""

    def __init__(
        self,
        loop: LoopThread,
        *,
        num_slots: int = 16,
        block_bytes: int = 40_000,
        namespace: bytes = SPACE,
        service: Service = KVStoreService,
        credentials: grpc.ServerCredentials | None = None,
        port: int = 0,
    ) -> None:
        slot_bytes = -(-block_bytes // 4096) * 4096
        self.arena = Arena.create(num_slots * slot_bytes, available_bytes=1 << 32)
        self.store = Store(self.arena, block_bytes)
        self.served: Served | None = Served(self.store, namespace)
        self.service = service(lambda: self.served)
        self._loop = loop

        async def start() -> int:
            self._server = new_server()
            kv_pb2_grpc.add_KVStoreServiceServicer_to_server(self.service, self._server)
            bound = bind(self._server, f"127.0.0.1:{port}", credentials)
            await self._server.start()
            return bound

        self.address = f"127.0.0.1:{loop.run(start())}"

    def put(self, keys: list[bytes]) -> None:
        blocks = [bytes_of(key, self.store.block_bytes) for key in keys]
        assert all(result.is_usable for result in self.store.put_batch(keys, blocks))

    def stop(self) -> None:
        """Stop the server. The store is kept."""
        self._loop.run(self._server.stop(None))

    def close(self) -> None:
        self.stop()
        self.service.leases.close()
        self.store.close()
        self.arena.close()


class PausingService(KVStoreService):
    """Stops in a read after so many chunks, and says so."""

    _chunks_left = int(os.environ.get("PAUSE_AFTER", "0"))

    async def _read(self, *args: Any) -> AsyncIterator[Any]:
        async for chunk in super()._read(*args):
            if not self._chunks_left:
                print("paused", flush=True)
                await asyncio.Event().wait()
            self._chunks_left -= 1
            yield chunk


def serve(num_blocks: int, block_bytes: int) -> None:
    loop = LoopThread()
    service: Service = PausingService if "PAUSE_AFTER" in os.environ else KVStoreService
    peer = KvPeer(loop, num_slots=4 * num_blocks, block_bytes=block_bytes, service=service)
    peer.put(keys_of(*range(num_blocks)))
    print(peer.address, flush=True)
    for _ in sys.stdin:
        print(json.dumps(dataclasses.asdict(peer.service.stats())), flush=True)
    peer.close()
    loop.close()


def use(address: str, block_bytes: int, state: str) -> None:
    """Reads or writes the first two blocks up to a state, says so and waits to be ended."""
    geometry = pb.Geometry(namespace=SPACE, block_bytes=block_bytes)
    keys = keys_of(0, 1)
    with open_blocking_channel(address) as channel:
        stub = kv_pb2_grpc.KVStoreServiceStub(channel)
        if state == "reading":
            held = stub.Lookup(pb.LookupRequest(geometry=geometry, keys=keys, lease_ms=9000))
            chunks = stub.Read(pb.ReadRequest(lease=held.lease, keys=keys))
            next(chunks)
        else:
            blocks = [pb.NewBlock(key=key) for key in keys]
            held = stub.Reserve(pb.ReserveRequest(geometry=geometry, blocks=blocks, lease_ms=9000))
        if state in ("writing", "written"):
            size = block_bytes if state == "written" else block_bytes // 2
            data = [bytes_of(key, block_bytes)[:size] for key in keys]
            stub.Write(
                pb.WriteRequest(lease=held.lease, block=number, data=each)
                for number, each in enumerate(data)
            )
        print(state, flush=True)
        signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        use(sys.argv[2], int(sys.argv[3]), sys.argv[4])
