"""The waiting room: bounded, in order, and nobody is forgotten."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_router.queue import QueueFull, WaitingRoom


def test_the_bound_is_over_all_pools() -> None:
    room = WaitingRoom(2)
    first = room.join("single", 0, 1.0, 10)
    room.join("large", 0, 2.0, 20)
    assert room.is_full
    with pytest.raises(QueueFull):
        room.join("single", 0, 3.0, 1)
    first.leave()
    first.leave()
    assert not room.is_full
    assert room.ahead() == {"large": 20}


def test_only_the_head_is_woken_and_hands_on() -> None:
    async def scenario() -> None:
        room = WaitingRoom(10)
        late = room.join("single", 0, 2.0, 1)
        early = room.join("single", 0, 1.0, 1)
        room.wake()
        assert await early.turn(1.0)
        assert not await early.turn(0.0)
        assert not await late.turn(0.0)
        early.leave()
        assert await late.turn(1.0)

    asyncio.run(scenario())


def test_priority_goes_before_arrival() -> None:
    room = WaitingRoom(10)
    normal = room.join("single", 0, 1.0, 5)
    urgent = room.join("single", 10, 2.0, 7)
    assert room.ahead(urgent) == {}
    assert room.ahead(normal) == {"single": 7}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("single", "large")), st.integers(-3, 3), st.floats(0, 9), st.booleans()
        ),
        max_size=30,
    )
)
def test_any_coming_and_going(visits: list[tuple[str, int, float, bool]]) -> None:
    room = WaitingRoom(12)
    inside = []
    for pool, priority, arrived, leaves in visits:
        if leaves and inside:
            inside.pop(0).leave()
        elif not room.is_full:
            inside.append(room.join(pool, priority, arrived, 1))
        room.check_integrity()
        assert len(room) == len(inside) <= 12
    assert sum(room.ahead().values()) == len(inside)
