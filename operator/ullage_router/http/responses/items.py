"""Converts the items of the Responses API to the messages of a conversation."""

from collections.abc import Sequence

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.validation import invalid_value
from ullage_router.files.documents import Documents, document_text
from ullage_router.http.openai.custom_tools import as_arguments
from ullage_router.http.openai.decoding import utf8
from ullage_router.http.responses.schemas import Item, ItemPart
from ullage_router.http.responses.tools import full_name

Message = inference_pb2.Message
Messages = inference_pb2.Messages

_ITEMS = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, "
    "reasoning"
)
_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = frozenset({"input_text", "output_text", "text"})


def add_items(conversation: Messages, items: list[Item], documents: Documents | None) -> None:
    """Move items to the end of a conversation.

    Reasoning, the assistant's message and its calls are items of their own, and together are one
    turn of a conversation. Each item is removed from the list as soon as it is converted, since two
    copies of a long conversation would take megabytes.

    Args:
        conversation: The conversation.
        items: The items.
        documents: The files that the items name, or None if the service stores no files.

    Raises:
        ServiceError: An item is invalid. The error names the field.
    """
    given = items[::-1]
    items.clear()
    turn: Message | None = None
    calls = {call.id for message in conversation.messages for call in message.tool_calls}
    for i in range(len(given)):
        item = given.pop()
        field = f"input[{i}]"
        turn = _add_item(conversation, field, item, turn, documents)
        call_id = item.call_id or ""
        if item.type in _CALLS:
            calls.add(call_id)
        elif item.type in _OUTPUTS and call_id not in calls:
            message = (
                f"{field}.call_id is {call_id[:160]}, and no earlier item is that call; send the "
                "call, too, or name its response in previous_response_id"
            )
            raise invalid(f"{field}.call_id", message)


def _add_item(
    conversation: Messages,
    field: str,
    item: Item,
    turn: Message | None,
    documents: Documents | None,
) -> Message | None:
    """Add an item, and return the assistant's turn to which the next item may belong.

    Args:
        conversation: The conversation to which the item is added.
        field: Name of the item in errors.
        item: The item.
        turn: The assistant's turn to which the item may belong, or None.
        documents: The files that the items name, or None if the service stores no files.
    """
    match item.type:
        case "message":
            return _add_message(conversation, field, item, turn, documents)
        case "reasoning":
            if turn is None or turn.content or turn.tool_calls or turn.reasoning:
                turn = conversation.messages.add(role="assistant")
            # A summary stands for content that is not there.
            parts = item.content if item.content else item.summary
            turn.reasoning = _reasoning(field, parts)
            return turn
        case "function_call" | "custom_tool_call":
            turn = turn or conversation.messages.add(role="assistant")
            turn.tool_calls.add(
                id=_required(f"{field}.call_id", item.call_id),
                name=full_name(
                    utf8(f"{field}.namespace", item.namespace or ""),
                    _required(f"{field}.name", item.name),
                ),
                arguments=_arguments(field, item),
            )
            return turn
        case "function_call_output" | "custom_tool_call_output":
            output = item.output
            conversation.messages.add(
                role="tool",
                tool_call_id=_required(f"{field}.call_id", item.call_id),
                content=_content(f"{field}.output", output, documents),
            )
            return None
        case _:
            raise invalid_value(f"{field}.type", item.type, _ITEMS)


def _arguments(field: str, item: Item) -> str:
    if item.type == "custom_tool_call":
        return as_arguments(utf8(f"{field}.input", item.input or ""))
    return utf8(f"{field}.arguments", item.arguments or "")


def _add_message(
    conversation: Messages,
    field: str,
    item: Item,
    turn: Message | None,
    documents: Documents | None,
) -> Message | None:
    role = _required(f"{field}.role", item.role)
    if role not in _ROLES:
        raise invalid_value(f"{field}.role", role, ", ".join(_ROLES))
    is_assistant = role == "assistant"
    content = _content(f"{field}.content", item.content, documents, is_assistant=is_assistant)
    if role != "assistant":
        conversation.messages.add(role=role, content=content)
        return None
    if turn is None or turn.content or turn.tool_calls:
        turn = conversation.messages.add(role="assistant")
    turn.content = content
    return turn


def _content(
    field: str,
    content: str | Sequence[ItemPart] | None,
    documents: Documents | None,
    *,
    is_assistant: bool = False,
) -> str:
    if content is None:
        raise invalid_value(field, "missing", "a string or a list of text parts")
    if isinstance(content, str):
        return utf8(field, content)
    return "\n".join(  # as the parts of chats
        _text(f"{field}[{i}]", part, documents, is_assistant=is_assistant)
        for i, part in enumerate(content)
    )


def _text(field: str, part: ItemPart, documents: Documents | None, *, is_assistant: bool) -> str:
    if part.type == "input_file" and not is_assistant:
        return _file_text(field, part, documents)
    is_refusal = part.type == "refusal" and is_assistant
    if part.type not in _TEXTS and not is_refusal:
        possible = "output_text, refusal" if is_assistant else "input_text, input_file"
        raise invalid_value(f"{field}.type", part.type, possible)
    return _required_text(
        f"{field}.{'refusal' if is_refusal else 'text'}", part.refusal if is_refusal else part.text
    )


def _file_text(field: str, part: ItemPart, documents: Documents | None) -> str:
    for name, value in (("file_data", part.file_data), ("file_url", part.file_url)):
        if value is not None:
            message = f"{field}.{name} is not supported; upload the file, and send its file_id"
            raise invalid(f"{field}.{name}", message)
    return document_text(field, part.file_id, documents)


def _reasoning(field: str, parts: str | Sequence[ItemPart] | None) -> str:
    if isinstance(parts, str):
        return utf8(f"{field}.content", parts)
    return "".join(
        _required_text(f"{field}.content[{i}].text", part.text)
        for i, part in enumerate(parts or ())
    )


def _required_text(field: str, text: str | None) -> str:
    if text is None:
        raise invalid_value(field, "missing", "a string")
    return utf8(field, text)


def _required(field: str, text: str | None) -> str:
    if not text:
        raise invalid_value(field, "missing", "a string that is not empty")
    return utf8(field, text)
