"""The bodies of OpenAI's responses, as typed structures for the OpenAPI document.

`responses.py` and `embeddings.py` write responses without using these structures. Tests parse real
responses into these structures, to detect fields that are missing from either.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class for objects in a response. Fields that are UNSET may be absent."""


class PromptTokensDetails(Answer, frozen=True, kw_only=True):
    """Details of the prompt tokens, such as how many had cached KV."""

    cached_tokens: int
    cached_tokens_details: dict[str, int] | UnsetType = UNSET
    """Cached tokens by cache tier. Absent if only the device had cached KV."""


class CompletionTokensDetails(Answer, frozen=True, kw_only=True):
    """Details of the output tokens."""

    reasoning_tokens: int


class Usage(Answer, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Absent if the answers have no reasoning."""


class Alternative(Answer, frozen=True, kw_only=True):
    """A token that the model could have chosen instead."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Alternative, frozen=True, kw_only=True):
    """A chosen token, with the most likely tokens at its position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(Answer, frozen=True, kw_only=True):
    """Log-probabilities of the tokens in a chat message's content."""

    content: list[ChatLogprob]


class CompletionLogprobs(Answer, frozen=True, kw_only=True):
    """Log-probabilities of the tokens in a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Log-probabilities, which are null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RankedToken(Answer, frozen=True, kw_only=True):
    """A token at a position of the prompt, with its rank among all tokens."""

    logprob: float
    rank: int
    decoded_token: str


class CalledFunction(Answer, frozen=True, kw_only=True):
    """A function's name, with its arguments as JSON."""

    name: str
    arguments: str


class CalledCustom(Answer, frozen=True, kw_only=True):
    """A custom tool's name, with its input as text."""

    name: str
    input: str


class AnswerToolCall(Answer, frozen=True, kw_only=True):
    """A tool call that the model makes, of a function or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class FunctionPiece(Answer, frozen=True, kw_only=True):
    """A fragment of a streamed function call. Only the first fragment has the name."""

    arguments: str
    name: str | UnsetType = UNSET


class CustomPiece(Answer, frozen=True, kw_only=True):
    """A fragment of a streamed custom call. Only the first fragment has the name."""

    input: str
    name: str | UnsetType = UNSET


class ToolCallPiece(Answer, frozen=True, kw_only=True):
    """A fragment of a streamed tool call. Only the first fragment has the id and the type."""

    index: int
    function: FunctionPiece | UnsetType = UNSET
    custom: CustomPiece | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET


class AnswerMessage(Answer, frozen=True, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same as `reasoning`."""
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class Choice(Answer, frozen=True, kw_only=True):
    """One of the answers to a request."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Choice, frozen=True, kw_only=True):
    """One answer to a chat request."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice, frozen=True, kw_only=True):
    """One answer to a completion request."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, RankedToken] | None] | UnsetType = UNSET
    """For each token of the prompt, its own and the likeliest tokens by id."""


class ChatCompletion(Answer, frozen=True, kw_only=True):
    """The response to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, RankedToken] | None] | UnsetType = UNSET
    """For each token of the prompt, its own and the likeliest tokens by id."""


class Completion(Answer, frozen=True, kw_only=True):
    """The response to a completion request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Delta(Answer, frozen=True, kw_only=True):
    """A fragment of the assistant's streamed message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same as `reasoning`."""
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(Answer, frozen=True, kw_only=True):
    """A fragment of one streamed answer. The last one has the finish reason and the stop reason."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(ChunkChoice, frozen=True, kw_only=True):
    """A fragment of one streamed answer to a chat request."""

    delta: Delta
    logprobs: ChatLogprobs | None


class CompletionChunkChoice(ChunkChoice, frozen=True, kw_only=True):
    """A fragment of one streamed answer to a completion request."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Resumption(Answer, frozen=True, kw_only=True):
    """How an answer was resumed after its engine was lost."""

    resumed_inexact: bool
    resumed_on: list[str]


class StreamChunk(Answer, frozen=True, kw_only=True):
    """An event of a streamed response."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET
    ullage: Resumption | UnsetType = UNSET


class ChatChunk(StreamChunk, frozen=True, kw_only=True):
    """An event of a streamed chat response."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(StreamChunk, frozen=True, kw_only=True):
    """An event of a streamed completion response."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class EmbeddingItem(Answer, frozen=True, kw_only=True):
    """The embedding of one input, as a list of floats or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Answer, frozen=True, kw_only=True):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class Embeddings(Answer, frozen=True, kw_only=True):
    """The embeddings of all inputs in a request."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingsUsage


class ScoreItem(Answer, frozen=True, kw_only=True):
    """The score of two texts: the cosine of their embeddings."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Answer, frozen=True, kw_only=True):
    """The scores of all pairs of texts in a request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingsUsage


class RankedText(Answer, frozen=True, kw_only=True):
    """A document, as the request has it."""

    text: str


class RankedDocument(Answer, frozen=True, kw_only=True):
    """A document with its score."""

    index: int
    """The document's place in the request, from 0."""
    document: RankedText
    relevance_score: float


class Ranking(Answer, frozen=True, kw_only=True):
    """The documents of a request, the most relevant first."""

    id: str
    model: str
    usage: EmbeddingsUsage
    results: list[RankedDocument]


class ModelCard(Answer, frozen=True, kw_only=True):
    """The served model or one of its adapters."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    """Maximum number of tokens in a prompt and its answer together.

    Null until an engine is known.
    """
    sampling_defaults: dict[str, float] | None


class ModelList(Answer, frozen=True, kw_only=True):
    """The models that an API key may use."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Answer, frozen=True, kw_only=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer, frozen=True, kw_only=True):
    """The text of tokens."""

    prompt: str


class TokenizerInfo(Answer, frozen=True, kw_only=True):
    """The tokenizer as tokenizer_config.json describes it."""

    tokenizer_class: str
    model_max_length: int
    add_bos_token: bool
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None


class ErrorDetails(Answer, frozen=True, kw_only=True):
    """Details of an error: its message and code, and the invalid field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer, frozen=True, kw_only=True):
    """An error response in OpenAI's envelope."""

    error: ErrorDetails


class EventErrorDetails(ErrorDetails, frozen=True, kw_only=True):
    """Details of the error that ends a stream, with the seconds to wait before a retry."""

    retry_after: int | UnsetType = UNSET


class ErrorEvent(Answer, frozen=True, kw_only=True):
    """The last event of a stream that fails."""

    error: EventErrorDetails
