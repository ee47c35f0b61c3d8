"""Reasoning before answers: what each format means, and that cutting the text changes nothing."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ullage_testing.counted_text import CountedText

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.reasoning_formats import REASONING_FORMATS, reasoning_format
from ullage_common.chat.tool_formats import ToolFormat
from ullage_router.prompts.tools.call_formats import CALL_FORMATS
from ullage_router.prompts.tools.pieces import Arguments, CallStart, Piece, Text, Thought
from ullage_router.prompts.tools.readers import MarkedReader
from ullage_router.prompts.tools.reasoning import PlainReader, ReasoningReader
from ullage_router.prompts.tools.tool_use import ToolUse

MARKS = [*(mark for form in REASONING_FORMATS.values() for mark in form.marks)]


def reader(name: str, is_open: bool) -> ReasoningReader:
    return ReasoningReader(REASONING_FORMATS[name], is_open, PlainReader())


def read(reader: ReasoningReader, texts: Iterable[str]) -> list[Piece]:
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.close()
    joined: list[Any] = []
    for piece in pieces:
        if joined and type(joined[-1]) is type(piece) and not isinstance(piece, CallStart):
            joined[-1] = type(piece)(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


CASES: list[tuple[str, bool, str, list[Piece]]] = [
    ("think", False, "<think>\nHm.\n</think>\n\nHi", [Thought("Hm."), Text("Hi")]),
    ("think", True, "Hm.  So\n</think>\n\nHi", [Thought("Hm.  So"), Text("Hi")]),
    ("think", False, "<think>\n\n</think>\n\nHi", [Text("Hi")]),
    ("think", False, "No <think>x</think>", [Text("No <think>x</think>")]),
    ("think", False, "<thi", [Text("<thi")]),
    ("think", False, " \n", [Text(" \n")]),
    ("think", True, "cut </th", [Thought("cut </th")]),
    ("think", True, "a</think>b</think>c", [Thought("a"), Text("b</think>c")]),
    ("mistral", False, "[THINK]a[/THINK]b", [Thought("a"), Text("b")]),
    (
        "granite",
        False,
        "Here is my thought process:This\nThat Here is my response:The rest",
        [Thought("This\nThat"), Text("The rest")],
    ),
    ("granite", False, "Here is my thought failure", [Text("Here is my thought failure")]),
    (
        "response",
        False,
        "<think>a</think> <response>b <c></response>",
        [Thought("a"), Text("b <c>")],
    ),
    ("response", False, "<think>a</think> b", [Thought("a"), Text("b")]),
    ("response", False, "<response>b</response>", [Text("<response>b</response>")]),
]


@pytest.mark.parametrize(("name", "is_open", "text", "expected"), CASES)
def test_what_an_answer_means(name: str, is_open: bool, text: str, expected: list[Piece]) -> None:
    assert read(reader(name, is_open), [text]) == expected
    assert read(reader(name, is_open), text) == expected


@pytest.mark.parametrize("name", REASONING_FORMATS)
@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([*MARKS, " ", "\n", "a", "<", "</", "[/", "Here is"]), max_size=8
    ),
    is_open=st.booleans(),
    data=st.data(),
)
def test_cutting_the_text_anywhere_changes_nothing(
    name: str, parts: list[str], is_open: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    expected = read(reader(name, is_open), [text])
    assert read(reader(name, is_open), pieces) == expected
    assert read(reader(name, is_open), text) == expected


@pytest.mark.parametrize("name", REASONING_FORMATS)
@settings(deadline=None)
@given(text=st.text(alphabet="<>[]/thinkTHINK a\n", max_size=30))
def test_text_without_reasoning_is_untouched(name: str, text: str) -> None:
    form = REASONING_FORMATS[name]
    if not text.lstrip().startswith(form.begin):
        assert read(reader(name, False), text) == ([Text(text)] if text else [])


@pytest.mark.parametrize("is_open", [True, False])
def test_blanks_are_copied_once(is_open: bool) -> None:
    """A client may let the model write nothing but blanks, a hundred in each token."""
    blank = CountedText(" " * 100)
    blanks = reader("think", is_open)
    CountedText.num_copied = 0
    for _ in range(100):
        assert blanks.push(blank) == []
    assert CountedText.num_copied <= 100 * len(blank)
    assert blanks.push("x") == [(Thought if is_open else Text)(" " * 10_000 * (not is_open) + "x")]


def test_no_part_of_a_mark_is_shown() -> None:
    thinking = reader("think", False)
    assert thinking.push("<thi") == []
    assert thinking.push("nk>\nHm") == [Thought("Hm")]
    assert thinking.is_thinking
    assert thinking.push(".\n</thi") == [Thought(".")]
    assert thinking.push("nk>") == []
    assert not thinking.is_thinking
    assert thinking.push("\n\n") == []
    assert thinking.push("Hi") == [Text("Hi")]


def test_a_call_may_follow_the_reasoning() -> None:
    form = CALL_FORMATS[ToolFormat.HERMES]
    both = ReasoningReader(REASONING_FORMATS["think"], True, MarkedReader(form, {"f": {}}))
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    pieces = read(both, [f"Not yet: {call}\n</think>\n\n{call}"])
    assert pieces == [Thought(f"Not yet: {call}"), CallStart("f"), Arguments("{}")]


def test_the_engine_is_told_the_marks() -> None:
    ids = {"[THINK]": 7, "[/THINK]": 8}
    form = REASONING_FORMATS["mistral"]
    use = ToolUse().with_reasoning(form, "[/INST]", ids.__contains__, ids.get)
    request = inference_pb2.GenerateRequest(grammar=inference_pb2.Grammar(regex="a"))
    use.ask(request)
    assert request.output.special_tokens
    assert request.reasoning == inference_pb2.Reasoning(
        begin="[THINK]", end="[/THINK]", begin_token_id=7, end_token_id=8
    )

    opened = ToolUse().with_reasoning(REASONING_FORMATS["think"], "<think>\n", bool, {}.get)
    assert opened.reasoning_marks == inference_pb2.Reasoning(end="</think>")
    free = inference_pb2.GenerateRequest()
    use.ask(free)
    assert not free.HasField("reasoning")


def test_an_answer_whose_prompt_ends_the_reasoning_has_none() -> None:
    use = ToolUse()
    form = REASONING_FORMATS["think"]
    assert use.with_reasoning(form, "<think>\n\n</think>\n\n", bool, {}.get) is use


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<think>' }}", "think"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("[THINK]", "mistral"),
        ("<think></think> and <response></response>", "response"),
        ("Here is my thought process: and Here is my response:", "granite"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, expected: str | None) -> None:
    assert reasoning_format(template) == (expected and REASONING_FORMATS[expected])
