"""The bodies and events of /v1/responses, as typed structures for the OpenAPI document.

`answer.py` writes responses without using these structures. Tests parse real responses into these
structures, to detect fields that are missing from either. `input_items.py` uses those of items.
"""

from typing import Literal

from msgspec import UNSET, UnsetType

from ullage_router.http.openai.answers import (
    Answer,
    ChatLogprob,
    EventErrorDetails,
    PromptTokensDetails,
)

Status = Literal["in_progress", "completed", "incomplete"]
Role = Literal["user", "assistant", "system", "developer"]
AnyObject = dict[str, object]


class OutputText(Answer, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[str]
    logprobs: list[ChatLogprob]


class ReasoningText(Answer, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of the model's reasoning."""

    text: str


class SummaryText(Answer, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A summary of reasoning that a client sent."""

    text: str


class OutputMessage(Answer, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The assistant's message."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Answer, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning, which has no summary unless a client sent one."""

    id: str
    status: Status
    summary: list[SummaryText]
    content: list[ReasoningText]


class OutputCall(Answer, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A function call that the model makes, with the arguments as JSON."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    """The function's namespace. Absent if it has none."""


class OutputCustomCall(Answer, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool that the model makes, with the input as text."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET
    """The tool's namespace. Absent if it has none."""


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputText(Answer, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """A text of a request."""

    text: str


class InputFile(Answer, frozen=True, kw_only=True, tag_field="type", tag="input_file"):
    """A file that a request names."""

    file_id: str


class RefusalText(Answer, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal that a client sent as the assistant's."""

    refusal: str


class InputMessage(Answer, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of a request or of an earlier answer."""

    id: str
    status: Status = "completed"
    role: Role
    content: list[InputText | InputFile | OutputText | RefusalText]


class CallOutput(Answer, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """The result of a function call."""

    id: str
    status: Status = "completed"
    call_id: str
    output: str | list[InputText | InputFile]


class CustomCallOutput(
    Answer, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"
):
    """The result of a custom tool's call."""

    id: str
    status: Status = "completed"
    call_id: str
    output: str | list[InputText | InputFile]


AnyInputItem = (
    InputMessage | OutputReasoning | OutputCall | OutputCustomCall | CallOutput | CustomCallOutput
)


class InputItemList(Answer, frozen=True, kw_only=True):
    """A page of the items that a response answers."""

    object: Literal["list"]
    data: list[AnyInputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensDetails(PromptTokensDetails, frozen=True, kw_only=True):
    """Details of the prompt tokens. None is ever charged for being written to the cache."""

    cache_write_tokens: int


class ResponseUsage(Answer, frozen=True, kw_only=True):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseFailure(Answer, frozen=True, kw_only=True):
    """The error that ended a response."""

    code: str
    message: str


class Response(Answer, frozen=True, kw_only=True):
    """A response, whose later fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItem]
    service_tier: str
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    store: bool
    text: AnyObject
    tool_choice: str | dict[str, str]
    tools: list[AnyObject]
    top_logprobs: int
    truncation: str
    user: str | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float


class InputTokens(Answer, frozen=True, kw_only=True):
    """The number of tokens of a request."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Answer, frozen=True, kw_only=True):
    """The answer to a request that deletes a stored response."""

    id: str
    object: Literal["response"]
    deleted: bool


class ResponseEvent(Answer, frozen=True, kw_only=True):
    """An event that has the whole response so far."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: Response


class ItemEvent(Answer, frozen=True, kw_only=True):
    """An item opens or closes."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(Answer, frozen=True, kw_only=True):
    """A content part of an item opens or closes."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(Answer, frozen=True, kw_only=True):
    """New text of a content part."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class TextDone(Answer, frozen=True, kw_only=True):
    """The whole text of a content part."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class ArgumentsDelta(Answer, frozen=True, kw_only=True):
    """A fragment of a call's arguments, or of a custom call's input."""

    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Answer, frozen=True, kw_only=True):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class InputDone(Answer, frozen=True, kw_only=True):
    """The whole input of a custom call."""

    type: Literal["response.custom_tool_call_input.done"]
    sequence_number: int
    item_id: str
    output_index: int
    input: str


class ResponseErrorEvent(Answer, frozen=True, kw_only=True):
    """The last event of a stream that fails before the response was created."""

    type: Literal["error"]
    sequence_number: int
    code: str
    message: str
    param: str | None
    error: EventErrorDetails


EVENTS = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDelta,
    TextDone,
    ArgumentsDelta,
    ArgumentsDone,
    InputDone,
    ResponseErrorEvent,
)
"""Types of the events of a stream."""
