"""Answers what a worker asks of KV outside the device.

The worker copies blocks between the device and slots of shared memory. Which slots, this says: what
the worker reserves and pins is under one lease, which ends with it. When a request arrives, what
only lower tiers have of its beginning is loaded to shared memory, as far as that is quicker than
computing it (`cost`).
"""

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ullage_engine.kv_tiers.cost import ComputeSpeed, LoadSpeed, Needed, seconds_to_load, split
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
)
from ullage_kv import Block, Result, Status, Store, block_keys, part_key
from ullage_kv.index import SlotRef
from ullage_kv.store import DEADLINE_S, HOST

log = logging.getLogger("ullage.engine.kv")

_MAX_ARRIVALS = 8192
"""Requests whose tiers are remembered until they start."""

_FIRST_PART = 8
"""Share of a load, one of so many, that is loaded before the rest of it to learn what loads of
different sizes take; smaller loads are not divided."""


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


@dataclass(slots=True)
class _Beginning:
    """What a request can begin with."""

    tiers: list[str]
    """The tier that had each block."""
    first: int = 0
    """Index of the first block that is loaded; those before it are here or computed."""
    hits: list[TierHits] = field(default_factory=list)
    """What it has begun with so far."""


class _Pinned(NamedTuple):
    request_id: str
    refs: list[SlotRef]
    tiers: list[str]
    asked_at: float
    beginning: _Beginning


