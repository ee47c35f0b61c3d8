"""The bodies of requests to /v1/messages and /v1/messages/count_tokens, as typed structures.

Unknown fields are ignored, as in chats. Known fields that would change the meaning of the answer
are refused by name if the service does not support them.
"""

from typing import Annotated, ClassVar

import msgspec

from ullage_common.wire.limits import MAX_MESSAGES, MAX_PARTS, MAX_STOP_STRINGS
from ullage_router.http.openai.schemas import AtLeastOne, Refusing, unread


class TextBlock(msgspec.Struct, frozen=True):
    """A block of text."""

    type: str
    text: str | None = None


TextBlocks = Annotated[list[TextBlock], msgspec.Meta(max_length=MAX_PARTS)]


class ContentBlock(msgspec.Struct, frozen=True):
    """A block of a message: text, a call, the result of a call, or thoughts."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = unread()
    tool_use_id: str | None = None
    content: str | TextBlocks | None = None


class MessageParam(msgspec.Struct, frozen=True):
    """A message of a conversation."""

    role: str
    content: str | Annotated[list[ContentBlock], msgspec.Meta(max_length=MAX_PARTS)]


class MessagesTool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = unread()


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether and which tools the model calls."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Whether the answer has the model's thoughts."""

    type: str
    budget_tokens: int | None = None
    """This field has no effect."""


class OutputFormat(msgspec.Struct, frozen=True):
    """A constraint on the answer's text."""

    type: str
    schema: msgspec.Raw = unread()


class OutputConfig(msgspec.Struct, frozen=True):
    """Options of the answer's text."""

    format: OutputFormat | None = None
    effort: str | None = None
    """This field has no effect."""


class CountTokensRequest(Refusing, frozen=True, kw_only=True):
    """The body of a POST request to /v1/messages/count_tokens."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "container": (None,),
        "mcp_servers": (None, []),
        "thread": (None,),
    }

    messages: Annotated[list[MessageParam], msgspec.Meta(max_length=MAX_MESSAGES)]
    model: str = ""
    system: str | TextBlocks | None = None
    tools: msgspec.Raw = unread()
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    container: object = None
    mcp_servers: object = None
    thread: object = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """The body of a POST request to /v1/messages."""

    max_tokens: AtLeastOne
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0)] | None = None
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
