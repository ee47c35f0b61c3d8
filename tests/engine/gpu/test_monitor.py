"""The monitor of GPUs: it survives every error, and a batch is not reduced for ever."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ullage_common.config.engine import ThrottlingSection
from ullage_engine.gpu import monitor
from ullage_engine.gpu.monitor import GpuMonitor, MonitorTimes
from ullage_engine.gpu.nvml import NvmlUnavailableError
from ullage_engine.gpu.throttling import BoostState

TIMES = MonitorTimes(interval_s=0.01, links_every_s=10.0, silent_s=0.3, retry_s=0.01)
THROTTLING = ThrottlingSection(after=0.02, recover_after=1.0, min_batch_percent=50)
ENOUGH_S = 20.0


class HotSample:
    """What the monitor reads of a sample of a GPU that is too hot."""

    index = "0"
    uuid = "GPU-0"
    throttle_reasons = frozenset({"hw_thermal"})
    failed_calls: dict[str, int] = {}  # noqa: RUF012 - never changed


class Driver:
    """A driver whose answers are scripted. As a class it stands for `Nvml`."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        """Errors of the next samples."""
        self.num_opened = 0
        self.num_samples = 0

    def __call__(self) -> "Driver":
        self.num_opened += 1
        return self

    def gpus(self, *_: Any) -> list["Driver"]:
        return [self]

    def sample(self, *, with_links: bool) -> HotSample:
        self.num_samples += 1
        if self.errors:
            raise self.errors.pop(0)
        return HotSample()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    def no_events(*_: Any) -> None:
        raise NvmlUnavailableError("no GPU sends events")

    scripted = Driver()
    monkeypatch.setattr(monitor, "Nvml", scripted)
    monkeypatch.setattr(monitor, "XidEvents", no_events)
    return scripted


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(ENOUGH_S):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [ValueError("unforeseen"), NvmlUnavailableError("it is gone")])
def test_an_error_is_not_the_end(
    driver: Driver, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    caplog.set_level("INFO", "ullage.engine.gpu")
    driver.errors = [error] * 3

    async def scenario() -> None:
        watch = GpuMonitor(1, THROTTLING, lambda boost: None, TIMES)
        watch.start()
        await until(lambda: len(watch.samples) == 1)
        watch.close()

    asyncio.run(scenario())
    assert driver.num_opened == 4
    lines = [each.message for each in caplog.records if "GPUs are not watched" in each.message]
    assert len(lines) == 1


def test_a_driver_that_fails_for_good_gives_the_batch_back(driver: Driver) -> None:
    boosts: list[BoostState] = []

    async def scenario() -> None:
        watch = GpuMonitor(1, THROTTLING, boosts.append, TIMES)
        watch.start()
        await until(lambda: bool(boosts) and boosts[-1].batch_share == 0.5)
        driver.errors = [NvmlUnavailableError("the driver was replaced")] * 10_000
        await until(lambda: boosts[-1] == BoostState())
        watch.close()

    asyncio.run(scenario())
    shares = [each.batch_share for each in boosts]
    assert min(shares) == 0.5
    assert shares[-1] == 1.0
