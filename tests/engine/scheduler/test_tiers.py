"""KV that leaves the device and comes back: every token is the one of an undisturbed run."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from ullage_engine.scheduler.scheduler import KvPolicy
from ullage_kv import Result, Status, TierStats, Transfer, block_keys
from ullage_kv.futures import done

SPACE = bytes(32)
TEXT = list(range(1000, 1100))
"""Six whole blocks and a few tokens."""


@pytest.fixture
def new_rig(make_rig: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    rigs = []

    def make(**settings: Any) -> Any:
        rig = make_rig(**{"blocks": 20, "max_model_len": 300, "tier_slots": 40, **settings})
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.broker.check_integrity()
        rig.store.close()


def settle(rig: Any) -> None:
    """Steps and exchanges messages until nothing is left to do."""
    rig.run()
    for _ in range(3):
        rig.exchange()
        while rig.scheduler.has_work:
            rig.step()


def forget(rig: Any) -> None:
    """Loses what the device has cached."""
    rig.scheduler._cache.evict_all()


def answer(rig: Any, name: str, token_ids: list[int], **settings: Any) -> list[int]:
    assert rig.submit(rig.request(name, token_ids, 8, **settings)) is None
    tokens: list[int] = rig.run()[name]
    assert tokens == rig.undisturbed(token_ids, 0, 8)
    return tokens


KINDS = [{}, {"window": 20}, {"conv_layers": 4}, {"in_flight": 2}]


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "window", "conv", "in-flight"])
def test_evicted_kv_comes_back(new_rig: Callable[..., Any], kind: dict[str, int]) -> None:
    rig = new_rig(**kind)
    answer(rig, "first", TEXT)
    settle(rig)
    forget(rig)
    answer(rig, "again", [*TEXT, 7, 8, 9])
    [(name, hits)] = rig.tier_hits
    assert (name, hits.tier, hits.num_blocks) == ("again", "host", 6)


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "window", "conv", "in-flight"])
def test_another_worker_finds_what_the_dead_one_had(
    new_rig: Callable[..., Any], kind: dict[str, int]
) -> None:
    rig = new_rig(**kind)
    request = rig.request("r", TEXT, 60)
    rig.submit(request)
    for _ in range(40):
        rig.step()
    sent = rig.tokens("r")
    assert len(sent) > 16
    rig.lose_worker()
    resumed = msgspec.structs.replace(request, token_ids=TEXT + sent)
    rig.submit(resumed, resumed=True)
    assert rig.run()["r"] == rig.undisturbed(TEXT, 0, 60)
    [(_, hits)] = rig.tier_hits
    assert hits.num_blocks >= 6


def address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


class AskedTier:
    """The store of another engine, which has what one has looked for before."""

    name = "remote"

    def __init__(self, source: Any) -> None:
        self.source = source
        self.reader: Any = None
        self.looked_for: set[bytes] = set()

    def look(self, keys: list[bytes]) -> "Future[None]":
        self.looked_for.update(keys)
        return done(None)

    def holds(self, keys: list[bytes]) -> list[bool]:
        held = self.source.store.contains(keys)
        return [bool(name) and key in self.looked_for for key, name in zip(keys, held, strict=True)]

    def wants(self, keys: list[bytes]) -> list[bool]:
        return [False] * len(keys)

    def load(self, transfers: list[Transfer], deadline_s: float) -> "Future[list[Result]]":
        """Copies what devices of tests have in place of a slot's bytes."""
        arena = self.reader.store.arena
        lease = self.source.store.index.lease()
        for key, memory, _ in transfers:
            ref = lease.pin(key)
            assert ref is not None
            slot = (address(memory) - address(arena.memory)) // arena.slot_bytes
            into = self.reader.scheduler.tiers._first_slot + slot
            self.reader.device.slots[into] = list(self.source.device.slots[ref.slot])
        lease.close()
        return done([Result(Status.HIT, self.name, 4096) for _ in transfers])

    def stats(self) -> TierStats:
        return TierStats(self.name, "another store")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "window", "conv", "in-flight"])
