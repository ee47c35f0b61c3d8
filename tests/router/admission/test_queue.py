"""The waiting room: bounded in count and bytes, shared fairly when full, and nobody forgotten."""

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ullage_common.config.router import QueueSection
from ullage_router.admission.queue import QueueEntry, RequestQueue, Waiter
from ullage_router.admission.queue_bounds import QueueFull
from ullage_router.policy.fair_queue import RESUMED


def room(max_requests: int = 10, **more: Any) -> RequestQueue:
    return RequestQueue(QueueSection(max_requests=max_requests, **more))


def waiter(size: int = 10, arrival: float = 0.0, **more: Any) -> Waiter:
    return Waiter(size=size, arrival=arrival, deadline=arrival + 30, **more)


def test_the_count_is_bounded_over_all_pools() -> None:
    here = room(2)
    first = here.join("single", waiter(10))
    here.join("large", waiter(20))
    with pytest.raises(QueueFull):
        here.join("single", waiter(1))
    first.leave()
    first.leave()
    assert here.ahead(0) == {"large": 20}
    here.join("single", waiter(1))


def test_nobody_waits_where_nobody_may() -> None:
    with pytest.raises(QueueFull):
        room(0).join("single", waiter())
    with pytest.raises(QueueFull):
        room(max_bytes=0).join("single", waiter())


def test_bytes_are_bounded() -> None:
    here = room(max_bytes=100)
    here.join("single", waiter(60))
    with pytest.raises(QueueFull):
        here.join("large", waiter(41))
    here.join("large", waiter(40))
    assert here.size == 100


def test_prompts_are_bounded() -> None:
    here = room(max_prompt_bytes=1000)
    here.join("single", waiter(prompt_bytes=600))
    with pytest.raises(QueueFull):
        here.join("single", waiter(prompt_bytes=401))
    assert here.prompt_bytes == 600


def test_only_the_head_is_woken_and_hands_on() -> None:
    async def scenario() -> None:
        here = room()
        early = here.join("single", waiter(arrival=1.0))
        late = here.join("single", waiter(arrival=2.0))
        assert await early.wait_turn(1.0)
        here.wake()
        assert await early.wait_turn(1.0)
        assert not await early.wait_turn(0.0)
        assert not await late.wait_turn(0.0)
        early.leave()
        assert await late.wait_turn(1.0)

    asyncio.run(scenario())


def test_those_behind_that_fit_are_woken_and_counted() -> None:
    async def scenario() -> None:
        here = room(backfill=2)
        head = here.join("single", waiter(100))
        large = here.join("single", waiter(50))
        small = [here.join("single", waiter(10)) for _ in range(3)]
        here.wake_followers(head, 10)
        assert not await large.wait_turn(0.0)
        for entry in small[:2]:
            assert await entry.wait_turn(1.0)
            assert here.passable() == {"single": 100}
            here.on_passed("single", entry)
            entry.serve()
        assert here.passable() == {}
        assert await small[2].wait_turn(1.0)  # of the first time
        here.wake_followers(head, 10)
        assert not await small[2].wait_turn(0.0)
        here.on_passed("single", head)
        head.serve()
        assert here.passed == 2
        assert here.passable() == {"single": 50}  # the next one is passed anew

    asyncio.run(scenario())


def test_lines_of_adapters_keep_the_order_of_those_that_any_engine_can_serve() -> None:
    async def scenario() -> None:
        here = room(backfill=1)
        sql = here.join("single", waiter(100, arrival=1.0, adapter="sql"))
        plain = here.join("single", waiter(40, arrival=2.0))
        later = here.join("single", waiter(20, arrival=3.0, adapter="sql"))
        python = here.join("single", waiter(30, arrival=4.0, adapter="python"))
        assert here.lengths() == {"single": 4}
        assert sql.is_head
        assert plain.is_head
        assert python.is_head
        assert not later.is_head
        # What any engine can serve leaves the engines alone that have the adapter, and no others.
        assert (here.ahead(0, plain), here.claims(plain)) == ({}, {("single", "sql"): 100})
        # What needs an adapter waits for all before it, but not for those of another adapter.
        assert (here.ahead(0, sql, "sql"), here.claims(sql, "sql")) == ({}, {})
        assert here.ahead(0, later, "sql") == {"single": 100 + 40}
        assert here.ahead(0, python, "python") == {"single": 40}
        assert here.claims(python, "python") == {("single", "sql"): 100}
        # Who is not in the queue yet is behind all.
        assert here.ahead(0) == {"single": 40}
        assert here.claims() == {("single", "sql"): 100, ("single", "python"): 30}
        assert here.passable(python, "python") == {"single": 40}
        here.on_passed("single", python, {"python"})
        assert here.passable(python, "python") == {}
        assert here.claims() == {("single", "sql"): 100, ("single", "python"): 30}
        # On an engine that has it, a head is passed by what any engine can serve.
        here.on_passed("single", plain, {"sql", "java"})
        assert here.claims() == {("single", "sql"): 0, ("single", "python"): 30}
        assert here.passed == 2
        # A higher priority goes first, whatever line it is in.
        urgent = here.join("single", waiter(10, arrival=5.0, priority=100))
        assert here.ahead(0, sql, "sql") == {"single": 50}
        assert here.claims(urgent) == {}
        for entry in (sql, plain, python, urgent):
            while await entry.wait_turn(0.0):
                pass
        urgent.serve()
        # Heads of all lines may run now.
        assert [await entry.wait_turn(0.0) for entry in (sql, plain, python)] == [True] * 3
        for entry in (sql, plain, later, python):
            entry.leave()
            here.check_integrity()
        assert (here.ahead(0), here.claims()) == ({}, {})

    asyncio.run(scenario())


