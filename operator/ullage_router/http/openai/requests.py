"""Converts an OpenAI body to the GenerateRequest that HTTP and gRPC share."""

import re
from collections.abc import Callable, Sequence

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.limits import MAX_BEAM_WIDTH
from ullage_common.wire.validation import invalid_value
from ullage_router.files.documents import Documents
from ullage_router.http.openai.conversation import set_conversation
from ullage_router.http.openai.decoding import (
    PIECE_BYTES,
    body_decoder,
    decode_field,
    long_token_lists,
    parse_fields,
    utf8,
)
from ullage_router.http.openai.schemas import (
    MAX_UINT32,
    ChatRequest,
    Common,
    CompletionRequest,
    Prompt,
    ResponseFormat,
    StructuredOutputs,
)

Request = inference_pb2.GenerateRequest
Grammar = inference_pb2.Grammar

_MAX_TOKEN_DIGITS = len(str(MAX_UINT32))
_CHAT = body_decoder(ChatRequest)
_COMPLETION = body_decoder(CompletionRequest)
_PROMPT = msgspec.json.Decoder(Prompt)
_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SCHEMA = re.compile(r"\s*(\{|true\b|false\b)")
"""Matches the beginning of a JSON Schema, which is an object or a boolean."""
_FORMATS = "text, json_object, json_schema"
_UNSUPPORTED_FORMS = {
    "structural_tag": "null; a grammar can say the same",
    "whitespace_pattern": "null; JSON is always compact",
    "disable_additional_properties": "false; set additionalProperties: false in the schema",
}
"""Fields of `structured_outputs` that are refused, with the remedy."""


MAX_PROMPTS = 128
"""Maximum number of prompts in one completion request."""


def parse_chat(body: bytes) -> tuple[ChatRequest, tuple[str, ...]]:
    """Decode the body of a chat request. Return it with the names of its unknown fields.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    return parse_fields(_CHAT, body)


def parse_completion(body: bytes) -> tuple[CompletionRequest, tuple[str, ...]]:
    """Decode the body of a completion request. Return it with the names of its unknown fields.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    return parse_fields(_COMPLETION, body)


def from_chat(chat: ChatRequest, documents: Documents | None = None) -> Request:
    """Convert a chat body to a GenerateRequest. This removes the messages from the body.

    Args:
        chat: The body.
        documents: The files that the body names, or None if the service stores no files.

    Raises:
        ServiceError: A field is invalid. The error names the field.
    """
    request = from_common(chat, chat.max_completion_tokens or chat.max_tokens)

    # Set even when empty, so that the error names `messages` rather than the missing input.
    request.messages.SetInParent()
    set_conversation(request.messages, chat, documents)
    if chat.add_special_tokens:
        raise invalid_value(
            "add_special_tokens", True, "false: the chat template writes the special tokens"
        )

    if chat.top_logprobs and not chat.logprobs:
        raise invalid_value(
            "top_logprobs", chat.top_logprobs, "0, or any up to 20 with logprobs: true"
        )
    if chat.logprobs:
        request.output.top_logprobs = chat.top_logprobs or 0
    request.output.echo = bool(chat.echo)
    return request


def from_completion(completion: CompletionRequest) -> list[Request]:
    """Convert a completion body to one GenerateRequest for each of its prompts.

    Raises:
        ServiceError: A field is invalid. The error names the field.
    """
    if completion.max_tokens == 0 and not completion.echo:
        raise invalid_value("max_tokens", 0, "at least 1, or 0 with echo: true")
    # The engine generates a token behind the prompt, which is not returned.
    request = from_common(completion, 1 if completion.max_tokens == 0 else completion.max_tokens)
    request.omit_special_tokens = completion.add_special_tokens is False

    if completion.logprobs is not None:
        request.output.top_logprobs = completion.logprobs
        if completion.echo:
            count = max(completion.logprobs, completion.prompt_logprobs or 0)
            request.output.prompt_logprobs = count
    request.output.echo = bool(completion.echo)
    return _with_prompts(request, completion.prompt)


def check_truncation(most: int | None) -> None:
    """Check the number of tokens to which a prompt is truncated.

    Raises:
        ServiceError: The number is 0, with which no prompt would be left.
    """
    if most == 0:
        raise invalid_value("truncate_prompt_tokens", 0, "-1, or at least 1")


