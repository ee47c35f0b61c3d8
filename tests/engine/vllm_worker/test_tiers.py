"""What vLLM's worker asks and tells of KV outside the device, against the broker of the server."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ullage_engine.kv_tiers.broker import BlockFormat, KvBroker, TierHits
from ullage_engine.kv_tiers.cost import ComputeSpeed
from ullage_engine.protocol.messages import FromKv, KvFound, KvGranted, KvWanted
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.vllm_worker.tiers import ConnectorTransfers, Copies
from ullage_kv import Arena, Result, Status, Store, TierStats, Transfer
from ullage_kv.futures import done

BLOCK = 4
NUM_BLOCKS = 12
NUM_SLOTS = 32
SPACE = bytes(32)
TEXT = list(range(100, 100 + 3 * BLOCK + 2))


class Device:
    """Blocks as vLLM keeps them, each with what it caches, and a server's tiers beside."""

    def __init__(self, *tiers: Any, compute: ComputeSpeed = ComputeSpeed()) -> None:  # noqa: B008
        self.now = 0.0
        self.cached: list[tuple[object, ...] | None] = [None] * NUM_BLOCKS
        """What vLLM says is in each block: salt and tokens up to its end."""
        self.memory: list[object] = [None] * NUM_BLOCKS
        """What is in it."""
        self.slots: dict[int, object] = {}
        self.hits: list[tuple[str, int]] = []
        arena = Arena.create(NUM_SLOTS * 4096, available_bytes=1 << 30)
        self.store = Store(arena, 4096, tiers, clock=lambda: 0.0)
        self._arena = arena
        self._answers: list[KvGranted | KvFound] = []
        self.broker = KvBroker(
            self.store,
            BlockFormat(SPACE, BLOCK, 0),
            self._answers.append,
            self._note_hits,
            lambda call: call(),
            lambda: compute,
            computes_beside_loads=False,
        )
        self.start_worker()

    def start_worker(self) -> None:
        self.cached = [None] * NUM_BLOCKS
        self.memory = [None] * NUM_BLOCKS
        self._answers.clear()
        self.tiers = ConnectorTransfers(SPACE, BLOCK, self.cached.__getitem__, lambda: self.now)

    def lose_worker(self) -> None:
        self.broker.worker_lost()
        self.start_worker()

    def close(self) -> None:
        self.broker.check_integrity()
        self.store.close()
        self._arena.close()

    def exchange(self) -> list[FromKv]:
        """Sends what the worker has to say, and takes the answers; returns the former."""
        messages = self.tiers.take_messages()
        for message in messages:
            self.broker.on_message(message)
        answers = list(self._answers)
        self._answers[:] = []
        for answer in answers:
            if isinstance(answer, KvFound):
                self.tiers.on_found(answer)
            else:
                self.tiers.on_granted(answer.slots)
        return messages

    def add(self, name: str, token_ids: list[int], salt: str = "", **fields: Any) -> EngineRequest:
        request = EngineRequest(
            request_id=name,
            token_ids=token_ids,
            num_prompt_tokens=fields.pop("num_prompt_tokens", len(token_ids)),
            max_tokens=8,
            sampling=SamplingParams(),
            cache_salt=salt,
            **fields,
        )
        request = structs.replace(request, num_stored_blocks=self.broker.arrived(request))
        self.tiers.add(name, request)
        return request

    def match(self, request: EngineRequest, num_cached: int = 0) -> int | None:
        return self.tiers.num_matched(request.request_id, request.token_ids, num_cached)

    def run(self, request: EngineRequest, blocks: Sequence[int], num_cached: int = 0) -> Copies:
        """Starts a request in these blocks and computes all of it with one step."""
        num_loaded = self.match(request, num_cached)
        assert num_loaded is not None
        contents = contents_of(request)
        for block, content in zip(blocks, contents, strict=True):
            self.cached[block] = content
        if num_loaded:
            self.tiers.load(request.request_id, blocks, num_loaded)
        self.tiers.offer(request.request_id, request.token_ids, blocks)
        computed = range(num_cached + num_loaded, len(blocks))
        return self.step({blocks[index]: contents[index] for index in computed})

    def step(self, computed: dict[int, object] | None = None) -> Copies:
        copies = self.tiers.plan()
        for slot, block in copies.loads:
            self.memory[block] = self.slots[slot]
        for block, content in (computed or {}).items():
            self.memory[block] = content
        for block, slot in copies.stores:
            self.slots[slot] = self.memory[block]
        if copies.number:
            self.tiers.on_copied(copies.number)
        return copies

    def settle(self) -> None:
        self.exchange()
        while self.tiers.has_moves:
            self.step()
            self.exchange()
        self.exchange()

    def evict(self) -> None:
        """Gives all blocks to others."""
        self.cached[:] = [None] * NUM_BLOCKS
        self.memory[:] = [None] * NUM_BLOCKS

    def check_held(self) -> None:
        """Asserts that what blocks cache is in them."""
        assert all(
            memory == cached
            for memory, cached in zip(self.memory, self.cached, strict=True)
            if cached is not None
        )

    def _note_hits(self, name: str, hits: list[TierHits]) -> None:
        self.hits += [(name, each.num_blocks) for each in hits]


