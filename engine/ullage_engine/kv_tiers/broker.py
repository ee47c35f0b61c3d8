"""The broker, which answers a worker's queries about KV blocks outside the device.

The worker copies blocks between the device and slots in shared memory that the broker has reserved
or pinned for it. A single lease tracks these slots and ends when the worker exits. When a request
arrives, the broker loads its prefix from lower tiers into shared memory if that is faster than
computing it (see `loads`).
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ullage_engine.kv_tiers.cost import ComputeSpeed
from ullage_engine.kv_tiers.loads import Loads
from ullage_engine.protocol.messages import (
    WINDOW_PART,
    FromKv,
    KvDamaged,
    KvFound,
    KvGranted,
    KvOffer,
    KvRead,
    KvSlot,
    KvWanted,
    KvWritten,
)
from ullage_engine.protocol.requests import EngineRequest
from ullage_kv import Block, Result, Status, Store, block_keys, part_key
from ullage_kv.futures import Steps, all_done, run
from ullage_kv.index import SlotRef
from ullage_kv.results import HOST
from ullage_kv.store import DEADLINE_S

log = logging.getLogger("ullage.engine.kv")

_PREFETCH_SHARE = 0.5
"""Maximum fraction of host memory slots that prefetched blocks may occupy.

Beyond that, waiting requests would evict each other's blocks, which would have to be reloaded."""


class TierHits(NamedTuple):
    """The blocks that a request reused from one tier instead of computing them."""

    tier: str
    num_blocks: int
    seconds: float
    """Seconds from the worker's first query until the blocks were on the device."""


class BlockFormat(NamedTuple):
    """The format of a worker's blocks, which determines their keys and the usable prefixes."""

    space: bytes
    """Namespace of the block keys."""
    block_tokens: int
    window_tokens: int
    """Length in tokens of sliding windows with separate blocks, or 0 if there are none."""

    def first_window_block(self, num_blocks: int) -> int:
        """Return the index of the first window block needed after the first `num_blocks` blocks."""
        first = max(0, num_blocks * self.block_tokens - self.window_tokens + 1)
        return first // self.block_tokens


@dataclass(slots=True)
class _Beginning:
    """A request's leading blocks that the tiers store, and the progress of loading them."""

    looking: Future[None]
    """Future that completes once the tiers have reported which blocks they have."""
    tiers: list[str] | None = None
    """Tier of each block when the broker first decided what to load, or None before then."""
    first: int = 0
    """Index of the first block to load. Earlier blocks are in host memory or are computed."""
    num_prefetched: int = 0
    """Number of blocks that are prefetched while the request waits in the queue."""
    asked_at: float | None = None
    """Time at which the worker first asked for the prefix, or None if it has not."""
    hits: dict[str, TierHits] = field(default_factory=dict)
    """Blocks that the request has reused so far, by tier."""


class _Pinned(NamedTuple):
    request_id: str
    refs: list[SlotRef]
    tiers: list[str]
    beginning: _Beginning