def from_common(common: Common, max_tokens: int | None) -> Request:
    """Convert the fields that endpoints share to a GenerateRequest without its input.

    Raises:
        ServiceError: A field is invalid. The error names the field.
    """
    if common.stream and common.prompt_logprobs is not None:
        raise invalid_value("prompt_logprobs", common.prompt_logprobs, "null with stream")
    check_truncation(common.truncate_prompt_tokens)
    # The smallest set of tokens, as `top_p: 0` means it, is the likeliest token alone.
    is_likeliest = common.top_p == 0
    top_k = 1 if is_likeliest else common.top_k
    sampling = inference_pb2.SamplingParams(
        temperature=common.temperature,
        top_p=None if is_likeliest else common.top_p,
        # All tokens: -1 in vLLM, 0 on the wire.
        top_k=None if top_k is None else min(max(top_k, 0), MAX_UINT32),
        min_p=common.min_p,
        repetition_penalty=common.repetition_penalty,
        presence_penalty=common.presence_penalty,
        frequency_penalty=common.frequency_penalty,
        # OpenAI's seeds are signed, the wire's are unsigned.
        seed=None if common.seed is None else common.seed % (1 << 64),
        logit_bias=logit_bias(common),
        allowed_token_ids=common.allowed_token_ids or (),
        bad_words=[utf8("bad_words", word) for word in common.bad_words or ()],
    )

    stop = inference_pb2.StopConditions(
        max_tokens=None if max_tokens is None else min(max_tokens, MAX_UINT32),
        stop_token_ids=common.stop_token_ids or (),
        ignore_eos=bool(common.ignore_eos),
        min_tokens=common.min_tokens or 0,
    )
    texts = [common.stop] if isinstance(common.stop, str) else common.stop or []
    stop.stop_strings.extend(utf8("stop", text) for text in texts)

    output = inference_pb2.OutputOptions(
        return_token_ids=bool(common.return_token_ids),
        special_tokens=common.skip_special_tokens is False,
        include_stop=bool(common.include_stop_str_in_output),
        prompt_logprobs=common.prompt_logprobs,
    )
    return Request(
        model=utf8("model", common.model),
        session_id=utf8("session_id", common.session_id or ""),
        cache_salt=utf8("cache_salt", common.cache_salt or ""),
        sampling=sampling,
        stop=stop,
        output=output,
        samples=_samples(common),
        grammar=_grammar(common),
        truncate_prompt_tokens=common.truncate_prompt_tokens or 0,
    )


def logit_bias(common: Common) -> dict[int, float]:
    """Return the logit biases by token id.

    Raises:
        ServiceError: A key is not a token id.
    """
    biases = {}
    for key, value in (common.logit_bias or {}).items():
        if not _is_token(key):
            raise invalid_value(f"logit_bias[{key[:20]!r}]", value, "keys that are token ids")
        biases[int(key)] = value
    return biases


def _is_token(key: str) -> bool:
    is_number = key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_DIGITS
    return is_number and int(key) <= MAX_UINT32


def _samples(common: Common) -> inference_pb2.Samples | None:
    """Return the settings for several answers or beam search, or None if neither is requested.

    Raises:
        ServiceError: A field is invalid. The error names the field.
    """
    if common.use_beam_search:
        return _beam_search(common)
    if common.length_penalty not in (None, 1.0):
        possible = "1, or another with use_beam_search: true"
        raise invalid_value("length_penalty", common.length_penalty, possible)
    if common.n is None and common.best_of is None:
        return None
    if common.stream and (common.best_of or 1) > (common.n or 1):
        raise invalid_value("best_of", common.best_of, f"{common.n or 1} with stream, more without")
    return inference_pb2.Samples(n=common.n, best_of=common.best_of)


def _beam_search(common: Common) -> inference_pb2.Samples:
    n = common.n or 1
    name, width = ("n", n) if common.best_of is None else ("best_of", common.best_of)
    if not n <= width <= MAX_BEAM_WIDTH:
        least = 1 if name == "n" else min(n, MAX_BEAM_WIDTH)
        raise invalid_value(name, width, f"{least} to {MAX_BEAM_WIDTH} with use_beam_search")
    if common.stream:
        raise invalid_value(
            "stream", True, "false with use_beam_search, whose end decides its beginning"
        )
    beam = inference_pb2.BeamSearch(width=width, length_penalty=common.length_penalty)
    return inference_pb2.Samples(n=n, beam=beam)


