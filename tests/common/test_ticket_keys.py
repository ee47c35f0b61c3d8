"""Keys of tickets, changed while they are in use, and how often tickets were used."""

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ullage_common.tickets.tickets import Claims, TicketKeys, TicketUses, engine_tag, verify

ENOUGH_S = 20.0


def test_a_new_key_signs_and_the_old_one_verifies_still(tmp_path: Path) -> None:
    old = b"o" * 32
    new = b"n" * 32
    (tmp_path / "a").write_bytes(old)
    claims = Claims(1, 10_000, engine_tag("e"), 1, 2, 1, 0, 3)

    async def scenario() -> None:
        keys = TicketKeys(tmp_path)
        keys.start()
        before = keys.signer.sign(claims)
        (tmp_path / "b").write_bytes(new)
        async with asyncio.timeout(ENOUGH_S):
            while keys.all != (old, new):  # noqa: ASYNC110 - the folder is looked at by others
                await asyncio.sleep(0.01)
        await keys.close()
        for ticket, key in ((before, old), (keys.signer.sign(claims), new)):
            assert verify(ticket, (key,), claims.engine, 9.0) == claims
            assert verify(ticket, keys.all, claims.engine, 9.0) == claims

    asyncio.run(scenario())


@given(
    capacity=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 3))),
)
def test_uses_count_until_their_time(capacity: int, steps: list[tuple[int, int, int]]) -> None:
    """Each step lets time pass and uses a ticket if there is room. Tickets expire in any order."""
    uses = TicketUses(capacity)
    now = 0
    added: dict[int, tuple[int, int]] = {}
    for ticket, lasts, passed in steps:
        now += passed
        uses.forget(now)
        added = {number: each for number, each in added.items() if each[1] >= now}
        if uses.has_room_for(ticket + 1):
            count, until = added.get(ticket + 1, (0, now + lasts))
            added[ticket + 1] = (count + 1, until)
            uses.add(ticket + 1, now + lasts)
        else:
            assert len(added) == capacity
            assert ticket + 1 not in added
        assert len(uses) == len(added) <= capacity
        assert all(uses.count(ticket) == count for ticket, (count, _) in added.items())


def test_a_router_whose_clock_is_ahead_keeps_no_ticket_of_others() -> None:
    uses = TicketUses(2)
    uses.add(1, 3600.0)
    uses.add(2, 10.0)
    uses.forget(11.0)
    assert uses.count(1) == 1
    assert uses.has_room_for(3)
