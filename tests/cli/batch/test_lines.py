"""The batch format: lines of requests, lines of answers, and going on after any cut."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_cli.batch.lines import (
    BatchPlan,
    MalformedLine,
    answer_line,
    error_line,
    parse_line,
    read_answered,
    read_plan,
    remaining,
)

ids = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
malformed = st.sampled_from(
    [
        b"{",
        b"[]",
        b"null",
        b'{"custom_id": 3}',
        b'{"custom_id": "", "url": 1}',
        b"\xff",
        b'"\\ud800"',
    ]
)
bodies = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5) | st.just("\n"),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


def line(**fields: Any) -> bytes:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps(whole | fields).encode() + b"\n"


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    """An input with requests, malformed lines and empty lines."""
    names = draw(st.lists(ids, unique=True, max_size=4))
    lines = [line(custom_id=name) for name in names]
    lines += [each + b"\n" for each in draw(st.lists(malformed, max_size=2))]
    lines += [line(custom_id=f"bad {draw(st.integers())}", method="GET")] * draw(st.booleans())
    lines += [b" \n"] * draw(st.booleans())
    joined = b"".join(draw(st.permutations(lines)))
    return joined if draw(st.booleans()) else joined.removesuffix(b"\n")


def plan_of(data: bytes) -> BatchPlan:
    return read_plan(io.BytesIO(data))


def answer(plan: BatchPlan, source: bytes, output: bytes, body: Any = None) -> bytes:
    """Return the output after a run that begins with the given output."""
    answered = read_answered(io.BytesIO(output))
    output = output[: answered.num_bytes]
    for entry in remaining(plan, answered):
        if entry.problem:
            output += error_line(entry)
        else:
            request = parse_line(source[entry.offset :].split(b"\n")[0])
            output += answer_line(request.custom_id, 200, f"r-{request.custom_id}", body)
    return output


@given(batches(), bodies)
def test_a_run_goes_on_after_every_cut(source: bytes, body: Any) -> None:
    plan = plan_of(source)
    whole = answer(plan, source, b"", body)
    lines = whole.splitlines(keepends=True)
    assert len(lines) == len(plan.entries)

    for cut in range(len(whole) + 1):
        resumed = answer(plan, source, whole[:cut], body)
        assert sorted(resumed.split(b"\n")) == sorted(whole.split(b"\n")), cut


@given(batches(), bodies)
def test_every_line_is_openais(source: bytes, body: Any) -> None:
    whole = answer(plan_of(source), source, b"", body)
    documents = [json.loads(each) for each in whole.splitlines()]
    assert len({each["id"] for each in documents}) == len(documents)
    for document in documents:
        assert set(document) == {"id", "custom_id", "response", "error"}
        assert (document["response"] is None) != (document["error"] is None)
        if document["response"]:
            assert document["response"] == {
                "status_code": 200,
                "request_id": f"r-{document['custom_id']}",
                "body": body,
            }
        else:
            assert document["error"]["code"] == "invalid_line"
            assert document["error"]["message"].startswith(f"line {document['error']['line']}: ")


def test_malformed_lines_are_named(subtests: pytest.Subtests) -> None:
    cases = [
        (b"", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"custom_id": "\xff"}', "not a JSON object"),
        (b"[" * 10_000, "not a JSON object"),
        (line(custom_id=7), "custom_id is 7; give a text of its own"),
        (line(custom_id=None), "custom_id is missing"),
        (line(method="GET"), "method is 'GET'; use POST"),
        (line(url="/v1/files"), "url is '/v1/files'; use one of /v1/chat/completions, "),
        (line(url=["x"]), "url is ['x']; "),
        (line(body=None), "body is not an object"),
        (line(body="x"), "body is not an object"),
        (line(body={"stream": True}), "body.stream is True; leave it out"),
    ]
    for data, message in cases:
        with subtests.test(data[:60]), pytest.raises(MalformedLine) as raised:
            parse_line(data)
        with subtests.test(f"message of {data[:60]!r}"):
            assert str(raised.value).startswith(message)


def test_a_custom_id_may_not_occur_twice() -> None:
    source = line(custom_id="a") + line(custom_id="b") + b"\n" + line(custom_id="a", method="PUT")
    with pytest.raises(ValueError, match="lines 1 and 4 have the custom_id 'a'"):
        plan_of(source)


def test_a_line_of_another_file_is_refused(subtests: pytest.Subtests) -> None:
    first = answer_line("a", 200, "", {})
    for other in (
        b"hello\n",
        b"hello",
        b"{}",
        b"{}\n",
        b'{"custom_id": null, "response": {}, "error": null}\n',
    ):
        with subtests.test(other), pytest.raises(ValueError, match="line 2 "):
            read_answered(io.BytesIO(first + other))


def test_failures_are_counted() -> None:
    plan = plan_of(b"{\n")
    lines = [
        answer_line("a", 200, "", {}),
        answer_line("b", 400, "", {}),
        error_line(plan.entries[0]),
    ]
    assert read_answered(io.BytesIO(b"".join(lines))).num_failed == 2
