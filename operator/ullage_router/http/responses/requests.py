"""Converts the body of a request to /v1/responses to a GenerateRequest."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.limits import MAX_MESSAGES
from ullage_common.wire.validation import check_calls, invalid_value
from ullage_router.files.documents import Documents
from ullage_router.http.long_bodies import LONG_BODY_BYTES
from ullage_router.http.openai.decoding import body_decoder, parse_fields, utf8
from ullage_router.http.openai.requests import from_common
from ullage_router.http.openai.responses import JSON
from ullage_router.http.openai.schemas import Common, JsonSchema, ResponseFormat
from ullage_router.http.responses.input_items import encode_items
from ullage_router.http.responses.items import add_items
from ullage_router.http.responses.schemas import (
    ResponseCreateEvent,
    ResponsesRequest,
    TextFormat,
)
from ullage_router.http.responses.store import (
    ConnectionResponses,
    ResponseStore,
    StoredResponse,
)
from ullage_router.http.responses.tools import (
    as_answered,
    full_name,
    functions_of,
    read_tools,
    to_functions,
    utf8_json,
)

ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, ENCRYPTED_REASONING)
"""Values of `include`. Reasoning is sent as it is, so there is none to encrypt."""
_TRUNCATIONS = ("disabled", "auto")
_SUMMARIES = ("auto", "none")
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling parameters that a response repeats, with the API's defaults."""
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
_BODY = body_decoder(ResponsesRequest)
_MESSAGE = body_decoder(ResponseCreateEvent)
_SHARED = frozenset(Common.__struct_fields__) & frozenset(ResponsesRequest.__struct_fields__)
"""Fields that have the same name and meaning in chats."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A converted request, and what is needed to answer it."""

    request: inference_pb2.GenerateRequest
    is_streamed: bool
    prompt_cache_key: str
    repeated: JSON
    """The fields of the request that the response repeats."""
    conversation: bytes
    """Serialized `Messages` without the instructions. Empty if the response is not to be kept.

    Long bodies and conversations are not stored, since requests that continue them would avoid the
    turns that long bodies take.
    """
    input_items: bytes
    """JSON list of the items that the response answers. Empty if it is not to be kept."""
    is_stored: bool
    """Whether the response is stored, as opposed to kept for its WebSocket only."""
    previous: StoredResponse | None
    """The response that the request continues."""
    namespaces: Mapping[str, str]
    """Namespaces of the functions that have one, by the function's name in the conversation."""
    custom_tools: frozenset[str]
    """Names in the conversation of the tools whose input is text instead of JSON."""
    kept_bytes: int
    """Size in bytes of what stays in memory until the response is complete."""
    ignored: tuple[str, ...]
    """Names of the body's unknown fields."""


def read_request(
    data: bytes,
    tenant: str,
    store: ResponseStore | ConnectionResponses,
    *,
    drops_turns: bool,
    documents: Documents | None = None,
) -> Asked:
    """Decode the body of a request to /v1/responses, and convert it.

    Args:
        data: The body, or the message of a WebSocket.
        tenant: Name of the tenant.
        store: The responses that may be continued. Those of a WebSocket if `data` is a message.
        drops_turns: Whether this service drops old turns of conversations that are too long.
        documents: The files that the body names, or None if the service stores no files.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    is_message = isinstance(store, ConnectionResponses)
    body: ResponsesRequest
    if is_message:
        event, ignored = parse_fields(_MESSAGE, data)
        body = event
    else:
        body, ignored = parse_fields(_BODY, data)
    _check_options(body, drops_turns=drops_turns)
    previous = _previous(body, tenant, store)
    is_stored = _is_stored(body, store)
    is_kept = (is_stored or is_message) and len(data) <= LONG_BODY_BYTES
    # The conversion empties the list. Copies of long ones would take megabytes.
    given = list(body.input) if is_kept and not isinstance(body.input, str) else body.input

    request = _without_input(body)
    messages = request.messages
    messages.SetInParent()
    if body.instructions:
        messages.messages.add(role="system", content=utf8("instructions", body.instructions))
    if previous:
        messages.MergeFromString(previous.conversation)
    if isinstance(body.input, str):
        messages.messages.add(role="user", content=utf8("input", body.input))
    else:
        add_items(messages, body.input, documents)
    if len(messages.messages) > MAX_MESSAGES:
        turns = f"a conversation with {len(messages.messages)} turns"
        raise invalid_value("input", turns, f"at most {MAX_MESSAGES} turns")
    check_calls(sum(len(message.tool_calls) for message in messages.messages))
    conversation = b""
    input_items = b""
    if is_kept and messages.ByteSize() <= LONG_BODY_BYTES:
        input_items = encode_items(given, previous)
        if len(input_items) > LONG_BODY_BYTES:
            input_items = b""
        else:
            conversation = _stored(body, messages)

    if arguments := _template_arguments(body):
        messages.template_arguments = utf8_json("chat_template_kwargs", arguments)
    tools = read_tools(body.tools)
    functions = to_functions(tools, body.tool_choice, body.parallel_tool_calls)
    if functions is not None:
        messages.tools.CopyFrom(functions)

    is_stored = is_stored and bool(conversation)
    repeated = _repeated(body, is_stored=is_stored)
    repeated["tools"] = msgspec.Raw(msgspec.json.encode([as_answered(tool) for tool in tools]))
    kept_bytes = len(conversation) + len(input_items)
    kept_bytes += sum(
        len(bytes(value)) for value in repeated.values() if isinstance(value, msgspec.Raw)
    )
    # Later requests of a conversation go to the engine that has its beginning in its cache.
    cache_key = body.prompt_cache_key or (previous.root if previous else "")
    namespaces = {
        full_name(namespace, tool.name or ""): namespace
        for namespace, tool in functions_of(tools)
        if namespace
    }
    custom_tools = frozenset(
        full_name(namespace, tool.name or "")
        for namespace, tool in functions_of(tools)
        if tool.type == "custom"
    )
    return Asked(
        request,
        bool(body.stream),
        cache_key,
        repeated,
        conversation,
        input_items,
        is_stored,
        previous,
        namespaces,
        custom_tools,
        kept_bytes,
        ignored,
    )


def _check_options(body: ResponsesRequest, *, drops_turns: bool) -> None:
    for value in body.include or ():
        if value not in _INCLUDES:
            raise invalid_value("include", value, ", ".join(_INCLUDES))
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise invalid_value(
            "top_logprobs", body.top_logprobs, f"0, or any up to 20 with include: [{LOGPROBS!r}]"
        )

    if body.truncation not in (None, *_TRUNCATIONS):
        raise invalid_value("truncation", body.truncation, ", ".join(_TRUNCATIONS))
    if body.truncation == "auto" and not drops_turns:
        message = (
            "truncation is auto, and this service drops no turns; leave it out, or add "
            "shrinkContext to spec.routing.ladder of the service"
        )
        raise invalid("truncation", message)
    if body.reasoning and body.reasoning.summary not in (None, *_SUMMARIES):
        raise invalid_value("reasoning.summary", body.reasoning.summary, ", ".join(_SUMMARIES))

    check_metadata(body.metadata)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Check the lengths of a client's own data.

    Raises:
        ServiceError: A key or a value is too long.
    """
    for key, value in (metadata or {}).items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            possible = (
                f"keys of at most {MAX_METADATA_KEY} and values of at most {MAX_METADATA_VALUE} "
                "characters"
            )
            raise invalid_value("metadata", f"{key[:20]}: {value[:20]}", possible)