def contents_of(request: EngineRequest) -> list[tuple[object, ...]]:
    tokens = request.token_ids
    salt = request.cache_salt
    return [(salt, *tokens[: end * BLOCK]) for end in range(1, len(tokens) // BLOCK + 1)]


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.close()


def store(device: Device, token_ids: list[int] = TEXT, salt: str = "") -> None:
    """Computes a text, and stores its blocks."""
    request = device.add("stored", token_ids, salt)
    device.run(request, range(len(token_ids) // BLOCK))
    device.tiers.forget("stored")
    device.settle()


def test_nothing_is_asked_where_nothing_is_likely(device: Device) -> None:
    request = device.add("r", TEXT)
    assert device.match(request) == 0
    assert device.tiers.take_messages() == []
    assert not device.tiers.has_moves


def test_evicted_blocks_are_waited_for_and_loaded(device: Device) -> None:
    store(device)
    device.evict()
    request = device.add("r", TEXT)
    assert device.match(request) is None
    assert device.match(request) is None
    [wanted] = device.exchange()
    assert isinstance(wanted, KvWanted)
    copies = device.run(request, [4, 5, 6])
    assert [block for _, block in copies.loads] == [4, 5, 6]
    device.check_held()
    device.settle()
    assert device.hits == [("r", 3)]
    assert device.tiers.num_loaded_tokens("r") == 3 * BLOCK


def test_the_last_token_is_computed(device: Device) -> None:
    store(device)
    device.evict()
    request = device.add("r", TEXT[: 3 * BLOCK])
    assert device.match(request) is None
    device.exchange()
    assert device.match(request) == 2


def test_what_the_device_has_meanwhile_is_not_loaded(device: Device) -> None:
    store(device)
    device.evict()
    request = device.add("r", TEXT)
    assert device.match(request) is None
    device.exchange()
    for block, content in enumerate(contents_of(request)[:2]):
        device.cached[block] = device.memory[block] = content
    copies = device.run(request, [0, 1, 7], num_cached=2)
    assert [block for _, block in copies.loads] == [7]
    device.check_held()
    device.settle()
    assert device.hits == [("r", 1)]


def test_what_the_device_loses_meanwhile_is_asked_for(device: Device) -> None:
    store(device)
    request = device.add("r", TEXT)
    assert device.match(request, 1) is None
    device.exchange()
    device.evict()
    assert device.match(request, 0) is None
    device.exchange()
    device.run(request, [4, 5, 6])
    device.check_held()
    device.settle()
    assert device.hits == [("r", 3)]


def test_a_request_that_ends_gives_back_what_it_asked_for(device: Device) -> None:
    store(device)
    device.evict()
    for name, is_answered in (("before", False), ("after", True)):
        request = device.add(name, TEXT)
        assert device.match(request) is None
        if is_answered:
            device.exchange()
        device.tiers.forget(name)
        device.settle()
    assert device.hits == []
    assert not device.broker._pinned


def test_an_answer_that_does_not_come_is_not_waited_for(device: Device) -> None:
    store(device)
    device.evict()
    request = device.add("r", TEXT)
    assert device.match(request) is None
    device.now += 31.0
    assert device.match(request) == 0
    device.run(request, [4, 5, 6])
    device.settle()  # it comes now, and nobody takes it
    assert device.hits == []
    assert not device.broker._pinned


def test_a_block_that_is_evicted_before_it_is_copied_is_not_stored(device: Device) -> None:
    request = device.add("r", TEXT)
    device.run(request, [0, 1, 2])
    device.exchange()
    device.cached[1] = ("another",)
    assert [block for block, _ in device.step().stores] == [0, 2]
    device.settle()
    assert not device.broker._reserved


def test_blocks_are_offered_once(device: Device) -> None:
    store(device)
    request = device.add("r", TEXT)
    assert device.match(request, 3) == 0
    device.run(request, [0, 1, 2], num_cached=3)
    assert device.tiers.take_messages() == []


def test_salts_are_apart(device: Device) -> None:
    store(device, salt="a")
    device.evict()
    assert device.match(device.add("b", TEXT, "b")) == 0
    assert device.match(device.add("a", TEXT, "a")) is None


def test_what_was_sent_is_asked_for_though_it_was_not_stored_when_it_came(device: Device) -> None:
    request = device.add("r", TEXT, num_prompt_tokens=5)
    store(device)
    device.evict()
    assert device.match(request) is None


def test_another_worker_finds_what_the_dead_one_had(device: Device) -> None:
    store(device)
    device.lose_worker()
    request = device.add("r", TEXT)
    assert device.match(request) is None
    device.exchange()
    device.run(request, [9, 3, 5])
    device.check_held()


class AnsweringTier:
    """A tier that has every block, whose loads end when a test says so."""

    name = "file"

    def __init__(self) -> None:
        self.deadlines_s: list[float] = []
        self._loads: list[tuple[int, Future[list[Result]]]] = []

    def look(self, keys: Sequence[bytes]) -> "Future[None]":
        return done(None)

    def holds(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)

    def wants(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def load(self, transfers: Sequence[Transfer], deadline_s: float) -> "Future[list[Result]]":
        self.deadlines_s.append(deadline_s)
        self._loads.append((len(transfers), Future()))
        return self._loads[-1][1]

    def finish(self, status: Status) -> None:
        for num_blocks, future in self._loads:
            future.set_result([Result(status, self.name, 4096)] * num_blocks)
        self._loads.clear()

    def stats(self) -> TierStats:
        return TierStats(self.name, "a test")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("status", "num_loaded"), [(Status.HIT, 3), (Status.TIMEOUT, 0)])
def test_what_lower_tiers_have_is_waited_for_as_long_as_computing_it_takes(
    status: Status, num_loaded: int
) -> None:
    tier = AnsweringTier()
    device = Device(tier, compute=ComputeSpeed(tokens_per_s=3.0))
    request = device.add("r", TEXT)
    assert device.match(request) is None
    device.exchange()
    assert device.match(request) is None, "it is being loaded"
    tier.finish(status)
    device.exchange()
    assert device.match(request) == num_loaded
    [deadline_s] = tier.deadlines_s
    assert deadline_s <= 3 * BLOCK / 3.0
    device.tiers.forget("r")
    device.settle()
    assert not device.broker._pinned
    device.close()


def test_what_is_quicker_to_compute_is_not_waited_for() -> None:
    tier = AnsweringTier()
    device = Device(tier, compute=ComputeSpeed(tokens_per_s=1e6))
    request = device.add("r", TEXT)
    assert device.match(request) == 0
    assert device.exchange() == []
    assert len(tier.deadlines_s) == 1, "it is measured how fast the tier is"
    assert device.broker.not_loaded == {("file", "slower"): 3}
    again = structs.replace(request, num_prompt_tokens=3)
    device.tiers.add("again", structs.replace(again, request_id="again"))
    assert device.tiers.num_matched("again", TEXT, 0) is None, "a request that was sent to before"
    device.exchange()
    assert device.tiers.num_matched("again", TEXT, 0) == 0
    assert len(tier.deadlines_s) == 1
    device.close()


Actions = list[tuple[str, int]]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("run", "ask", "end", "evict", "exchange", "step", "lose")),
        st.integers(0, 5),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_blocks_hold_what_they_are_for(actions: Actions) -> None:
    """Texts begin alike in pairs; blocks are taken in turn from whoever has them."""
    device = Device()
    waiting = dict[str, EngineRequest]()
    names = iter(range(1000))
    next_block = 0
    calls: dict[str, Callable[[], object]] = {
        "evict": device.evict,
        "exchange": device.exchange,
        "step": device.step,
    }
    for action, number in actions:
        text = [number // 2] * BLOCK + [number] * (2 * BLOCK) + [1]
        if action in calls:
            calls[action]()
        elif action == "lose":
            device.lose_worker()
            waiting.clear()
        elif action == "ask":
            request = device.add(f"r{next(names)}", text)
            waiting[request.request_id] = request
            device.match(request)
        elif waiting:
            name = list(waiting)[number % len(waiting)]
            if action == "run" and device.match(waiting[name]) is not None:
                request = waiting.pop(name)
                blocks = [(next_block + each) % NUM_BLOCKS for each in range(3)]
                next_block += 3
                for block in blocks:
                    device.cached[block] = None
                device.run(request, blocks)
                device.tiers.forget(name)
            elif action == "end":
                del waiting[name]
                device.tiers.forget(name)
        device.check_held()
    for name in waiting:
        device.tiers.forget(name)
    device.settle()
    assert not device.broker._pinned
    assert not device.broker._reserved
    device.close()
