"""Converts the messages, tools and template variables of a chat body to a protobuf conversation."""

import re
from collections.abc import Mapping

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.json_size import VALUE_LIMITS, JsonCounter
from ullage_common.wire.limits import MAX_TOOLS_BYTES
from ullage_common.wire.validation import check_calls, invalid_value
from ullage_router.files.documents import Documents, document_text
from ullage_router.http.openai.custom_tools import DefinedCustom, as_arguments, as_chat_tool
from ullage_router.http.openai.decoding import decode_field, utf8
from ullage_router.http.openai.schemas import (
    NULL,
    AllowedTools,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FileReference,
    NamedFunction,
    NamedTool,
    ToolCall,
)

MODES = {
    "none": inference_pb2.TOOL_MODE_NONE,
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}
_NOTHING = re.compile(r"null|\[\s*\]")
_CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": ...}}, '
    '{"type": "custom", "custom": {"name": ...}}, '
    '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)
_TOOLS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_NAMED = msgspec.json.Decoder(NamedFunction)
_CUSTOM = msgspec.json.Decoder(DefinedCustom)
_CUSTOM_TYPE = b'"custom"'


def set_conversation(
    conversation: inference_pb2.Messages, chat: ChatRequest, documents: Documents | None
) -> None:
    """Move a chat body's messages, and copy its tools, into a conversation.

    Each message is removed from the body as soon as it is converted, since two copies of a long
    conversation would take megabytes.

    Args:
        conversation: The conversation.
        chat: The body.
        documents: The files that the body names, or None if the service stores no files.

    Raises:
        ServiceError: A field is invalid. The error names the field.
    """
    check_calls(sum(len(message.tool_calls or ()) for message in chat.messages))
    given = chat.messages[::-1]
    chat.messages.clear()
    for i in range(len(given)):
        _add_message(conversation, f"messages[{i}]", given.pop(), documents)

    conversation.end = _prompt_end(chat)
    conversation.template_arguments = _template_arguments(chat)
    if (tools := _tools(chat)) is not None:
        conversation.tools.CopyFrom(tools)


def _prompt_end(chat: ChatRequest) -> inference_pb2.PromptEnd:
    if chat.continue_final_message:
        if chat.add_generation_prompt:
            raise invalid_value(
                "add_generation_prompt", True, "false with continue_final_message: true"
            )
        return inference_pb2.PROMPT_END_FINAL_MESSAGE
    if chat.add_generation_prompt is False:
        return inference_pb2.PROMPT_END_CLOSED
    # Left unset, because services of 0.2.0 do not know the field.
    return inference_pb2.PROMPT_END_UNSPECIFIED


def _template_arguments(chat: ChatRequest) -> str:
    """Return the template's variables as JSON: `chat_template_kwargs` and `reasoning_effort`."""
    if not chat.chat_template_kwargs and chat.reasoning_effort is None:
        return ""

    arguments = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", chat.reasoning_effort)
    try:
        return msgspec.json.encode(arguments).decode()
    except (UnicodeEncodeError, RecursionError) as error:
        message = "chat_template_kwargs is nested too deeply or not valid Unicode; send less"
        raise invalid("chat_template_kwargs", message) from error


def _tools(chat: ChatRequest) -> inference_pb2.Tools | None:
    mode, name, allowed = _choice(chat.tool_choice)
    if len(chat.tools) > MAX_TOOLS_BYTES:
        permitted = f"at most {MAX_TOOLS_BYTES} bytes"
        raise invalid_value("tools", f"{len(chat.tools)} bytes", permitted)

    try:
        tools, _ = as_functions(chat.tools)
        functions = bytes(tools).decode()
    except UnicodeDecodeError as error:
        raise invalid("tools", "tools is not valid UTF-8; encode it as UTF-8") from error

    if _NOTHING.fullmatch(functions):
        if mode in (inference_pb2.TOOL_MODE_REQUIRED, inference_pb2.TOOL_MODE_NAMED):
            raise invalid_value(
                "tool_choice", "given without tools", "none or auto, or any with tools"
            )
        return None

    if allowed is not None:
        functions = _restricted(tools, allowed)
    single = chat.parallel_tool_calls is False
    return inference_pb2.Tools(
        functions=functions,
        mode=mode,
        name=name,
        single_call=single,
        several_forced_calls=chat.parallel_tool_calls is True,
    )


def as_functions(tools: msgspec.Raw) -> tuple[msgspec.Raw, frozenset[str]]:
    """Return the JSON of tools with functions for custom tools, and the names of the latter.

    Raises:
        ServiceError: A custom tool is invalid. The error names the field.
    """
    if _CUSTOM_TYPE not in bytes(tools):
        return tools, frozenset()

    JsonCounter("tools", VALUE_LIMITS).add(bytes(tools))
    listed: list[Mapping[str, object]] = []
    names = set()
    given = decode_field(_TOOLS, tools, "tools")
    for i, tool in enumerate(given):
        if bytes(tool.get("type", NULL)) != _CUSTOM_TYPE:
            listed.append(tool)
            continue
        field = f"tools[{i}].custom"
        if tool.get("custom", NULL) == NULL:
            raise invalid_value(field, "missing", "an object with a name")
        defined = decode_field(_CUSTOM, tool["custom"], field)
        listed.append(as_chat_tool(field, defined))
        names.add(defined.name)
    try:
        return msgspec.Raw(msgspec.json.encode(listed)), frozenset(names)
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise invalid("tools", "tools is not valid UTF-8; encode it as UTF-8") from error


