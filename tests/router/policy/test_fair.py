"""The order of service: priority, fairness among tenants, deadlines, and nobody starves."""

import itertools
from collections import Counter
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ullage_router.policy.fair_queue import MAX_LEAD_S, RESUMED, FairEntry, FairQueue

AGING_S = 0.05
numbers: Iterator[int] = itertools.count()


def entry(
    tenant: str = "a",
    size: int = 10,
    priority: int = 0,
    arrival: float = 0.0,
    deadline: float = 30.0,
    weight: float = 1.0,
) -> FairEntry:
    return FairEntry(next(numbers), tenant, weight, priority, arrival, deadline, size, cost=size)


def line_of(*entries: FairEntry) -> FairQueue:
    line = FairQueue(AGING_S)
    for each in entries:
        line.add(each)
    return line


def drain(line: FairQueue) -> list[FairEntry]:
    """All entries as they are served."""
    order = []
    while head := line.head:
        line.serve(head)
        line.check_integrity()
        order.append(head)
    return order


def test_in_order_of_arrival_where_nothing_else_speaks() -> None:
    entries = [entry(arrival=float(i)) for i in range(5)]
    assert drain(line_of(*entries)) == entries


def test_priority_goes_first() -> None:
    low = entry(priority=-5)
    normal = entry()
    high = entry(priority=7)
    assert drain(line_of(low, normal, high)) == [high, normal, low]


def test_no_wait_makes_up_for_a_pause() -> None:
    first = entry(priority=RESUMED, arrival=1e6)
    second = entry(priority=RESUMED, arrival=0.0)
    assert drain(line_of(entry(priority=100), first, second))[:2] == [second, first]


def test_waiting_makes_up_for_priority() -> None:
    old = entry(arrival=0.0)
    assert line_of(old, entry(priority=10, arrival=0.49)).head is not old
    assert line_of(old, entry(priority=10, arrival=0.51)).head is old


def test_the_earliest_deadline_of_a_tenant_goes_first() -> None:
    late = entry(deadline=0.9)
    soon = entry(deadline=0.5)
    assert drain(line_of(late, soon)) == [soon, late]


def test_a_later_deadline_is_overtaken_for_a_second_at_most() -> None:
    """However many of the tenant's requests with earlier deadlines come after it."""
    patient = entry(arrival=0.0, deadline=30.0)
    hurried = [entry(arrival=n / 10, deadline=n / 10 + 0.2) for n in range(1000)]
    order = drain(line_of(patient, *hurried))
    before = order[: order.index(patient)]
    assert before
    assert all(each.arrival <= MAX_LEAD_S for each in before)


def test_a_deadline_is_no_way_past_other_tenants() -> None:
    first = entry("a", deadline=30)
    assert line_of(first, entry("b", deadline=1)).head is first


def test_tenants_take_turns() -> None:
    line = line_of(*(entry("a") for _ in range(4)), *(entry("b") for _ in range(4)))
    assert "".join(e.tenant for e in drain(line)) == "abababab"


def test_bytes_are_shared_not_requests() -> None:
    line = line_of(*(entry("a", 30) for _ in range(3)), *(entry("b", 10) for _ in range(9)))
    assert "".join(e.tenant for e in drain(line)) == "abbbabbbabbb"


def test_who_comes_late_gets_its_share_and_no_more() -> None:
    line = line_of(*(entry("a") for _ in range(8)))
    for _ in range(4):
        line.serve(line.head)  # type: ignore[arg-type]
    for _ in range(4):
        line.add(entry("b"))
    assert "".join(e.tenant for e in drain(line)) in ("abababab", "babababa")


def test_what_passes_others_is_charged_to_its_tenant() -> None:
    line = line_of(entry("a", 100), small := entry("b", 10), *(entry("b", 10) for _ in range(2)))
    line.add(entry("c", 10))
    line.serve(small)
    assert "".join(e.tenant for e in drain(line)) == "acbb"


def test_leaving_and_coming_again_gives_no_second_share() -> None:
    line = line_of(*(entry("a", 10) for _ in range(6)), entry("b", 40))
    served = []
    for _ in range(4):
        head = line.head
        assert head
        line.serve(head)
        served.append(head.tenant)
        if head.tenant == "b":
            line.add(entry("b", 40))
    assert served == ["a", "b", "a", "a"]


