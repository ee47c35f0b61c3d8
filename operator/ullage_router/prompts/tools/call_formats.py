"""The formats of tool calls between marks, as steps of reading (`cursor.py`).

A call begins as soon as its format, the function's name and the beginning of the arguments leave no
doubt. Anything else raises NoCall and stays text. The last brace of the arguments follows when the
call has ended as its format demands.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ullage_common.chat.tool_formats import ToolFormat
from ullage_router.prompts.tools.call_syntax import parse_json_calls
from ullage_router.prompts.tools.cursor import Cursor, NoCall, Steps, parsed
from ullage_router.prompts.tools.pieces import Arguments, CallStart
from ullage_router.prompts.tools.toolbox import NAME_CHARACTERS
from ullage_router.prompts.tools.values import json_value

Functions = Mapping[str, Mapping[str, Any]]
"""JSON Schema of the arguments object, by function name."""
ReadCalls = Callable[[Cursor, Functions], Steps[None]]

_MEMBERS = {"name", "arguments", "parameters", "function"}
_KIMI_ID = re.compile(rf"\s*(?:functions\.)?({NAME_CHARACTERS}+):[0-9]+\s*")
DEEPSEEK_CALLS = "<\uff5ctool▁calls▁begin\uff5c>"
DEEPSEEK_CALLS_END = "<\uff5ctool▁calls▁end\uff5c>"
DEEPSEEK_CALL = "<\uff5ctool▁call▁begin\uff5c>"
DEEPSEEK_CALL_END = "<\uff5ctool▁call▁end\uff5c>"
DEEPSEEK_SEPARATOR = "<\uff5ctool▁sep\uff5c>"
KIMI_CALLS = "<|tool_calls_section_begin|>"
KIMI_CALLS_END = "<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>"
KIMI_CALL_END = "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format of calls that begin with a mark."""

    mark: str
    read: ReadCalls
    others: tuple[str, ...] = ()
    """Other marks of the format that a tokenizer may have as special tokens."""