def test_another_engine_begins_with_what_this_one_has(
    new_rig: Callable[..., Any], kind: dict[str, int]
) -> None:
    source = new_rig(**kind)
    answer(source, "first", TEXT)
    settle(source)
    tier = AskedTier(source)
    reader = tier.reader = new_rig(**kind, lower_tiers=[tier])
    answer(reader, "again", [*TEXT, 7])
    [(_, hits)] = reader.tier_hits
    assert (hits.tier, hits.num_blocks) == ("remote", 6)


def test_only_what_the_device_lacks_is_loaded(new_rig: Callable[..., Any]) -> None:
    rig = new_rig()
    answer(rig, "first", TEXT)
    settle(rig)
    answer(rig, "again", [*TEXT, 7])
    assert not rig.tier_hits


def test_tenants_find_only_their_own(new_rig: Callable[..., Any]) -> None:
    rig = new_rig()
    answer(rig, "first", TEXT, salt="one")
    settle(rig)
    forget(rig)
    answer(rig, "other", TEXT, salt="other")
    assert not rig.tier_hits
    answer(rig, "own", TEXT, salt="one")
    assert rig.tier_hits


def test_a_block_that_is_evicted_before_it_is_copied_is_not_stored(
    new_rig: Callable[..., Any],
) -> None:
    rig = new_rig(blocks=9)
    rig.submit(rig.request("first", TEXT, 1))
    while rig.scheduler.stats().num_running or rig.scheduler.stats().num_waiting:
        rig.begin(rig.scheduler.schedule())
        rig.end()
    rig.exchange(0)
    # Its blocks are granted, and gone before they can be copied.
    other = list(range(2000, 2100))
    rig.submit(rig.request("other", other, 4))
    rig.begin(rig.scheduler.schedule())
    rig.end()
    rig.exchange()
    settle(rig)
    forget(rig)
    assert len(rig.store.lookup_prefix(block_keys(SPACE, TEXT, 16))) < 6
    answer(rig, "again", [*TEXT, 7])


def test_cancelled_while_it_waits(new_rig: Callable[..., Any]) -> None:
    rig = new_rig()
    answer(rig, "first", TEXT)
    settle(rig)
    forget(rig)
    rig.submit(rig.request("again", [*TEXT, 7], 8))
    assert not rig.scheduler.schedule().chunks, "it waits for the answer"
    rig.scheduler.cancel("again")
    settle(rig)
    assert not rig.tier_hits
    rig.broker.check_integrity()
    assert not rig.broker._pinned


def test_an_answer_that_never_comes_is_not_waited_for(new_rig: Callable[..., Any]) -> None:
    rig = new_rig()
    answer(rig, "first", TEXT)
    settle(rig)
    forget(rig)
    rig.submit(rig.request("again", [*TEXT, 7], 8))
    assert not rig.scheduler.schedule().chunks
    rig.now += 60
    assert rig.begin(rig.scheduler.schedule())
    rig.end()
    settle(rig)
    assert rig.run()["again"] == rig.undisturbed([*TEXT, 7], 0, 8)
    assert not rig.broker._pinned


def test_damaged_kv_is_withdrawn_from_all_tiers(new_rig: Callable[..., Any]) -> None:
    rig = new_rig()
    answer(rig, "first", TEXT)
    settle(rig)
    rig.submit(rig.request("again", [*TEXT, 7], 30))
    rig.submit(rig.request("beside", [*TEXT, 8], 30))
    rig.step()
    rig.scheduler.discard("again")
    settle(rig)
    assert not rig.store.lookup_prefix(block_keys(SPACE, TEXT, 16))
    assert rig.run()["beside"] == rig.undisturbed([*TEXT, 8], 0, 30)
    assert not len(rig.store.index), "what continues damaged KV is stored by nobody"


def lose_step(rig: Any, name: str, prompt: list[int]) -> None:
    """Computes one step of a request, whose result is no number."""
    rig.submit(rig.request(name, prompt, 4))
    while True:
        rig.exchange()
        plan = rig.scheduler.schedule()
        rig.begin(plan)
        if plan.chunks:
            break
        rig.end()
    rig.scheduler.discard(name)
    rig.computed[0] = []
    rig.end()
    settle(rig)


