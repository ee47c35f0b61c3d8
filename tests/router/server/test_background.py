"""The log of duties that fail."""

import pytest

from ullage_router import background
from ullage_router.background import failures_logged


def fail(duty: str, error: Exception) -> None:
    with failures_logged(duty):
        raise error


def test_an_error_that_lasts_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        fail("test: one", ValueError("a"))
    assert len(caplog.records) == 1

    fail("test: one", ValueError("b"))
    fail("test: two", ValueError("b"))
    assert len(caplog.records) == 3

    monkeypatch.setattr(background, "QUIET_S", 0.0)
    fail("test: two", ValueError("b"))
    assert len(caplog.records) == 4
