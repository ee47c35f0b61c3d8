"""The bodies of OpenAI's answers, as typed structures for the API's description.

`responses.py` and `embeddings.py` write answers without these structures. Tests parse the written
answers with them, and so find fields that only one side has.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object of an answer. Fields that are UNSET may be absent."""


class PromptTokensDetails(Answer, frozen=True, kw_only=True):
    """Prompt tokens whose KV was cached."""

    cached_tokens: int
    cached_tokens_details: dict[str, int] | UnsetType = UNSET
    """Tokens by tier, if any tier but the device had a part."""


class Usage(Answer, frozen=True, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Alternative(Answer, frozen=True, kw_only=True):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Alternative, frozen=True, kw_only=True):
    """A token that was chosen, and the likeliest tokens in its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Answer, frozen=True, kw_only=True):
    """Tokens of a chat's content."""

    content: list[ChatLogprob]


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    """Tokens of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CalledFunction(Answer, frozen=True, kw_only=True):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class AnswerToolCall(Answer, frozen=True, kw_only=True):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class FunctionPiece(Answer, frozen=True, kw_only=True):
    """A piece of a call's function. Only the first piece has the name."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallPiece(Answer, frozen=True, kw_only=True):
    """A piece of a call. Only the first piece has the id and the type."""

    index: int
    function: FunctionPiece
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AnswerMessage(Answer, frozen=True, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class Choice(Answer, frozen=True, kw_only=True):
    """One of the answers to a request."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Choice, frozen=True, kw_only=True):
    """One answer to a chat."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice, frozen=True, kw_only=True):
    """One completion."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Answer, frozen=True, kw_only=True):
    """The answer to a prompt."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Delta(Answer, frozen=True, kw_only=True):
    """A piece of the assistant's turn."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(Answer, frozen=True, kw_only=True):
    """A piece of one of the answers. The last piece has both reasons."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(ChunkChoice, frozen=True, kw_only=True):
    """A piece of one answer to a chat."""

    delta: Delta
    logprobs: ChatLogprobs | None


class CompletionChunkChoice(ChunkChoice, frozen=True, kw_only=True):
    """A piece of one completion."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Resumption(Answer, frozen=True, kw_only=True):
    """How an answer was resumed when its engine was lost."""

    resumed_inexact: bool
    resumed_on: list[str]


class StreamChunk(Answer, frozen=True, kw_only=True):
    """An event of a stream."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET
    ullage: Resumption | UnsetType = UNSET


class ChatChunk(StreamChunk, frozen=True, kw_only=True):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(StreamChunk, frozen=True, kw_only=True):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class EmbeddingItem(Answer, frozen=True, kw_only=True):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Answer, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class Embeddings(Answer, frozen=True, kw_only=True):
    """The vectors of a body's inputs."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingsUsage


class ModelCard(Answer, frozen=True, kw_only=True):
    """The served model, or one of its adapters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    """Most tokens of a prompt and its answer together, or null while no engine is known."""
    sampling_defaults: dict[str, float] | None


class ModelList(Answer, frozen=True, kw_only=True):
    """The models that a key may use."""

    object: Literal["list"]
    data: list[ModelCard]


class ErrorDetails(Answer, frozen=True, kw_only=True):
    """The message and the code of an error, and the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer, frozen=True, kw_only=True):
    """OpenAI's envelope of errors."""

    error: ErrorDetails


class EventErrorDetails(ErrorDetails, frozen=True, kw_only=True):
    """The error that ends a stream, with the seconds that Retry-After would have."""

    retry_after: int | UnsetType = UNSET


class ErrorEvent(Answer, frozen=True, kw_only=True):
    """The last event of a stream that fails."""

    error: EventErrorDetails
