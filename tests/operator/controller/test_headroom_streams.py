"""Whom the operator follows, and that it lets go."""

import asyncio

from ullage_operator.controller.healer import HeadroomStreams, StreamTimes
from ullage_operator.healing import EngineTarget

NOWHERE = EngineTarget("single", "127.0.0.1:9", 0.2)


def following() -> set[str]:
    names = {task.get_name() for task in asyncio.all_tasks() if not task.cancelling()}
    return {name for name in names if name.startswith("headroom ") and "clock" not in name}


def test_who_no_longer_leads_follows_nobody() -> None:
    async def scenario() -> None:
        streams = HeadroomStreams[str](lambda _: None, StreamTimes())
        streams.follow("a", {"1": NOWHERE, "2": NOWHERE})
        streams.follow("b", {"3": NOWHERE})
        assert following() == {"headroom 1", "headroom 2", "headroom 3"}
        streams.drop()
        assert following() == set()
        for key in ("a", "b"):
            assert streams.engine_health(key) == streams.pressure_levels(key) == {}
        streams.follow("b", {"3": NOWHERE})  # it leads again
        assert following() == {"headroom 3"}
        await streams.close()

    asyncio.run(scenario())
