"""Sampling parameters by vLLM's names, and the requests that they make.

The router's own reading of OpenAI's bodies converts and checks the parameters, so that a field
means the same here and over HTTP.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.validation import validate_request
from ullage_router.http.openai.requests import (
    from_chat,
    from_completion,
    parse_chat,
    parse_completion,
)

DEFAULT_MAX_TOKENS = 16
"""Most tokens of an answer for which `max_tokens` is not set, as in vLLM."""

Request = inference_pb2.GenerateRequest
Message = Mapping[str, Any]
"""A message of a conversation, as in OpenAI's API."""


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """What an answer must match. Set one of the fields."""

    json: str | dict[str, Any] | None = None
    """JSON Schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Context-free grammar in llguidance's dialect of Lark."""
    json_object: bool | None = None


@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when an answer ends. Names and defaults are those of vLLM.

    Raises:
        ValueError: a field has an invalid value, or is one that Ullage does not support.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """Most tokens of an answer, or None for as many as the context has room for."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Number of likeliest tokens to return at each position, 0 to 20. The chosen one is added."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    """Words that an answer must not complete."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt. The prompt is computed without cached KV."""

    # Fields that Ullage does not support, with the only values that it takes.
    flat_logprobs: bool = False
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: Sequence[Any] | None = None
    guided_decoding: None = None
    repetition_detection: None = None
    output_kind: None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields.

        Raises:
            ValueError: a field has an invalid value, or is one that Ullage does not support.
        """
        completion_request(self)

    def body(self) -> dict[str, Any]:
        """Return the fields of an OpenAI body that the parameters make, without logprobs.

        Raises:
            ValueError: a field is one that Ullage does not support.
        """
        for name, (neutral, remedy) in _UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise ValueError(f"{name} {value!r} is not supported; {remedy}")

        names = [each.name for each in fields(self)]
        values = {name: getattr(self, name) for name in names if name not in _SEPARATE}
        return {name: value for name, value in values.items() if value is not None}


_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "flat_logprobs": ((False,), "leave it out: logprobs are a dict for each token"),
    "detokenize": ((True,), "leave it out: answers have text and token_ids"),
    "spaces_between_special_tokens": ((True,), "leave it out"),
    "logits_processors": (((), []), "use logit_bias, allowed_token_ids or structured_outputs"),
    "guided_decoding": ((), "set structured_outputs, which has the same fields"),
    "repetition_detection": ((), "use repetition_penalty or frequency_penalty"),
    "output_kind": ((), "leave it out: answers are returned as a whole"),
    "extra_args": (({},), "leave it out"),
}
"""Unsupported fields, with the values that have no effect, and the remedy."""

_SEPARATE = {*_UNSUPPORTED, "logprobs"}


def completion_request(params: SamplingParams | None) -> Request:
    """Return a request whose prompt is not yet set.

    Args:
        params: the parameters, or None for the model's own with vLLM's `max_tokens`.

    Raises:
        ValueError: a parameter is invalid or not supported.
    """
    body = _body_of(params) | {"prompt": "?"}
    if params and params.logprobs is not None:
        body["logprobs"] = params.logprobs
    try:
        completion, _ = parse_completion(msgspec.json.encode(body))
        [request] = from_completion(completion)
        return _checked(request)
    except ServiceError as error:
        raise ValueError(error.message) from None


def chat_request(
    params: SamplingParams | None, messages: Sequence[Message], options: Mapping[str, Any]
) -> Request:
    """Return a request for the next message of a conversation.

    Args:
        params: as for `completion_request`.
        messages: the conversation, oldest message first.
        options: further fields of a chat body, such as tools. Those that are None are left out.

    Raises:
        ValueError: a parameter, a message or an option is invalid or not supported.
    """
    given = {name: value for name, value in options.items() if value is not None}
    body = _body_of(params) | given | {"messages": list(messages)}
    if params and params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs}
    try:
        chat, _ = parse_chat(msgspec.json.encode(body))
        return _checked(from_chat(chat))
    except ServiceError as error:
        raise ValueError(error.message) from None


def _body_of(params: SamplingParams | None) -> dict[str, Any]:
    return params.body() if params else {"max_tokens": DEFAULT_MAX_TOKENS}


def _checked(request: Request) -> Request:
    request.output.return_token_ids = True
    validate_request(request)
    return request