def _choice(
    choice: str | NamedTool | None,
) -> tuple[inference_pb2.ToolMode, str, AllowedTools | None]:
    """Return the mode, the function that must be called, and the tools that may be called."""
    if choice is None:
        return inference_pb2.TOOL_MODE_AUTO, "", None
    if isinstance(choice, str):
        if choice not in MODES:
            raise invalid_value("tool_choice", choice, _CHOICES)
        return MODES[choice], "", None
    if choice.type == "allowed_tools" and choice.allowed_tools:
        return MODES[choice.allowed_tools.mode], "", choice.allowed_tools
    named = choice.custom if choice.type == "custom" else choice.function
    if choice.type not in ("function", "custom") or not named:
        raise invalid_value("tool_choice.type", choice.type, _CHOICES)
    name = utf8(f"tool_choice.{choice.type}.name", named.name)
    return inference_pb2.TOOL_MODE_NAMED, name, None


def _restricted(tools: msgspec.Raw, allowed: AllowedTools) -> str:
    """Return the JSON of the tools that the request allows. The model does not see the others.

    Raises:
        ServiceError: An allowed tool is not among the tools, or none is allowed.
    """
    field = "tool_choice.allowed_tools.tools"
    JsonCounter("tools", VALUE_LIMITS).add(bytes(tools))
    named = [tool.custom if tool.type == "custom" else tool.function for tool in allowed.tools]
    names = [tool.name if tool else "" for tool in named]
    given = {_name_of(tool): tool for tool in decode_field(_TOOLS, tools, "tools")}
    for i, name in enumerate(names):
        if name not in given:
            raise invalid_value(f"{field}[{i}]", name or "unnamed", "functions of tools")
    if not names:
        raise invalid_value(field, "an empty list", "at least one function of tools")
    kept = [given[name] for name in dict.fromkeys(names)]
    try:
        return msgspec.json.encode(kept).decode()
    except UnicodeDecodeError as error:
        raise invalid("tools", "tools is not valid UTF-8; encode it as UTF-8") from error


def _name_of(tool: dict[str, msgspec.Raw]) -> str:
    """Return the name of a tool's function (empty for other tools, which are refused later)."""
    raw = tool.get("function", NULL)
    return "" if raw == NULL else decode_field(_NAMED, raw, "tools.function").name


def _add_message(
    conversation: inference_pb2.Messages,
    field: str,
    message: ChatMessage,
    documents: Documents | None,
) -> None:
    for name, value in (("function_call", message.function_call), ("audio", message.audio)):
        if value != NULL:
            remedy = "tool_calls" if name == "function_call" else "text"
            raise invalid(f"{field}.{name}", f"{field}.{name} is not supported; send {remedy}")

    added = conversation.messages.add(
        role=utf8(f"{field}.role", message.role),
        content=_content(f"{field}.content", message, documents),
        tool_call_id=utf8(f"{field}.tool_call_id", message.tool_call_id or ""),
        name=utf8(f"{field}.name", message.name or ""),
        reasoning=_reasoning(field, message),
    )

    for j, call in enumerate(message.tool_calls or ()):
        _add_call(added, f"{field}.tool_calls[{j}]", call)


def _reasoning(field: str, message: ChatMessage) -> str:
    if message.reasoning:
        return utf8(f"{field}.reasoning", message.reasoning)
    return utf8(f"{field}.reasoning_content", message.reasoning_content or "")


def _add_call(message: inference_pb2.Message, field: str, call: ToolCall) -> None:
    called = message.tool_calls.add(id=utf8(f"{field}.id", call.id))
    if call.type == "custom" and call.custom:
        called.name = utf8(f"{field}.custom.name", call.custom.name)
        called.arguments = as_arguments(utf8(f"{field}.custom.input", call.custom.input))
    elif call.type == "function" and call.function:
        called.name = utf8(f"{field}.function.name", call.function.name)
        called.arguments = utf8(f"{field}.function.arguments", call.function.arguments)
    elif call.type in ("function", "custom"):
        raise invalid_value(f"{field}.{call.type}", "missing", "an object with a name")
    else:
        raise invalid_value(f"{field}.type", call.type, "function, custom")


def _content(field: str, message: ChatMessage, documents: Documents | None) -> str:
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise invalid_value(field, "null", "a string or a list of text parts")
    if isinstance(message.content, str):
        return utf8(field, message.content)
    parts = enumerate(message.content)
    # vLLM joins parts in the same way. Without it, the words at their edges would run together.
    return "\n".join(_part(f"{field}[{j}]", part, message.role, documents) for j, part in parts)


def _part(field: str, part: ContentPart, role: str, documents: Documents | None) -> str:
    """Return the text of a content part, or of the file that the part names.

    In an assistant message, the part may also be a refusal, whose text is then returned.
    """
    if part.type == "file":
        return _file_text(f"{field}.file", part.file or FileReference(), documents)
    is_refusal = part.type == "refusal" and role == "assistant"
    if part.type != "text" and not is_refusal:
        raise invalid_value(f"{field}.type", part.type, "text, file")
    text = part.refusal if is_refusal else part.text
    if text is None:
        raise invalid_value(f"{field}.{part.type}", "missing", "a string")
    return utf8(f"{field}.{part.type}", text)


def _file_text(field: str, file: FileReference, documents: Documents | None) -> str:
    if file.file_data is not None:
        message = f"{field}.file_data is not supported; upload the file, and send its file_id"
        raise invalid(f"{field}.file_data", message)
    return document_text(field, file.file_id, documents)
