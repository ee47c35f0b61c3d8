"""Answers that the processes of a router share by files."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from ullage_router.pipeline.shared_answers import (
    AnswerFolder,
    AnswerLost,
    AnswerReader,
    AnswerWriter,
    OtherRequest,
)

TTL_S = 3600.0
DIGEST = b"d" * 16
GUARD_S = 60.0


class Clock:
    """Moved by tests."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.passed_s  # files have the present time, too


class Processes:
    """The folder as two processes have it; whose locks are as apart as those of real ones."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20) -> None:
        self.clock = Clock()
        self._path = path / "answers"
        self._max_bytes = max_bytes
        self.one, self.other = self.open(0), self.open(1)

    def open(self, index: int) -> AnswerFolder:
        return AnswerFolder(self._path, index, TTL_S, self._max_bytes, self.clock)


def written(folder: AnswerFolder, *records: bytes, key: str = "k") -> AnswerWriter:
    writer = folder.claim("", key, DIGEST)
    assert isinstance(writer, AnswerWriter)
    for record in records:
        writer.append(record)
    return writer


def reading(folder: AnswerFolder, digest: bytes = DIGEST, key: str = "k") -> AnswerReader:
    reader = folder.claim("", key, digest)
    assert isinstance(reader, AnswerReader)
    return reader


def files(path: Path) -> list[str]:
    """Of the answers."""
    return os.listdir(path / "answers")


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


async def rest(reader: AnswerReader) -> list[bytes]:
    records = []
    while (record := await reader.next()) is not None:
        records.append(record)
    reader.close()
    return records


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(GUARD_S):
            await scenario

    asyncio.run(guarded())


def test_an_answer_is_read_while_it_grows_and_when_it_is_finished(tmp_path: Path) -> None:
    async def scenario() -> None:
        both = Processes(tmp_path)
        writer = written(both.one, b"decision", b"accepted", b"Hello")
        early = reading(both.other)
        assert await early.begin() == b"decision"
        assert writer.has_readers()
        task = asyncio.ensure_future(rest(early))
        await asyncio.sleep(0)
        writer.append(b" world")
        writer.finish()
        assert await task == [b"accepted", b"Hello", b" world"]
        assert await rest(reading(both.one)) == [b"decision", b"accepted", b"Hello", b" world"]

    run(scenario())


def test_the_key_of_another_request_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        both = Processes(tmp_path)
        written(both.one, b"decision").finish()
        with pytest.raises(OtherRequest):
            await reading(both.other, b"e" * 16).begin()
        written(both.other, key="another")

    run(scenario())


def test_what_was_given_up_is_generated_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        both = Processes(tmp_path)
        writer = written(both.one, b"decision")
        reader = reading(both.other)
        assert await reader.begin() == b"decision"
        writer.give_up()
        with pytest.raises(AnswerLost):
            await reader.next()
        assert not written(both.other).has_readers(), "those who read what is lost do not count"

    run(scenario())


def test_what_a_dead_process_left_is_generated_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        both = Processes(tmp_path)
        writer = written(both.one, b"decision")
        assert writer._file is not None
        os.close(writer._file)  # as the kernel does
        written(both.other, b"decision").finish()
        assert await reading(both.open(0)).begin() == b"decision"

    run(scenario())


def test_finished_answers_outlive_their_process_until_their_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        both = Processes(tmp_path)
        written(both.one, b"decision").finish()
        successor = both.open(0)
        assert successor.size == both.one.size > 0 == both.other.size
        both.clock.passed_s = TTL_S / 2
        assert await reading(successor).begin() == b"decision"
        both.clock.passed_s = TTL_S * 2
        written(both.other)
        successor.claim("", "another", DIGEST)
        assert successor.size == 0

    run(scenario())


def test_the_oldest_answers_go_when_there_are_too_many(tmp_path: Path) -> None:
    both = Processes(tmp_path, max_bytes=250)
    for number in range(4):
        written(both.one, b"x" * 70, key=str(number)).finish()
    assert 0 < both.one.size <= 250
    reading(both.other, key="3")
    written(both.other, key="0")


@pytest.mark.parametrize("max_bytes", [0, 60])
def test_an_answer_that_is_larger_than_all_that_is_kept_is_not_kept(
    tmp_path: Path, max_bytes: int
) -> None:
    both = Processes(tmp_path, max_bytes)
    writer = written(both.one, b"x" * 70)
    ended = threading.Thread(target=writer.finish, daemon=True)
    ended.start()
    ended.join(GUARD_S)
    assert not ended.is_alive(), "it waits for a lock that it has itself"
    assert both.one.size == 0
    assert not files(tmp_path)


def test_a_full_disk_ends_the_sharing_and_not_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Processes(tmp_path)
    writer = written(both.one, b"decision")
    with monkeypatch.context() as patched:
        patched.setattr("ullage_router.pipeline.shared_answers.os.write", full)
        writer.append(b"accepted")
        writer.finish()
    written(both.other)


def test_a_full_disk_from_the_beginning_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        both = Processes(tmp_path)
        num_open = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr("ullage_router.pipeline.shared_answers.os.write", full)
            writer = written(both.one, b"decision")
            writer.finish()
            writer.give_up()
        assert len(os.listdir("/proc/self/fd")) == num_open
        assert not files(tmp_path)
        written(both.other, b"decision").finish()
        assert await reading(both.one).begin() == b"decision"

    run(scenario())


def test_an_answer_that_failed_leaves_no_file(tmp_path: Path) -> None:
    writer = written(Processes(tmp_path).one, b"decision")
    writer.give_up()
    assert not writer.has_readers()
    assert not files(tmp_path)


def test_nobody_reads_where_the_files_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Processes(tmp_path)
    writer = written(both.one, b"decision")
    reading(both.other)
    with monkeypatch.context() as patched:
        patched.setattr("ullage_router.pipeline.shared_answers.os.open", full)
        assert not writer.has_readers()
    assert writer.has_readers()


@pytest.mark.parametrize("is_finished", [False, True])
def test_forgetting_an_answer_spares_the_next_one_of_its_key(
    tmp_path: Path, is_finished: bool
) -> None:
    async def scenario() -> None:
        both = Processes(tmp_path, max_bytes=100)
        written(both.one, b"old").finish()
        both.clock.passed_s = TTL_S * 2
        writer = written(both.other, b"new")
        both.clock.passed_s = 0.0
        if is_finished:
            writer.finish()
        written(both.one, b"x" * 70, key="another").finish()
        assert both.one.size < 100, "the old one was forgotten"
        assert await reading(both.open(2)).begin() == b"new"

    run(scenario())


def test_another_request_with_the_key_is_refused_before_the_answer_begins(tmp_path: Path) -> None:
    async def scenario() -> None:
        both = Processes(tmp_path)
        written(both.one)
        with pytest.raises(OtherRequest):
            await reading(both.other, b"e" * 16).begin()

    run(scenario())