def test_what_leaves_unserved_is_not_charged() -> None:
    gone = entry("a", 100)
    kept = entry("a", 10)
    line = line_of(gone, kept, entry("b", 10))
    line.remove(gone)
    assert [e.tenant for e in drain(line)] == ["a", "b"]


def test_bytes_from_a_priority_on() -> None:
    line = line_of(entry(size=1, priority=-1), entry(size=2), entry(size=4, priority=3))
    assert [line.size_from(p) for p in (-1, 0, 1, 4)] == [7, 6, 4, 0]


weights = st.sampled_from((0.5, 1.0, 2.0, 3.0, 8.0))
sizes = st.integers(1, 100)


@settings(max_examples=60, deadline=None)
@given(weights, weights, st.lists(sizes, min_size=400, max_size=400))
def test_shares_of_two_backlogged_tenants_converge(
    weight_a: float, weight_b: float, drawn: list[int]
) -> None:
    line = FairQueue(AGING_S)
    for size in drawn[:200]:
        line.add(entry("a", size, weight=weight_a))
    for size in drawn[200:]:
        line.add(entry("b", size, weight=weight_b))
    left = Counter({"a": 200, "b": 200})
    served = Counter[str]()
    while min(left.values()):
        head = line.head
        assert head
        line.serve(head)
        left[head.tenant] -= 1
        served[head.tenant] += head.size
        # Goyal, Vin, Cheng (1996), theorem 1: start-time fair queueing's bound on unfairness.
        gap = abs(served["a"] / weight_a - served["b"] / weight_b)
        assert gap <= 100 / weight_a + 100 / weight_b + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(-100, 100), st.integers(1, 40))
def test_nobody_starves(priority: int, rate: int) -> None:
    """A request is served however many more important ones keep coming."""
    line = FairQueue(AGING_S)
    poor = entry("poor", priority=priority, arrival=0.0)
    line.add(poor)
    now = 0.0
    most = (100 - priority) * AGING_S
    while line.head is not poor:
        now += 1 / rate
        line.add(entry("rich", priority=100, arrival=now, weight=100.0))
        head = line.head
        assert head
        if head is not poor:
            line.serve(head)
        assert now <= most + 2 / rate


class FairMachine(RuleBasedStateMachine):
    """Any coming, leaving and being served, against a model that scans everything."""

    def __init__(self) -> None:
        super().__init__()
        self.line = FairQueue(AGING_S)
        self.inside: list[FairEntry] = []
        self.now = 0.0

    @rule(
        tenant=st.sampled_from("abcd"),
        size=st.integers(0, 100),
        priority=st.integers(-2, 2),
        patience=st.floats(0, 30),
        weight=weights,
    )
    def join(self, tenant: str, size: int, priority: int, patience: float, weight: float) -> None:
        self.now += 0.01
        one = entry(tenant, size, priority, self.now, self.now + patience, weight)
        self.line.add(one)
        self.inside.append(one)

    @precondition(lambda self: self.inside)
    @rule(place=st.integers(0, 1000))
    def leave(self, place: int) -> None:
        self.line.remove(self.inside.pop(place % len(self.inside)))

    @precondition(lambda self: self.inside)
    @rule()
    def serve(self) -> None:
        head = self.line.head
        assert head
        self.line.serve(head)
        self.inside.remove(head)

    @precondition(lambda self: self.inside)
    @rule(place=st.integers(0, 1000))
    def pass_the_head(self, place: int) -> None:
        self.line.serve(self.inside.pop(place % len(self.inside)))

    @invariant()
    def the_head_is_one_that_may_go(self) -> None:
        self.line.check_integrity()
        assert len(self.line) == len(self.inside)
        head = self.line.head
        assert (head is None) == (not self.inside)
        for other in self.inside:
            assert head
            if (other.tenant, other.priority) == (head.tenant, head.priority):
                assert (head.due, head.number) <= (other.due, other.number)
        first = self.line.first(100)
        assert sorted(e.number for e in first) == sorted(e.number for e in self.inside)
        assert first[:1] == ([head] if head else [])
        sums = {p: sum(e.size for e in self.inside if e.priority >= p) for p in range(-2, 3)}
        assert sums == {p: self.line.size_from(p) for p in range(-2, 3)}

    def teardown(self) -> None:
        assert {e.number for e in drain(self.line)} == {e.number for e in self.inside}


TestFairMachine = FairMachine.TestCase
TestFairMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
