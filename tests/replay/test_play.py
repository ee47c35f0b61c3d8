"""Following the memory of engines while a trace is played."""

import asyncio

import pytest
from ullage_testing.fake_engine import FakeEngine

from ullage_replay.play import WatchError, watching


def test_an_engine_whose_reports_end_is_named() -> None:
    async def scenario() -> None:
        engines = {name: FakeEngine(name, "single", 10, 100) for name in ("well", "broken")}
        for engine in engines.values():
            engine.heartbeat_s = 0.02
            await engine.start()
        targets = {name: engine.address for name, engine in engines.items()}

        async with asyncio.timeout(60), watching(targets) as watched:
            while not all(each.num_reports for each in watched.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        reason = f"the reports of broken at {targets['broken']} ended early: "
        with pytest.raises(WatchError, match=reason):
            async with asyncio.timeout(60), watching(targets) as watched:
                while not watched["broken"].num_reports:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await engines["broken"].stop()
                before = watched["well"].num_reports
                while watched["well"].num_reports < before + 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await engines["well"].stop()

    asyncio.run(scenario())
