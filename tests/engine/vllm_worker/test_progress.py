"""The progress of a worker that loads is reported, even after a measurement has failed."""

import threading

import pytest

from ullage_engine.protocol.messages import Loading
from ullage_engine.vllm_worker import progress
from ullage_engine.vllm_worker.progress import StartProgress

ENOUGH_S = 20.0


def test_a_measurement_that_fails_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "_PROGRESS_S", 0.001)
    readings = iter([0, OSError("/proc is gone"), OSError("/proc is gone"), 40])
    reported = threading.Event()
    reports: list[Loading] = []

    def used_bytes() -> int:
        reading = next(readings, 40)
        if isinstance(reading, OSError):
            raise reading
        return reading

    def report(loading: Loading) -> None:
        reports.append(loading)
        if loading.done_bytes == 40:
            reported.set()

    start_progress = StartProgress(report, used_bytes)  # type: ignore[arg-type]
    start_progress.begin("weights", 100)
    with start_progress.watch():
        assert reported.wait(ENOUGH_S)

    assert [each.done_bytes for each in reports] == [0, 40, 100]
    assert len([each for each in caplog.records if "cannot be measured" in each.message]) == 1
