"""The bodies of requests to /v1/responses, as typed structures.

Unknown fields are ignored, as in chats. Known fields that would change the meaning of the answer
are refused by name if the service does not support them.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from ullage_common.wire.limits import (
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
)
from ullage_router.http.openai.custom_tools import CustomFormat
from ullage_router.http.openai.schemas import (
    MAX_UINT32,
    AtLeastOne,
    Refusing,
    Seed,
    StructuredOutputs,
    Token,
    TopLogprobs,
    unread,
)

MAX_ITEMS = 3 * MAX_MESSAGES
"""Maximum number of items, as a turn may consist of reasoning, a message and calls."""
MAX_METADATA = 16
MAX_INCLUDES = 16

Metadata = Annotated[dict[str, str], msgspec.Meta(max_length=MAX_METADATA)]
Includes = Annotated[list[str], msgspec.Meta(max_length=MAX_INCLUDES)]


class ItemPart(msgspec.Struct, frozen=True):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    """This field has no effect."""


Parts = Annotated[list[ItemPart], msgspec.Meta(max_length=MAX_PARTS)]


class Item(msgspec.Struct, frozen=True):
    """An item of a conversation: a message, a function call, its output, or reasoning."""

    type: str = "message"
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    """Namespace of the called function, if the tools have it in one."""
    arguments: str | None = None
    input: str | None = None
    """Input of a custom tool's call."""
    output: str | Parts | None = None
    summary: Parts | None = None


class ResponsesTool(msgspec.Struct, frozen=True):
    """A function or a custom tool that the model may call, or a namespace of these."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw = unread()
    strict: bool | None = None
    """This field has no effect. Forced calls always follow the schema."""
    tools: list["ResponsesTool"] | None = None
    """The functions of a namespace."""
    format: CustomFormat | None = None
    """The format of a custom tool's input."""


class ChosenTool(msgspec.Struct, frozen=True):
    """The function that the model must call."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """A constraint on the answer's text."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = unread()
    strict: bool | None = None
    """This field has no effect, because answers always follow the schema."""


class TextOptions(msgspec.Struct, frozen=True):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """This field has no effect."""


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Options of the model's reasoning."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Refusing, frozen=True, kw_only=True):
    """The body of a POST request to /v1/responses. Null means the default.

    Fields from `top_k` on are not OpenAI's. They have the meaning that they have in chats.
    """

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "prompt": (None,),
    }

    input: str | Annotated[list[Item], msgspec.Meta(max_length=MAX_ITEMS)]
    model: str = ""
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    tools: msgspec.Raw = unread()
    tool_choice: str | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: AtLeastOne | None = None
    max_tool_calls: int | None = None
    """Maximum number of calls of built-in tools, of which there are none."""
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: TopLogprobs | None = None
    include: Includes | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    background: bool | None = None
    context_management: object = None
    conversation: object = None
    prompt: object = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Token], msgspec.Meta(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_UINT32)] | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: dict[str, object] | None = None
    session_id: str | None = None
    cache_salt: str | None = None


class ResponseCreateEvent(ResponsesRequest, frozen=True, kw_only=True):
    """A message of a client on a WebSocket to /v1/responses, which asks for a response."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        **ResponsesRequest.NEUTRAL,
        "generate": (None, True),
        "stream": (None, True),
        "stream_id": (None,),
    }

    type: Literal["response.create"]
    generate: bool | None = None
    stream_id: object = None
