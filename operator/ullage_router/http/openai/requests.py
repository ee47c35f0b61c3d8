"""Converts an OpenAI body to the GenerateRequest that HTTP and gRPC share: its conversation with
images and tools, its sampling parameters, and its grammar.
"""

import functools
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.json_size import BODY_LIMITS, JsonCounter
from ullage_common.wire.limits import MAX_BEAM_WIDTH, MAX_PROMPT_TOKENS, MAX_TOOLS_BYTES
from ullage_common.wire.validation import check_calls, invalid_value
from ullage_router.http.openai.schemas import (
    MAX_UINT32,
    NULL,
    ChatMessage,
    ChatRequest,
    Common,
    CompletionRequest,
    ContentPart,
    NamedTool,
    Prompt,
    ResponseFormat,
    StructuredOutputs,
    Token,
    ToolCall,
    max_field_bytes,
)
from ullage_router.intake import INLINE_BYTES

Grammar = inference_pb2.Grammar

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TYPES = "text, json_object, json_schema"


_MAX_TOKEN_DIGITS = len(str(MAX_UINT32))


def logit_bias(common: Common) -> dict[int, float]:
    """Return biases by token; raises ServiceError for a key that is no token."""
    biases = {}
    for key, value in (common.logit_bias or {}).items():
        if not _is_token(key):
            raise invalid_value(f"logit_bias[{key[:20]!r}]", value, "keys that are token ids")
        biases[int(key)] = value
    return biases


def _is_token(key: str) -> bool:
    is_number = key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_DIGITS
    return is_number and int(key) <= MAX_UINT32


