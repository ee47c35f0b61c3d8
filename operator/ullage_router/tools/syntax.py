"""Calls as models write them: JSON objects, or a list of calls in Python's syntax.

Python's syntax is parsed and never evaluated: names, calls and literals are all there may be.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is complete; its arguments are text of a JSON object."""

    name: str
    arguments: str


ParseCalls = Callable[[str], list[Call] | None]
"""None: the text is not calls and nothing but calls."""

_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*(?:```)?", re.DOTALL)
_BETWEEN = re.compile(r"[\s;,]*")


def parse_json_calls(text: str) -> list[Call] | None:
    """One object or several, perhaps in a list; {"name", "arguments" or "parameters"} each."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if text.startswith("```") and (fenced := _FENCE.fullmatch(text)):
        text = fenced[1]
    objects = _json_objects(text)
    calls = [_from_json(item) for item in objects or ()]
    whole = [call for call in calls if call]
    return whole if whole and len(whole) == len(calls) else None


def parse_python_calls(text: str) -> list[Call] | None:
    """[name(argument=literal, ...), ...]; the models that write so write JSON sometimes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as \d, which mean themselves
            tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_from_python(node) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return parse_json_calls(text)


def _json_objects(text: str) -> list[Any] | None:
    decoder, place, found = json.JSONDecoder(), 0, []
    try:
        while place < len(text):
            value, place = decoder.raw_decode(text, place)
            found.extend(value if isinstance(value, list) else [value])
            place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return None
    return found


def _from_json(item: object) -> Call | None:
    if not isinstance(item, dict):
        return None
    inner = item.get("function")
    told = inner if isinstance(inner, dict) else item
    arguments = told.get("arguments", told.get("parameters", {}))
    if not isinstance(told.get("name"), str) or not isinstance(arguments, dict):
        return None
    try:
        return Call(told["name"], _text(arguments))
    except ValueError:
        return None


def _from_python(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    values = {key.arg: ast.literal_eval(key.value) for key in node.keywords if key.arg}
    if len(values) != len(node.keywords):
        raise ValueError("unpacked arguments, or one given twice")
    return Call(_name(node.func), _text(values))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("not a name")
    return node.id


def _text(arguments: dict[str, Any]) -> str:
    """Raises TypeError or ValueError for what JSON or UTF-8 cannot say: a set, NaN, a surrogate."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text
