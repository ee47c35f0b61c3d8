"""Converts the messages, tools and template variables of a chat body to a protobuf conversation."""

import re

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.limits import MAX_TOOLS_BYTES
from ullage_common.wire.validation import check_calls, invalid_value
from ullage_router.http.openai.decoding import utf8
from ullage_router.http.openai.schemas import (
    NULL,
    ChatMessage,
    ChatRequest,
    ContentPart,
    NamedTool,
    ToolCall,
)

MODES = {
    "none": inference_pb2.TOOL_MODE_NONE,
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}
_NOTHING = re.compile(r"null|\[\s*\]")
_CHOICES = 'none, auto, required, {"type": "function", "function": {"name": ...}}'


def set_conversation(conversation: inference_pb2.Messages, chat: ChatRequest) -> None:
    """Move a chat body's messages, and copy its tools, into a conversation.

    Each message is removed from the body as soon as it is converted, since two copies of a long
    conversation would take megabytes.

    Raises:
        ServiceError: A field is invalid. The error names the field.
    """
    check_calls(sum(len(message.tool_calls or ()) for message in chat.messages))
    given = chat.messages[::-1]
    chat.messages.clear()
    for i in range(len(given)):
        _add_message(conversation, f"messages[{i}]", given.pop())

    conversation.template_arguments = _template_arguments(chat)
    if (tools := _tools(chat)) is not None:
        conversation.tools.CopyFrom(tools)


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
    mode, name = _choice(chat.tool_choice)
    if len(chat.tools) > MAX_TOOLS_BYTES:
        permitted = f"at most {MAX_TOOLS_BYTES} bytes"
        raise invalid_value("tools", f"{len(chat.tools)} bytes", permitted)

    try:
        functions = bytes(chat.tools).decode()
    except UnicodeDecodeError as error:
        raise invalid("tools", "tools is not valid UTF-8; encode it as UTF-8") from error

    if _NOTHING.fullmatch(functions):
        if mode in (inference_pb2.TOOL_MODE_REQUIRED, inference_pb2.TOOL_MODE_NAMED):
            raise invalid_value(
                "tool_choice", "given without tools", "none or auto, or any with tools"
            )
        return None

    single = chat.parallel_tool_calls is False
    return inference_pb2.Tools(
        functions=functions,
        mode=mode,
        name=name,
        single_call=single,
        several_forced_calls=chat.parallel_tool_calls is True,
    )


def _choice(choice: str | NamedTool | None) -> tuple[inference_pb2.ToolMode, str]:
    if choice is None:
        return inference_pb2.TOOL_MODE_AUTO, ""
    if isinstance(choice, str):
        if choice not in MODES:
            raise invalid_value("tool_choice", choice, _CHOICES)
        return MODES[choice], ""
    if choice.type != "function" or not choice.function:
        raise invalid_value("tool_choice.type", choice.type, _CHOICES)
    return inference_pb2.TOOL_MODE_NAMED, utf8("tool_choice.function.name", choice.function.name)


def _add_message(conversation: inference_pb2.Messages, field: str, message: ChatMessage) -> None:
    for name, value in (("function_call", message.function_call), ("audio", message.audio)):
        if value != NULL:
            remedy = "tool_calls" if name == "function_call" else "text"
            raise invalid(f"{field}.{name}", f"{field}.{name} is not supported; send {remedy}")

    added = conversation.messages.add(
        role=utf8(f"{field}.role", message.role),
        content=_content(f"{field}.content", message),
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
    if call.type != "function":
        raise invalid_value(f"{field}.type", call.type, "function")
    message.tool_calls.add(
        id=utf8(f"{field}.id", call.id),
        name=utf8(f"{field}.function.name", call.function.name),
        arguments=utf8(f"{field}.function.arguments", call.function.arguments),
    )


def _content(field: str, message: ChatMessage) -> str:
    if message.content is None:
        says_else = message.tool_calls or message.reasoning or message.reasoning_content
        if message.role == "assistant" and says_else:
            return ""
        raise invalid_value(field, "null", "a string or a list of text parts")
    if isinstance(message.content, str):
        return utf8(field, message.content)
    parts = enumerate(message.content)
    return "".join(_part(f"{field}[{j}]", part, message.role) for j, part in parts)


def _part(field: str, part: ContentPart, role: str) -> str:
    """Return the text of a content part.

    In an assistant message, the part may also be a refusal, whose text is then returned.
    """
    is_refusal = part.type == "refusal" and role == "assistant"
    if part.type != "text" and not is_refusal:
        raise invalid_value(f"{field}.type", part.type, "text")
    text = part.refusal if is_refusal else part.text
    if text is None:
        raise invalid_value(f"{field}.{part.type}", "missing", "a string")
    return utf8(f"{field}.{part.type}", text)