def grammar(common: Common) -> Grammar | None:
    """The grammar that the body asks for; None: any text.

    Raises:
        ServiceError: it is incomplete, or there are two.
    """
    if common.response_format is None and common.structured_outputs is None:
        return None
    asked = common.structured_outputs or StructuredOutputs()
    forms: dict[str, Callable[[], Grammar | None]] = {
        "response_format": lambda: _from_format(common.response_format),
        "structured_outputs.json": lambda: _from_schema("structured_outputs.json", asked.json),
        "structured_outputs.json_object": lambda: _object() if asked.json_object else None,
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
        return _object()
    if asked.type != "json_schema":
        raise invalid_value("response_format.type", asked.type, _TYPES)
    field = "response_format.json_schema"
    form = asked.json_schema
    if form is None:
        raise invalid_value(field, "missing", "an object with name and schema")
    if not _NAME.fullmatch(form.name):
        possible = "1 to 64 letters, digits, underscores and dashes"
        raise invalid_value(f"{field}.name", form.name, possible)
    schema = _from_schema(f"{field}.schema", form.schema)
    if schema is None:
        raise invalid_value(f"{field}.schema", "missing", "a JSON Schema")
    return schema


def _object() -> Grammar:
    return Grammar(json_object=inference_pb2.JsonObject())


def _from_schema(field: str, raw: msgspec.Raw) -> Grammar | None:
    """A schema as it stands in the body, or in a string there; None for null."""
    try:
        text = bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise invalid(field, f"{field} is not valid UTF-8; encode it as UTF-8") from error
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    return None if text == "null" else Grammar(json_schema=text)


def _from_choice(texts: list[str] | None) -> Grammar | None:
    return None if texts is None else Grammar(choice=inference_pb2.Choice(texts=texts))


def _from_regex(text: str | None) -> Grammar | None:
    return None if text is None else Grammar(regex=text)


def _from_lark(text: str | None) -> Grammar | None:
    return None if text is None else Grammar(lark=text)


_MODES = {
    "none": inference_pb2.TOOL_MODE_NONE,
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}
_NOTHING = re.compile(r"null|\[\s*\]")
_CHOICES = 'none, auto, required, {"type": "function", "function": {"name": ...}}'


def set_conversation(conversation: inference_pb2.Messages, chat: ChatRequest) -> None:
    """Set a conversation from a chat body and take its messages out: copies would be megabytes.

    Raises:
        ServiceError: INVALID_ARGUMENT, which names the field.
    """
    check_calls(sum(len(message.tool_calls or ()) for message in chat.messages))
    given = chat.messages[::-1]
    chat.messages.clear()
    for i in range(len(given)):
        _add_message(conversation, f"messages[{i}]", given.pop())
    conversation.template_arguments = _template_arguments(chat)
    if (tools := _tools(chat)) is not None:
        conversation.tools.CopyFrom(tools)


def _template_arguments(chat: ChatRequest) -> str:
    """vLLM's variables of the template, among which OpenAI has a name for one."""
    if not chat.chat_template_kwargs and chat.reasoning_effort is None:
        return ""
    arguments = dict(chat.chat_template_kwargs or {})
    if chat.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", chat.reasoning_effort)
    try:
        return msgspec.json.encode(arguments).decode()
    except (UnicodeEncodeError, RecursionError) as error:
        message = "chat_template_kwargs is nested too deeply or not valid Unicode; send less"
        raise invalid("chat_template_kwargs", message) from error


def utf8(field: str, text: str) -> str:
    """The text, which must be without unpaired surrogates: they have no UTF-8."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"{field} has an unpaired surrogate; send valid Unicode"
        raise invalid(field, message) from error
    return text


def _tools(chat: ChatRequest) -> inference_pb2.Tools | None:
    mode, name = _choice(chat.tool_choice)
    if len(chat.tools) > MAX_TOOLS_BYTES:
        permitted = f"at most {MAX_TOOLS_BYTES} bytes"
        raise invalid_value("tools", f"{len(chat.tools)} bytes", permitted)
    try:
        functions = bytes(chat.tools).decode()
    except UnicodeDecodeError as error:
        raise invalid("tools", "tools is not valid UTF-8; encode it as UTF-8") from error
    if _NOTHING.fullmatch(functions):
        if mode in (inference_pb2.TOOL_MODE_REQUIRED, inference_pb2.TOOL_MODE_NAMED):
            raise invalid_value(
                "tool_choice", "given without tools", "none or auto, or any with tools"
            )
        return None
    single = chat.parallel_tool_calls is False
    return inference_pb2.Tools(functions=functions, mode=mode, name=name, single_call=single)


def _choice(choice: str | NamedTool | None) -> tuple[inference_pb2.ToolMode, str]:
    if choice is None:
        return inference_pb2.TOOL_MODE_AUTO, ""
    if isinstance(choice, str):
        if choice not in _MODES:
            raise invalid_value("tool_choice", choice, _CHOICES)
        return _MODES[choice], ""
    if choice.type != "function" or not choice.function:
        raise invalid_value("tool_choice.type", choice.type, _CHOICES)
    return inference_pb2.TOOL_MODE_NAMED, utf8("tool_choice.function.name", choice.function.name)


def _add_message(conversation: inference_pb2.Messages, field: str, message: ChatMessage) -> None:
    for name, value in (("function_call", message.function_call), ("audio", message.audio)):
        if value != NULL:
            remedy = "tool_calls" if name == "function_call" else "text"
            raise invalid(f"{field}.{name}", f"{field}.{name} is not supported; send {remedy}")
    added = conversation.messages.add(
        role=utf8(f"{field}.role", message.role),
        content=_content(f"{field}.content", message),
        tool_call_id=utf8(f"{field}.tool_call_id", message.tool_call_id or ""),
        name=utf8(f"{field}.name", message.name or ""),
        reasoning=utf8(f"{field}.reasoning_content", message.reasoning_content or ""),
    )
    for j, call in enumerate(message.tool_calls or ()):
        _add_call(added, f"{field}.tool_calls[{j}]", call)


def _add_call(message: inference_pb2.Message, field: str, call: ToolCall) -> None:
    if call.type != "function":
        raise invalid_value(f"{field}.type", call.type, "function")
    message.tool_calls.add(
        id=utf8(f"{field}.id", call.id),
        name=utf8(f"{field}.function.name", call.function.name),
        arguments=utf8(f"{field}.function.arguments", call.function.arguments),
    )


def _content(field: str, message: ChatMessage) -> str:
    if message.content is None:
        if message.role == "assistant" and (message.tool_calls or message.reasoning_content):
            return ""
        raise invalid_value(field, "null", "a string or a list of text parts")
    if isinstance(message.content, str):
        return utf8(field, message.content)
    parts = enumerate(message.content)
    return "".join(_part(f"{field}[{j}]", part, message.role) for j, part in parts)


def _part(field: str, part: ContentPart, role: str) -> str:
    """Text; of an assistant a refusal too, which is its words as well."""
    is_refusal = part.type == "refusal" and role == "assistant"
    if part.type != "text" and not is_refusal:
        raise invalid_value(f"{field}.type", part.type, "text")
    text = part.refusal if is_refusal else part.text
    if text is None:
        raise invalid_value(f"{field}.{part.type}", "missing", "a string")
    return utf8(f"{field}.{part.type}", text)


Request = inference_pb2.GenerateRequest


class _Body(Protocol):
    def refused(self) -> tuple[str, object] | None: ...


T = TypeVar("T", bound=_Body)
V = TypeVar("V")

# What OpenAI calls deprecated, by what it calls the successor.
SUCCESSORS = {
    "functions": "tools",
    "function_call": "tool_choice",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}

_AT = re.compile(r"^(?P<what>.*) - at `(?P<key>key in )?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_HALF_PAIR_BYTES = 11
"""Most bytes from an escaped half to the end of a body that msgspec takes for cut short: those of
the half, and fewer than the other half has."""
_HALF_PAIR_ERRORS = ("surrogate pair", "unexpected end of hex escape")
"""Parts of what msgspec says of half a pair; the second of one in a field that it skips."""
_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Raise ServiceError INVALID_ARGUMENT that names the field."""
    return parse(_CHAT, body)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raise ServiceError INVALID_ARGUMENT that names the field."""
    return parse(_COMPLETION, body)


def from_chat(chat: ChatRequest) -> Request:
    """Convert a chat body to the wire's form."""
    request = _from_common(chat, chat.max_completion_tokens or chat.max_tokens)
    # Set even when empty, so that the check names `messages` and not the missing input.
    request.messages.SetInParent()
    set_conversation(request.messages, chat)
    if chat.top_logprobs and not chat.logprobs:
        raise invalid_value(
            "top_logprobs", chat.top_logprobs, "0, or any up to 20 with logprobs: true"
        )
    if chat.logprobs:
        request.output.top_logprobs = chat.top_logprobs or 0
    request.output.echo = bool(chat.echo)
    return request


def from_completion(completion: CompletionRequest) -> Request:
    """Convert a completion body to the wire's form."""
    _check_no_chat(completion)
    request = _from_common(completion, completion.max_tokens)
    _set_prompt(request, completion.prompt)
    if completion.logprobs is not None:
        if completion.echo:
            raise invalid_value("logprobs", completion.logprobs, "null together with echo")
        request.output.top_logprobs = completion.logprobs
    request.output.echo = bool(completion.echo)
    return request


def _check_no_chat(completion: CompletionRequest) -> None:
    for name in ("chat_template_kwargs", "reasoning_effort"):
        if getattr(completion, name):
            raise invalid(name, f"{name} is for chats; leave it out or use /v1/chat/completions")


def parse(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body; raise ServiceError INVALID_ARGUMENT that names the field."""
    try:
        if len(body) <= INLINE_BYTES:
            parsed = decoder.decode(body)
        else:
            parsed = _decode_long(decoder.type, body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from error
    except UnicodeDecodeError as error:
        raise invalid("body", "body: the JSON is not valid UTF-8; encode it as UTF-8") from error
    except msgspec.DecodeError as error:
        if _is_half_pair(str(error), body):
            message = "body: a string has half a surrogate pair; escape both halves, or send UTF-8"
            raise invalid("body", message) from error
        raise invalid("body", f"body: {error}; send one JSON object") from error
    except RecursionError as error:
        raise invalid("body", "body: the JSON is nested too deeply; flatten it") from error
    if refused := parsed.refused():
        name, value = refused
        remedy = f"send {SUCCESSORS[name]}" if name in SUCCESSORS else "leave it out"
        raise invalid(name, f"{name} is {_short(value)}, which is not supported; {remedy}")
    return parsed


def _decode_long(kind: type[T], body: bytes) -> T:
    """Decode a body field by field, each of bounded size: a parser holds the interpreter's lock to
    its end, and checks the length of a list only when it has built all of it.

    Raises:
        ServiceError: a field is wrong or too long, or the body has too many parts.
        msgspec.DecodeError: the body is no JSON object.
    """
    JsonCounter("body", BODY_LIMITS).add(body)
    unparsed, decoders = _field_decoders(kind)
    given = unparsed.decode(body)
    values = {}
    for name, decoder in decoders.items():
        raw = getattr(given, name)
        if raw is NULL:  # the field is absent
            continue
        limit = max_field_bytes(name)
        if limit is not None and len(raw) > limit:
            raise invalid(name, f"{name} has {len(raw)} bytes of JSON; send at most {limit}")
        if len(raw) < len(body) // 2:
            raw = raw.copy()  # or what is decoded of it would keep the whole body
        values[name] = raw if decoder is None else decode_field(decoder, raw, name)
    for field in msgspec.structs.fields(cast(type[msgspec.Struct], kind)):
        if field.required and field.name not in values:
            raise invalid(field.name, f"{field.name} is missing; it is required")
    return kind(**values)


_Decoders = Mapping[str, msgspec.json.Decoder[object] | None]


@functools.cache
def _field_decoders(kind: type) -> tuple[msgspec.json.Decoder[msgspec.Struct], _Decoders]:
    """Return the decoder of a body into raw fields, and each field's decoder; None if it has
    none."""
    fields = msgspec.structs.fields(kind)
    unparsed = msgspec.defstruct("Unparsed", [(f.name, msgspec.Raw, NULL) for f in fields])
    decoders = {
        field.name: None if field.type is msgspec.Raw else msgspec.json.Decoder(field.type)
        for field in fields
    }
    return msgspec.json.Decoder(unparsed), decoders


def decode_field(decoder: msgspec.json.Decoder[V], raw: msgspec.Raw, name: str) -> V:
    """Decode a field; raise ServiceError INVALID_ARGUMENT that names the place in it."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), name) from error


def _is_half_pair(text: str, body: bytes) -> bool:
    """Return whether a field escapes half a surrogate pair, which msgspec reports as a truncated
    body where it is at the end.

    Args:
        text: the message of msgspec's error.
    """
    if "truncated" not in text:
        return any(words in text for words in _HALF_PAIR_ERRORS)
    half = _HALF_PAIR.search(body, max(0, len(body) - _HALF_PAIR_BYTES))
    if half is None:
        return False
    before = body[: half.start() + 1]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _validation_error(text: str, name: str = "") -> ServiceError:
    """Return the ServiceError for an error of msgspec.

    Args:
        name: of the field that was decoded; empty: the whole body was.
    """
    if match := _AT.match(text):
        path = match["path"]
        dot = "." if name and path and not path.startswith("[") else ""
        field = f"{name}{dot}{path}" or "body"
        return invalid(field, f"{field}: {_lower(match['what'])}")
    if not name and (match := _MISSING.search(text)):
        return invalid(match["name"], f"{match['name']} is missing; it is required")
    return invalid(name or "body", f"{name or 'body'}: {_lower(text)}")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _short(value: object) -> str:
    """Return the JSON of a value, truncated if it is long."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _from_common(common: Common, max_tokens: int | None) -> Request:
    sampling = inference_pb2.SamplingParams(
        temperature=common.temperature,
        top_p=common.top_p,
        # vLLM says -1 for all.
        top_k=None if common.top_k is None else min(max(common.top_k, 0), MAX_UINT32),
        min_p=common.min_p,
        repetition_penalty=common.repetition_penalty,
        presence_penalty=common.presence_penalty,
        frequency_penalty=common.frequency_penalty,
        # OpenAI's seeds are signed, the wire's are not.
        seed=None if common.seed is None else common.seed % (1 << 64),
        logit_bias=logit_bias(common),
    )
    stop = inference_pb2.StopConditions(
        max_tokens=None if max_tokens is None else min(max_tokens, MAX_UINT32),
        stop_token_ids=common.stop_token_ids or (),
        ignore_eos=bool(common.ignore_eos),
        min_tokens=common.min_tokens or 0,
    )
    texts = [common.stop] if isinstance(common.stop, str) else common.stop or []
    stop.stop_strings.extend(utf8("stop", text) for text in texts)
    output = inference_pb2.OutputOptions(return_token_ids=bool(common.return_token_ids))
    return Request(
        model=utf8("model", common.model),
        session_id=utf8("session_id", common.session_id or ""),
        cache_salt=utf8("cache_salt", common.cache_salt or ""),
        sampling=sampling,
        stop=stop,
        output=output,
        samples=_samples(common),
        grammar=grammar(common),
    )


def _samples(common: Common) -> inference_pb2.Samples | None:
    """None: one answer."""
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


PIECE_BYTES = 64 << 10
"""Bytes of a list of token ids, and ids of one, that are handled at a time."""

_PROMPT = msgspec.json.Decoder(Prompt)
_TOKENS = msgspec.json.Decoder(list[Token])


def _set_prompt(request: Request, raw: msgspec.Raw) -> None:
    """Set the prompt from a text, token ids, or a list of one of these."""
    lists = long_token_lists(raw, "prompt")
    if lists is not None and len(lists) == 1:
        set_tokens(request, lists[0])
        return
    prompt = decode_field(_PROMPT, raw, "prompt")
    if isinstance(prompt, str):
        request.text = utf8("prompt", prompt)
        return
    if all(isinstance(item, int) for item in prompt):
        set_tokens(request, [token for token in prompt if isinstance(token, int)])
        return
    if len(prompt) > 1:
        raise invalid_value("prompt", f"a list of {len(prompt)} prompts", "one prompt a request")
    only = prompt[0]
    if isinstance(only, list):
        set_tokens(request, only)
    else:
        request.text = utf8("prompt", str(only))


def long_token_lists(raw: msgspec.Raw, field: str) -> "list[array[int]] | None":
    """Return the token ids of a long JSON list of them, or of each list in it, four bytes an id.

    Returns:
        None if the JSON is short or of another form, or has an error that the full decoder names.

    Raises:
        ServiceError: there are more than any prompt has.
    """
    text = bytes(raw) if len(raw) > INLINE_BYTES else b""
    if not text.startswith(b"[") or b'"' in text:
        return None
    text = text[1:-1].strip()
    if text.count(b",") >= MAX_PROMPT_TOKENS:
        message = f"{field}: expected `array` of length <= {MAX_PROMPT_TOKENS}"
        raise invalid(field, message)
    if not text.startswith(b"["):
        ids = _token_ids(text)
        return None if ids is None else [ids]

    lists = []
    for before in text.removesuffix(b"]").split(b"]"):
        gap, bracket, inner = before.partition(b"[")
        ids = _token_ids(inner)
        if gap.strip() not in (b"", b",") or not bracket or ids is None:
            return None
        lists.append(ids)
    return lists


def _token_ids(text: bytes) -> "array[int] | None":
    """Return the ids of a list without its brackets; None if an item is no token id."""
    ids = array("I")
    start = 0
    while start < len(text):
        comma = text.find(b",", start + PIECE_BYTES)
        end = len(text) if comma < 0 else comma
        try:
            ids.extend(_TOKENS.decode(b"[%b]" % text[start:end]))
        except msgspec.DecodeError:
            return None
        start = end + 1
    return ids


def set_tokens(request: Request, ids: Sequence[int]) -> None:
    """Set the prompt in pieces, since each is copied while others wait."""
    request.token_ids.SetInParent()
    for start in range(0, len(ids), PIECE_BYTES):
        request.token_ids.ids.extend(ids[start : start + PIECE_BYTES])
