"""Converts the tools of the Responses API to those of a conversation.

A function in a namespace has both names in the conversation, as in `crm.find`.
"""

import re
from collections.abc import Iterator

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.json_size import VALUE_LIMITS, JsonCounter
from ullage_common.wire.limits import MAX_TOOLS, MAX_TOOLS_BYTES
from ullage_common.wire.validation import invalid_value
from ullage_router.http.openai.conversation import MODES
from ullage_router.http.openai.custom_tools import DefinedCustom
from ullage_router.http.openai.custom_tools import as_chat_tool as as_function
from ullage_router.http.openai.decoding import decode_field, utf8
from ullage_router.http.openai.responses import JSON
from ullage_router.http.openai.schemas import NULL
from ullage_router.http.responses.schemas import ChosenTool, ResponsesTool

_TOOLS = msgspec.json.Decoder(list[ResponsesTool] | None)
_CHOICES = 'none, auto, required, {"type": "function" or "custom", "name": ...}'
_NOTHING = re.compile(rb"null|\[\s*\]")


def read_tools(raw: msgspec.Raw) -> list[ResponsesTool]:
    """Decode the tools of a request.

    Raises:
        ServiceError: The tools are too large, or one of them has another type or format.
    """
    text = bytes(raw)
    if _NOTHING.fullmatch(text):
        return []
    if len(text) > MAX_TOOLS_BYTES:
        raise invalid_value("tools", f"{len(text)} bytes", f"at most {MAX_TOOLS_BYTES} bytes")
    JsonCounter("tools", VALUE_LIMITS).add(text)

    tools = decode_field(_TOOLS, msgspec.Raw(text), "tools") or []
    for i, tool in enumerate(tools):
        _check(f"tools[{i}]", tool, "function, custom, namespace")
        for j, inner in enumerate(tool.tools or ()):
            _check(f"tools[{i}].tools[{j}]", inner, "function, custom")
    count = sum(1 for _ in functions_of(tools))
    if count > MAX_TOOLS:
        raise invalid_value("tools", f"a list of {count} functions", f"at most {MAX_TOOLS}")
    return tools


def _check(field: str, tool: ResponsesTool, possible: str) -> None:
    if tool.type not in possible.split(", "):
        raise invalid_value(f"{field}.type", tool.type, possible)
    if not tool.name:
        raise invalid_value(f"{field}.name", "missing", "a name")
    if tool.type == "custom":
        as_custom(field, tool)


def as_custom(field: str, tool: ResponsesTool, namespace: str = "") -> JSON:
    """Return the function by which the model knows a custom tool, as chat templates expect it.

    Raises:
        ServiceError: The format of the tool's input is another one than text.
    """
    name = full_name(namespace, tool.name or "")
    return as_function(field, DefinedCustom(name, tool.description, tool.format))


def functions_of(tools: list[ResponsesTool]) -> Iterator[tuple[str, ResponsesTool]]:
    """Yield the functions, each with its namespace (empty for none)."""
    for tool in tools:
        if tool.type == "namespace":
            for inner in tool.tools or ():
                yield tool.name or "", inner
        else:
            yield "", tool


def full_name(namespace: str | None, name: str) -> str:
    """Return a function's name in the conversation."""
    return f"{namespace}.{name}" if namespace else name


def to_functions(
    tools: list[ResponsesTool], choice: str | ChosenTool | None, is_parallel: bool | None
) -> inference_pb2.Tools | None:
    """Return the functions that the model may call, or None if there are none.

    Args:
        tools: The tools of the request.
        choice: The request's tool choice.
        is_parallel: Whether the model may make several calls. None is the default: several by its
            own wish, and one if it must call.

    Raises:
        ServiceError: The tool choice is invalid.
    """
    mode, name = _choice(choice)
    chat_tools = [as_chat_tool(tool, namespace) for namespace, tool in functions_of(tools)]
    if not chat_tools:
        if mode in (inference_pb2.TOOL_MODE_REQUIRED, inference_pb2.TOOL_MODE_NAMED):
            raise invalid_value("tool_choice", "given without tools", "none or auto")
        return None
    functions = utf8_json("tools", chat_tools)
    return inference_pb2.Tools(
        functions=functions,
        mode=mode,
        name=name,
        single_call=is_parallel is False,
        several_forced_calls=is_parallel is True,
    )


def as_chat_tool(tool: ResponsesTool, namespace: str) -> JSON:
    """Return a tool as chat templates expect it."""
    if tool.type == "custom":
        return as_custom("tools", tool, namespace)
    function: JSON = {"name": full_name(namespace, tool.name or "")}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters != NULL:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def as_answered(tool: ResponsesTool) -> JSON:
    """Return a tool as responses repeat it."""
    if tool.type == "namespace":
        inner = [as_answered(each) for each in tool.tools or ()]
        named: JSON = {"type": tool.type, "name": tool.name, "description": tool.description}
        return named | {"tools": inner}
    if tool.type == "custom":
        form = {"type": tool.format.type if tool.format else "text"}
        given: JSON = {"type": "custom", "name": tool.name, "description": tool.description}
        return given | {"format": form}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def utf8_json(field: str, value: object) -> str:
    """Encode a value of a body as JSON.

    Raises:
        ServiceError: The value has text that is not valid Unicode.
    """
    try:
        return msgspec.json.encode(value).decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        message = f"{field} is not valid Unicode; encode it as UTF-8"
        raise invalid(field, message) from error


def _choice(choice: str | ChosenTool | None) -> tuple[inference_pb2.ToolMode, str]:
    if choice is None:
        return inference_pb2.TOOL_MODE_AUTO, ""
    if isinstance(choice, str):
        if choice not in MODES:
            raise invalid_value("tool_choice", choice, _CHOICES)
        return MODES[choice], ""
    if choice.type not in ("function", "custom") or not choice.name:
        raise invalid_value("tool_choice.type", choice.type, _CHOICES)
    return inference_pb2.TOOL_MODE_NAMED, utf8("tool_choice.name", choice.name)