def _is_stored(body: ResponsesRequest, store: ResponseStore | ConnectionResponses) -> bool:
    if store.is_enabled:
        return body.store is not False
    if body.store:
        raise invalid(
            "store",
            "store is true, and this service stores no responses; send false or leave it out, or "
            "set spec.routing.responses.enabled of the service to true",
        )
    return False


def _previous(
    body: ResponsesRequest, tenant: str, store: ResponseStore | ConnectionResponses
) -> StoredResponse | None:
    name = body.previous_response_id
    if not name:
        return None
    if not (store.is_enabled or isinstance(store, ConnectionResponses)):
        raise invalid(
            "previous_response_id",
            f"previous_response_id is {name[:60]}, and this service stores no responses; send the "
            "whole conversation as input, or set spec.routing.responses.enabled of the service",
        )
    stored = store.find(tenant, name)
    if stored is None:
        message = (
            f"previous_response_id is {name[:160]}, which is not stored here (any more); send the "
            "whole conversation as input"
        )
        raise invalid("previous_response_id", message, "PREVIOUS_RESPONSE_NOT_FOUND")
    return stored


def _without_input(body: ResponsesRequest) -> inference_pb2.GenerateRequest:
    """Convert the fields of a body, except its conversation and its tools."""
    fields = {name: getattr(body, name) for name in _SHARED}
    common = Common(**fields, response_format=_format(body.text.format if body.text else None))
    request = from_common(common, body.max_output_tokens)
    if LOGPROBS in (body.include or ()):
        request.output.top_logprobs = body.top_logprobs or 0
    return request


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    schema = JsonSchema(form.name or "", form.schema) if form.type == "json_schema" else None
    return ResponseFormat(form.type, schema)


def _stored(body: ResponsesRequest, messages: inference_pb2.Messages) -> bytes:
    """Return the serialized conversation without the instructions, which hold for one request."""
    turns = messages.messages[1:] if body.instructions else messages.messages
    return inference_pb2.Messages(messages=turns).SerializeToString()


def _template_arguments(body: ResponsesRequest) -> dict[str, object]:
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning and body.reasoning.effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning.effort)
    return arguments


def _repeated(body: ResponsesRequest, *, is_stored: bool) -> JSON:
    """Return the fields that a response repeats, with OpenAI's defaults. Long ones are encoded."""
    form = body.text.format if body.text else None
    choice = body.tool_choice
    options = body.reasoning
    reasoning = {"effort": options.effort if options else None, "summary": None}
    return {
        "instructions": msgspec.Raw(msgspec.json.encode(body.instructions)),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": body.safety_identifier,
        "store": is_stored,
        "text": msgspec.Raw(msgspec.json.encode({"format": _answered_format(form)})),
        "tool_choice": "auto" if choice is None else choice,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        **{name: getattr(body, name) for name in SAMPLING},
    }


def _answered_format(form: TextFormat | None) -> JSON:
    if form is None or form.type != "json_schema":
        return {"type": form.type if form else "text"}
    return {
        "type": form.type,
        "name": form.name,
        "description": form.description,
        "schema": form.schema,
        "strict": form.strict,
    }
