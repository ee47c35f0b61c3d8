"""Files that are followed: every change is taken up, even after one that could not be."""

import asyncio
import datetime
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ullage_testing.certificates import Authority
from ullage_testing.failing_disk import FailingDisk

from ullage_common.process import file_watch
from ullage_common.process.config_file import ConfigError
from ullage_common.process.file_watch import (
    INTERVAL_S,
    QUICK_RETRIES,
    RETRY_S,
    fingerprint,
    follow,
    retry_delay_s,
)
from ullage_common.tickets.tickets import TicketKeys
from ullage_common.wire.tls import Certificates

ENOUGH_S = 20.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(ENOUGH_S):
        while not condition():  # noqa: ASYNC110 - the files are looked at by others
            await asyncio.sleep(0.01)


def test_a_change_that_fails_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        tries = 0
        taken = asyncio.Event()

        async def reload() -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise OSError("no space")
            taken.set()

        following = asyncio.create_task(follow((tmp_path,), fingerprint((tmp_path,)), reload))
        (tmp_path / "new").write_text("x")
        async with asyncio.timeout(30):
            await taken.wait()
        following.cancel()
        assert tries == 2

    asyncio.run(scenario())
    assert "retrying" in caplog.text


def test_the_same_failure_is_logged_once_and_tried_again_until_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "INTERVAL_S", 0.001)

    async def scenario() -> None:
        failures = [ConfigError("broken")] * 3 + [ConfigError("still broken")] * 3
        taken = asyncio.Event()

        async def reload() -> None:
            if failures:
                raise failures.pop(0)
            taken.set()

        following = asyncio.create_task(follow((tmp_path,), None, reload, "file not read"))
        async with asyncio.timeout(ENOUGH_S):
            await taken.wait()
        following.cancel()
        assert not failures

    asyncio.run(scenario())
    reasons = [vars(each)["reason"] for each in caplog.records if "file not read" in each.message]
    assert reasons == ["broken", "still broken"]


def test_no_thread_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at its limit of threads follows its files again once it is below it."""
    monkeypatch.setattr(file_watch, "INTERVAL_S", 0.001)
    start = threading.Thread.start
    refusals = 2

    def start_later(thread: threading.Thread) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    async def scenario() -> None:
        taken = asyncio.Event()

        async def reload() -> None:
            taken.set()

        monkeypatch.setattr(threading.Thread, "start", start_later)
        following = asyncio.create_task(follow((tmp_path,), None, reload))
        async with asyncio.timeout(ENOUGH_S):
            await taken.wait()
        following.cancel()

    asyncio.run(scenario())
    assert not refusals


def test_a_failure_that_lasts_is_tried_again_less_often() -> None:
    assert retry_delay_s(1) == INTERVAL_S
    assert retry_delay_s(QUICK_RETRIES) == INTERVAL_S
    assert retry_delay_s(QUICK_RETRIES + 1) == RETRY_S


def test_a_certificate_of_a_clock_that_is_ahead_is_used_once_it_is_valid(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "INTERVAL_S", 0.1)
    monkeypatch.setattr(file_watch, "RETRY_S", 0.2)
    authority = Authority()
    folder = authority.issue(tmp_path / "tls", "here.test")
    ahead = authority.issue(
        tmp_path / "ahead",
        "here.test",
        validity=datetime.timedelta(days=2),
        starts_in=datetime.timedelta(seconds=8),
    )

    async def scenario() -> None:
        changed = asyncio.Event()
        certificates = Certificates(folder, folder, changed.set)
        await certificates.start()
        before = certificates.material
        for name in ("tls.key", "tls.crt", "ca.crt"):
            (ahead / name).replace(folder / name)

        await until(lambda: "not valid before" in certificates.problem)
        assert certificates.material is before
        async with asyncio.timeout(ENOUGH_S):
            await changed.wait()
        assert certificates.problem == ""
        assert certificates.material.expires > before.expires
        await certificates.close()

    asyncio.run(scenario())
    lines = [each for each in caplog.records if "not valid before" in vars(each).get("reason", "")]
    assert len(lines) == 1


def test_a_certificate_is_read_again_after_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "INTERVAL_S", 0.01)
    authority = Authority()
    folder = authority.issue(tmp_path / "tls", "here.test")
    disk = FailingDisk(folder, monkeypatch)

    async def scenario() -> None:
        changed = asyncio.Event()
        certificates = Certificates(folder, folder, changed.set)
        await certificates.start()
        authority.issue(folder, "here.test")
        disk.num_failures_left = 3
        async with asyncio.timeout(ENOUGH_S):
            await changed.wait()
        await until(lambda: not disk.num_failures_left and not certificates.problem)
        assert certificates.material.certificate == (folder / "tls.crt").read_bytes()
        await certificates.close()

    asyncio.run(scenario())


def test_ticket_keys_are_read_again_after_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_watch, "INTERVAL_S", 0.01)
    (tmp_path / "a").write_bytes(b"o" * 32)
    disk = FailingDisk(tmp_path, monkeypatch)

    async def scenario() -> None:
        keys = TicketKeys(tmp_path)
        keys.start()
        disk.num_failures_left = 3
        (tmp_path / "b").write_bytes(b"n" * 32)
        await until(lambda: len(keys.all) == 2)
        await keys.close()

    asyncio.run(scenario())
    assert not disk.num_failures_left


def test_what_is_no_file_counts_for_nothing(tmp_path: Path) -> None:
    before = fingerprint((tmp_path, tmp_path / "missing"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert fingerprint((tmp_path, tmp_path / "missing")) == before == ()
