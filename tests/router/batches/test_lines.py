"""Lines of batches: what is refused, and what is written."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_router.batches.lines import (
    MAX_ERRORS,
    MAX_LINE_BYTES,
    BatchReply,
    LineChecker,
    LineIndex,
    answered_numbers,
    check_file,
    error_line,
    reply_line,
)
from ullage_router.batches.runner import MAX_WAIT_S, wait_s

CHAT = "/v1/chat/completions"


def line(custom_id: Any = "a", **more: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {}} | more
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


def problems(*lines: bytes, most: int = 100) -> list[tuple[str, str | None, int | None]]:
    checker = LineChecker(CHAT, most)
    for number, each in enumerate(lines, 1):
        if not checker.add(number, each):
            break
    checker.end()
    return [(error.code, error.param, error.line) for error in checker.errors]


def test_unknown_fields_of_a_line_take_no_memory() -> None:
    """A long line has room for a million of them."""
    checker = LineChecker(CHAT, 100)
    unknown = {f"{i:x}": 0 for i in range(100_000)}
    text = line("a", **unknown)
    tracemalloc.start()
    try:
        assert checker.add(1, text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not checker.errors
    assert peak < len(text) // 2


def test_right_lines_pass() -> None:
    assert problems(line("a"), b"  ", line("b", body={"stream": False}), b"") == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], ("empty_file", None, None)),
        ([b"\n"], ("empty_file", None, None)),
        ([b" "] * 101, ("too_many_lines", None, 101)),
        ([b"{"], ("invalid_json_line", None, 1)),
        ([b"[]"], ("invalid_json_line", None, 1)),
        ([b"[" * 100_000], ("invalid_json_line", None, 1)),
        ([line(...)], ("missing_required_parameter", "custom_id", 1)),
        ([line(body=...)], ("missing_required_parameter", "body", 1)),
        ([line("")], ("invalid_custom_id", "custom_id", 1)),
        ([line(5)], ("invalid_custom_id", "custom_id", 1)),
        ([line("x" * 513)], ("invalid_custom_id", "custom_id", 1)),
        ([line("a"), b"", line("a")], ("duplicate_custom_id", "custom_id", 3)),
        ([line(method="GET")], ("invalid_method", "method", 1)),
        ([line(url="/v1/embeddings")], ("mismatched_url", "url", 1)),
        ([line(body=[])], ("invalid_body", "body", 1)),
        ([line(body=None)], ("invalid_body", "body", 1)),
        ([line(body={"stream": True})], ("invalid_stream", "body.stream", 1)),
        ([line(body={"stream": 1})], ("invalid_stream", "body.stream", 1)),
        ([line(body={"stream": "true"})], ("invalid_stream", "body.stream", 1)),
        ([line(body={"a": "x" * (8 << 20)})], ("line_too_long", None, 1)),
        ([b" " * (MAX_LINE_BYTES + 1)], ("line_too_long", None, 1)),
    ],
)
def test_a_wrong_line_is_named(lines: list[bytes], expected: Any) -> None:
    assert problems(*lines)[0] == expected


def test_checking_ends_at_the_limits() -> None:
    assert problems(*[line(str(i)) for i in range(4)], most=3) == [
        ("too_many_requests", None, None)
    ]
    assert len(problems(*[b"{"] * 500, most=500)) == MAX_ERRORS


@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=5), st.sampled_from(["\n", "\r\n", "\n\n", " \n"])),
        unique_by=lambda pair: pair[0],
        max_size=20,
    ),
    st.booleans(),
)
def test_every_line_is_found_again(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]], has_end: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "input.jsonl"
    data = b"".join(line(name, body={"id": name}) + end.encode() for name, end in pairs)
    path.write_bytes(data if has_end else data.rstrip(b" \r\n"))
    checker = check_file(path, CHAT, 100)
    index = LineIndex(path)
    assert checker.total == len(index) == len(pairs)
    read = [index.read(number) for number in range(len(index))]
    assert [each.custom_id for each in read] == [name for name, _ in pairs]
    assert [json.loads(bytes(each.body))["id"] for each in read] == [name for name, _ in pairs]


@pytest.mark.parametrize("blank", [b" ", b"\r", b"\t"])
def test_a_long_blank_line_is_never_read_as_a_whole(tmp_path: Path, blank: bytes) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(line("a") + b"\n" + blank * (2 * MAX_LINE_BYTES + 4) + line("b"))
    [error] = check_file(path, CHAT, 100).errors
    assert (error.code, error.line) == ("line_too_long", 2)
    with pytest.raises(ValueError, match="too long"):
        LineIndex(path)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_of_the_maximum_length_passes(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(line("a").ljust(MAX_LINE_BYTES) + end + line("b"))
    assert check_file(path, CHAT, 100).errors == []
    assert [LineIndex(path).read(number).custom_id for number in range(2)] == ["a", "b"]


def test_output_lines_are_those_of_openai(tmp_path: Path) -> None:
    reply = BatchReply(200, b'{"x": 1}', "req-1")
    written = reply_line("batch_1", 7, "a\n", reply)
    assert json.loads(written) == {
        "id": "batch_req_1_7",
        "custom_id": "a\n",
        "response": {"status_code": 200, "request_id": "req-1", "body": {"x": 1}},
        "error": None,
    }
    late = error_line("batch_1", 12, "b", "batch_expired", "late")
    assert json.loads(late)["error"] == {"code": "batch_expired", "message": "late"}
    (tmp_path / "out").write_bytes(written + late)
    assert list(answered_numbers(tmp_path / "out")) == [7, 12]


@given(st.integers(1, 100), st.none() | st.floats(0, 100))
def test_waits_are_at_least_as_long_as_asked_and_bounded(tries: int, asked: float | None) -> None:
    waited = wait_s(tries, asked)
    assert (asked or 0.0) <= waited <= 1.25 * max(MAX_WAIT_S, asked or 0.0)
    assert waited >= 1.0