def test_kv_that_was_loaded_and_is_damaged_is_not_loaded_again(
    new_rig: Callable[..., Any],
) -> None:
    rig = new_rig()
    answer(rig, "first", TEXT)
    settle(rig)
    forget(rig)
    lose_step(rig, "again", [*TEXT, 7])
    assert not len(rig.store.index)


def test_longer_texts_that_only_tiers_have_are_withdrawn_with_it(
    new_rig: Callable[..., Any],
) -> None:
    rig = new_rig()
    answer(rig, "long", [*TEXT, *range(2000, 2050)])
    settle(rig)
    forget(rig)
    answer(rig, "first", TEXT)
    lose_step(rig, "again", [*TEXT, 7])
    assert not len(rig.store.index)


def test_what_is_copied_while_it_is_withdrawn_is_stored_by_nobody(
    new_rig: Callable[..., Any],
) -> None:
    rig = new_rig(prompt_tokens=32)
    rig.submit(rig.request("r", TEXT, 4))
    for _ in range(2):
        rig.exchange()
        rig.begin(rig.scheduler.schedule())
        rig.end()
    rig.exchange()  # granted
    rig.begin(rig.scheduler.schedule())  # copied
    rig.scheduler.discard("r")
    rig.computed[0] = []
    rig.end()
    settle(rig)
    assert not len(rig.store.index)
    rig.scheduler.evict_all()
    settle(rig)
    answer(rig, "again", TEXT)


class SlowTier(AskedTier):
    """Loads that end by the clock of the rig that reads, one behind the other."""

    block_s = 0.0
    free_at = 0.0

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.sizes: list[int] = []
        """Blocks of each load."""
        self.under_way: list[tuple[float, Any, Any]] = []

    def load(self, transfers: Any, deadline_s: float) -> "Future[list[Result]]":
        now = self.reader.now
        future = Future[list[Result]]()
        self.sizes.append(len(transfers))
        self.free_at = max(now, self.free_at) + len(transfers) * self.block_s
        self.under_way.append((min(self.free_at, now + deadline_s), transfers, future))
        return future

    def remove_chains(self, chains: Any) -> None:
        """Nothing goes."""

    def tick(self, *, fails: bool = False) -> None:
        """Ends what is due; loads of tiers that hang end by their deadline."""
        due = [each for each in self.under_way if each[0] <= self.reader.now]
        self.under_way = [each for each in self.under_way if each not in due]
        for _, transfers, future in due:
            if fails or self.block_s >= 1:
                future.set_result([Result(Status.TIMEOUT, self.name) for _ in transfers])
            else:
                future.set_result(super().load(transfers, 5.0).result())

    def finish(self) -> None:
        """Ends all loads, and those that they lead to."""
        while self.under_way:
            self.reader.now = max(self.reader.now, self.under_way[0][0])
            self.tick()


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "window", "conv", "in-flight"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_lower", [False, True], ids=["", "slow tier"])
def test_dense_traffic(
    new_rig: Callable[..., Any], kind: dict[str, int], seed: int, has_lower: bool
) -> None:
    draw = random.Random(seed)
    documents = [[1000 * n + at for at in range(120)] for n in range(3)]
    source = new_rig(**kind, tier_slots=60)
    for document in documents:
        answer(source, f"d{document[0]}", document)
        settle(source)
    tier = SlowTier(source)
    rig = tier.reader = new_rig(
        **kind,
        lower_tiers=[tier] if has_lower else [],
        prefill_rate=20.0,
        blocks=18,
        max_sequences=4,
        prompt_tokens=48,
        expected=8,
        policy=KvPolicy(session_blocks=6, session_idle=5.0, host_slots=draw.choice([0, 12])),
    )
    contexts: dict[str, list[int]] = {}

    def submit(name: str, token_ids: list[int], *, resumed: bool = False) -> None:
        own = rig.request(name, token_ids, 40, num_prompt_tokens=1, session=draw.choice(["", "s"]))
        if rig.submit(own, resumed=resumed) is None:
            contexts[name] = list(token_ids)

    def check() -> None:
        outputs = rig.heard
        rig.heard = []
        for output in outputs:
            context = contexts[output.request_id]
            for token in output.token_ids:
                assert [token] == rig.undisturbed(context, 0, 1)
                context.append(token)
            if output.finish:
                del contexts[output.request_id]

    for turn in range(600):
        if draw.random() < 0.3 and len(contexts) < 6:
            submit(f"r{turn}", [*draw.choice(documents)[: draw.randint(1, 120)], turn])
        rig.exchange(draw.choice([0, 1, 2, 100]))
        while len(rig.computed) < rig._in_flight and rig.begin(rig.scheduler.schedule()):
            pass
        rig.end()
        check()
        rig.now += draw.choice([0.0, 0.005, 0.05])
        tier.block_s = draw.choice([0.0, 0.001, 0.01])
        tier.tick(fails=draw.random() < 0.1)
        event = draw.random()
        if event < 0.1:
            forget(rig)
            if has_lower:
                rig.store.remove_chains(None)
        elif event < 0.15 and not rig.computed:
            rig.scheduler.preempt_newest()
        elif event < 0.2 and contexts:
            rig.scheduler.cancel(contexts.popitem()[0])
        elif event < 0.23:
            rig.lose_worker()
            waiting = contexts
            contexts = {}
            for name, token_ids in waiting.items():
                submit(name, token_ids, resumed=True)
        rig.broker.check_integrity()
    while contexts:
        rig.now += 0.01
        tier.tick()
        rig.step()
        check()
    tier.finish()
    settle(rig)
    assert not rig.broker._pinned
    assert not rig.broker._loads.num_under_way
    num_blocks = sum(hits.num_blocks for _, hits in rig.tier_hits)
    num_remote = sum(hits.num_blocks for _, hits in rig.tier_hits if hits.tier == "remote")
    assert num_remote > 3 if has_lower else num_blocks > 8


