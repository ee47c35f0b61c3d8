"""Checks the functions that a request offers to the model, and the request's tool choice."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.json_size import VALUE_LIMITS, JsonCounter
from ullage_common.wire.limits import MAX_TOOLS, MAX_TOOLS_BYTES
from ullage_common.wire.validation import invalid_value

NAME_CHARACTERS = r"[a-zA-Z0-9_.:/-]"
"""Regular expression of one character of a function's name."""
_NAME = re.compile(NAME_CHARACTERS + "{1,128}")
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions that a model may call."""

    tools: Sequence[Mapping[str, Any]]
    """Tools in OpenAI's format, for the chat template."""
    parameters: Mapping[str, Schema]
    """JSON Schema of the arguments object, by function name."""
    forced: Sequence[str]
    """Names of the functions from which the model must call one (empty if it need not call any)."""
    single_call: bool
    """Whether at most one function may be called."""
    several_forced: bool = False
    """Whether several calls may follow where one is forced."""


def open_toolbox(tools: inference_pb2.Tools) -> Toolbox | None:
    """Return the functions of a request, or None if the model may not call any function.

    Raises:
        ServiceError: a field is invalid.
    """
    listed = _parse(tools.functions)
    functions = [_function(f"tools[{i}]", tool) for i, tool in enumerate(listed)]
    parameters = {function["name"]: _parameters(function) for function in functions}
    if len(parameters) < len(functions):
        raise invalid("tools", "tools has two functions of one name; give each its own")
    forced = _forced(tools, list(parameters))
    if tools.mode == inference_pb2.TOOL_MODE_NONE:
        return None
    several = tools.several_forced_calls and tools.mode == inference_pb2.TOOL_MODE_REQUIRED
    single = tools.single_call or bool(forced and not several)
    return Toolbox(listed, parameters, forced, single, several and not single)


def _parse(text: str) -> list[Any]:
    size = len(text.encode())
    if size > MAX_TOOLS_BYTES:
        raise invalid_value("tools", f"{size} bytes", f"at most {MAX_TOOLS_BYTES} bytes")
    JsonCounter("tools", VALUE_LIMITS).add(text.encode())
    try:
        listed = json.loads(text)
        json.dumps(listed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        message = "tools is not JSON, nested too deeply, or has unpaired surrogates; send a list"
        raise invalid("tools", message) from error
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_TOOLS:
        raise invalid("tools", f"tools must be a list of 1 to {MAX_TOOLS} tools")
    return listed


def _function(field: str, tool: object) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid_value(field, json.dumps(tool), "an object")
    if tool.get("type") != "function":
        raise invalid_value(f"{field}.type", json.dumps(tool.get("type")), '"function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid_value(f"{field}.function", json.dumps(function), "an object")

    name = function.get("name")
    shape = function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        possible = "1 to 128 of letters, digits, underscore, dot, colon, slash and hyphen"
        raise invalid_value(f"{field}.function.name", json.dumps(name), possible)

    if shape is not None and not isinstance(shape, dict):
        raise invalid_value(f"{field}.function.parameters", json.dumps(shape), "a JSON schema")
    if isinstance(shape, dict) and shape.get("type", "object") != "object":
        possible = '"object"'
        raise invalid_value(
            f"{field}.function.parameters.type", json.dumps(shape["type"]), possible
        )
    return function


def _parameters(function: Mapping[str, Any]) -> Schema:
    """Return the schema of a function's arguments.

    A function without a schema takes no arguments, as in OpenAI's API.
    """
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}


def _forced(tools: inference_pb2.Tools, names: list[str]) -> list[str]:
    if tools.mode == inference_pb2.TOOL_MODE_REQUIRED:
        return names
    if tools.mode != inference_pb2.TOOL_MODE_NAMED:
        return []
    if tools.name not in names:
        raise invalid_value("tool_choice.function.name", tools.name or '""', ", ".join(names))
    return [tools.name]