def test_a_new_head_may_decide_at_once() -> None:
    async def scenario() -> None:
        here = room()
        here.join("single", waiter())
        urgent = here.join("single", waiter(priority=5))
        assert await urgent.wait_turn(1.0)

    asyncio.run(scenario())


def test_priority_goes_before_arrival() -> None:
    here = room()
    normal = here.join("single", waiter(5, 1.0))
    urgent = here.join("single", waiter(7, 1.1, priority=10))
    assert here.ahead(10, urgent) == {}
    assert here.ahead(0, normal) == {"single": 7}
    assert here.ahead(0) == {"single": 12}
    assert here.ahead(10) == {"single": 7}
    assert here.ahead(11) == {"single": 0}


def test_an_answer_that_lost_its_engine_has_nobody_ahead_who_has_not_begun() -> None:
    here = room()
    here.join("single", waiter(5, arrival=-1000.0, priority=100))
    here.join("single", waiter(7, adapter="sql"))
    assert here.ahead(RESUMED) == here.claims(priority=RESUMED) == {}
    assert here.passable(priority=RESUMED) == {}
    assert here.lengths(RESUMED) == {"single": 0}
    here.on_passed("single", None, {"sql"}, RESUMED)
    assert here.passed == 0

    resumed = here.join("single", waiter(9, priority=RESUMED))
    assert resumed.is_head
    assert here.ahead(RESUMED, resumed) == {}
    assert here.ahead(RESUMED) == {"single": 9}  # a second one waits for the first
    assert here.lengths(RESUMED) == {"single": 1}
    assert here.lengths() == {"single": 3}


def test_a_flood_leaves_room_for_others() -> None:
    here = room(4)
    flood = [here.join("single", waiter(tenant="flood")) for _ in range(4)]
    first = here.join("single", waiter(tenant="other"))
    here.join("single", waiter(tenant="other"))
    assert [ticket.is_evicted for ticket in flood] == [False, False, True, True]
    with pytest.raises(QueueFull):
        here.join("single", waiter(tenant="other"))
    with pytest.raises(QueueFull):
        here.join("single", waiter(tenant="flood"))
    assert not first.is_evicted
    assert here.sizes() == {"flood": 20, "other": 20}


def test_the_bound_that_is_short_is_the_one_that_is_shared() -> None:
    """Small requests may fill the count while another tenant's bytes are many."""
    here = room(256, max_bytes=1 << 36)
    flood = [here.join("single", waiter(2 << 20, tenant="flood")) for _ in range(256)]
    here.join("single", waiter(600 << 20, tenant="other"))
    assert [entry.is_evicted for entry in flood] == [False] * 255 + [True]
    here = room(256, max_bytes=100, max_prompt_bytes=1000)
    flood = [here.join("single", waiter(1, prompt_bytes=100, tenant="flood")) for _ in range(10)]
    here.join("single", waiter(80, prompt_bytes=100, tenant="other"))
    assert sum(entry.is_evicted for entry in flood) == 1
    here.check_integrity()


def test_a_higher_priority_displaces_a_lower_one_whosever_it_is() -> None:
    here = room(3)
    low = here.join("single", waiter(1, tenant="small", priority=-1))
    for _ in range(2):
        here.join("single", waiter(1000, tenant="large"))
    first = here.join("single", waiter(5000, tenant="large", priority=50))
    assert (low.is_evicted, first.is_evicted) == (False, False)
    urgent = here.join("single", waiter(5000, tenant="large", priority=50))
    assert not urgent.is_evicted
    here.join("single", waiter(9000, tenant="large", priority=50))
    assert low.is_evicted
    with pytest.raises(QueueFull):
        here.join("single", waiter(1, tenant="small", priority=49))


