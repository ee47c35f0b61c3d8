"""The tiers of KV outside the device, which the server's process owns and its worker uses.

The worker copies blocks between the device and slots of shared memory. Which slots, this says: what
the worker reserves and pins is under one lease, which ends with it. When a request arrives, what
only lower tiers have of its beginning is fetched to shared memory while the request waits.
"""

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

import msgspec

from ullage_common.config.engine import TiersSection
from ullage_common.wire.tls import Material
from ullage_engine.protocol.messages import (
    WINDOW_PART,
    EngineRequest,
    FromKv,
    KvDamaged,
    KvFound,
    KvGranted,
    KvOffer,
    KvRead,
    KvSlot,
    KvWanted,
    KvWritten,
    Ready,
)
from ullage_kv import (
    Arena,
    Block,
    FileTier,
    FileTierError,
    LowerTier,
    Result,
    Status,
    Store,
    TierStats,
    block_keys,
    part_key,
)
from ullage_kv.index import SlotRef
from ullage_kv.remote_tier import RemoteTier
from ullage_kv.service import KVStoreService, Served
from ullage_kv.store import DEADLINE_S, HOST

log = logging.getLogger("ullage.engine.kv")

_OPEN_S = 10.0
"""Seconds in which a folder must answer when it is opened."""
_BROKEN = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
"""Errors of a file system that is not what it was, rather than of a wrong path."""
_MAX_ARRIVALS = 8192
"""Requests whose tiers are remembered until they start."""


class TierHits(NamedTuple):
    """Blocks that a request began with from one tier."""

    tier: str
    num_blocks: int
    seconds: float
    """Seconds that the request waited for the blocks of all tiers."""


class BlockFormat(NamedTuple):
    """What keys and prefixes depend on."""

    space: bytes
    """Namespace of the keys."""
    block_tokens: int
    window_tokens: int
    """Length of the sliding windows of layers that have blocks of their own; 0: there are none."""

    def first_window_block(self, num_blocks: int) -> int:
        """Returns the index of the first window block that whoever goes on behind so many blocks
        reads."""
        first = max(0, num_blocks * self.block_tokens - self.window_tokens + 1)
        return first // self.block_tokens


class _Pinned(NamedTuple):
    request_id: str
    refs: list[SlotRef]
    tiers: list[str]
    asked_at: float


