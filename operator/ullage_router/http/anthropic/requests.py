"""Converts the bodies of the Messages API to GenerateRequests."""

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.json_size import VALUE_LIMITS, JsonCounter
from ullage_common.wire.limits import MAX_TOOLS, MAX_TOOLS_BYTES
from ullage_common.wire.validation import check_calls, invalid_value
from ullage_router.http.anthropic.schemas import (
    ContentBlock,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    MessagesTool,
    TextBlock,
    TextBlocks,
    ToolChoice,
)
from ullage_router.http.openai.decoding import body_decoder, decode_field, parse_fields, utf8
from ullage_router.http.openai.requests import from_common
from ullage_router.http.openai.responses import JSON
from ullage_router.http.openai.schemas import NULL, Common, JsonSchema, ResponseFormat

Message = inference_pb2.Message
Request = inference_pb2.GenerateRequest

SEPARATOR = "\n\n"
"""Put between the text blocks of one message, which are paragraphs of their own."""
_BODY = body_decoder(MessagesRequest)
_COUNTED = body_decoder(CountTokensRequest)
_TOOLS = msgspec.json.Decoder(list[MessagesTool] | None)
_MODES = {
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "any": inference_pb2.TOOL_MODE_REQUIRED,
    "none": inference_pb2.TOOL_MODE_NONE,
    "tool": inference_pb2.TOOL_MODE_NAMED,
}
_CHOICES = 'auto, any, none, {"type": "tool", "name": ...}'
_THINKING = ("enabled", "adaptive", "disabled")
_SCHEMA_NAME = "output"


def parse_messages(data: bytes) -> tuple[MessagesRequest, tuple[str, ...]]:
    """Decode the body of a request to /v1/messages. Return it with the names of unknown fields.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    return parse_fields(_BODY, data)


def parse_count(data: bytes) -> tuple[CountTokensRequest, tuple[str, ...]]:
    """Decode the body of a request to /v1/messages/count_tokens, as `parse_messages` does.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    return parse_fields(_COUNTED, data)


def from_messages(body: MessagesRequest) -> Request:
    """Convert a body to a GenerateRequest. This removes the messages from the body.

    Raises:
        ServiceError: A field is invalid. The error names the field.
    """
    common = Common(
        model=body.model,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
        response_format=_format(body),
    )
    request = from_common(common, body.max_tokens)
    _set_conversation(request, body)
    return request


def from_count(body: CountTokensRequest) -> Request:
    """Convert a body to a GenerateRequest whose prompt is counted.

    Raises:
        ServiceError: A field is invalid. The error names the field.
    """
    common = Common(model=body.model, response_format=_format(body))
    request = from_common(common, None)
    _set_conversation(request, body)
    return request


def shows_thinking(body: CountTokensRequest) -> bool:
    """Return whether the answer has the model's thoughts.

    Raises:
        ServiceError: The type of `thinking` is unknown.
    """
    if body.thinking is None:
        return False
    if body.thinking.type not in _THINKING:
        raise invalid_value("thinking.type", body.thinking.type, ", ".join(_THINKING))
    return body.thinking.type != "disabled"


def _format(body: CountTokensRequest) -> ResponseFormat | None:
    form = body.output_config.format if body.output_config else None
    if form is None:
        return None
    if form.type != "json_schema":
        raise invalid_value("output_config.format.type", form.type, "json_schema")
    return ResponseFormat(form.type, JsonSchema(_SCHEMA_NAME, form.schema))


def _set_conversation(request: Request, body: CountTokensRequest) -> None:
    """Move a body's messages, and copy its tools, into the request.

    Each message is removed from the body as soon as it is converted, since two copies of a long
    conversation would take megabytes.
    """
    conversation = request.messages
    conversation.SetInParent()
    if body.system:
        conversation.messages.add(role="system", content=_texts("system", body.system))

    given = body.messages[::-1]
    body.messages.clear()
    role = ""
    for i in range(len(given)):
        message = given.pop()
        role = message.role
        _add_message(conversation, f"messages[{i}]", message)
    if role == "assistant":
        raise invalid(
            "messages",
            "messages ends with the assistant's message, which answers of this API do not "
            "continue; let the last message be the user's, or send continue_final_message to "
            "/v1/chat/completions",
        )
    check_calls(sum(len(message.tool_calls) for message in conversation.messages))

    tools = _tools(body.tools, body.tool_choice)
    if tools is not None:
        conversation.tools.CopyFrom(tools)


def _add_message(conversation: inference_pb2.Messages, field: str, message: MessageParam) -> None:
    match message.role:
        case "user":
            _add_user(conversation, field, message)
        case "assistant":
            _add_assistant(conversation, field, message)
        case "system":
            content = _content(field, message)
            conversation.messages.add(role="system", content=content)
        case _:
            raise invalid_value(f"{field}.role", message.role, "user, assistant, system")


def _content(field: str, message: MessageParam) -> str:
    if isinstance(message.content, str):
        return utf8(f"{field}.content", message.content)
    blocks = enumerate(message.content)
    return SEPARATOR.join(_text(f"{field}.content[{i}]", block, "text") for i, block in blocks)