def _hermes(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read JSON calls, one after another or in a list, up to the closing tag."""
    yield from cursor.spaces()
    is_list = bool((yield from cursor.peek("[")))
    if is_list:
        yield from _json_list(cursor, functions)
        yield from cursor.spaces()
        yield from cursor.finish("</tool_call>")
        cursor.cut()
        return
    while True:
        yield from _json_call(cursor, functions)
        yield from _between(cursor)
        if (yield from cursor.peek("{")):
            yield cursor.last_brace()
            continue
        yield from cursor.finish("</tool_call>")
        yield cursor.last_brace()
        return


def _between(cursor: Cursor) -> Steps[None]:
    """Skip what may separate two calls."""
    yield from cursor.spaces()
    while (yield from cursor.peek(",", ";")):
        yield from cursor.literal(",", ";")
        yield from cursor.spaces()


def _json_list(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read a JSON list of calls."""
    yield from cursor.literal("[")
    while True:
        yield from cursor.spaces()
        yield from _json_call(cursor, functions)
        yield from cursor.spaces()
        mark = yield from cursor.literal(",", "]")
        yield cursor.last_brace()
        if mark == "]":
            return


def _json_call(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read {"name": ..., "arguments": {...}}, except for the last brace of the arguments.

    The arguments are streamed if the name comes before them.
    """
    start = cursor.mark()
    try:
        name = yield from _json_head(cursor)
    except NoCall:
        cursor.back(start)
        yield from _whole_json_call(cursor, functions)
        return
    yield _call_start(cursor, functions, name)
    yield from cursor.arguments()
    rest = yield from cursor.whole_object(is_inside=True)
    more = parsed("{" + rest.lstrip(" \t\n\r").removeprefix(","))
    if not isinstance(more, dict) or _MEMBERS & more.keys():
        raise NoCall


def _json_head(cursor: Cursor) -> Steps[str]:
    """Read up to the beginning of the arguments, and return the function's name."""
    yield from cursor.literal("{")
    yield from cursor.spaces()
    yield from cursor.literal('"name"')
    yield from cursor.spaces()
    yield from cursor.literal(":")
    yield from cursor.spaces()
    name = yield from cursor.string()
    for text in (",", '"', ":", "{"):
        yield from cursor.spaces()
        if text == '"':
            yield from cursor.literal('"arguments"', '"parameters"')
        elif text == "{":
            if not (yield from cursor.peek(text)):
                raise NoCall
        else:
            yield from cursor.literal(text)
    return name


def _whole_json_call(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read a call whose members come in another order, all at once."""
    text = yield from cursor.whole_object()
    calls = parse_json_calls(text)
    if not calls or len(calls) != 1:
        raise NoCall
    yield _call_start(cursor, functions, calls[0].name)
    yield Arguments(calls[0].arguments[:-1])


def _call_start(cursor: Cursor, functions: Functions, name: str) -> CallStart:
    """Return the start of a call.

    Raises:
        NoCall: the function is not known.
    """
    if name not in functions:
        raise NoCall
    cursor.cut()
    return CallStart(name)


def _mistral(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read a list of JSON calls (older templates), or a name and its arguments (newer ones)."""
    yield from cursor.spaces()
    if (yield from cursor.peek("[")):
        yield from _json_list(cursor, functions)
        return
    name = yield from cursor.name()
    if (yield from cursor.peek("[CALL_ID]")):
        yield from cursor.until("[ARGS]")
    elif (yield from cursor.peek("[ARGS]")):
        yield from cursor.literal("[ARGS]")
    yield from cursor.spaces()
    if not (yield from cursor.peek("{")):
        raise NoCall
    yield _call_start(cursor, functions, name)
    yield from cursor.arguments()
    yield cursor.last_brace()


def _granite(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read a list of JSON calls, after which Phi-4-mini writes a closing mark."""
    yield from cursor.spaces()
    yield from _json_list(cursor, functions)
    if (yield from cursor.peek("<|/tool_call|>")):
        yield from cursor.literal("<|/tool_call|>")
        cursor.cut()


def _deepseek(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read calls of DeepSeek-V3, with arguments in a fence, or of V3.1, without one."""
    mark = yield from cursor.literal(DEEPSEEK_CALL)
    while mark == DEEPSEEK_CALL:
        name, _ = yield from cursor.until(DEEPSEEK_SEPARATOR)
        is_fenced = name == "function" and not (yield from cursor.peek("{"))
        if is_fenced:
            name, _ = yield from cursor.until("\n")
            yield from cursor.literal("```json\n")
        if not (yield from cursor.peek("{")):
            raise NoCall
        yield _call_start(cursor, functions, name.strip())
        yield from cursor.arguments()
        yield from cursor.spaces()
        if is_fenced:
            yield from cursor.literal("```")
        yield from cursor.finish(DEEPSEEK_CALL_END)
        yield cursor.last_brace()
        yield from cursor.spaces()
        mark = yield from cursor.finish(DEEPSEEK_CALLS_END, DEEPSEEK_CALL)
    cursor.cut()


def _kimi(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read calls of Kimi-K2, whose ids name the functions."""
    yield from cursor.spaces()
    mark = yield from cursor.literal(KIMI_CALL)
    while mark == KIMI_CALL:
        call_id, _ = yield from cursor.until(KIMI_ARGUMENTS)
        match = _KIMI_ID.fullmatch(call_id)
        yield from cursor.spaces()
        if not match or not (yield from cursor.peek("{")):
            raise NoCall
        yield _call_start(cursor, functions, match[1])
        yield from cursor.arguments()
        yield from cursor.spaces()
        yield from cursor.finish(KIMI_CALL_END)
        yield cursor.last_brace()
        yield from cursor.spaces()
        mark = yield from cursor.finish(KIMI_CALLS_END, KIMI_CALL)
    cursor.cut()


class _PlainArguments:
    """Makes the JSON of arguments that the model writes as plain text, one by one."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        self._keys = set[str]()

    def add(self, cursor: Cursor, key: str, text: str) -> Arguments:
        """Return the piece for one argument.

        Raises:
            NoCall: the call has the argument already.
        """
        if key in self._keys:
            raise NoCall
        begin = ", " if self._keys else ""
        self._keys.add(key)
        cursor.cut()
        quoted = json.dumps(key, ensure_ascii=False)
        return Arguments(f"{begin}{quoted}: {json_value(text, self._parameters, key)}")


def _qwen_xml(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read a call of Qwen3-Coder."""
    yield from cursor.spaces()
    yield from cursor.literal("<function=")
    name, _ = yield from cursor.until(">")
    yield from cursor.spaces()
    mark = yield from cursor.literal("<parameter=", "</function>")
    yield _call_start(cursor, functions, name)
    yield Arguments("{")
    arguments = _PlainArguments(functions[name])
    while mark == "<parameter=":
        key, _ = yield from cursor.until(">")
        value, _ = yield from cursor.until("</parameter>")
        yield arguments.add(cursor, key, value.removeprefix("\n").removesuffix("\n"))
        yield from cursor.spaces()
        mark = yield from cursor.literal("<parameter=", "</function>")
    yield from cursor.spaces()
    yield from cursor.finish("</tool_call>")
    yield cursor.last_brace()


def _glm(cursor: Cursor, functions: Functions) -> Steps[None]:
    """Read a call of GLM-4.5."""
    yield from cursor.spaces()
    name = yield from cursor.name()
    yield from cursor.spaces()
    mark = yield from cursor.literal("<arg_key>", "</tool_call>")
    yield _call_start(cursor, functions, name)
    yield Arguments("{")
    arguments = _PlainArguments(functions[name])
    while mark == "<arg_key>":
        key, _ = yield from cursor.until("</arg_key>")
        yield from cursor.spaces()
        yield from cursor.literal("<arg_value>")
        value, _ = yield from cursor.until("</arg_value>")
        yield arguments.add(cursor, key.strip(), value)
        yield from cursor.spaces()
        mark = yield from cursor.literal("<arg_key>", "</tool_call>")
    yield cursor.last_brace()


_DEEPSEEK = CallFormat(
    DEEPSEEK_CALLS,
    _deepseek,
    (DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEPARATOR),
)
_MISTRAL = CallFormat("[TOOL_CALLS]", _mistral, ("[ARGS]", "[CALL_ID]"))
CALL_FORMATS: Mapping[ToolFormat, CallFormat] = {
    ToolFormat.HERMES: CallFormat("<tool_call>", _hermes, ("</tool_call>",)),
    ToolFormat.QWEN_XML: CallFormat("<tool_call>", _qwen_xml, ("</tool_call>",)),
    ToolFormat.GLM: CallFormat(
        "<tool_call>",
        _glm,
        ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolFormat.MISTRAL: _MISTRAL,
    ToolFormat.MISTRAL_LIST: _MISTRAL,
    ToolFormat.GRANITE: CallFormat("<|tool_call|>", _granite, ("<|/tool_call|>",)),
    ToolFormat.DEEPSEEK_V3: _DEEPSEEK,
    ToolFormat.DEEPSEEK_V31: _DEEPSEEK,
    ToolFormat.KIMI: CallFormat(
        KIMI_CALLS, _kimi, (KIMI_CALLS_END, KIMI_CALL, KIMI_CALL_END, KIMI_ARGUMENTS)
    ),
}
"""Formats whose calls are between marks, except for those in Python's syntax."""