class KvBroker:
    """Answers one worker after the other; one thread uses it."""

    def __init__(
        self,
        store: Store,
        block_format: BlockFormat,
        post: Callable[[KvGranted | KvFound], None],
        on_hits: Callable[[str, list[TierHits]], None],
        call_soon: Callable[[Callable[[], None]], object],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """
        Args:
            post: sends a message to the worker.
            on_hits: gets a request's id and what it began with.
            call_soon: runs a function in the thread that uses this, from any thread.
        """
        self._store = store
        self._format = block_format
        self._post = post
        self._on_hits = on_hits
        self._call_soon = call_soon
        self._deadline_s = deadline_s
        self._lease = store.index.lease()
        self._reserved: dict[KvSlot, Block] = {}
        self._pinned: dict[int, _Pinned] = {}
        self._arrivals: OrderedDict[str, list[str]] = OrderedDict()

    def arrived(self, request: EngineRequest) -> int:
        """Begins to fetch what a request can begin with; returns its number of blocks, or of all
        that it has where that is being asked."""
        kv, salt = self._format, request.cache_salt
        keys = block_keys(kv.space, request.token_ids[:-1], kv.block_tokens, salt)
        looking = self._look(keys)
        if looking.done():
            return self._begin(request.request_id, keys)

        def begin() -> None:
            self._begin(request.request_id, keys)

        looking.add_done_callback(lambda _: self._call_soon(begin))
        return len(keys)

    def _look(self, keys: list[bytes]) -> "Future[None]":
        """Finds out what tiers have of a beginning. Which window blocks it takes depends on how
        long it is, so all of them are looked for."""
        if not self._format.window_tokens:
            return self._store.look(keys)
        return self._store.look([*keys, *[part_key(key, WINDOW_PART) for key in keys]])

    def _begin(self, request_id: str, keys: list[bytes]) -> int:
        """Begins to fetch the blocks that tiers have of a beginning; returns their number."""
        tiers = self._store.lookup_prefix(keys)
        if not tiers:
            return 0
        keys = keys[: len(tiers)]
        self._store.touch(keys)
        if any(tier != HOST for tier in tiers):
            self._store.fetch(keys, self._deadline_s)
        self._store.fetch(self._last_windows(keys), self._deadline_s)
        self._arrivals[request_id] = tiers
        while len(self._arrivals) > _MAX_ARRIVALS:
            self._arrivals.popitem(last=False)
        return len(tiers)

    def _last_windows(self, keys: list[bytes]) -> list[bytes]:
        """Returns the keys of the window blocks that whoever goes on behind these blocks reads."""
        if not self._format.window_tokens:
            return []
        first = self._format.first_window_block(len(keys))
        return [part_key(key, WINDOW_PART) for key in keys[first:]]

    def on_message(self, message: FromKv) -> None:
        """Does what the worker says or asks."""
        match message:
            case KvOffer():
                self._post(KvGranted(slots=self._grant(message)))
            case KvWritten(stored=stored, dropped=dropped):
                for slot in stored:
                    ref = SlotRef(slot.slot, slot.generation)
                    self._store.committed(self._lease, ref, self._reserved.pop(slot))
                for slot in dropped:
                    del self._reserved[slot]
                    self._lease.abort(SlotRef(slot.slot, slot.generation))
            case KvWanted():
                self._fetch(message)
            case KvRead(number=number, num_blocks=num_blocks):
                self._was_read(self._pinned.pop(number), num_blocks)
            case KvDamaged(chains=chains):
                self._store.remove_chains(chains)

    def worker_lost(self) -> None:
        """Gives back what the worker held, whose process has ended; another one may begin."""
        self._lease.close()
        self._lease = self._store.index.lease()
        self._reserved, self._pinned = {}, {}
        self._arrivals.clear()

    def check_integrity(self) -> None:
        """Asserts that the store holds slots only for what is not answered."""
        assert len(self._lease.reserved) == len(self._reserved), "reservations lost or doubled"
        pins = Counter(ref for pinned in self._pinned.values() for ref in pinned.refs)
        assert pins == self._lease.pinned, "pins lost or doubled"
        self._store.index.check_integrity([self._lease])

    def _grant(self, offer: KvOffer) -> list[KvSlot]:
        slots = []
        for block in offer.blocks:
            own = Block(block.key, block.parent, block.is_kept)
            ref = self._store.offer(self._lease, own)
            if ref is not None:
                slot = KvSlot(block.key, ref.slot, ref.generation)
                self._reserved[slot] = own
                slots.append(slot)
        return slots

    def _fetch(self, wanted: KvWanted) -> None:
        """Answers when all that is wanted is in shared memory, or does not come."""
        asked_at, lease = time.monotonic(), self._lease

        def answer() -> None:
            if lease is self._lease:  # else the worker that asked is gone
                self._answer(wanted, asked_at)

        def fetch() -> None:
            if lease is not self._lease:
                return
            futures = self._store.fetch(wanted.keys[wanted.first :], self._deadline_s)
            futures += self._store.fetch(self._last_windows(wanted.keys), self._deadline_s)
            pending = [future for future in futures if not future.done()]
            if pending:
                _when_done(pending, lambda: self._call_soon(answer))
            else:
                answer()

        looking = self._look(wanted.keys)
        if looking.done():
            fetch()
        else:
            looking.add_done_callback(lambda _: self._call_soon(fetch))

    def _answer(self, wanted: KvWanted, asked_at: float) -> None:
        refs = self._pin(wanted.keys[wanted.first :])
        windows: list[SlotRef] = []
        if self._format.window_tokens:
            refs, windows = self._with_windows(wanted, refs)
        tiers = self._arrivals.pop(wanted.request_id, [])
        tiers = [*tiers[wanted.first :], *[HOST] * len(refs)][: len(refs)]
        self._pinned[wanted.number] = _Pinned(wanted.request_id, [*refs, *windows], tiers, asked_at)
        self._post(
            KvFound(
                number=wanted.number,
                slots=[ref.slot for ref in refs],
                window_slots=[ref.slot for ref in windows],
            )
        )

    def _pin(self, keys: list[bytes]) -> list[SlotRef]:
        """Pins the first blocks that are here, up to one that is not."""
        refs: list[SlotRef] = []
        for key in keys:
            ref = self._lease.pin(key)
            if ref is None:
                break
            refs.append(ref)
        return refs

    def _with_windows(
        self, wanted: KvWanted, refs: list[SlotRef]
    ) -> tuple[list[SlotRef], list[SlotRef]]:
        """Returns the longest beginning of what is here that has its last window, too, with that;
        unpins the rest."""
        while refs:
            end = wanted.first + len(refs)
            first = self._format.first_window_block(end)
            windows = self._pin([part_key(key, WINDOW_PART) for key in wanted.keys[first:end]])
            if len(windows) == end - first:
                return refs, windows
            for ref in [*windows, refs.pop()]:
                self._lease.unpin(ref)
        return [], []

    def _was_read(self, pinned: _Pinned, num_blocks: int) -> None:
        for ref in pinned.refs:
            self._lease.unpin(ref)
        if not num_blocks:
            return
        size = self._store.block_bytes
        self._store.was_read([Result(Status.HIT, HOST, size)] * len(pinned.refs))
        seconds = time.monotonic() - pinned.asked_at
        counted = Counter(pinned.tiers[:num_blocks])
        hits = [TierHits(tier, count, seconds) for tier, count in counted.items()]
        self._on_hits(pinned.request_id, hits)


class KvTiers:
    """The memory of the host tier, and the store and its broker as soon as a worker says what
    blocks it has; for one event loop."""

    def __init__(
        self,
        section: TiersSection,
        on_hits: Callable[[str, list[TierHits]], None],
        material: Callable[[], Material | None] = lambda: None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """
        Args:
            on_hits: gets a request's id and what it began with.
            deadline_s: seconds that a request waits for lower tiers, at most.
            material: returns the newest certificate to show to peers; None: they speak plaintext.
        """
        self._section = section
        self._deadline_s = min(deadline_s, DEADLINE_S)
        self._material = material
        self.service = KVStoreService(self._served) if section.remote else None
        """What peers read from and write to; None: there are none."""
        self._on_hits = on_hits
        self._arena: Arena | None = None
        self._space = b""
        self._broker: KvBroker | None = None
        self.store: Store | None = None
        """None: no worker was ready yet."""

    def open(self) -> None:
        """Takes the memory, every page of it, which may take seconds.

        Raises:
            ArenaError: it is not there.
        """
        num_bytes = self._section.host.size

        def report(done: int, total: int) -> None:
            if done and done < total:
                log.info("taking memory", extra={"done_bytes": done, "total_bytes": total})

        self._arena = Arena.create(num_bytes, progress=report)
        facts = {"bytes": num_bytes, "huge_page_bytes": self._arena.huge_page_bytes()}
        log.info("the host tier has its memory", extra=facts)

    @property
    def worker_options(self) -> list[str]:
        """Options of a worker's command line by which it finds the memory."""
        assert self._arena is not None, "open comes first"
        return ["--kv-arena", self._arena.path, "--kv-bytes", str(self._arena.num_bytes)]

    async def worker_ready(self, ready: Ready, post: Callable[[KvGranted | KvFound], None]) -> None:
        """Serves a worker from now on: with what the store has where its blocks are those of the
        worker before, else with another one.

        Raises:
            FileTierError: the first store's folder cannot be used.
        """
        assert self._arena is not None, "open comes first"
        profile = ready.profile
        if not ready.kv_space:
            log.warning(
                "memory.tiers.host.size: %d bytes hold no KV block of %d bytes; nothing is kept "
                "outside the device",
                self._arena.num_bytes,
                profile.block_bytes,
            )
            return
        if self._space != ready.kv_space:
            store, self.store = self.store, None
            if store is not None:
                await asyncio.to_thread(store.close)
            tiers = await self._lower_tiers(ready.kv_space, profile.block_bytes)
            self._space = ready.kv_space
            self.store = Store(self._arena, profile.block_bytes, tiers)
        assert self.store is not None
        loop = asyncio.get_running_loop()
        self._broker = KvBroker(
            self.store,
            BlockFormat(ready.kv_space, profile.block_tokens, profile.window_tokens),
            post,
            self._on_hits,
            loop.call_soon_threadsafe,
            self._deadline_s,
        )

    def worker_lost(self) -> None:
        """Gives back what the worker held; call it when its process has ended."""
        if self._broker is not None:
            self._broker.worker_lost()
        self._broker = None

    def with_stored(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Begins to fetch what samples of one prompt can begin with, and tells the worker of it."""
        if self._broker is None:
            return list(requests)
        num_blocks = self._broker.arrived(requests[0])
        return [msgspec.structs.replace(each, num_stored_blocks=num_blocks) for each in requests]

    def on_message(self, message: FromKv) -> None:
        """Does what the worker says or asks."""
        if self._broker is not None:
            self._broker.on_message(message)

    def stats(self) -> list[TierStats]:
        """Returns the figures of every tier; none before the first worker was ready."""
        store = self.store  # which another thread may set to None
        return store.stats() if store is not None else []

    def _served(self) -> Served | None:
        return None if self.store is None else Served(self.store, self._space)

    async def _lower_tiers(self, space: bytes, block_bytes: int) -> list[LowerTier]:
        """Opens the configured tiers below host memory, the fastest first."""
        tiers: list[LowerTier] = []
        file = await self._file_tier(space, block_bytes)
        if (remote := self._section.remote) is not None:
            assert self.service is not None
            tiers.append(
                RemoteTier(
                    remote.peers,
                    space,
                    block_bytes,
                    instance=self.service.instance,
                    deadline_s=remote.deadline,
                    copies=remote.copy,
                    server_name=remote.server_name or "",
                    material=self._material,
                )
            )
        return tiers if file is None else [*tiers, file]

    async def _file_tier(self, space: bytes, block_bytes: int) -> FileTier | None:
        """Opens the files. A folder that does not answer, or that is full or broken, is done
        without, as it would be later on.

        Raises:
            FileTierError: the folder is not one that this engine may use.
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
            problem = f"it does not answer within {_OPEN_S:g} s"
        except FileTierError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _BROKEN:
                raise
            problem = os.strerror(cause.errno or 0)
        log.error(
            "memory.tiers.file.path: %s: %s; KV is kept in no files until the next start",
            section.path,
            problem,
        )
        return None

    def close(self) -> None:
        """Ends all tiers, and gives the memory back. It may take seconds: what was to be written is
        written."""
        store, self.store = self.store, None  # peers get nothing from now on
        if store is not None:
            store.close()
        if self._arena is not None:
            self._arena.close()


def _in_daemon(
    open_tier: Callable[[], FileTier], on_late: Callable[[FileTier], None]
) -> "Future[FileTier]":
    """Runs a function in a thread that the process need not wait for, as a mount may hang for ever.

    `on_late` gets the result of what was cancelled meanwhile.
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


def _when_done(futures: "list[Future[Result]]", then: Callable[[], object]) -> None:
    """Calls a function once, when all futures are done, in the thread of the last one."""
    lock, num_pending = threading.Lock(), len(futures)

    def count(_: "Future[Result]") -> None:
        nonlocal num_pending
        with lock:
            num_pending -= 1
            is_last = not num_pending
        if is_last:
            then()

    for future in futures:
        future.add_done_callback(count)
