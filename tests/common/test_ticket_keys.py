"""Keys of tickets, changed while they are in use."""

import asyncio
from pathlib import Path

from ullage_common.tickets.tickets import Claims, TicketKeys, engine_tag, verify

ENOUGH_S = 20.0


def test_a_new_key_signs_and_the_old_one_verifies_still(tmp_path: Path) -> None:
    old, new = b"o" * 32, b"n" * 32
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