def test_who_finds_no_place_displaces_nobody() -> None:
    here = room(10, max_bytes=100)
    small = [here.join("single", waiter(10, tenant="flood", arrival=n)) for n in range(10)]
    with pytest.raises(QueueFull):
        here.join("single", waiter(90, tenant="other"))
    assert not any(entry.is_evicted for entry in small)
    assert here.sizes() == {"flood": 100}
    here.check_integrity()


def test_weights_count_in_a_full_queue() -> None:
    here = room(4)
    for _ in range(4):
        here.join("single", waiter(tenant="flood", weight=1.0))
    for _ in range(3):
        here.join("single", waiter(tenant="gold", weight=3.0))
    with pytest.raises(QueueFull):
        here.join("single", waiter(tenant="gold", weight=3.0))
    assert here.sizes() == {"flood": 10, "gold": 30}


def test_priority_counts_in_a_full_queue() -> None:
    here = room(2)
    low = here.join("single", waiter(priority=-1))
    normal = here.join("single", waiter())
    here.join("large", waiter(priority=1))
    assert (low.is_evicted, normal.is_evicted) == (True, False)
    with pytest.raises(QueueFull):
        here.join("single", waiter())
    with pytest.raises(QueueFull):  # a larger share is no reason to push out the more important
        here.join("single", waiter(tenant="other", priority=-5))


def test_the_displaced_one_learns_it() -> None:
    async def scenario() -> None:
        here = room(2)
        here.join("single", waiter(tenant="flood"))
        last = here.join("single", waiter(tenant="flood"))
        here.join("single", waiter(tenant="other"))
        assert await last.wait_turn(1.0)
        assert last.is_evicted
        last.leave()
        here.check_integrity()

    asyncio.run(scenario())


def test_what_comes_back_from_an_engine_is_charged_once() -> None:
    for is_charged in (True, False):
        here = room()
        first = here.join("single", waiter(tenant="a", is_charged=is_charged))
        second = here.join("single", waiter(tenant="a"))
        here.join("single", waiter(tenant="b"))
        first.serve()
        assert here.ahead(0, second) == ({} if is_charged else {"single": 10})


class RoomMachine(RuleBasedStateMachine):
    """Bounds hold, sums are right and every ticket ends, whatever comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds = QueueSection(max_requests=8, max_bytes=300, max_prompt_bytes=500)
        self.room = RequestQueue(self.bounds)
        self.inside: list[QueueEntry] = []
        self.now = 0.0

    @rule(
        pool=st.sampled_from(("single", "large")),
        size=st.integers(0, 120),
        prompt_bytes=st.integers(0, 200),
        priority=st.integers(-2, 2),
        tenant=st.sampled_from("abc"),
        weight=st.sampled_from((0.5, 1.0, 4.0)),
        adapter=st.sampled_from(("", "sql", "python")),
    )
    def join(self, pool: str, **fields: Any) -> None:
        self.now += 0.01
        before = len(self.room)
        try:
            ticket = self.room.join(pool, waiter(arrival=self.now, **fields))
        except QueueFull:
            assert len(self.room) == before
            return
        self.inside = [t for t in self.inside if not t.is_evicted]
        self.inside.append(ticket)

    @precondition(lambda self: self.inside)
    @rule(place=st.integers(0, 1000), served=st.booleans())
    def end(self, place: int, served: bool) -> None:
        ticket = self.inside.pop(place % len(self.inside))
        if served:
            ticket.serve()
        ticket.leave()

    @rule()
    def wake(self) -> None:
        self.room.wake()

    @invariant()
    def bounds_hold(self) -> None:
        self.room.check_integrity()
        assert len(self.room) == len(self.inside) <= self.bounds.max_requests
        assert self.room.size <= self.bounds.max_bytes
        assert self.room.prompt_bytes <= self.bounds.max_prompt_bytes
        nexts = [ticket.pool for ticket in self.inside if self.is_next(ticket)]
        assert sorted(nexts) == sorted({ticket.pool for ticket in self.inside})

    def is_next(self, ticket: QueueEntry) -> bool:
        """Whether the request waits for memory and for nobody."""
        adapter = ticket.waiter.adapter
        claims = self.room.claims(ticket, adapter)
        is_ahead = ticket.pool in self.room.ahead(0, ticket, adapter)
        return not is_ahead and ticket.pool not in [pool for pool, _ in claims]

    def teardown(self) -> None:
        for ticket in self.inside:
            ticket.leave()
        self.room.check_integrity()
        assert (len(self.room), self.room.size, self.room.prompt_bytes) == (0, 0, 0)


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
