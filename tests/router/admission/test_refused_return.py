"""Sixty refused clients that come back when they are told to are not refused again."""

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ullage.headroom.v1 import headroom_pb2
from ullage_common.config.router import DEFAULT_LADDER, QueueSection
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_router.admission.queue import QueueEntry, RequestQueue, Waiter
from ullage_router.admission.queue_bounds import QueueFull
from ullage_router.policy.decide import decide
from ullage_router.policy.deferral import DeferralBook, Deferrals, Deferred
from ullage_router.policy.facts import (
    EngineState,
    EngineView,
    QueueState,
    Release,
    RequestFacts,
    RoutingPolicy,
    TimeLimits,
)
from ullage_router.policy.next_step import Refuse, Run, Wait

if TYPE_CHECKING:
    Service = Any
    StartService = Any

POLICY = RoutingPolicy(("single",), 100_000, 1 << 40, DEFAULT_LADDER)
PROFILE = MemoryProfile(16, (CacheGroup(1000),))
BLOCK = PROFILE.block_bytes
PROMPT = 160
OUTPUT = 160
SIZE = 20 * BLOCK
"""Of each request's KV."""


@dataclass
class Client:
    """A client that obeys."""

    refusals: int = 0
    state: QueueState = QueueState.OPEN
    arrived: float = 0.0
    entry: QueueEntry | None = None


@dataclass
class Simulation:
    """A pool of one engine and its clients in virtual time: all that decides is the router's own.

    Args:
        slots: requests that the engine has memory for.
        run_s: how long each runs.
        queued: most that wait.
        seed: of the draws.
        counts_refused: whether those who were refused count as ahead of others.
    """

    slots: int
    run_s: float
    queued: int
    seed: int
    counts_refused: bool = True
    now: float = 1000.0
    ends: list[float] = field(default_factory=list)
    served: int = 0

    def __post_init__(self) -> None:
        self.queue = RequestQueue(QueueSection(max_requests=self.queued))
        self.book = DeferralBook()
        self.random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._waiting: dict[int, Client] = {}

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def run(self) -> None:
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def arrive(self, client: Client) -> None:
        client.arrived = self.now
        client.state = QueueState.OPEN
        self._step(client)

    def _view(self) -> EngineView:
        ends = sorted(self.ends)
        step_s = self.run_s / OUTPUT
        return EngineView(
            id="a",
            pool="single",
            standing=EngineState.USABLE,
            available=(self.slots - len(ends)) * SIZE,
            capacity=self.slots * SIZE,
            profile=PROFILE,
            expected_output=OUTPUT,
            max_model_len=4096,
            load=len(ends),
            releases=tuple(Release(end - self.now, SIZE) for end in ends),
            prefill_speed=1e6,
            decode_speed=1 / step_s,
            step_seconds=tuple(step_s for _ in range(8)),
            max_sequences=256,
        )

    def _facts(self, client: Client) -> RequestFacts:
        self.book.expire(self.now)
        return RequestFacts(
            PROMPT,
            OUTPUT,
            OUTPUT,
            queue=client.state,
            ahead=self.queue.ahead(0, client.entry),
            waiting=self.queue.lengths(),
            limits=TimeLimits(7.0, 20.0, self.now - client.arrived),
            deferrals=Deferrals(self.book, self.now),
            draw=self.random.getrandbits(30),
        )

    def _step(self, client: Client) -> None:
        match decide(self._facts(client), [self._view()], POLICY):
            case Run():
                self._start(client)
            case Wait(longest_s=longest_s) as wait:
                self._wait(client, wait.demand.kv_bytes, min(longest_s, 10.0))
            case Refuse(retry_after_s=int(seconds), demand=demand):
                assert demand
                self._leave(client)
                client.refusals += 1
                due = self.now + seconds
                if self.counts_refused:
                    self.book.add(Deferred("single", "", 0), 1.0, demand.kv_bytes, due)
                self.at(due, lambda: self.arrive(client))
            case other:
                raise AssertionError(other)

    def _start(self, client: Client) -> None:
        if client.entry:
            del self._waiting[id(client.entry)]
            client.entry.serve()
            client.entry = None
        end = self.now + self.run_s
        self.ends.append(end)
        self.at(end, lambda: self._end(end))

    def _end(self, end: float) -> None:
        self.ends.remove(end)
        self.served += 1
        while head := self.queue.head(("single", "")):
            self._step(self._waiting[id(head)])
            if self.queue.head(("single", "")) is head:
                return

    def _wait(self, client: Client, size: int, longest_s: float) -> None:
        if client.entry:
            return
        waiter = Waiter(size, client.arrived, client.arrived + 30)
        try:
            client.entry = entry = self.queue.join("single", waiter)
        except QueueFull:
            client.state = QueueState.FULL
            self._step(client)
            return
        self._waiting[id(entry)] = client

        def time_out() -> None:
            if client.entry is entry:
                client.state = QueueState.SPENT
                self._step(client)

        self.at(client.arrived + longest_s, time_out)

    def _leave(self, client: Client) -> None:
        if client.entry:
            del self._waiting[id(client.entry)]
            client.entry.leave()
            client.entry = None


