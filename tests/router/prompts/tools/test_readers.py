"""Readers of calls: what each format means, and that cutting the text anywhere changes nothing."""

import json
import keyword
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ullage_testing.counted_text import CountedText

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.tool_formats import ToolFormat
from ullage_router.prompts.tools.call_formats import CALL_FORMATS
from ullage_router.prompts.tools.call_syntax import parse_json_calls, parse_python_calls
from ullage_router.prompts.tools.forced_calls import FURTHER, force
from ullage_router.prompts.tools.harmony import HarmonyReader
from ullage_router.prompts.tools.pieces import Arguments, CallStart, Piece, Reader, Text, Thought
from ullage_router.prompts.tools.readers import (
    ForcedReader,
    MarkedReader,
    TaggedReader,
    Trimmer,
    WholeReader,
)
from ullage_router.prompts.tools.toolbox import open_toolbox

NAMES = ("f", "get_weather")
PROPERTIES = {
    "city": {"type": "string"},
    "days": {"$ref": "#/$defs/Days"},
    "at": {"anyOf": [{"type": "object"}, {"type": "null"}]},
}
FUNCTIONS: Mapping[str, Any] = {
    "f": {"type": "object"},
    "get_weather": {
        "type": "object",
        "properties": PROPERTIES,
        "$defs": {"Days": {"type": "integer"}},
    },
}
READERS: Mapping[str, Callable[[], Reader]] = {
    **{form.value: partial(MarkedReader, CALL_FORMATS[form], FUNCTIONS) for form in CALL_FORMATS},
    "lfm2": lambda: TaggedReader(
        ("<|tool_call_start|>", "<|tool_call_end|>"), parse_python_calls, NAMES
    ),
    "whole": lambda: WholeReader(NAMES),
    "harmony": lambda: HarmonyReader(NAMES),
    "forced": lambda: ForcedReader({name: f'{name}", "arguments": ' for name in NAMES}),
}


def deepseek(text: str) -> str:
    """The text with the marks of DeepSeek, which have other bars and underscores."""
    return re.sub(r"<\|(\w+)\|>", lambda m: f"<\uff5c{m[1].replace('_', chr(0x2581))}\uff5c>", text)


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
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<function=f>", "<parameter=a>", "</parameter>"),
    *(
        "</function>",
        "<arg_key>",
        "a</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "f",
        "functions.f:0",
    ),
    *(
        "<|tool_calls_begin|>",
        "<|tool_call_begin|>",
        "<|tool_sep|>",
        "<|tool_call_end|>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_calls_section_end|>", "[", "]", '{"a": [1, "\\u00', "}", "```json", '{"name": "f", '),
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