def _add_user(conversation: inference_pb2.Messages, field: str, message: MessageParam) -> None:
    """Add a user's message. The results of calls in it become turns of their own."""
    if isinstance(message.content, str):
        conversation.messages.add(role="user", content=_content(field, message))
        return

    texts: list[str] = []
    for i, block in enumerate(message.content):
        place = f"{field}.content[{i}]"
        if block.type == "tool_result":
            _flush(conversation, texts)
            conversation.messages.add(
                role="tool",
                tool_call_id=_required(f"{place}.tool_use_id", block.tool_use_id),
                content=_texts(f"{place}.content", block.content or ""),
            )
        else:
            texts.append(_text(place, block, "text, tool_result"))
    _flush(conversation, texts)


def _flush(conversation: inference_pb2.Messages, texts: list[str]) -> None:
    if texts:
        conversation.messages.add(role="user", content=SEPARATOR.join(texts))
        texts.clear()


def _add_assistant(conversation: inference_pb2.Messages, field: str, message: MessageParam) -> None:
    if isinstance(message.content, str):
        conversation.messages.add(role="assistant", content=_content(field, message))
        return

    added = conversation.messages.add(role="assistant")
    texts = []
    thoughts = []
    for i, block in enumerate(message.content):
        place = f"{field}.content[{i}]"
        if block.type == "thinking":
            thoughts.append(utf8(f"{place}.thinking", block.thinking or ""))
        elif block.type == "tool_use":
            added.tool_calls.add(
                id=_required(f"{place}.id", block.id),
                name=_required(f"{place}.name", block.name),
                arguments=_arguments(f"{place}.input", block.input),
            )
        else:
            texts.append(_text(place, block, "text, tool_use, thinking"))
    added.content = SEPARATOR.join(texts)
    added.reasoning = "".join(thoughts)


def _texts(field: str, content: str | TextBlocks) -> str:
    if isinstance(content, str):
        return utf8(field, content)
    return SEPARATOR.join(_text(f"{field}[{i}]", block, "text") for i, block in enumerate(content))


def _text(field: str, block: ContentBlock | TextBlock, possible: str) -> str:
    if block.type != "text":
        raise invalid_value(f"{field}.type", block.type, possible)
    if block.text is None:
        raise invalid_value(f"{field}.text", "missing", "a string")
    return utf8(f"{field}.text", block.text)


def _arguments(field: str, raw: msgspec.Raw) -> str:
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise invalid(field, f"{field} is not valid UTF-8; encode it as UTF-8") from error
    if not text.startswith("{"):
        raise invalid_value(field, text, "an object")
    return text


def _required(field: str, text: str | None) -> str:
    if not text:
        raise invalid_value(field, "missing", "a string that is not empty")
    return utf8(field, text)


def _tools(raw: msgspec.Raw, choice: ToolChoice | None) -> inference_pb2.Tools | None:
    mode, name = _choice(choice)
    tools = _read_tools(raw)
    if not tools:
        if mode in (inference_pb2.TOOL_MODE_REQUIRED, inference_pb2.TOOL_MODE_NAMED):
            raise invalid_value("tool_choice", "given without tools", "none or auto")
        return None
    try:
        functions = msgspec.json.encode([_as_chat_tool(tool) for tool in tools]).decode()
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise invalid("tools", "tools is not valid Unicode; encode it as UTF-8") from error
    is_single = choice.disable_parallel_tool_use if choice else None
    return inference_pb2.Tools(
        functions=functions,
        mode=mode,
        name=name,
        single_call=bool(is_single),
        # As in chats, a client that must get a call says if it takes more than one.
        several_forced_calls=is_single is False,
    )


def _read_tools(raw: msgspec.Raw) -> list[MessagesTool]:
    text = bytes(raw)
    if len(text) > MAX_TOOLS_BYTES:
        raise invalid_value("tools", f"{len(text)} bytes", f"at most {MAX_TOOLS_BYTES} bytes")
    JsonCounter("tools", VALUE_LIMITS).add(text)
    tools = decode_field(_TOOLS, msgspec.Raw(text), "tools") or []
    if len(tools) > MAX_TOOLS:
        raise invalid_value("tools", f"a list of {len(tools)} tools", f"at most {MAX_TOOLS}")
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise invalid_value(f"tools[{i}].type", tool.type, "custom")
        if tool.input_schema == NULL:
            raise invalid_value(f"tools[{i}].input_schema", "missing", "a JSON Schema")
    return tools


def _as_chat_tool(tool: MessagesTool) -> JSON:
    function: JSON = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice | None) -> tuple[inference_pb2.ToolMode, str]:
    if choice is None:
        return inference_pb2.TOOL_MODE_AUTO, ""
    if choice.type not in _MODES or (choice.type == "tool" and not choice.name):
        raise invalid_value("tool_choice.type", choice.type, _CHOICES)
    name = choice.name if choice.type == "tool" else None
    return _MODES[choice.type], utf8("tool_choice.name", name or "")