def _grammar(common: Common) -> Grammar | None:
    """Return the grammar that the body requests, or None if any text is allowed.

    Raises:
        ServiceError: The grammar is incomplete, or there are two grammars.
    """
    if common.response_format is None and common.structured_outputs is None:
        return None

    asked = common.structured_outputs or StructuredOutputs()
    for name, remedy in _UNSUPPORTED_FORMS.items():
        if value := getattr(asked, name):
            raise invalid_value(f"structured_outputs.{name}", f"{value!r:.60}", remedy)
    forms: dict[str, Callable[[], Grammar | None]] = {
        "response_format": lambda: _from_format(common.response_format),
        "structured_outputs.json": lambda: _from_schema("structured_outputs.json", asked.json),
        "structured_outputs.json_object": lambda: _json_object() if asked.json_object else None,
        "structured_outputs.regex": lambda: _from_regex(asked.regex),
        "structured_outputs.choice": lambda: _from_choice(asked.choice),
        "structured_outputs.grammar": lambda: _from_lark(asked.grammar),
    }

    first = ""
    chosen = None
    for field, make in forms.items():
        option = make()
        if option is None:
            continue
        if chosen is not None:
            raise invalid_value(field, "set", f"only one of {first} and {field}")
        first = field
        chosen = option
    return chosen


def _from_format(asked: ResponseFormat | None) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _json_object()
    if asked.type != "json_schema":
        raise invalid_value("response_format.type", asked.type, _FORMATS)

    field = "response_format.json_schema"
    form = asked.json_schema
    if form is None:
        raise invalid_value(field, "missing", "an object with name and schema")
    if not _SCHEMA_NAME.fullmatch(form.name):
        possible = "1 to 64 letters, digits, underscores and dashes"
        raise invalid_value(f"{field}.name", form.name, possible)

    schema = _from_schema(f"{field}.schema", form.schema)
    if schema is None:
        raise invalid_value(f"{field}.schema", "missing", "a JSON Schema")
    return schema


def _json_object() -> Grammar:
    return Grammar(json_object=inference_pb2.JsonObject())


def _from_schema(field: str, raw: msgspec.Raw) -> Grammar | None:
    """Return the grammar for a JSON Schema, or None if the schema is null.

    The schema may be JSON, or a JSON string that contains it.
    """
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise invalid(field, f"{field} is not valid UTF-8; encode it as UTF-8") from error
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    if text == "null":
        return None

    if not _SCHEMA.match(text):
        raise invalid_value(field, text[:100], "a JSON Schema: an object, true or false")
    return Grammar(json_schema=text)


def _from_choice(texts: list[str] | None) -> Grammar | None:
    return None if texts is None else Grammar(choice=inference_pb2.Choice(texts=texts))


def _from_regex(text: str | None) -> Grammar | None:
    return None if text is None else Grammar(regex=text)


def _from_lark(text: str | None) -> Grammar | None:
    return None if text is None else Grammar(lark=text)


def _with_prompts(request: Request, raw: msgspec.Raw) -> list[Request]:
    """Return a copy of the request for each prompt: a text, token ids, or a list of such prompts.

    Raises:
        ServiceError: A prompt is invalid, or there are none or too many.
    """
    prompts = _prompts(raw)
    if len(prompts) > MAX_PROMPTS:
        raise invalid_value("prompt", f"a list of {len(prompts)}", f"1 to {MAX_PROMPTS} prompts")
    if len(prompts) > 1:
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise invalid_value(f"prompt[{i}]", "empty", "a text or a list of tokens")

    requests = [request]
    for _ in prompts[1:]:
        copy = Request()
        copy.CopyFrom(request)
        requests.append(copy)
    for each, prompt in zip(requests, prompts, strict=True):
        if isinstance(prompt, str):
            each.text = utf8("prompt", prompt)
        else:
            set_tokens(each, prompt)
    return requests


def _prompts(raw: msgspec.Raw) -> Sequence[str | Sequence[int]]:
    """Decode the prompts of a completion body. At least one is returned."""
    lists = long_token_lists(raw, "prompt")
    if lists:
        return lists
    prompt = decode_field(_PROMPT, raw, "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [[token for token in prompt if isinstance(token, int)]]
    prompts = [item for item in prompt if not isinstance(item, int)]
    if len(prompts) < len(prompt):
        raise invalid("prompt", "prompt mixes tokens and prompts; send texts or lists of tokens")
    return prompts


def set_tokens(request: Request, ids: Sequence[int]) -> None:
    """Set the prompt's token ids in chunks, since the GIL is held while a chunk is copied."""
    request.token_ids.SetInParent()
    for start in range(0, len(ids), PIECE_BYTES):
        request.token_ids.ids.extend(ids[start : start + PIECE_BYTES])