@pytest.mark.parametrize("name", [*(form.value for form in CALL_FORMATS), "lfm2", "whole"])
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
    (
        "hermes",
        '<tool_call>{"arguments": {"a": {"b": []}}, "name": "f"}</tool_call>',
        one("f", '{"a": {"b": []}}'),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"}</tool_call> So.',
        [*one("f", '{"a": 1}'), Text(" So.")],
    ),
    # What goes wrong after the arguments began leaves them without their last brace.
    (
        "hermes",
        f"<tool_call>{CALL} oops</tool_call>",
        [*one("f", '{"a": 1'), Text("}} oops</tool_call>")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "name": "get_weather"}</tool_call>',
        [*one("f", '{"a": 1'), Text('}, "name": "get_weather"}</tool_call>')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', one("f", '{"a": "x')),
    (
        "mistral-list",
        '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "f"}]',
        one("f", '{"name": "John Doe"}'),
    ),
    (
        "mistral-list",
        'Hello[TOOL_CALLS] [{"name": "f", "arguments": {"a": 3.5, "b": 4}}, '
        '{"name": "get_weather", "arguments":{"city": "San Francisco"}, "id": "abcDEF123"}]',
        [
            Text("Hello"),
            *one("f", '{"a": 3.5, "b": 4}'),
            *one("get_weather", '{"city": "San Francisco"}'),
        ],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f{"a": 3.5, "b": 4}[TOOL_CALLS]get_weather{"a": 3, "b": 6}',
        [*one("f", '{"a": 3.5, "b": 4}'), *one("get_weather", '{"a": 3, "b": 6}')],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 3.5}[TOOL_CALLS]get_weather[ARGS]{}',
        [*one("f", '{"a": 3.5}'), *one("get_weather", "{}")],
    ),
    ("mistral", "[TOOL_CALLS] not JSON", [Text("[TOOL_CALLS] not JSON")]),
    ("mistral", '[TOOL_CALLS]other{"a": 1}', [Text('[TOOL_CALLS]other{"a": 1}')]),
    (
        "granite",
        '<|tool_call|> [{"name": "get_weather", "arguments": {"city": "Tokyo"}}]',
        one("get_weather", '{"city": "Tokyo"}'),
    ),
    (
        "granite",
        '<|tool_call|> {"name": "f", "arguments": {}}',
        [Text('<|tool_call|> {"name": "f", "arguments": {}}')],
    ),
    (
        "deepseek-v3",
        deepseek(
            "Sure.<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>get_weather\n"
            '```json\n{"city": "Tokyo"}\n```<|tool_call_end|><|tool_call_begin|>function'
            '<|tool_sep|>f\n```json\n{"a": {}}\n```<|tool_call_end|><|tool_calls_end|>'
        ),
        [Text("Sure."), *one("get_weather", '{"city": "Tokyo"}'), *one("f", '{"a": {}}')],
    ),
    (
        "deepseek-v3",
        deepseek("<|tool_calls_begin|>function<|tool_sep|>f\n```json\n{}\n```<|tool_calls_end|>"),
        [
            Text(
                deepseek(
                    "<|tool_calls_begin|>function<|tool_sep|>f\n```json\n{}\n```<|tool_calls_end|>"
                )
            )
        ],
    ),
    (
        "deepseek-v3.1",
        deepseek(
            '<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"a": 1}<|tool_call_end|>'
            "<|tool_calls_end|>"
        ),
        one("f", '{"a": 1}'),
    ),
    (
        "kimi",
        "I'll check. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0 "
        '<|tool_call_argument_begin|>{"city": "Beijing"} <|tool_call_end|><|tool_call_begin|>'
        "functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [Text("I'll check."), *one("get_weather", '{"city": "Beijing"}'), *one("f", "{}")],
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f.0<|tool_call_argument_begin|>",
        [
            Text(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f.0"
                "<|tool_call_argument_begin|>"
            )
        ],
    ),
    (
        "qwen-xml",
        'Hi\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSan "F"\nCA\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=at>\n{"a": 1}\n</parameter>\n</function>\n'
        "</tool_call>\n",
        [
            Text("Hi"),
            *one("get_weather", '{"city": "San \\"F\\"\\nCA", "days": 3, "at": {"a": 1}}'),
        ],
    ),
    ("qwen-xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>", one("f", "{}")),
    ("qwen-xml", f"<tool_call>{CALL}</tool_call>", [Text(f"<tool_call>{CALL}</tool_call>")]),
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>",
        [*one("get_weather", '{"city": "Beijing", "days": 5}'), *one("f", "{}")],
    ),
    (
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>1</arg_value></tool_call>",
        one("get_weather", '{"city": "1"}'),
    ),
    ("glm", "<tool_call>other\n</tool_call>", [Text("<tool_call>other\n</tool_call>")]),
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


def test_a_call_streams_its_name_and_then_its_arguments() -> None:
    reader = READERS["hermes"]()
    assert reader.push('<tool_call>{"name": "f", "arguments": ') == []
    assert reader.push('{"a": "lo') == [CallStart("f"), Arguments('{"a": "lo')]
    assert reader.push("ng\\u00") == [Arguments("ng")]
    assert reader.push('e9"}') == [Arguments('\\u00e9"')]
    assert reader.push("}</tool_") == []
    assert reader.push("call>") == [Arguments("}")]
    xml = READERS["qwen-xml"]()
    assert xml.push("<tool_call><function=f><parameter=a>") == [CallStart("f"), Arguments("{")]
    assert xml.push("1</parameter>") == [Arguments('"a": "1"')]
    whole = READERS["whole"]()
    assert whole.push('{"answer"') == [Text('{"answer"')]
    assert whole.push(": 1") == [Text(": 1")]


def written(form: ToolFormat, name: str, arguments: str) -> str:
    """One call, complete, as a forced answer of the format continues its opening."""
    tools = [{"type": "function", "function": {"name": name, "parameters": FUNCTIONS.get(name)}}]
    mode = inference_pb2.TOOL_MODE_REQUIRED
    asked = inference_pb2.Tools(functions=json.dumps(tools), mode=mode, several_forced_calls=True)
    toolbox = open_toolbox(asked)
    assert toolbox
    made = force(toolbox, form)
    after, _, last = FURTHER[form]
    return made.opening + made.openings[name] + arguments + after + last


NAME_CHARACTERS = string.ascii_letters + string.digits + "_.:/-"


def free_calls(name: str) -> Iterable[tuple[Reader, str]]:
    """Every format's reader, and a call of the function as the format writes it."""
    functions = {name: {"properties": {"a": {"type": "integer"}}}}
    for form in sorted(CALL_FORMATS, key=str):
        if form is ToolFormat.GLM:
            call = f"<tool_call>{name}\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        elif form is ToolFormat.QWEN_XML:
            call = f"<function={name}><parameter=a>1</parameter></function>"
            call = f"<tool_call>{call}</tool_call>"
        else:
            call = written(form, name, '{"a": 1}')
        yield MarkedReader(CALL_FORMATS[form], functions), call
    in_json = json.dumps({"name": name, "arguments": {"a": 1}})
    tags = ("<|tool_call_start|>", "<|tool_call_end|>")
    yield TaggedReader(tags, parse_python_calls, functions), f"{tags[0]}[{in_json}]{tags[1]}"
    yield WholeReader(functions), in_json
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    yield HarmonyReader(functions), f'{header}{{"a": 1}}<|call|>'


@pytest.mark.parametrize("character", NAME_CHARACTERS)
def test_a_name_may_have_every_allowed_character(character: str) -> None:
    for name in (character, f"a{character}b", f"a{character}0", f"{character}:1"):
        for reader, call in free_calls(name):
            assert read(reader, call) == one(name, '{"a": 1}'), call


IN_JSON = sorted(set(CALL_FORMATS) - {ToolFormat.QWEN_XML, ToolFormat.GLM}, key=str)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    nested,
    max_leaves=6,
)


@pytest.mark.parametrize("form", IN_JSON)
@settings(max_examples=100, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=6), VALUES, max_size=4),
    is_ascii=st.booleans(),
    data=st.data(),
)
def test_the_pieces_of_a_call_join_to_its_arguments(
    form: ToolFormat, arguments: dict[str, Any], is_ascii: bool, data: st.DataObject
) -> None:
    text = json.dumps(arguments, ensure_ascii=is_ascii)
    call = written(form, "f", text)
    cuts = data.draw(st.lists(st.integers(0, len(call)), max_size=6).map(sorted))
    pieces = [call[a:b] for a, b in pairwise([0, *cuts, len(call)])]
    assert read(READERS[form.value](), pieces) == one("f", text)


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


def test_blanks_around_calls_are_copied_once() -> None:
    """A client may let the model write nothing but blanks, a hundred in each token."""
    blank = Text(CountedText(" " * 100))
    trimmer = Trimmer()
    CountedText.num_copied = 0
    for _ in range(100):
        assert trimmer.push([blank]) == []
    assert CountedText.num_copied <= 100 * len(blank.text)
    assert trimmer.push([Text("x ")]) == [Text(" " * 10_000 + "x")]
    assert trimmer.close() == [Text(" ")]
