"""The breaker of lower tiers, by random operations against the rule written out plainly."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ullage_kv.tier import CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_failures_in_a_row_open_it_and_a_probe_closes_it() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock, max_failures=2, pause_s=1.0, max_pause_s=4.0)
    breaker.failed()
    breaker.succeeded()
    assert not breaker.failed()
    assert breaker.allows()
    assert breaker.failed()
    assert breaker.is_open
    assert not breaker.allows()
    clock.now = 1.0
    assert breaker.allows()
    assert not breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.allows()
    assert not breaker.is_open


def test_each_failed_probe_doubles_the_pause_up_to_the_longest() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock, max_failures=1, pause_s=1.0, max_pause_s=4.0)
    breaker.failed()
    for pause in (1.0, 2.0, 4.0, 4.0):
        clock.now += pause - 0.5
        assert not breaker.allows()
        clock.now += 0.5
        assert breaker.allows()
        assert breaker.failed()
    breaker.succeeded()
    breaker.failed()
    clock.now += 1.0
    assert breaker.allows()


def test_a_probe_that_never_reports_gives_way_to_another() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock, max_failures=1, pause_s=1.0)
    breaker.failed()
    clock.now = 1.0
    assert breaker.allows()
    assert not breaker.allows()
    clock.now = 2.0
    assert breaker.allows()


class BreakerMachine(RuleBasedStateMachine):
    """At most one probe a pause, closed after a success, never shut for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = CircuitBreaker(self.clock, max_failures=3, pause_s=1.0, max_pause_s=8.0)
        self.failures = 0
        """In a row, while it is closed."""
        self.last_allowed = -1e9

    @rule(seconds=st.sampled_from([0.25, 1.0, 2.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def ask(self) -> None:
        was_open = self.breaker.is_open
        was_paused = self.breaker.is_paused
        allowed = self.breaker.allows()
        assert allowed != was_paused
        assert allowed or was_open
        if was_open and allowed:
            assert self.clock.now - self.last_allowed >= 1.0
            self.last_allowed = self.clock.now

    @rule()
    def fail(self) -> None:
        was_open = self.breaker.is_open
        opened = self.breaker.failed()
        if was_open:
            assert self.breaker.is_open
        else:
            self.failures += 1
            assert opened == self.breaker.is_open == (self.failures == 3)
        if opened:
            assert not self.breaker.allows()

    @rule()
    def succeed(self) -> None:
        self.breaker.succeeded()
        self.failures = 0
        self.last_allowed = -1e9

    @precondition(lambda self: self.breaker.is_open)
    @rule()
    def wait_for_the_longest_pause(self) -> None:
        self.clock.now += 8.0
        assert self.breaker.allows()
        self.last_allowed = self.clock.now

    @invariant()
    def closed_is_never_held_back(self) -> None:
        assert self.breaker.is_open or self.breaker.allows()


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