def sixty_refused(simulation: Simulation) -> list[Client]:
    """Plays a burst of which sixty are refused at once, until all have their answers."""
    clients = list[Client]()

    def burst() -> None:
        while sum(client.refusals for client in clients) < 60:
            clients.append(Client())
            simulation.arrive(clients[-1])

    simulation.at(simulation.now, burst)
    simulation.run()
    assert simulation.served == len(clients)
    return clients


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("slots", "run_s", "queued"),
    [(8, 2.0, 16), (4, 1.0, 8), (16, 4.0, 4), (32, 5.0, 256), (64, 8.0, 256), (20, 1.0, 20)],
)
def test_who_obeys_is_not_refused_again(slots: int, run_s: float, queued: int, seed: int) -> None:
    simulation = Simulation(slots, run_s, queued, seed)
    began = simulation.now
    clients = sixty_refused(simulation)
    assert [client for client in clients if client.refusals > 1] == []
    # Nor is the engine left idle for the sake of that.
    shortest_s = len(clients) / slots * run_s
    assert simulation.now - began <= 1.8 * shortest_s + 3


def test_without_counting_them_there_is_a_second_wave() -> None:
    simulation = Simulation(8, 2.0, 16, 0)
    simulation.counts_refused = False
    clients = sixty_refused(simulation)
    assert sum(client.refusals > 1 for client in clients) > 30


# Through a router.

BURST = 60


def test_a_burst_is_told_to_come_back_one_after_another(start_service: "StartService") -> None:
    """The engine gives back what one request takes every half a second, the first after two."""

    async def scenario() -> None:
        routing = {"ladder": ["reject"]}
        async with start_service(routing=routing) as service:
            # 16 tokens of prompt and 16 of output: two blocks each.
            releases = [
                headroom_pb2.Release(after_ms=2000 + 500 * n, bytes=2 * BLOCK) for n in range(16)
            ]
            service.engine.push(headroom_bytes=0, releases=releases)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.available == 0)
            tasks = [service.complete("x" * 16, max_tokens=16) for _ in range(BURST)]
            answers = await asyncio.gather(*tasks)
            assert {answer.status_code for answer in answers} == {429}
            seconds = sorted(int(answer.headers["retry-after"]) for answer in answers)
            # 32 blocks are given back within 9.5 seconds.
            rate = 32 / 9.5
            for place, second in enumerate(seconds):
                forecast = 2 + 2 * place / rate
                assert second >= math.floor(forecast) or second >= 15
            assert seconds[0] <= 3
            assert max(map(seconds.count, seconds)) <= BURST / 8

    asyncio.run(scenario())


def test_where_nothing_is_known_a_burst_is_spread(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing={"ladder": ["reject"]}) as service:
            service.engine.push(headroom_bytes=0)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.available == 0)
            tasks = [service.complete("x" * 16, max_tokens=16) for _ in range(BURST)]
            answers = await asyncio.gather(*tasks)
            seconds = [int(answer.headers["retry-after"]) for answer in answers]
            assert set(seconds) == {5, 6, 7, 8, 9, 10}
            assert max(map(seconds.count, seconds)) <= 20

    asyncio.run(scenario())


def test_a_service_without_engines_sends_nobody_back_at_one_second(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.engine.stop()
            await service.until(lambda: service.engine_state("single-0") == "connecting", 20)
            answers = await asyncio.gather(*(service.complete() for _ in range(BURST)))
            assert {answer.status_code for answer in answers} == {503}
            seconds = {int(answer.headers["retry-after"]) for answer in answers}
            assert min(seconds) >= 5
            assert max(seconds) <= 10
            assert len(seconds) > 2

    asyncio.run(scenario())
