"""Parses complete tool calls, written as JSON objects or in Python syntax.

Python is parsed and never evaluated. Only names, calls and literals are allowed.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BETWEEN = re.compile(r"[\s;,]*")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete tool call."""

    name: str
    arguments: str
    """The arguments as the JSON text of an object."""


ParseCalls = Callable[[str], list[ParsedCall] | None]
"""A function that returns the calls in a text, or None if the text contains anything else."""


def parse_json_calls(text: str) -> list[ParsedCall] | None:
    """Parse tool calls written as JSON objects, possibly in a list.

    Each object has a "name", and "arguments" or "parameters".
    """
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if text.startswith("```"):
        text = text.removeprefix("```").removeprefix("json").removesuffix("```").strip()
    objects = _json_objects(text)
    calls = [_from_json(item) for item in objects or ()]
    whole = [call for call in calls if call]
    return whole if whole and len(whole) == len(calls) else None


def parse_python_calls(text: str) -> list[ParsedCall] | None:
    """Parse `[name(argument=literal, ...), ...]`, or the JSON that some models write instead."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes such as \d are valid with a warning
            tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_from_python(node) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return parse_json_calls(text)


def _json_objects(text: str) -> list[Any] | None:
    decoder = json.JSONDecoder()
    place = 0
    values = []
    try:
        while place < len(text):
            value, place = decoder.raw_decode(text, place)
            values.extend(value if isinstance(value, list) else [value])
            place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return None
    return values


def _from_json(item: object) -> ParsedCall | None:
    if not isinstance(item, dict):
        return None
    inner = item.get("function")
    call = inner if isinstance(inner, dict) else item
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    try:
        return ParsedCall(call["name"], _text(arguments))
    except ValueError:
        return None


def _from_python(node: ast.expr) -> ParsedCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    values = {key.arg: ast.literal_eval(key.value) for key in node.keywords if key.arg}
    if len(values) != len(node.keywords):
        raise ValueError("unpacked arguments, or one given twice")
    return ParsedCall(_name(node.func), _text(values))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("not a name")
    return node.id


def _text(arguments: dict[str, Any]) -> str:
    """Return arguments as JSON text.

    Raises:
        TypeError: a value cannot be represented in JSON, such as a set.
        ValueError: a value cannot be represented in JSON, such as NaN, or in UTF-8, such as a
            surrogate.
    """
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
