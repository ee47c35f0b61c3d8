"""The KV tiers outside the device, which the server process opens and closes."""

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

import msgspec

from ullage_common.config.engine import TiersSection
from ullage_common.wire.tls import Material
from ullage_engine.kv_tiers.broker import BlockFormat, KvBroker, TierHits
from ullage_engine.kv_tiers.cost import ComputeSpeed
from ullage_engine.protocol.messages import FromKv, KvFound, KvGranted, Ready
from ullage_engine.protocol.requests import EngineRequest
from ullage_kv import Arena, FileTier, FileTierError, LowerTier, Store, TierStats
from ullage_kv.remote_tier import RemoteTier
from ullage_kv.service import KVStoreService, Served
from ullage_kv.store import DEADLINE_S

log = logging.getLogger("ullage.engine.kv")

_OPEN_S = 10.0
"""Maximum time in seconds to open the file tier's folder."""
_BROKEN = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
"""Error numbers of a broken or full file system. All others indicate a misconfigured path."""


class KvTiers:
    """Owns the host tier's memory, the KV store and its broker. For use in a single event loop.

    The store and its broker are created once a worker has reported the format of its blocks.
    """

    def __init__(
        self,
        section: TiersSection,
        on_hits: Callable[[str, list[TierHits]], None],
        material: Callable[[], Material | None] = lambda: None,
        compute: Callable[[], ComputeSpeed] = ComputeSpeed,
        deadline_s: float = DEADLINE_S,
        has_begun: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Prepare the configured tiers. `open` allocates their memory later.

        Args:
            section: the configured tiers.
            on_hits: called with a request's id and the blocks that it reused, by tier.
            material: returns the newest certificate for connections to peers, or None for
                plaintext.
            compute: returns the current prefill speed.
            deadline_s: maximum duration of a load from lower tiers, in seconds.
            has_begun: returns whether the request with this id has received a token from this
                worker, or has finished.
        """
        self._section = section
        self._deadline_s = min(deadline_s, DEADLINE_S)
        self._material = material
        self.service = KVStoreService(self._served) if section.remote else None
        """The service for peer engines, or None if no peers are configured."""
        self._on_hits = on_hits
        self._compute = compute
        self._has_begun = has_begun
        self._remote: RemoteTier | None = None
        self._arena: Arena | None = None
        self._space = b""
        self.not_loaded = Counter[tuple[str, str]]()
        """The `KvBroker.not_loaded` counter, summed over all workers."""
        self._broker: KvBroker | None = None
        """The store's broker, which outlives workers, or None before the first worker is ready."""
        self._post: Callable[[KvGranted | KvFound], None] | None = None
        """Function that sends a message to the worker, or None while no worker uses the tiers."""
        self.store: Store | None = None
        """The store, or None before the first worker is ready."""

    def open(self, num_bytes: int) -> None:
        """Allocate the host tier's memory and touch every page, which may take seconds.

        Raises:
            ArenaError: the memory is not available.
        """

        def report(done: int, total: int) -> None:
            if done and done < total:
                log.info("allocating memory", extra={"done_bytes": done, "total_bytes": total})

        self._arena = Arena.create(num_bytes, progress=report)
        facts = {"bytes": num_bytes, "huge_page_bytes": self._arena.huge_page_bytes()}
        log.info("the host tier is allocated", extra=facts)

    @property
    def worker_options(self) -> list[str]:
        """Return the command line options that tell a worker where the host tier's memory is."""
        assert self._arena is not None, "open comes first"
        return ["--kv-arena", self._arena.path, "--kv-bytes", str(self._arena.num_bytes)]

    async def worker_ready(self, ready: Ready, post: Callable[[KvGranted | KvFound], None]) -> None:
        """Start serving KV blocks to a worker that has reported ready.

        The store is kept if the worker's blocks have the same namespace as the previous worker's.
        Otherwise it is replaced with a new store.

        Raises:
            FileTierError: the folder of the file tier cannot be used.
        """
        assert self._arena is not None, "open comes first"
        profile = ready.profile
        if not ready.kv_space:
            given = self._arena.num_bytes
            needed = profile.block_bytes
            if given < needed:
                log.warning(
                    "memory.tiers.host.size: %d bytes hold no KV block of %d bytes, so no KV is "
                    "kept outside the device; raise it",
                    given,
                    needed,
                )
            else:
                log.info(
                    "memory.tiers: the worker keeps no KV outside its device, and its log says "
                    "why. The %d bytes of the host tier are not used",
                    given,
                )
            if self.store is None:  # otherwise peers may read from it
                self._arena.drop_pages()
            return

        if self._space != ready.kv_space:
            store = self.store
            self.store = None
            if store is not None:
                await asyncio.to_thread(store.close)
            tiers = await self._lower_tiers(ready.kv_space, profile.block_bytes)
            self._space = ready.kv_space
            self.store = Store(self._arena, profile.block_bytes, tiers)
            self._broker = self._make_broker(self.store, ready)
        elif self._remote is not None:
            self._remote.trust()  # a worker that may have damaged blocks is gone
        self._post = post

    def _make_broker(self, store: Store, ready: Ready) -> KvBroker:
        """Create the broker for this worker and later workers with the same block namespace."""

        def post(message: KvGranted | KvFound) -> None:
            if self._post is not None:
                self._post(message)

        profile = ready.profile
        return KvBroker(
            store,
            BlockFormat(ready.kv_space, profile.block_tokens, profile.window_tokens),
            post,
            self._on_hits,
            asyncio.get_running_loop().call_soon_threadsafe,
            self._compute,
            computes_beside_loads=ready.computes_beside_loads,
            deadline_s=self._deadline_s,
            has_begun=self._has_begun,
            not_loaded=self.not_loaded,
        )

    def worker_lost(self) -> None:
        """Free the slots of a worker that has exited."""
        if self._broker is not None:
            self._broker.worker_lost()
        self._post = None

    def with_stored(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Start prefetching the stored KV of new requests if that is faster than computing it.

        Args:
            requests: requests with the same prompt, one for each sample to generate.

        Returns:
            Copies of the requests, with `num_stored_blocks` set to the number of leading blocks
            that the tiers store or may store. Before a worker is ready, nothing is changed.
        """
        if self._broker is None or self._post is None:
            return list(requests)
        num_blocks = self._broker.arrived(requests[0])
        return [msgspec.structs.replace(each, num_stored_blocks=num_blocks) for each in requests]

    def on_message(self, message: FromKv) -> None:
        """Handle a message from the worker."""
        if self._broker is not None and self._post is not None:
            self._broker.on_message(message)

    def stats(self) -> list[TierStats]:
        """Return the statistics of every tier, or [] before the first worker is ready."""
        store = self.store  # which another thread may set to None
        return store.stats() if store is not None else []

    def _served(self) -> Served | None:
        return None if self.store is None else Served(self.store, self._space)

    async def _lower_tiers(self, space: bytes, block_bytes: int) -> list[LowerTier]:
        """Open the configured tiers below host memory, and return them, fastest first."""
        tiers: list[LowerTier] = []
        file = await self._file_tier(space, block_bytes)
        if (remote := self._section.remote) is not None:
            assert self.service is not None
            self._remote = RemoteTier(
                remote.peers,
                space,
                block_bytes,
                instance=self.service.instance,
                deadline_s=remote.deadline,
                copies=remote.copy,
                server_name=remote.server_name or "",
                material=self._material,
            )
            tiers.append(self._remote)
        return tiers if file is None else [*tiers, file]

    async def _file_tier(self, space: bytes, block_bytes: int) -> FileTier | None:
        """Open the file tier, or return None if its file system is unresponsive, full or broken.

        The engine then serves without the file tier, just as if the file system had failed later.

        Raises:
            FileTierError: if the folder cannot be used for any other reason.
        """
        section = self._section.file
        if section is None:
            return None
        opening = _in_daemon(
            lambda: FileTier(section.path, space, block_bytes, section.size),
            lambda tier: tier.close(),
        )
        try:
            async with asyncio.timeout(_OPEN_S):
                return await asyncio.wrap_future(opening)
        except TimeoutError:
            problem = f"it did not answer within {_OPEN_S:g} s"
        except FileTierError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _BROKEN:
                raise
            problem = os.strerror(cause.errno or 0)
        log.error(
            "memory.tiers.file.path: %s: %s. No KV is kept in files until the next start",
            section.path,
            problem,
        )
        return None

    def close(self) -> None:
        """Finish queued writes, close all tiers, and free the memory."""
        store = self.store
        self.store = None  # from now on peers get no blocks
        if store is not None:
            store.close()
        if self._arena is not None:
            self._arena.close()


def _in_daemon(
    open_tier: Callable[[], FileTier], on_late: Callable[[FileTier], None]
) -> "Future[FileTier]":
    """Open a tier in a daemon thread, so that a hanging mount does not block the process.

    Args:
        open_tier: opens the tier.
        on_late: called with a tier that was opened after the future was cancelled.

    Returns:
        A future that completes with the tier, or with the error that prevented its opening.
    """
    result = Future[FileTier]()

    def work() -> None:
        try:
            tier = open_tier()
        except Exception as error:
            with contextlib.suppress(InvalidStateError):
                result.set_exception(error)
            return
        try:
            result.set_result(tier)
        except InvalidStateError:
            on_late(tier)

    threading.Thread(target=work, name="open-file-tier", daemon=True).start()
    return result
