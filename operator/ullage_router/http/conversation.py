"""The conversation of an OpenAI chat request, with its tools, in the wire's form."""

import re

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_router.http.schemas import ChatMessage, ChatRequest, ContentPart, NamedTool, ToolCall
from ullage_router.validate import check_calls, wrong
from ullage_rpc.errors import invalid

_MODES = {
    "none": inference_pb2.TOOL_MODE_NONE,
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}
_NOTHING = re.compile(r"null|\[\s*\]")
_CHOICES = 'none, auto, required, {"type": "function", "function": {"name": ...}}'


def from_conversation(chat: ChatRequest) -> inference_pb2.Messages:
    """Raises ServiceError INVALID_ARGUMENT that names the field."""
    check_calls(sum(len(message.tool_calls or ()) for message in chat.messages))
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(chat.messages)]
    arguments = _template_arguments(chat)
    return inference_pb2.Messages(
        messages=messages, tools=_tools(chat), template_arguments=arguments
    )


def _template_arguments(chat: ChatRequest) -> str:
    """vLLM's variables of the template, among which OpenAI has a name for one."""
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


def utf8(field: str, text: str) -> str:
    """The text, which must be without unpaired surrogates: they have no UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{field} has an unpaired surrogate; send valid Unicode"
        raise invalid(field, message) from error
    return text


def _tools(chat: ChatRequest) -> inference_pb2.Tools | None:
    mode, name = _choice(chat.tool_choice)
    try:
        functions = bytes(chat.tools).decode()
    except UnicodeDecodeError as error:
        raise invalid("tools", "tools is not valid UTF-8; encode it as UTF-8") from error
    if _NOTHING.fullmatch(functions):
        if mode in (inference_pb2.TOOL_MODE_REQUIRED, inference_pb2.TOOL_MODE_NAMED):
            raise wrong("tool_choice", "given without tools", "none or auto, or any with tools")
        return None
    single = chat.parallel_tool_calls is False
    return inference_pb2.Tools(functions=functions, mode=mode, name=name, single_call=single)


def _choice(choice: str | NamedTool | None) -> tuple[inference_pb2.ToolMode, str]:
    if choice is None:
        return inference_pb2.TOOL_MODE_AUTO, ""
    if isinstance(choice, str):
        if choice not in _MODES:
            raise wrong("tool_choice", choice, _CHOICES)
        return _MODES[choice], ""
    if choice.type != "function" or not choice.function:
        raise wrong("tool_choice.type", choice.type, _CHOICES)
    return inference_pb2.TOOL_MODE_NAMED, utf8("tool_choice.function.name", choice.function.name)


def _message(field: str, message: ChatMessage) -> inference_pb2.Message:
    for name, value in (("function_call", message.function_call), ("audio", message.audio)):
        if value is not None:
            remedy = "tool_calls" if name == "function_call" else "text"
            raise invalid(f"{field}.{name}", f"{field}.{name} is not supported; send {remedy}")
    calls = message.tool_calls or []
    return inference_pb2.Message(
        role=utf8(f"{field}.role", message.role),
        content=_content(f"{field}.content", message),
        tool_calls=[_call(f"{field}.tool_calls[{j}]", call) for j, call in enumerate(calls)],
        tool_call_id=utf8(f"{field}.tool_call_id", message.tool_call_id or ""),
        name=utf8(f"{field}.name", message.name or ""),
        reasoning=utf8(f"{field}.reasoning_content", message.reasoning_content or ""),
    )


def _call(field: str, call: ToolCall) -> inference_pb2.ToolCall:
    if call.type != "function":
        raise wrong(f"{field}.type", call.type, "function")
    return inference_pb2.ToolCall(
        id=utf8(f"{field}.id", call.id),
        name=utf8(f"{field}.function.name", call.function.name),
        arguments=utf8(f"{field}.function.arguments", call.function.arguments),
    )


def _content(field: str, message: ChatMessage) -> str:
    if message.content is None:
        if message.role == "assistant" and (message.tool_calls or message.reasoning_content):
            return ""
        raise wrong(field, "null", "a string or a list of text parts")
    if isinstance(message.content, str):
        return utf8(field, message.content)
    parts = enumerate(message.content)
    return "".join(_part(f"{field}[{j}]", part, message.role) for j, part in parts)


def _part(field: str, part: ContentPart, role: str) -> str:
    """Text; of an assistant a refusal too, which is its words as well."""
    is_refusal = part.type == "refusal" and role == "assistant"
    if part.type != "text" and not is_refusal:
        raise wrong(f"{field}.type", part.type, "text")
    text = part.refusal if is_refusal else part.text
    if text is None:
        raise wrong(f"{field}.{part.type}", "missing", "a string")
    return utf8(f"{field}.{part.type}", text)
