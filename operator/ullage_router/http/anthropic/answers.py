"""The bodies and events of the Messages API, as typed structures for the OpenAPI document.

`answer.py` writes responses without using these structures. Tests parse real responses into these
structures, to detect fields that are missing from either.
"""

from typing import Literal

from msgspec import UNSET, UnsetType

from ullage_router.http.openai.answers import Answer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnswerText(Answer, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A block of text."""

    text: str


class AnswerThinking(Answer, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """The model's thoughts. The signature is empty, since nothing checks it."""

    thinking: str
    signature: str


class AnswerToolUse(Answer, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call that the model makes."""

    id: str
    name: str
    input: dict[str, object]


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse


class MessagesUsage(Answer, frozen=True, kw_only=True):
    """Token counts of a request. Input tokens are those that were not cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer, frozen=True, kw_only=True):
    """The response to a request to /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(Answer, frozen=True, kw_only=True):
    """The number of a prompt's tokens."""

    input_tokens: int


class MessageStart(Answer, frozen=True, kw_only=True):
    """The first event, with a message that has no content yet."""

    type: Literal["message_start"]
    message: MessageAnswer


class BlockStart(Answer, frozen=True, kw_only=True):
    """A block starts."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class NewText(Answer, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """New text of a block."""

    text: str


class NewThinking(Answer, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """New thoughts of a block."""

    thinking: str


class NewInput(Answer, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """A fragment of a call's input as JSON."""

    partial_json: str


class BlockDelta(Answer, frozen=True, kw_only=True):
    """A block grows."""

    type: Literal["content_block_delta"]
    index: int
    delta: NewText | NewThinking | NewInput


class BlockStop(Answer, frozen=True, kw_only=True):
    """A block stops."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Answer, frozen=True, kw_only=True):
    """Why an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Answer, frozen=True, kw_only=True):
    """The end of the answer, with the token counts of the request."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Answer, frozen=True, kw_only=True):
    """The last event, or a sign of life."""

    type: Literal["message_stop", "ping"]


class MessagesErrorDetails(Answer, frozen=True, kw_only=True):
    """Details of an error: Anthropic's type, and this service's reason and the invalid field."""

    type: str
    message: str
    code: str
    param: str | None
    retry_after: int | UnsetType = UNSET
    """Seconds to wait before a retry, in the error that ends a stream."""


class MessagesError(Answer, frozen=True, kw_only=True):
    """An error in Anthropic's format, as a response or as the last event of a stream."""

    type: Literal["error"]
    error: MessagesErrorDetails


EVENTS = (
    MessageStart,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    MessagesError,
)
"""Types of the events of a stream."""