class KvBroker:
    """Answers the worker's KV queries and outlives worker restarts. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        block_format: BlockFormat,
        post: Callable[[KvGranted | KvFound], None],
        on_hits: Callable[[str, list[TierHits]], None],
        call_soon: Callable[[Callable[[], None]], object],
        compute: Callable[[], ComputeSpeed] = ComputeSpeed,
        *,
        computes_beside_loads: bool = True,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
        has_begun: Callable[[str], bool] = lambda _: False,
        not_loaded: Counter[tuple[str, str]] | None = None,
    ) -> None:
        """Open a lease in the store.

        Args:
            store: the store of the worker's blocks.
            block_format: the format of the worker's blocks.
            post: sends a message to the worker.
            on_hits: called with a request's id and the blocks that it reused, by tier.
            call_soon: schedules a function in this object's thread. Callable from any thread.
            compute: returns the current prefill speed.
            computes_beside_loads: whether the worker computes the first blocks of a request while
                the last ones are loaded. If not, its requests wait for loads, and each query gets
                only one answer.
            deadline_s: maximum duration of a load, in seconds.
            clock: returns the time in seconds.
            has_begun: returns whether the request with this id has received a token from this
                worker, or has finished.
            not_loaded: an earlier broker's `not_loaded` counter to continue, or None for a new one.
        """
        self._store = store
        self._format = block_format
        self._post = post
        self._on_hits = on_hits
        self._call_soon = call_soon
        self._compute = compute
        self._computes_beside_loads = computes_beside_loads
        self._clock = clock
        self._has_begun = has_begun
        self.not_loaded = Counter[tuple[str, str]]() if not_loaded is None else not_loaded
        """Number of stored blocks that requests did not use, by tier and reason.

        The reason is `slower` if loading would have taken longer than computing, or `unused` if the
        blocks arrived too late or the request had already finished.
        """
        self._loads = Loads(
            store,
            call_soon,
            compute,
            block_format.block_tokens,
            are_waited_for=not computes_beside_loads,
            deadline_s=deadline_s,
            clock=clock,
        )
        self._lease = store.index.lease()
        self._reserved: dict[KvSlot, Block] = {}
        self._pinned: dict[int, _Pinned] = {}
        self._beginnings: OrderedDict[str, _Beginning] = OrderedDict()
        self._num_prefetched = 0
        """Total number of prefetched blocks, summed over all waiting requests."""

    def arrived(self, request: EngineRequest) -> int:
        """Start prefetching the stored prefix of a request if that is faster than computing it.

        Returns:
            The number of stored blocks that the request can use. If the tiers have not answered
            yet, this is the upper limit: the request's total number of full blocks.
        """
        kv = self._format
        salt = request.cache_salt
        keys = block_keys(kv.space, request.token_ids[:-1], kv.block_tokens, salt)
        # Read the backlog before it includes this request.
        starts_at = self._clock() + self._compute().start_s
        name = request.request_id
        self._forget(name)
        self._forget_begun()
        beginning = self._remember(name, keys)
        if beginning.looking.done():
            return self._prefetch(name, beginning, keys, starts_at)

        run(self._prefetch_when_known(name, beginning, keys, starts_at), self._call_soon)
        return len(keys)

    def _prefetch_when_known(
        self, request_id: str, beginning: _Beginning, keys: list[bytes], starts_at: float
    ) -> Steps:
        """Prefetch a prefix once the tiers have answered, unless the worker asks for it first."""
        yield beginning.looking
        if self._beginnings.get(request_id) is beginning and beginning.tiers is None:
            self._prefetch(request_id, beginning, keys, starts_at)

    def _look(self, keys: list[bytes]) -> "Future[None]":
        """Ask the tiers which blocks of a prefix they store.

        The query includes all window blocks, because the ones that are needed depend on the length
        of the stored prefix, which is not known yet.
        """
        if not self._format.window_tokens:
            return self._store.look(keys)
        return self._store.look([*keys, *[part_key(key, WINDOW_PART) for key in keys]])

    def _prefetch(
        self, request_id: str, beginning: _Beginning, keys: list[bytes], starts_at: float
    ) -> int:
        """Start loading a prefix, and return the number of blocks that the request can use."""
        tiers = self._lookup(keys)
        if not tiers:
            self._forget(request_id)
            return 0
        num_here = _num_in_host(tiers)
        most = int(_PREFETCH_SHARE * self._store.index.num_slots) - self._num_prefetched
        if self._num_prefetched and len(tiers) - num_here > most:
            return len(tiers)  # The worker's query decides which blocks are loaded.
        self._decide(request_id, beginning, keys, tiers, starts_at=starts_at)
        first = beginning.first
        if first == len(tiers):
            return num_here

        beginning.num_prefetched = len(tiers) - first
        self._num_prefetched += beginning.num_prefetched
        longest_s = self._loads.longest_s(len(tiers) - num_here, starts_at - self._clock())
        self._load(keys[: len(tiers)], first, longest_s)
        return len(tiers)

    def _lookup(self, keys: list[bytes]) -> list[str]:
        """Return the tier of each block in the longest stored prefix that the request can use.

        A prefix is usable if the window blocks that the next token needs are stored as well.
        """
        tiers = self._store.lookup_prefix(keys)
        if not self._format.window_tokens:
            return tiers
        windows = self._store.contains([part_key(key, WINDOW_PART) for key in keys[: len(tiers)]])
        end = len(tiers)
        first = self._format.first_window_block(len(tiers))
        while "" in windows[first:end]:
            # Any prefix that ends between the missing block and `end` would need that block, too.
            end = max(index for index in range(first, end) if not windows[index])
            first = self._format.first_window_block(end)
        return tiers[:end]

    def _decide(
        self,
        request_id: str,
        beginning: _Beginning,
        keys: list[bytes],
        tiers: list[str],
        num_here: int | None = None,
        starts_at: float = 0.0,
    ) -> None:
        """Choose the first block to load, and store its index in `beginning.first`.

        All later blocks of the stored prefix are to be loaded as well. Calling this again for the
        same request overwrites the earlier choice.

        Args:
            request_id: the request's id.
            beginning: the stored prefix.
            keys: keys of the request's blocks. Keys after the stored prefix are ignored.
            tiers: the tier of each block of the stored prefix.
            num_here: number of leading blocks that do not have to be computed or loaded. The
                default is the number of leading blocks in host memory.
            starts_at: earliest time at which the computation of the remaining blocks can start.
        """
        keys = keys[: len(tiers)]
        if num_here is None:
            num_here = _num_in_host(tiers)
        start_s = max(0.0, starts_at - self._clock())
        windows = self._last_windows(keys)
        beginning.first = self._loads.first(keys, tiers, num_here, windows, start_s)
        if beginning.tiers is not None:
            return

        beginning.tiers = tiers
        self._store.touch([*keys, *windows])
        self._note_slower(request_id, tiers[num_here : beginning.first])
        if beginning.first == len(keys):
            self._loads.measure(keys[num_here:], tiers[num_here:])

    def _note_slower(self, request_id: str, tiers: list[str]) -> None:
        for tier, count in Counter(tier for tier in tiers if tier != HOST).items():
            self.not_loaded[tier, "slower"] += count
            speed = self._loads.speed(tier)
            facts = {
                "request_id": request_id,
                "tier": tier,
                "blocks": count,
                "load_latency_s": round(speed.latency_s, 6),
                "load_bytes_per_s": round(speed.bytes_per_s),
                "prefill_tokens_per_s": round(self._compute().tokens_per_s, 1),
            }
            log.info("computed rather than loaded", extra=facts)

    def _remember(self, request_id: str, keys: list[bytes]) -> _Beginning:
        """Return what is known about a request's stored prefix, and keep track of it.

        On the first call for a request, ask the tiers which of its blocks they store.
        """
        beginning = self._beginnings.get(request_id)
        if beginning is None:
            beginning = self._beginnings[request_id] = _Beginning(self._look(keys))
        return beginning

    def _forget(self, request_id: str) -> None:
        beginning = self._beginnings.pop(request_id, None)
        if beginning is not None:
            self._num_prefetched -= beginning.num_prefetched

    def _forget_begun(self) -> None:
        """Delete the state of old requests that have begun, so that it does not accumulate.

        A request has begun once it has received a token or has finished. The worker might then
        never ask for its stored prefix, so no answer would delete the state. Requests are checked
        from the oldest on, up to the first that has not begun.
        """
        while self._beginnings and self._has_begun(oldest := next(iter(self._beginnings))):
            self._forget(oldest)

    def _load(
        self, keys: list[bytes], first: int, longest_s: float | None = None
    ) -> list[Future[Any]]:
        """Start loading the blocks at index `first` and later, and the window blocks they require.

        Returns:
            Futures that complete when the blocks have arrived, or at the deadline.
        """
        return self._loads.load([*keys[first:], *self._last_windows(keys)], longest_s)

    def _last_windows(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys of the window blocks needed to compute the token after these blocks."""
        if not self._format.window_tokens:
            return []
        first = self._format.first_window_block(len(keys))
        return [part_key(key, WINDOW_PART) for key in keys[first:]]

    def on_message(self, message: FromKv) -> None:
        """Handle a message in which the worker offers, requests or reports on KV blocks."""
        match message:
            case KvOffer():
                self._post(KvGranted(slots=self._grant(message)))
            case KvWritten(stored=stored, dropped=dropped):
                refs = [SlotRef(slot.slot, slot.generation) for slot in stored]
                blocks = [self._reserved.pop(slot) for slot in stored]
                self._store.committed(self._lease, refs, blocks)
                for slot in dropped:
                    del self._reserved[slot]
                    self._lease.abort(SlotRef(slot.slot, slot.generation))
            case KvWanted() if message.is_rest or not self._computes_beside_loads:
                run(self._answer_when_loaded(message), self._call_soon)
            case KvWanted():
                self._answer_at_once(message)
            case KvRead(number=number, num_blocks=num_blocks):
                self._was_read(self._pinned.pop(number), num_blocks)
            case KvDamaged(chains=chains):
                self._store.remove_chains(chains)

    def worker_lost(self) -> None:
        """Free the slots of a worker that has exited, so that its replacement can start."""
        self._lease.close()
        self._lease = self._store.index.lease()
        self._reserved = {}
        self._pinned = {}
        self._beginnings.clear()
        self._num_prefetched = 0

    def check_integrity(self) -> None:
        """Assert that the lease holds exactly the slots that the broker has reserved or pinned.

        Slots are reserved for blocks that the worker has offered to copy to the host tier, and
        pinned for queries that have not finished.
        """
        assert len(self._lease.reserved) == len(self._reserved), "reservations lost or doubled"
        pins = Counter(ref for pinned in self._pinned.values() for ref in pinned.refs)
        assert pins == self._lease.pinned, "pins lost or doubled"
        self._store.check_integrity([self._lease])

    def _grant(self, offer: KvOffer) -> list[KvSlot]:
        blocks = [Block(each.key, each.parent, each.is_kept) for each in offer.blocks]
        slots = []
        for block, ref in zip(blocks, self._store.offer(self._lease, blocks), strict=True):
            if ref is not None:
                slot = KvSlot(block.key, ref.slot, ref.generation)
                self._reserved[slot] = block
                slots.append(slot)
        return slots

    def _ask(self, wanted: KvWanted) -> _Beginning:
        """Return what is known about the stored prefix of the request in a worker's query.

        On the first query for a request, also record the time as `asked_at`.
        """
        beginning = self._remember(wanted.request_id, wanted.keys)
        if beginning.asked_at is None:
            beginning.asked_at = self._clock()
        return beginning

    def _answer_at_once(self, wanted: KvWanted) -> None:
        """Answer a query at once with the blocks that are already in shared memory.

        If more blocks may follow later, the answer includes the index of the first of them.
        """
        name = wanted.request_id
        keys = wanted.keys
        beginning = self._ask(wanted)
        tiers = self._lookup(keys) if beginning.looking.done() else []
        refs, windows = self._pin_beginning(wanted)
        here = wanted.first + len(refs)
        more_from = None
        if not beginning.looking.done():
            more_from = here
        elif here < len(tiers):
            self._decide(name, beginning, keys, tiers, here)
            if beginning.first < len(tiers):
                self._load(keys[: len(tiers)], beginning.first)
                more_from = beginning.first
        self._answer(wanted, beginning, refs, windows, more_from)

    def _answer_when_loaded(self, wanted: KvWanted) -> Steps:
        """Answer a query once the blocks to load for it have arrived, or at the deadline."""
        lease = self._lease
        beginning = self._ask(wanted)

        yield beginning.looking
        if lease is not self._lease:
            return  # The worker that asked is gone.
        tiers = self._lookup(wanted.keys)
        if beginning.tiers is None or not wanted.is_rest:
            here = wanted.first if wanted.is_rest else None
            self._decide(wanted.request_id, beginning, wanted.keys, tiers, here)

        if wanted.is_rest and beginning.first > wanted.first:
            # The worker asked before the tiers had answered. It computes the blocks before `first`.
            refs, windows = self._pin_beginning(wanted)
            first = max(beginning.first, wanted.first + len(refs))
            more_from = first if first < len(tiers) else None
            self._answer(wanted, beginning, refs, windows, more_from)
            return

        yield all_done(self._load_wanted(wanted, beginning.first, tiers))
        if lease is not self._lease:
            return
        refs, windows = self._pin_beginning(wanted)
        self._answer(wanted, beginning, refs, windows, None)

    def _load_wanted(self, wanted: KvWanted, first: int, tiers: list[str]) -> list[Future[Any]]:
        """Start loading the stored blocks that a request is waiting for, starting at index `first`.

        Returns:
            Futures that complete when the blocks have arrived, or at the deadline.
        """
        keys = wanted.keys[: len(tiers)]
        longest_s = None
        if not wanted.is_rest:
            longest_s = self._loads.longest_s(len(keys) - _num_in_host(tiers), 0.0)
        return self._load(keys, first, longest_s) if first < len(keys) else []

    def _answer(
        self,
        wanted: KvWanted,
        beginning: _Beginning,
        refs: list[SlotRef],
        windows: list[SlotRef],
        more_from: int | None,
    ) -> None:
        tiers = [*(beginning.tiers or [])[wanted.first :], *[HOST] * len(refs)][: len(refs)]
        self._pinned[wanted.number] = _Pinned(
            wanted.request_id, [*refs, *windows], tiers, beginning
        )
        if more_from is None:
            self._forget(wanted.request_id)
        self._post(
            KvFound(
                number=wanted.number,
                slots=[ref.slot for ref in refs],
                window_slots=[ref.slot for ref in windows],
                more_from=more_from,
            )
        )

    def _pin_beginning(self, wanted: KvWanted) -> tuple[list[SlotRef], list[SlotRef]]:
        """Pin the requested blocks up to the first missing one, and the window blocks they need.

        Returns:
            The slots of the blocks, and the slots of the window blocks.
        """
        refs = self._pin(wanted.keys[wanted.first :])
        return self._with_windows(wanted, refs) if self._format.window_tokens else (refs, [])

    def _pin(self, keys: list[bytes]) -> list[SlotRef]:
        """Pin blocks in shared memory up to the first missing one, and return their slots."""
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
        """Return the longest prefix of `refs` whose required window blocks are in shared memory.

        These window blocks are pinned and returned as well. Other blocks in `refs` are unpinned.
        """
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
        # The worker read the last blocks. It may have computed the first ones in the meantime.
        num_late = len(pinned.tiers) - num_blocks
        for tier, count in Counter(pinned.tiers[:num_late]).items():
            if tier != HOST:
                self.not_loaded[tier, "unused"] += count
        if not num_blocks:
            return

        size = self._store.block_bytes
        self._store.was_read([Result(Status.HIT, HOST, size)] * len(pinned.refs))
        hits = pinned.beginning.hits
        asked_at = pinned.beginning.asked_at
        assert asked_at is not None, "answered without being asked"
        seconds = self._clock() - asked_at
        for tier, count in Counter(pinned.tiers[num_late:]).items():
            num_before = hits[tier].num_blocks if tier in hits else 0
            hits[tier] = TierHits(tier, num_before + count, seconds)
        self._on_hits(pinned.request_id, list(hits.values()))


def _num_in_host(tiers: list[str]) -> int:
    """Return the number of leading blocks that are in shared memory."""
    return next((n for n, tier in enumerate(tiers) if tier != HOST), len(tiers))
