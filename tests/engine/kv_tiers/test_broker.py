"""What the broker asks tiers for while requests wait, and what it does not."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from ullage_engine.kv_tiers.broker import BlockFormat, KvBroker, TierHits
from ullage_engine.kv_tiers.cost import PROBE_S, ComputeSpeed
from ullage_engine.protocol.messages import (
    WINDOW_PART,
    KvBlock,
    KvFound,
    KvGranted,
    KvOffer,
    KvRead,
    KvWanted,
    KvWritten,
)
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_kv import Arena, Result, Status, Store, TierStats, Transfer, block_keys, part_key
from ullage_kv.futures import done

SPACE = bytes(32)
BLOCK = 16
BLOCK_BYTES = 4096
UNKNOWN = ComputeSpeed()
SLOW = ComputeSpeed(100.0)
QUICK = ComputeSpeed(1e6)
"""When all is loaded; 0.16 s a block, when most is; and 16 µs, when nothing is worth it."""


def keys_of(token_ids: Sequence[int]) -> list[bytes]:
    return block_keys(SPACE, token_ids, BLOCK)


class Peers:
    """A tier that must be asked what it has; nothing ends before the test says so."""

    name = "remote"

    def __init__(self) -> None:
        self.held = set[bytes]()
        self.saved = set[bytes]()
        self.looks: list[Future[None]] = []
        self.num_looks = 0
        self.loads: list[tuple[list[bytes], Future[list[Result]]]] = []
        self._asked = set[bytes]()

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        self.num_looks += 1
        self._asked.update(keys)
        future = Future[None]()
        self.looks.append(future)
        return future

    def answer(self) -> None:
        """Ends all looks."""
        looks = self.looks
        self.looks = []
        for each in looks:
            each.set_result(None)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.held and key in self._asked and not self.looks for key in keys]

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        future = Future[list[Result]]()
        self.loads.append(([key for key, *_ in transfers], future))
        return future

    def finish(self, status: Status = Status.HIT) -> list[bytes]:
        """Ends all loads, and those that they lead to; returns the keys."""
        loaded = []
        while self.loads:
            keys, future = self.loads.pop(0)
            loaded += keys
            future.set_result([Result(status, self.name, BLOCK_BYTES)] * len(keys))
        return loaded

    def save(self, transfers: Sequence[Transfer]) -> "Future[list[Result]]":
        self.saved.update(key for key, *_ in transfers)
        return done([Result(Status.STORED, self.name, BLOCK_BYTES)] * len(transfers))

    def remove(self, keys: Sequence[bytes]) -> None: ...

    def remove_chains(self, chains: object) -> None: ...

    def stats(self) -> TierStats:
        return TierStats(self.name, "test")

    def close(self) -> None: ...


class Engine:
    """A broker, the store below it, and the messages of its worker."""

    def __init__(self, *, slots: int = 64, window: int = 0) -> None:
        self.now = 0.0
        self.compute = UNKNOWN
        self.begun = set[str]()
        self.peers = Peers()
        self.store = Store(Arena.create(slots * BLOCK_BYTES), BLOCK_BYTES, [self.peers])
        self.posted: list[KvGranted | KvFound] = []
        self.hits: list[TierHits] = []
        self.broker = KvBroker(
            self.store,
            BlockFormat(SPACE, BLOCK, window),
            self.posted.append,
            lambda _, hits: self.hits.extend(hits),
            lambda call: call(),
            lambda: self.compute,
            clock=lambda: self.now,
            has_begun=self.begun.__contains__,
        )
        self._num_wanted = 0

    def arrive(self, name: str, token_ids: Sequence[int]) -> int:
        request = EngineRequest(
            request_id=name,
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            max_tokens=1,
            sampling=SamplingParams(),
        )
        return self.broker.arrived(request)

    def write(self, keys: Sequence[bytes], parents: Sequence[bytes | None]) -> None:
        """Stores blocks that the worker has computed."""
        blocks = [KvBlock(*each, False) for each in zip(keys, parents, strict=True)]
        self.broker.on_message(KvOffer(blocks=blocks))
        granted = self.posted.pop()
        assert isinstance(granted, KvGranted)
        self.broker.on_message(KvWritten(stored=granted.slots))

    def ask(self, name: str, keys: list[bytes], first: int = 0, *, is_rest: bool = False) -> int:
        """Asks for blocks; returns the number of the message."""
        self._num_wanted += 1
        number = self._num_wanted
        self.broker.on_message(
            KvWanted(number=number, request_id=name, first=first, keys=keys, is_rest=is_rest)
        )
        return number

    def answer_to(self, number: int) -> KvFound:
        """Takes the answer, whose blocks are read."""
        [found] = [
            each for each in self.posted if isinstance(each, KvFound) and each.number == number
        ]
        self.posted.remove(found)
        self.broker.on_message(KvRead(number=number, num_blocks=len(found.slots)))
        return found


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**settings: Any) -> Engine:
        engines.append(Engine(**settings))
        return engines[-1]

    yield make
    for each in engines:
        each.peers.answer()
        each.peers.finish()
        assert not each.posted, "not answered to"
        each.broker.check_integrity()
        each.store.close()


TEXT = list(range(1000, 1000 + 10 * BLOCK + 1))
"""Ten blocks and a token."""
KEYS = keys_of(TEXT[:-1])


def test_a_tier_that_is_thought_slow_is_measured_and_then_loaded_from(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine()
    peers = engine.peers
    peers.held = set(KEYS)
    engine.compute = SLOW

    def arrive(seconds: float) -> int:
        """Lets a request come whose loads take so long; returns the number of its blocks."""
        engine.arrive("r", TEXT)
        peers.answer()
        engine.now += seconds if peers.loads else 0.0
        loaded = peers.finish()
        engine.store.index.remove_chains(None)
        return len(loaded)

    assert arrive(4.0) == 9
    while arrive(4.0):
        assert engine.now < 60
    engine.now += PROBE_S
    assert arrive(4.0) == 8, "nobody waits for these"
    assert arrive(0.0) == 0, "it is still slow"
    for _ in range(20):
        engine.now += PROBE_S
        num_loaded = arrive(0.001)
        assert num_loaded >= 8
    assert num_loaded == 9
    assert arrive(0.001) == 9
    assert engine.broker.not_loaded["remote", "slower"] >= 40


def test_peers_are_asked_once_for_a_request(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    peers = engine.peers
    peers.held = set(KEYS)
    engine.arrive("r", TEXT)
    first = engine.answer_to(engine.ask("r", KEYS))
    assert (first.slots, first.more_from) == ([], 0)
    rest = engine.ask("r", KEYS, is_rest=True)
    peers.answer()
    assert not engine.posted, "it is being loaded"
    peers.finish()
    assert len(engine.answer_to(rest).slots) == 10
    assert engine.hits == [("remote", 10, 0.0)]
    assert peers.num_looks == 1


def test_what_comes_in_two_answers_is_one_hit(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    peers = engine.peers
    peers.held = set(KEYS)
    engine.arrive("r", TEXT)
    peers.answer()
    keys, future = peers.loads.pop(0)
    future.set_result([Result(Status.HIT, "remote", BLOCK_BYTES)] * len(keys))
    engine.now = 1.0
    assert engine.answer_to(engine.ask("r", KEYS)).more_from == len(keys) == 1
    rest = engine.ask("r", KEYS, 1, is_rest=True)
    engine.now = 3.0
    peers.finish()
    assert len(engine.answer_to(rest).slots) == 9
    assert engine.hits == [("remote", 1, 0.0), ("remote", 10, 2.0)], "each says all so far"


def test_nothing_behind_a_gap_is_loaded(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    peers = engine.peers
    peers.held = {*KEYS[:4], *KEYS[5:]}
    engine.arrive("r", TEXT)
    engine.answer_to(engine.ask("r", KEYS))
    rest = engine.ask("r", KEYS, is_rest=True)
    peers.answer()
    assert peers.finish() == KEYS[:4]
    assert len(engine.answer_to(rest).slots) == 4


def test_what_is_slower_is_not_loaded_either_where_no_arrival_is_known(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine()
    peers = engine.peers
    peers.held = set(KEYS)
    engine.compute = QUICK
    engine.answer_to(engine.ask("r", KEYS))
    rest = engine.ask("r", KEYS, is_rest=True)
    peers.answer()
    found = engine.answer_to(rest)
    assert (found.slots, found.more_from) == ([], None)
    assert engine.broker.not_loaded == {("remote", "slower"): 10}


def test_what_is_loaded_for_waiting_requests_does_not_evict_one_another(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine(slots=48)
    texts = [[number, *TEXT] for number in range(6)]
    peers = engine.peers
    peers.held = {key for text in texts for key in keys_of(text[:-1])}
    for number, text in enumerate(texts):
        engine.arrive(f"r{number}", text)
        peers.answer()
        peers.finish()
    held = [engine.store.index.contains_each(keys_of(text[:-1])) for text in texts]
    assert [all(each) for each in held] == [True, True, False, False, False, False]

    def begin(number: int) -> None:
        name = f"r{number}"
        keys = keys_of(texts[number][:-1])
        found = engine.answer_to(engine.ask(name, keys))
        if found.more_from is not None:
            rest = engine.ask(name, keys, len(found.slots), is_rest=True)
            peers.finish()
            engine.answer_to(rest)
        engine.begun.add(name)

    for number in range(6):
        begin(number)
    assert sum(hit.num_blocks for hit in engine.hits if hit.tier == "remote") == 60
    engine.arrive("r6", texts[5])
    assert list(engine.broker._beginnings) == ["r6"], "the others are forgotten"
    assert engine.broker._num_prefetched == 0


def test_requests_that_never_ask_are_forgotten(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    engine.peers.held = set(KEYS)
    for number in range(5):
        engine.arrive(f"r{number}", TEXT)
        engine.peers.answer()
        engine.begun.add(f"r{number}")
    assert len(engine.broker._beginnings) == 1


def windows_of(keys: Sequence[bytes]) -> list[bytes]:
    return [part_key(key, WINDOW_PART) for key in keys]


def test_beginnings_without_their_last_windows_are_computed(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine(window=40)
    peers = engine.peers
    peers.held = {*KEYS, *windows_of(KEYS[2:6])}
    assert engine.arrive("r", TEXT) == 10, "not known yet"
    peers.answer()
    # Behind six blocks 39 tokens are read: those of the last three.
    assert set(peers.finish()) == {*KEYS[:6], *windows_of(KEYS[3:6])}
    found = engine.answer_to(engine.ask("r", KEYS))
    assert (len(found.slots), len(found.window_slots), found.more_from) == (6, 3, None)


def test_windows_are_copied_down_with_what_they_belong_to(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine(window=40)
    engine.write(KEYS, [None, *KEYS[:-1]])
    engine.write(windows_of(KEYS), KEYS)
    for number in range(2):
        engine.arrive(f"r{number}", TEXT)
        engine.peers.answer()
    assert engine.peers.saved == {*KEYS, *windows_of(KEYS[-3:])}