@pytest.mark.parametrize("block_s", [0.0016, 0.016, 0.16, 1000.0])
@pytest.mark.parametrize("kind", KINDS, ids=["plain", "window", "conv", "in-flight"])
def test_no_load_makes_the_first_token_later_than_computing(
    new_rig: Callable[..., Any], kind: dict[str, int], block_s: float
) -> None:
    shape = {**kind, "blocks": 64, "max_model_len": 1000, "tier_slots": 140, "prefill_rate": 1000.0}
    text = list(range(1000, 1645))
    source = new_rig(**shape)
    answer(source, "first", text)
    settle(source)
    tier = SlowTier(source)
    tier.block_s = block_s
    rig = tier.reader = new_rig(**shape, lower_tiers=[tier])

    def first_token_s(name: str) -> float:
        began_at = rig.now
        assert rig.submit(rig.request(name, text, 1)) is None
        while not rig.tokens(name):
            rig.exchange()
            plan = rig.scheduler.schedule()
            rig.begin(plan)
            rig.now += plan.num_tokens / 1000 or 0.001
            tier.tick()
            rig.end()
        assert rig.tokens(name) == source.undisturbed(text, 0, 1)
        seconds: float = rig.now - began_at
        tier.finish()
        settle(rig)
        forget(rig)
        rig.store.remove_chains(None)
        return seconds

    times = [first_token_s(f"r{number}") for number in range(3)]
    assert max(times) <= 0.645 * 1.05
    if block_s < 0.01:
        assert times[-1] < 0.645 / 3


def begin_with_rest(new_rig: Callable[..., Any], kind: dict[str, int]) -> tuple[Any, SlowTier]:
    """A rig whose request `r` has asked for blocks that are still being loaded."""
    shape = {**kind, "blocks": 64, "max_model_len": 1000, "tier_slots": 140, "prefill_rate": 1000.0}
    source = new_rig(**shape)
    answer(source, "first", LONG_TEXT)
    settle(source)
    tier = SlowTier(source)
    tier.block_s = 0.016
    rig = tier.reader = new_rig(**shape, lower_tiers=[tier])
    rig.submit(rig.request("r", LONG_TEXT, 8))
    for _ in range(3):
        rig.step()
    assert tier.under_way, "the rest is being loaded"
    return rig, tier


LONG_TEXT = list(range(1000, 1645))
EVENTS: dict[str, Callable[[Any], object]] = {
    "cancelled": lambda rig: rig.scheduler.cancel("r"),
    "preempted": lambda rig: rig.scheduler.preempt_newest(),
    "lost": lambda rig: rig.lose_worker(),
}


