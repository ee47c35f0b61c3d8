"""Readers of calls: what each format means, and that cutting the text anywhere changes nothing."""

import json
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ullage_router.prompts.tools.call_syntax import parse_json_calls, parse_python_calls
from ullage_router.prompts.tools.harmony import HarmonyReader
from ullage_router.prompts.tools.pieces import Arguments, CallStart, Piece, Reader, Text, Thought
from ullage_router.prompts.tools.readers import ForcedReader, TaggedReader, WholeReader

NAMES = ("f", "get_weather")
READERS: Mapping[str, Callable[[], Reader]] = {
    "hermes": lambda: TaggedReader(("<tool_call>", "</tool_call>"), parse_json_calls, NAMES),
    "lfm2": lambda: TaggedReader(
        ("<|tool_call_start|>", "<|tool_call_end|>"), parse_python_calls, NAMES
    ),
    "whole": lambda: WholeReader(NAMES),
    "harmony": lambda: HarmonyReader(NAMES),
    "forced": lambda: ForcedReader({name: f'{name}", "arguments": ' for name in NAMES}),
}
MARKS = [
    *("<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "assistant", " to=f"),
    *(
        "analysis",
        "commentary to=functions.f ",
        "final",
        "<|",
        "<",
        "[f(a=1)]",
        'f", "arguments": ',
    ),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "none"}', "\n", " ", "{", '["a"', "é😀"),
]


def read(reader: Reader, texts: Iterable[str]) -> list[Piece]:
    """All pieces, neighbours of one kind joined."""
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.close()
    joined: list[Any] = []
    for piece in pieces:
        if joined and type(joined[-1]) is type(piece) and not isinstance(piece, CallStart):
            joined[-1] = type(piece)(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def one(name: str, arguments: str) -> list[Piece]:
    return [CallStart(name), Arguments(arguments)]


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(MARKS), max_size=8), data=st.data())
def test_cutting_the_text_anywhere_changes_nothing(
    name: str, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    expected = read(READERS[name](), [text])
    assert read(READERS[name](), pieces) == expected
    assert read(READERS[name](), text) == expected


@pytest.mark.parametrize("name", ["hermes", "lfm2", "whole"])
@settings(deadline=None)
@given(text=st.text(alphabet="<|>a {[\"'\n", max_size=30))
@example(text="<tool_call>")
def test_text_without_calls_is_untouched(name: str, text: str) -> None:
    assert read(READERS[name](), text) == ([Text(text)] if text else [])


CALL = '{"name": "f", "arguments": {"a": 1}}'
FREE: list[tuple[str, str, Sequence[Piece]]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", one("f", '{"a": 1}')),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n",
        [Text("Let me see."), *one("f", '{"a": 1}'), *one("f", '{"a": 1}')],
    ),
    ("hermes", f"<tool_call>{CALL}", one("f", '{"a": 1}')),
    ("hermes", "<tool_call>{broken</tool_call> ", [Text("<tool_call>{broken</tool_call> ")]),
    (
        "hermes",
        '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
        [Text('<tool_call>{"name": "none", "arguments": {}}</tool_call>')],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[f(a='x', b=[True, None]), get_weather()]<|tool_call_end|>So.",
        [
            *one("f", '{"a": "x", "b": [true, null]}'),
            *one("get_weather", "{}"),
            Text("So."),
        ],
    ),
    ("lfm2", f"<|tool_call_start|>[{CALL}]<|tool_call_end|>", one("f", '{"a": 1}')),
    ("lfm2", r"<|tool_call_start|>f(a='\d')<|tool_call_end|>", one("f", r'{"a": "\\d"}')),
    (
        "lfm2",
        "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>",
        [Text("<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>")],
    ),
    ("whole", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', one("f", '{"a": 1}')),
    ("whole", f"\n{CALL}; {CALL}", [*one("f", '{"a": 1}'), *one("f", '{"a": 1}')]),
    ("whole", f"```json\n{CALL}\n```", one("f", '{"a": 1}')),
    ("whole", '{"answer": 42}', [Text('{"answer": 42}')]),
    ("whole", "[1] is a footnote", [Text("[1] is a footnote")]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hmm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        [Thought("Hmm."), Text("Hi")],
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{'raw",
        one("f", "{'raw"),
    ),
    ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", one("f", "{}")),
    ("harmony", "<|channel|>commentary<|message|>I'll look.<|end|>", [Text("I'll look.")]),
    ("harmony", "<|channel|>commentary to=browser.open<|message|>x", [Thought("x")]),
    ("harmony", '{"bare": "JSON"}', [Text('{"bare": "JSON"}')]),
    *(
        ("harmony", text, [Text(text)])
        for text in (
            "assistant",
            "assistants help",
            "assistant to be",
            "assi",
            "<",
            " t",
            "assistant ",
        )
    ),
    ("harmony", "assistant<|channel|>final<|message|>Hi", [Text("Hi")]),
    ("harmony", "assistant to=functions.f<|message|>{}", one("f", "{}")),
    ("harmony", "assistant<|channel|>fin", []),
    (
        "forced",
        'get_weather", "arguments": {"city": "Oslo"}',
        one("get_weather", '{"city": "Oslo"}'),
    ),
    ("forced", "get_wea", []),
]


@pytest.mark.parametrize(("name", "text", "expected"), FREE)
def test_what_an_answer_means(name: str, text: str, expected: list[Piece]) -> None:
    assert read(READERS[name](), [text]) == expected


def test_text_and_arguments_come_as_they_are_written() -> None:
    reader = READERS["harmony"]()
    reader.push("<|channel|>commentary to=functions.f<|message|>")
    assert reader.push('{"a"') == [Arguments('{"a"')]
    assert reader.push(": 1}<|ca") == [Arguments(": 1}")]
    tagged = READERS["hermes"]()
    assert tagged.push("Well <tool") == [Text("Well")]
    assert tagged.push("box") == [Text(" <toolbox")]
    whole = READERS["whole"]()
    assert whole.push("Wel") + whole.push("l") == [Text("Wel"), Text("l")]


HOSTILE = [
    "f(a=1)(b=2)",
    "[f(*x)]",
    "[f(**{'a': 1})]",
    "[f(1)]",
    "[f(a=__import__('os').system('true'))]",
    "[f(a={1, 2})]",
    "[f(a=1, a=2)]",
    "[f(a=1e999)]",
    "[f(a='\\ud800')]",
    "[" * 5000,
    "f(a=" + "(" * 300,
    "lambda: 0",
    "[]",
    "",
    '{"name": "f", "arguments": "text"}',
    '{"name": 3}',
    '{"name": "f", "arguments": {"a": NaN}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:30] or "empty")
def test_what_is_no_call_is_not_evaluated(text: str) -> None:
    assert parse_python_calls(text) is None
    assert parse_json_calls(text) is None


@settings(deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,6}", fullmatch=True).filter(str.isidentifier),
        st.none()
        | st.booleans()
        | st.integers(-9, 9)
        | st.text(max_size=5)
        | st.lists(st.text(max_size=3)),
        max_size=4,
    )
)
def test_arguments_survive_both_syntaxes(arguments: dict[str, Any]) -> None:
    written = json.dumps({"name": "f", "arguments": arguments})
    (call,) = parse_json_calls(written) or []
    assert json.loads(call.arguments) == arguments
    if not any(map(keyword.iskeyword, arguments)):
        python = f"[f({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]"
        (call,) = parse_python_calls(python) or []
        assert json.loads(call.arguments) == arguments


def test_blanks_in_a_fence_end() -> None:
    """What is quadratic in half a megabyte takes longer than the test may."""
    assert parse_json_calls(f"```json\n{CALL}{' ' * 500_000}\n```") == parse_json_calls(CALL)
    assert parse_json_calls(f"```{CALL}{' ' * 500_000}x") is None
