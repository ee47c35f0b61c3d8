"""Whose memory of a shared GPU is whose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.memory.shared_device import (
    MAX_WAIT_S,
    POLL_S,
    STABLE_S,
    allocator_fraction,
    bytes_of_others,
    differs,
    find_own,
    largest_share_of_others,
    own_bytes,
    wait_for_memory,
)

MIB = 1 << 20
GIB = 1 << 30


class Device:
    """Free memory that changes with every look, and the time that passes between two."""

    def __init__(self, *free_mib: int) -> None:
        self._free = list(free_mib)
        self.now = 0.0

    def read(self) -> int:
        free = self._free[0]
        if len(self._free) > 1:
            del self._free[0]
        return free * MIB

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, enough_mib: int) -> int:
        return wait_for_memory(self.read, enough_mib * MIB, lambda: self.now, self.sleep) // MIB


def test_an_empty_device_is_not_waited_for() -> None:
    device = Device(80_000)
    assert (device.wait(78_000), device.now) == (80_000, 0.0)


def test_memory_that_is_being_returned_is_waited_for_until_there_is_enough() -> None:
    device = Device(10_000, 10_000, 30_000, 30_000, 60_000, 79_000)
    assert device.wait(78_000) == 79_000
    assert device.now == pytest.approx(0.5)


def test_a_neighbour_is_waited_for_as_long_as_it_might_be_a_dead_process() -> None:
    device = Device(40_000)
    assert device.wait(78_000) == 40_000
    assert device.now == pytest.approx(STABLE_S)


def test_what_a_neighbour_takes_is_no_reason_to_wait_for_longer() -> None:
    device = Device(*range(60_000, 20_000, -1000))
    assert device.wait(78_000) < 60_000
    assert device.now == pytest.approx(STABLE_S)


def test_a_device_that_is_never_stable_is_not_waited_for_for_ever() -> None:
    device = Device(*range(0, 78_000, 100))
    device.wait(78_000)
    assert device.now == pytest.approx(MAX_WAIT_S, abs=2 * POLL_S)


def test_a_process_is_known_by_what_it_allocates_and_not_by_its_id() -> None:
    before = {7: 500 * MIB, 9000: 500 * MIB, 9001: 20 * GIB}
    during = {7: 500 * MIB, 9000: 560 * MIB, 9001: 21 * GIB}
    assert find_own(before, during, before, 60 * MIB) == 9000
    # It had nothing before, as the driver may list a process only once it has memory.
    assert find_own({}, {9000: 60 * MIB}, {}, 60 * MIB) == 9000


@pytest.mark.parametrize(
    ("before", "during", "after"),
    [
        ({}, {}, {}),  # the driver lists nothing
        ({7: 500}, {7: 500}, {7: 500}),  # or another container's processes alone
        ({7: 500}, {7: 560}, {7: 560}),  # a neighbour that loads
        ({7: 500, 8: 600}, {7: 560, 8: 660}, {7: 500, 8: 600}),  # two that do the same
    ],
)
def test_a_process_that_cannot_be_told_from_others_is_not_guessed(
    before: dict[int, int], during: dict[int, int], after: dict[int, int]
) -> None:
    looks = [{pid: held * MIB for pid, held in look.items()} for look in (before, during, after)]
    assert find_own(*looks, 60 * MIB) is None


def test_own_bytes_are_what_the_driver_lists() -> None:
    assert own_bytes(21 * GIB, 80 * GIB, 10 * GIB, 20 * GIB) == 21 * GIB


def test_without_a_list_own_bytes_are_the_allocators_and_the_context() -> None:
    free_before = 60 * GIB
    context = 600 * MIB
    reserved = 20 * GIB
    free = free_before - context - reserved
    assert own_bytes(None, free_before, free, reserved) == reserved + context


@given(
    context=st.integers(128 * MIB, 2 * GIB),
    reserved=st.integers(0, 40 * GIB),
    change=st.integers(-40 * GIB, 40 * GIB),
)
def test_without_a_list_others_are_charged_with_little(
    context: int, reserved: int, change: int
) -> None:
    """A neighbour that starts at the same time, or a dead worker that returns what it had."""
    free_before = 80 * GIB
    free = free_before - context - reserved - change
    own = own_bytes(None, free_before, free, reserved)
    assert abs(own - reserved - context) <= 2 * GIB
    assert own >= reserved + 128 * MIB


def test_others_hold_what_is_neither_free_nor_reserved() -> None:
    reserve = 2 * GIB
    # Alone: 68 of 80 GiB are the budget, of which 20 are allocated and 2 the reserve.
    assert bytes_of_others(46 * GIB, 60 * GIB, reserve, reserve, GIB) == 0
    # A neighbour with 40 of them.
    assert bytes_of_others(46 * GIB, 20 * GIB, reserve, reserve, GIB) == 28 * GIB
    # One with nearly all: nothing is promised.
    assert bytes_of_others(46 * GIB, 16 * MIB, reserve, reserve, GIB) == 46 * GIB


def test_the_safety_reserve_yields_to_the_longest_sequence_on_a_full_device() -> None:
    reserve = 2 * GIB
    longest = 600 * MIB
    # The worker before had 600 MiB of KV, and a neighbour has taken all beside it but 64 MiB.
    free = longest + 64 * MIB
    kv = 46 * GIB - bytes_of_others(46 * GIB, free, reserve, reserve, longest)
    assert kv == longest
    kv = 46 * GIB - bytes_of_others(46 * GIB, 300 * MIB, reserve, reserve, longest)
    assert kv == 300 * MIB - 32 * MIB


def test_torch_may_have_what_the_ledger_promised_less_what_lies_outside() -> None:
    total = 80 * GIB
    fraction = allocator_fraction(40 * GIB, GIB, 30 * GIB, total)
    assert int(fraction * total) == 39 * GIB


def test_torch_may_have_what_it_has_and_room_to_round_up() -> None:
    total = 80 * GIB
    assert int(allocator_fraction(30 * GIB, GIB, 30 * GIB, total) * total) == 30 * GIB + 40 * MIB
    assert allocator_fraction(200 * GIB, GIB, 30 * GIB, total) == 1.0


def test_a_ledger_is_right_within_two_percent() -> None:
    assert not differs(98, 100)
    assert not differs(102, 100)
    assert differs(97, 100)
    assert differs(103, 100)


GPUS = st.integers(8, 160).flatmap(
    lambda total: st.tuples(st.integers(0, total * GIB), st.just(total * GIB))
)


@given(st.lists(GPUS, min_size=1, max_size=8), st.floats(0.3, 0.95))
def test_every_gpu_has_free_what_is_planned_of_it(
    memory: list[tuple[int, int]], threshold: float
) -> None:
    """Also where GPUs are of unequal sizes: one share of each is planned with."""
    share, fullest = largest_share_of_others(memory, threshold)
    planned = threshold - max(share, 0.0)
    assert all(planned * total <= free + 1 for free, total in memory)
    free, total = memory[fullest]
    assert share <= 0.0 or abs(planned * total - free) <= 1, "no more is set aside than needed"
