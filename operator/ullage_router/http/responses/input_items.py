"""The items that a response answers, as they are stored and listed."""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec

from ullage_common.wire.errors import invalid
from ullage_common.wire.validation import invalid_value
from ullage_router.http.files.queries import read_limit, read_word
from ullage_router.http.responses.answers import (
    AnyInputItem,
    CallOutput,
    CustomCallOutput,
    InputFile,
    InputMessage,
    InputText,
    OutputCall,
    OutputCustomCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    RefusalText,
    Role,
    Status,
    SummaryText,
)
from ullage_router.http.responses.schemas import Item, ItemPart
from ullage_router.http.responses.store import StoredResponse
from ullage_router.http.responses.tools import utf8_json

MAX_PAGE = 100
"""Maximum number of items in a list, as in OpenAI's API."""
DEFAULT_PAGE = 20
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""Beginnings of items' ids, by type."""


class _Text(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a stored message. Its log-probabilities are skipped: they may take megabytes."""

    text: str
    annotations: list[str]


class _Message(msgspec.Struct, tag_field="type", tag="message"):
    """A stored message without its log-probabilities."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[_Text]

    def listed(self) -> OutputMessage:
        """Return the message as lists have it."""
        content = [
            OutputText(text=part.text, annotations=part.annotations, logprobs=[])
            for part in self.content
        ]
        return OutputMessage(id=self.id, status=self.status, role=self.role, content=content)


class _Answered(msgspec.Struct):
    """The field of a response that has the items of the answer."""

    output: list[_Message | OutputReasoning | OutputCall | OutputCustomCall]


class _Identified(msgspec.Struct):
    """The field of an item that has its id."""

    id: str


_ANSWERED = msgspec.json.Decoder(_Answered)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_IDS = msgspec.json.Decoder(list[_Identified])


def encode_items(given: str | Sequence[Item], previous: StoredResponse | None) -> bytes:
    """Return the items that a response answers, as a JSON list.

    Args:
        given: The input of the request, which is valid.
        previous: The response that the request continues. Its input and its answer come first.

    Raises:
        ServiceError: A text is not valid Unicode.
    """
    items: list[object] = []
    if previous:
        items += _ITEMS.decode(previous.input_items)
        items += [
            item.listed() if isinstance(item, _Message) else item
            for item in _ANSWERED.decode(previous.body).output
        ]

    # A client may send one id twice, and pages need ids that differ.
    unique = os.urandom(16).hex()
    own = [Item(role="user", content=given)] if isinstance(given, str) else given
    items += [_listed(item, f"{unique}_{i}") for i, item in enumerate(own)]
    return utf8_json("input", items).encode()


def read_page(items: bytes, query: Mapping[str, str]) -> bytes:
    """Return the page of a list of items that a query asks for, as JSON.

    Args:
        items: The JSON list, the oldest item first.
        query: The parameters of the query.

    Raises:
        ServiceError: A parameter is invalid.
    """
    limit = read_limit(query, MAX_PAGE, DEFAULT_PAGE)
    order = read_word(query, "order", ("asc", "desc"), "desc")
    _refuse_unsupported(query)

    rest = list(zip(_IDS.decode(items), _ITEMS.decode(items), strict=True))
    if order == "desc":
        rest.reverse()
    if after := query.get("after"):
        ids = [each.id for each, _ in rest]
        if after not in ids:
            raise invalid_value("after", after, "the id of an item of this response")
        rest = rest[ids.index(after) + 1 :]

    page = rest[:limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [item for _, item in page],
            "first_id": page[0][0].id if page else None,
            "last_id": page[-1][0].id if page else None,
            "has_more": len(rest) > limit,
        }
    )


def _refuse_unsupported(query: Mapping[str, str]) -> None:
    for name in query:
        field = name.partition("[")[0]  # clients write lists as include[]
        if field == "include":
            message = (
                f"include is {query[name]}, and items of the input have nothing to include; leave "
                "it out, and read log-probabilities from the response itself"
            )
            raise invalid("include", message)
        if field == "before":
            message = f"before is {query[name]}, which is not supported; send order and after"
            raise invalid("before", message)


def _listed(item: Item, suffix: str) -> AnyInputItem:
    """Return an item of a request as lists have it.

    Args:
        item: The item.
        suffix: End of the item's id, after the prefix of its type.
    """
    name = f"{_PREFIXES[item.type]}_{suffix}"
    call_id = item.call_id or ""
    function = item.name or ""
    namespace = item.namespace or msgspec.UNSET
    match item.type:
        case "message":
            role = cast(Role, item.role)
            return InputMessage(id=name, role=role, content=_message_parts(role, item.content))
        case "reasoning":
            summary = [SummaryText(text=part.text or "") for part in item.summary or ()]
            return OutputReasoning(
                id=name, status="completed", summary=summary, content=_reasoning(item.content)
            )
        case "function_call":
            return OutputCall(
                id=name,
                status="completed",
                call_id=call_id,
                name=function,
                arguments=item.arguments or "",
                namespace=namespace,
            )
        case "custom_tool_call":
            return OutputCustomCall(
                id=name,
                status="completed",
                call_id=call_id,
                name=function,
                input=item.input or "",
                namespace=namespace,
            )
        case "function_call_output":
            return CallOutput(id=name, call_id=call_id, output=_output(item.output))
        case _:
            return CustomCallOutput(id=name, call_id=call_id, output=_output(item.output))


def _message_parts(
    role: Role, content: str | Sequence[ItemPart] | None
) -> list[InputText | InputFile | OutputText | RefusalText]:
    if isinstance(content, str):
        content = [ItemPart("text", content)]
    if role != "assistant":
        return [*_input_parts(content or ())]
    return [
        RefusalText(refusal=part.refusal or "")
        if part.type == "refusal"
        else OutputText(text=part.text or "", annotations=[], logprobs=[])
        for part in content or ()
    ]


def _input_parts(parts: Sequence[ItemPart]) -> list[InputText | InputFile]:
    return [
        InputFile(file_id=part.file_id or "")
        if part.type == "input_file"
        else InputText(text=part.text or "")
        for part in parts
    ]


def _output(output: str | Sequence[ItemPart] | None) -> str | list[InputText | InputFile]:
    return _input_parts(output or ()) if not isinstance(output, str) else output


def _reasoning(content: str | Sequence[ItemPart] | None) -> list[ReasoningText]:
    if isinstance(content, str):
        return [ReasoningText(text=content)]
    return [ReasoningText(text=part.text or "") for part in content or ()]