@pytest.mark.parametrize("has_come", [False, True], ids=["loading", "loaded"])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("kind", KINDS, ids=["plain", "window", "conv", "in-flight"])
def test_what_is_loaded_for_a_request_that_stops_is_given_back(
    new_rig: Callable[..., Any], kind: dict[str, int], event: str, has_come: bool
) -> None:
    rig, tier = begin_with_rest(new_rig, kind)
    if has_come:
        tier.finish()
        for message in rig.scheduler.tiers.take_messages():
            rig.broker.on_message(message)
    while rig.computed:
        rig.end()
    EVENTS[event](rig)
    tier.finish()
    settle(rig)
    if event == "lost":
        rig.submit(rig.request("r", LONG_TEXT, 8))
        tier.finish()
        settle(rig)
    if event != "cancelled":
        assert rig.tokens("r") == rig.undisturbed(LONG_TEXT, 0, 8)
    assert not rig.broker._pinned
    assert not rig.broker._lease.pinned
    assert not rig.broker._loads.num_under_way


def test_loads_of_one_size_are_divided(new_rig: Callable[..., Any]) -> None:
    rig, tier = begin_with_rest(new_rig, {})
    tier.finish()
    settle(rig)
    first, rest = tier.sizes
    assert first == (first + rest) // 8
    assert not rig.broker._loads.speed("remote").is_of_one_size


def test_what_is_known_of_tiers_outlives_the_worker(new_rig: Callable[..., Any]) -> None:
    rig, tier = begin_with_rest(new_rig, {})
    tier.block_s = 1000.0
    rig.lose_worker()
    rig.now += 60
    tier.tick(fails=True)
    tier.tick(fails=True)
    num_loads = len(tier.sizes)
    before = rig.broker.not_loaded["remote", "slower"]
    rig.submit(rig.request("r", LONG_TEXT, 8))
    assert len(tier.sizes) == num_loads
    assert rig.broker.not_loaded["remote", "slower"] - before == len(LONG_TEXT) // 16
    settle(rig)
    assert rig.tokens("r") == rig.undisturbed(LONG_TEXT, 0, 8)


def test_everything_is_loaded_where_the_speed_of_computing_is_unknown(
    new_rig: Callable[..., Any],
) -> None:
    source = new_rig()
    answer(source, "first", TEXT)
    settle(source)
    tier = SlowTier(source)
    tier.block_s = 0.1
    rig = tier.reader = new_rig(lower_tiers=[tier])
    rig.submit(rig.request("r", TEXT, 8))
    rig.exchange()
    assert not rig.scheduler.schedule().chunks, "it waits for the answer"
    rig.exchange()
    assert not rig.scheduler.schedule().chunks, "it waits for the load"
    rig.exchange()
    tier.finish()
    settle(rig)
    assert rig.tokens("r") == rig.undisturbed(TEXT, 0, 8)
    assert [(hits.tier, hits.num_blocks) for _, hits in rig.tier_hits] == [("remote", 6)]


@pytest.mark.parametrize("block_s", [0.004, 0.9])
def test_what_is_slower_is_not_waited_for_when_it_is_known_late(
    new_rig: Callable[..., Any], block_s: float
) -> None:
    rig, tier = begin_with_rest(new_rig, {})
    tier.finish()
    settle(rig)
    forget(rig)
    rig.store.remove_chains(None)
    tier.sizes.clear()
    tier.block_s = block_s
    rig.broker._loads.speed("remote")._byte_s = block_s / 4096
    look = Future[None]()
    tier.look = lambda keys: look  # type: ignore[method-assign]
    rig.submit(rig.request("again", LONG_TEXT, 1))
    rig.exchange()
    assert not rig.scheduler.schedule().chunks, "it waits for the look"
    rig.exchange()
    assert not rig.scheduler.schedule().chunks, "and asks for the rest"
    rig.exchange()
    look.set_result(None)
    rig.exchange()
    assert rig.scheduler.schedule().chunks, "it computes what is not loaded"
    assert bool(tier.sizes) is (block_s < 0.016)
    assert sum(tier.sizes) < len(LONG_TEXT) // 16
