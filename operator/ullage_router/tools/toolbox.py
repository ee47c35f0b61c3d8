"""The functions of a request, checked."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.inference.v1 import inference_pb2
from ullage_router.validate import wrong
from ullage_rpc.errors import invalid
from ullage_rpc.limits import MAX_TOOLS, MAX_TOOLS_BYTES

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What may be called."""

    tools: Sequence[Mapping[str, Any]]
    """As OpenAI has them; what a chat template is given."""
    parameters: Mapping[str, Schema]
    """JSON schema of the arguments by function; each is of an object."""
    forced: Sequence[str]
    """Functions one of which must be called; empty: none must."""
    single_call: bool


def open_toolbox(tools: inference_pb2.Tools) -> Toolbox | None:
    """The functions that the model is told of; None where it is told of none.

    Raises:
        ServiceError: a field is wrong.
    """
    listed = _parse(tools.functions)
    functions = [_function(f"tools[{i}]", tool) for i, tool in enumerate(listed)]
    parameters = {function["name"]: _parameters(function) for function in functions}
    if len(parameters) < len(functions):
        raise invalid("tools", "tools has two functions of one name; give each its own")
    forced = _forced(tools, list(parameters))
    if tools.mode == inference_pb2.TOOL_MODE_NONE:
        return None
    return Toolbox(listed, parameters, forced, tools.single_call or bool(forced))


def _parse(text: str) -> list[Any]:
    size = len(text.encode())
    if size > MAX_TOOLS_BYTES:
        raise wrong("tools", f"{size} bytes", f"at most {MAX_TOOLS_BYTES} bytes")
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
        raise wrong(field, json.dumps(tool), "an object")
    if tool.get("type") != "function":
        raise wrong(f"{field}.type", json.dumps(tool.get("type")), '"function"')
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{field}.function", json.dumps(function), "an object")
    name, shape = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "1 to 64 of letters, digits, underscore, dot and hyphen"
        raise wrong(f"{field}.function.name", json.dumps(name), wanted)
    if shape is not None and not isinstance(shape, dict):
        raise wrong(f"{field}.function.parameters", json.dumps(shape), "a JSON schema")
    if isinstance(shape, dict) and shape.get("type", "object") != "object":
        wanted = '"object"'
        raise wrong(f"{field}.function.parameters.type", json.dumps(shape["type"]), wanted)
    return function


def _parameters(function: Mapping[str, Any]) -> Schema:
    """No schema means no parameters, as OpenAI has it."""
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
        raise wrong("tool_choice.function.name", tools.name or '""', ", ".join(names))
    return [tools.name]
