"""Log lines that nobody reads hold up nobody; the others are whole, in order and not lost."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from ullage_testing.thread_limit import no_new_threads

from ullage_common.process import log_writer, logs
from ullage_common.process.log_writer import DROPPED, MAX_WAITING_BYTES, LineWriter

WAIT_S = 60.0
PROGRAM = """
import asyncio, logging, sys
from ullage_common.process import logs

async def main(count, size):
    logs.configure("info")
    log = logging.getLogger("test")
    for number in range(count):
        log.info("line", extra={"number": number, "text": "x" * size})
        await asyncio.sleep(0)
    print("through", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    log.info("last")

asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
"""


def start(count: int, size: int) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, str(count), str(size)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize(("count", "size"), [(20_000, 200), (200, 30_000)], ids=["short", "long"])
def test_a_reader_that_stands_still_stops_nothing(count: int, size: int) -> None:
    with start(count, size) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdin
        assert process.stdout.readline() == "through\n"  # nobody has read a line yet
        lines = []
        reading = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
        reading.start()
        process.stdin.close()
        reading.join(WAIT_S)
        assert process.wait(WAIT_S) == 0
    found = [json.loads(line) for line in lines]
    numbers = [line["number"] for line in found if "number" in line]
    dropped = sum(line["dropped"] for line in found if line["message"] == DROPPED)
    assert dropped
    assert numbers == list(range(len(numbers)))
    assert len(numbers) + dropped >= count
    assert found[-1]["message"] in ("last", DROPPED)
    waiting = sum(
        len(line) for line, parsed in zip(lines, found, strict=True) if "number" in parsed
    )
    assert waiting <= MAX_WAITING_BYTES + (128 << 10)


def test_a_process_ends_though_nobody_reads() -> None:
    with start(20_000, 200) as process:
        assert process.stdout
        assert process.stdin
        assert process.stdout.readline() == "through\n"
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


def test_a_killed_process_has_written_its_lines() -> None:
    """What is read is written at once, and not by a thread that comes later."""
    with start(10, 100) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "through\n"
        process.send_signal(signal.SIGKILL)
        numbers = [json.loads(line)["number"] for line in process.stderr]
    assert numbers == list(range(10))


class Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.getMessage()} {getattr(record, 'dropped', '')}".strip()


def record(message: str) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message})


def written(fd_mode: str, tmp_path: Path, *messages: str) -> list[str]:
    """What a reader gets by a pipe, a socket or a file."""
    if fd_mode == "file":
        fd = os.open(tmp_path / "log", os.O_CREAT | os.O_RDWR)
        reader = os.open(tmp_path / "log", os.O_RDONLY)
    else:
        reader, fd = os.pipe()
    writer = LineWriter(fd)
    writer.setFormatter(Lines())
    for message in messages:
        writer.handle(record(message))
    writer.flush()
    writer.close()
    data = b""
    while len(data.splitlines()) < len(messages):
        data += os.read(reader, 1 << 20)
    return data.decode().splitlines()


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_lines_of_any_length_stay_in_order(kind: str, tmp_path: Path) -> None:
    messages = ["a", "b" * 10_000, "c", "d" * 5_000, "\udcff", "e"]
    assert written(kind, tmp_path, *messages) == [*messages[:4], "\\udcff", "e"]


def test_a_pipe_that_cannot_be_opened_again_is_written_by_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "_unblocked", lambda fd: None)
    messages = [str(number) for number in range(1000)]
    assert written("pipe", tmp_path, *messages) == messages


def test_lines_that_find_no_thread_are_written_with_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_writer, "_unblocked", lambda fd: None)
    reader, fd = os.pipe()
    writer = LineWriter(fd)
    writer.setFormatter(Lines())

    with no_new_threads():
        writer.handle(record("a"))
        writer.handle(record("b"))
    writer.handle(record("c"))
    writer.flush()
    assert os.read(reader, 100).decode().splitlines() == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_lines_that_wait_without_a_thread_are_written_even_if_no_more_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_writer, "_unblocked", lambda fd: None)
    monkeypatch.setattr(log_writer, "MAX_WAITING_BYTES", 4)
    reader, fd = os.pipe()
    writer = LineWriter(fd)
    writer.setFormatter(Lines())

    with no_new_threads():
        for text in ("a", "b", "dropped"):
            writer.handle(record(text))
    writer.handle(record("dropped"))
    writer.flush()
    lines = os.read(reader, 100).decode().splitlines()
    assert lines == ["a", "b", f"{log_writer.DROPPED} 2"]


def test_a_reader_that_went_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    reader, fd = os.pipe()
    os.close(reader)
    writer = LineWriter(fd)
    for size in (1, 100_000):
        writer.handle(record("x" * size))
    writer.flush()
    assert capsys.readouterr().err == ""


def test_a_child_does_not_write_what_waits_for_its_parent() -> None:
    reader, fd = os.pipe()
    writer = LineWriter(fd)
    writer.setFormatter(Lines())
    writer.handle(record("x" * 200_000))  # more than a pipe takes
    child = os.fork()
    if not child:
        writer.flush()
        writer.handle(record("child"))
        writer.flush()
        os._exit(0)
    data = b""
    while data.count(b"\n") < 2:
        data += os.read(reader, 1 << 20)
    os.waitpid(child, 0)
    assert data.count(b"x") == 200_000
    assert data.count(b"child") == 1


def test_a_stream_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    root: Any = logging.getLogger()
    before = list(root.handlers)
    handler = log_writer.new_handler(stream)
    handler.setFormatter(logs.JsonFormatter({"a": 1}))
    handler.handle(logging.makeLogRecord({"msg": "m", "levelname": "INFO", "name": "n"}))
    assert json.loads(stream.getvalue())["message"] == "m"
    assert root.handlers == before
