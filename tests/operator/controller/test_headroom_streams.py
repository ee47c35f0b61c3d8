"""Whom the operator follows, and that it lets go."""

import asyncio

import pytest
from ullage_testing.fake_engine import FakeEngine

from ullage.headroom.v1.headroom_pb2 import AdapterState
from ullage_operator.controller.headroom_streams import HeadroomStreams, StreamTimes
from ullage_operator.policy.engine_health import EngineTarget

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


def test_an_error_does_not_stop_the_clock_that_notices_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ullage_operator.controller.headroom_streams.SILENT_S", 0.05)
    looks: list[str] = []

    def on_news(key: str) -> None:
        looks.append(key)
        if key == "a":
            raise ValueError("a bug")

    async def scenario() -> None:
        streams = HeadroomStreams[str](on_news, StreamTimes(tick_s=0.02))
        streams.follow("a", {"1": NOWHERE})
        streams.follow("b", {"2": NOWHERE})
        async with asyncio.timeout(30):
            while "b" not in looks:  # noqa: ASYNC110 - the clock has no event
                await asyncio.sleep(0.01)
            silent_s = streams.engine_health("a")["1"].silent_s
            while streams.engine_health("a")["1"].silent_s == silent_s:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await streams.close()

    asyncio.run(scenario())
    assert looks == ["a", "b"]
    assert "checking the reports of a failed" in caplog.text


def test_a_new_fingerprint_is_worth_a_look() -> None:
    async def scenario() -> None:
        engine = FakeEngine("e", "single", 10, 100)
        engine.heartbeat_s = 0.02
        await engine.start()
        looks: list[str] = []
        streams = HeadroomStreams[str](looks.append, StreamTimes(status_interval_s=3600.0))

        def digest() -> str:
            report = streams.engine_health("a")["1"].report
            return report.fingerprint if report else "none yet"

        async def until_reported(wanted: str) -> None:
            async with asyncio.timeout(30):
                while digest() != wanted:  # noqa: ASYNC110 - the stream has no event
                    await asyncio.sleep(0.01)

        try:
            streams.follow("a", {"1": EngineTarget("single", engine.address, 0.2)})
            await until_reported("")
            before = len(looks)
            engine.set_facts(weights="1")
            await until_reported(engine.headroom.fingerprint)
            assert len(looks) == before + 1
            engine.set_facts(weights="2")
            await until_reported(engine.headroom.fingerprint)
            assert len(looks) == before + 2
            assert dict(streams.engine_health("a")["1"].report.fingerprint_facts) == {
                "weights": "2"
            }
        finally:
            await streams.close()
            await engine.stop()

    asyncio.run(scenario())


def test_adapters_that_come_and_go_are_worth_a_look() -> None:
    async def scenario() -> None:
        engine = FakeEngine("e", "single", 10, 100)
        engine.heartbeat_s = 0.02
        await engine.start()
        looks: list[str] = []
        streams = HeadroomStreams[str](looks.append, StreamTimes(status_interval_s=3600.0))

        async def until_reported(*names: str) -> None:
            async with asyncio.timeout(30):
                while True:
                    report = streams.engine_health("a")["1"].report
                    if report and [each.name for each in report.adapters] == list(names):
                        return
                    await asyncio.sleep(0.01)

        try:
            streams.follow("a", {"1": EngineTarget("single", engine.address, 0.2)})
            await until_reported()
            before = len(looks)
            engine.push(adapters=[AdapterState(name="sql")])
            await until_reported("sql")
            assert len(looks) == before + 1
            engine.push(adapters=[])
            await until_reported()
            assert len(looks) == before + 2
        finally:
            await streams.close()
            await engine.stop()

    asyncio.run(scenario())