class KvBroker:
    """Answers one worker after the other; one thread uses it."""

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
        not_loaded: Counter[tuple[str, str]] | None = None,
    ) -> None:
        """
        Args:
            post: sends a message to the worker.
            on_hits: gets a request's id and what it began with.
            call_soon: runs a function in the thread that uses this, from any thread.
            compute: returns how fast prompts are computed at present.
            computes_beside_loads: whether the worker computes the first blocks of a request while
                the last ones are loaded; if not, its requests wait for loads, and it gets one
                answer only.
            deadline_s: seconds that a load may take.
            clock: in seconds.
            not_loaded: counts on, as `not_loaded` below.
        """
        self._store = store
        self._format = block_format
        self._post = post
        self._on_hits = on_hits
        self._call_soon = call_soon
        self._compute = compute
        self._computes_beside_loads = computes_beside_loads
        self._deadline_s = deadline_s
        self._clock = clock
        self.not_loaded = Counter[tuple[str, str]]() if not_loaded is None else not_loaded
        """Blocks that requests did not begin with though a lower tier had them, by tier and reason:
        `slower` to load than to compute, or `unused`, as they came late or the request ended."""
        self._speeds: dict[str, LoadSpeed] = {}
        self._due: dict[bytes, float] = {}
        """Times at which the blocks that are being loaded are predicted to be here."""
        self._lease = store.index.lease()
        self._reserved: dict[KvSlot, Block] = {}
        self._pinned: dict[int, _Pinned] = {}
        self._beginnings: OrderedDict[str, _Beginning] = OrderedDict()

    def arrived(self, request: EngineRequest) -> int:
        """Begins to load what a request can begin with, as far as that is quicker than computing
        it; returns its number of blocks, or of all that it has where that is being asked."""
        kv, salt = self._format, request.cache_salt
        keys = block_keys(kv.space, request.token_ids[:-1], kv.block_tokens, salt)
        # Later on the backlog has this request, too.
        starts_at = self._clock() + self._compute().start_s
        looking = self._look(keys)
        if looking.done():
            return self._begin(request.request_id, keys, starts_at)

        def begin() -> None:
            self._begin(request.request_id, keys, starts_at)

        looking.add_done_callback(lambda _: self._call_soon(begin))
        return len(keys)

    def _look(self, keys: list[bytes]) -> "Future[None]":
        """Finds out what tiers have of a beginning. Which window blocks it takes depends on how
        long it is, so all of them are looked for."""
        if not self._format.window_tokens:
            return self._store.look(keys)
        return self._store.look([*keys, *[part_key(key, WINDOW_PART) for key in keys]])

    def _begin(self, request_id: str, keys: list[bytes], starts_at: float) -> int:
        """Begins to load blocks that tiers have of a beginning; returns the number of those that
        the request can begin with."""
        tiers = self._store.lookup_prefix(keys)
        if not tiers:
            return 0
        keys = keys[: len(tiers)]
        self._store.touch(keys)
        beginning = self._remember(request_id, tiers)
        num_here = _num_in_host(tiers)
        start_s = max(0.0, starts_at - self._clock())
        first = beginning.first = self._first_to_load(keys, tiers, num_here, start_s)
        self._note_slower(request_id, tiers[num_here:first])
        if first == len(keys):
            self._measure(keys[num_here:], tiers[num_here:])
            return num_here
        self._load(keys, first, self._longest_load_s(len(keys) - num_here, start_s))
        return len(keys)

    def _measure(self, keys: list[bytes], tiers: list[str]) -> None:
        """Loads a few of the blocks that are computed, from tiers whose speed is not known or was
        not seen for long; nobody waits for them."""
        for tier in {*tiers} - {HOST}:
            if self._speed(tier).is_to_measure:
                of_tier = [key for key, own in zip(keys, tiers, strict=True) if own == tier]
                self._fetch(tier, of_tier[-_FIRST_PART:], self._deadline_s)

    def _note_slower(self, request_id: str, tiers: list[str]) -> None:
        for tier, count in Counter(tier for tier in tiers if tier != HOST).items():
            self.not_loaded[tier, "slower"] += count
            speed = self._speed(tier)
            facts = {
                "request_id": request_id,
                "tier": tier,
                "blocks": count,
                "load_latency_s": round(speed.latency_s, 6),
                "load_bytes_per_s": round(speed.bytes_per_s),
                "prefill_tokens_per_s": round(self._compute().tokens_per_s, 1),
            }
            log.info("computed rather than loaded", extra=facts)

    def _remember(self, request_id: str, tiers: list[str]) -> _Beginning:
        beginning = self._beginnings[request_id] = _Beginning(tiers)
        while len(self._beginnings) > _MAX_ARRIVALS:
            self._beginnings.popitem(last=False)
        return beginning

    def _first_to_load(
        self, keys: list[bytes], tiers: list[str], first: int, start_s: float
    ) -> int:
        """Returns the index of the first of the blocks from `first` on that are loaded, as all
        behind it are: those that are there before they could be computed; the number of all where
        there are none. `start_s`: seconds until the computation can begin."""
        compute = self._compute()
        if not compute.tokens_per_s:
            return first
        windows = self._last_windows(keys)
        seconds = seconds_to_load(
            self._needed(keys[first:], tiers[first:]),
            self._predict,
            self._needed(windows, self._store.contains(windows)),
        )
        block_s = compute.seconds(self._format.block_tokens)
        if self._computes_beside_loads:
            return first + split(seconds, block_s, start_s)
        num_lacking = len(keys) - first
        return first if seconds[0] <= start_s + num_lacking * block_s else len(keys)

    def _longest_load_s(self, num_lacking: int, start_s: float) -> float:
        """Returns after how many seconds loads are given up: a request that waits for them waits
        no longer than it takes to compute its blocks."""
        if self._computes_beside_loads:
            return self._deadline_s
        compute_s = self._compute().seconds(num_lacking * self._format.block_tokens)
        return min(self._deadline_s, start_s + compute_s)

    def _needed(self, keys: list[bytes], tiers: list[str]) -> list[Needed]:
        now, needed = self._clock(), []
        for key, tier in zip(keys, tiers, strict=True):
            if key in self._due:
                needed.append(Needed(ready_s=max(0.0, self._due[key] - now)))
            else:
                needed.append(Needed("" if tier == HOST else tier))
        return needed

    def _predict(self, tier: str) -> Callable[[int], float]:
        """Returns what predicts the seconds to load so many blocks of a tier from now on."""
        speed, block_bytes = self._speed(tier), self._store.block_bytes
        time_of, latency_s = speed.predict(), speed.latency_s
        least = _FIRST_PART if speed.is_of_one_size else math.inf

        def seconds(num_blocks: int) -> float:
            own = time_of.seconds(num_blocks * block_bytes)
            return own + latency_s if num_blocks >= least else own

        return seconds

    def _num_first(self, tier: str, num_blocks: int) -> int:
        """Returns how many blocks of a load are loaded before the rest of it; 0: it is one load."""
        return num_blocks // _FIRST_PART if self._speed(tier).is_of_one_size else 0

    def _speed(self, tier: str) -> LoadSpeed:
        if tier not in self._speeds:
            self._speeds[tier] = LoadSpeed(self._clock)
        return self._speeds[tier]

    def _load(self, keys: list[bytes], first: int, longest_s: float) -> list[Future[Any]]:
        """Begins to load blocks from `first` on that only lower tiers have, and what else whoever
        goes on behind them reads; what that takes is measured."""
        keys = [*keys[first:], *self._last_windows(keys)]
        tiers = self._store.contains(keys)
        new: dict[str, list[bytes]] = {}
        loading = []
        for key, tier in zip(keys, tiers, strict=True):
            if key in self._due:
                loading.append(key)
            elif tier not in ("", HOST):
                new.setdefault(tier, []).append(key)
        fetches: list[Future[Any]] = []
        if loading:
            fetches.append(self._store.fetch(loading, longest_s))
        return fetches + [self._load_from(*each, longest_s) for each in new.items()]

    def _load_from(self, tier: str, keys: list[bytes], longest_s: float) -> "Future[Any]":
        ends_at, num_first = self._clock() + longest_s, self._num_first(tier, len(keys))
        due = self._clock() + self._predict(tier)(len(keys))
        self._due |= dict.fromkeys(keys, due)
        if not num_first:
            return self._fetch(tier, keys, longest_s)
        everything = Future[None]()

        def load_rest() -> None:
            rest = self._fetch(tier, keys[num_first:], ends_at - self._clock(), keys[num_first - 1])
            rest.add_done_callback(lambda _: everything.set_result(None))

        first = self._fetch(tier, keys[:num_first], longest_s)
        first.add_done_callback(lambda _: self._call_soon(load_rest))
        return everything

    def _fetch(
        self, tier: str, keys: list[bytes], longest_s: float, before: bytes | None = None
    ) -> "Future[list[Result]]":
        """Fetches new blocks of one tier and measures what that takes. `before`: the block that
        they continue, which came before."""
        number = self._speed(tier).begin(len(keys) * self._store.block_bytes)
        fetched = self._store.fetch(keys if before is None else [before, *keys], longest_s)

        def finish() -> None:
            results = fetched.result()[-len(keys) :]
            num_hits = sum(each.status is Status.HIT for each in results)
            self._speed(tier).finish(number, num_hits * self._store.block_bytes)
            for key in keys:
                self._due.pop(key, None)

        fetched.add_done_callback(lambda _: self._call_soon(finish))
        return fetched

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
                refs = [SlotRef(slot.slot, slot.generation) for slot in stored]
                blocks = [self._reserved.pop(slot) for slot in stored]
                self._store.committed(self._lease, refs, blocks)
                for slot in dropped:
                    del self._reserved[slot]
                    self._lease.abort(SlotRef(slot.slot, slot.generation))
            case KvWanted() if message.is_rest or not self._computes_beside_loads:
                self._answer_when_loaded(message)
            case KvWanted():
                self._answer_at_once(message)
            case KvRead(number=number, num_blocks=num_blocks):
                self._was_read(self._pinned.pop(number), num_blocks)
            case KvDamaged(chains=chains):
                self._store.remove_chains(chains)

    def worker_lost(self) -> None:
        """Gives back what the worker held, whose process has ended; another one may begin."""
        self._lease.close()
        self._lease = self._store.index.lease()
        self._reserved, self._pinned = {}, {}
        self._beginnings.clear()

    def check_integrity(self) -> None:
        """Asserts that the store holds slots only for what is not answered."""
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

    def _answer_at_once(self, wanted: KvWanted) -> None:
        """Answers with what is in shared memory, and says from where on more is coming."""
        looking = self._look(wanted.keys)
        tiers = self._store.lookup_prefix(wanted.keys)
        if wanted.request_id not in self._beginnings and looking.done():
            self._remember(wanted.request_id, tiers)
        refs, windows = self._pin_beginning(wanted)
        here, end = wanted.first + len(refs), len(tiers)
        more_from = None
        if not looking.done():
            more_from = here
        elif here < end:
            first = self._first_to_load(wanted.keys[:end], tiers, here, 0.0)
            self._beginnings[wanted.request_id].first = first
            if first < end:
                self._load(wanted.keys[:end], first, self._deadline_s)
                more_from = first
        self._answer(wanted, refs, windows, self._clock(), more_from)

    def _answer_when_loaded(self, wanted: KvWanted) -> None:
        """Answers when all that is wanted is in shared memory, or does not come."""
        asked_at, lease = self._clock(), self._lease

        def answer() -> None:
            if lease is self._lease:  # else the worker that asked is gone
                self._answer(wanted, *self._pin_beginning(wanted), asked_at)

        def load() -> None:
            if lease is not self._lease:
                return
            beginning = self._beginnings.get(wanted.request_id)
            if wanted.is_rest and beginning is not None and beginning.first > wanted.first:
                # It was asked for before tiers were looked at; what is before that is computed.
                refs, windows = self._pin_beginning(wanted)
                first = max(beginning.first, wanted.first + len(refs))
                more_from = first if first < len(beginning.tiers) else None
                self._answer(wanted, refs, windows, asked_at, more_from)
                return
            pending = [future for future in self._load_rest(wanted) if not future.done()]
            if pending:
                _when_done(pending, lambda: self._call_soon(answer))
            else:
                answer()

        looking = self._look(wanted.keys)
        if looking.done():
            load()
        else:
            looking.add_done_callback(lambda _: self._call_soon(load))

    def _load_rest(self, wanted: KvWanted) -> list[Future[Any]]:
        """Begins to load what a request waits for: what it was told of, or what is there sooner
        than it could be computed."""
        tiers = self._store.lookup_prefix(wanted.keys)
        if wanted.request_id not in self._beginnings:
            self._remember(wanted.request_id, tiers)
        if wanted.is_rest:
            return self._load(wanted.keys, wanted.first, self._deadline_s)
        keys, num_here = wanted.keys[: len(tiers)], _num_in_host(tiers)
        first = self._first_to_load(keys, tiers, num_here, 0.0)
        if first == len(keys):
            return []
        return self._load(keys, first, self._longest_load_s(len(keys) - num_here, 0.0))

    def _answer(
        self,
        wanted: KvWanted,
        refs: list[SlotRef],
        windows: list[SlotRef],
        asked_at: float,
        more_from: int | None = None,
    ) -> None:
        beginning = self._beginnings.get(wanted.request_id) or _Beginning([])
        tiers = [*beginning.tiers[wanted.first :], *[HOST] * len(refs)][: len(refs)]
        self._pinned[wanted.number] = _Pinned(
            wanted.request_id, [*refs, *windows], tiers, asked_at, beginning
        )
        if more_from is None:
            self._beginnings.pop(wanted.request_id, None)
        self._post(
            KvFound(
                number=wanted.number,
                slots=[ref.slot for ref in refs],
                window_slots=[ref.slot for ref in windows],
                more_from=more_from,
            )
        )

    def _pin_beginning(self, wanted: KvWanted) -> tuple[list[SlotRef], list[SlotRef]]:
        """Pins the first blocks that are here of what is wanted, and their last windows."""
        refs = self._pin(wanted.keys[wanted.first :])
        return self._with_windows(wanted, refs) if self._format.window_tokens else (refs, [])

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
        # The last ones are read: the first ones may have been computed meanwhile.
        num_late = len(pinned.tiers) - num_blocks
        for tier, count in Counter(pinned.tiers[:num_late]).items():
            if tier != HOST:
                self.not_loaded[tier, "unused"] += count
        if not num_blocks:
            return
        size = self._store.block_bytes
        self._store.was_read([Result(Status.HIT, HOST, size)] * len(pinned.refs))
        seconds = self._clock() - pinned.asked_at
        counted = Counter(pinned.tiers[num_late:])
        hits = pinned.beginning.hits
        hits += [TierHits(tier, count, seconds) for tier, count in counted.items()]
        self._on_hits(pinned.request_id, list(hits))


def _num_in_host(tiers: list[str]) -> int:
    """Returns how many of the first blocks are in shared memory."""
    return next((n for n, tier in enumerate(tiers) if tier != HOST), len(tiers))


def _when_done(futures: list[Future[Any]], then: Callable[[], object]) -> None:
    """Calls a function once, when all futures are done, in the thread of the last one."""
    lock, num_pending = threading.Lock(), len(futures)

    def count(_: "Future[Any]") -> None:
        nonlocal num_pending
        with lock:
            num_pending -= 1
            is_last = not num_pending
        if is_last:
            then()

    for future in futures:
        future.add_done_callback(count)
