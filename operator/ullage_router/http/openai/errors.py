"""Formats errors as OpenAI error objects, and the router's decisions as `x-ullage-*` headers."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import (
    INVALID_API_KEY,
    NO_RETRY,
    RATE_LIMIT_EXCEEDED,
    UPGRADE_REQUIRED,
    error_type,
    retry_after_s,
)
from ullage_router.http.messages import Headers
from ullage_router.policy.decision import attempts_header
from ullage_router.telemetry.record import (
    DEVICE,
    RESUMED_INEXACT,
    RequestRecord,
    TierHit,
)

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""

_CODES = {
    INVALID_API_KEY: "invalid_api_key",
    RATE_LIMIT_EXCEEDED: "rate_limit_exceeded",
    "CONTEXT_TOO_LONG": "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "PREVIOUS_RESPONSE_NOT_FOUND": "previous_response_not_found",
    "WEBSOCKET_CONNECTION_LIMIT_REACHED": "websocket_connection_limit_reached",
}
"""Maps this service's error reasons to the OpenAI codes with the same meaning."""
FieldNames = Sequence[tuple[re.Pattern[str], str]]
"""An API's names of fields: patterns of the beginnings of protobuf names, and replacements."""


def field_names(names: dict[str, str]) -> FieldNames:
    """Compile an API's names of fields. The first pattern that matches a field is used."""
    return [(re.compile(pattern), name) for pattern, name in names.items()]


STRUCTURED_OUTPUTS = {
    r"grammar\.regex": "structured_outputs.regex",
    r"grammar\.choice": "structured_outputs.choice",
    r"grammar\.lark": "structured_outputs.grammar",
}
"""vLLM's names of grammars, which several endpoints have."""
_NAMES = field_names(
    {
        r"grammar\.json_schema": "response_format.json_schema.schema",
        **STRUCTURED_OUTPUTS,
        r"grammar": "response_format",
        r"samples\.beam": "use_beam_search",
    }
)


_MAX_IGNORED = 16
"""Maximum number of ignored parts of a request that a header names."""
_MAX_IGNORED_NAME = 100
"""Maximum characters of each name. Longer names are cut."""


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """An API's format of errors."""

    body: Callable[[ServiceError], bytes]
    """Returns the body of an error response."""
    event: Callable[[ServiceError], bytes]
    """Returns the last bytes of a stream that fails before the answer has begun."""


def openai_errors(input_field: str, names: FieldNames = _NAMES) -> ErrorFormat:
    """Return OpenAI's format of errors.

    Args:
        input_field: The endpoint's name for the prompt.
        names: The endpoint's names of other fields.
    """

    def event(error: ServiceError) -> bytes:
        return sse_event(envelope(error, input_field, names, is_event=True)) + DONE

    return ErrorFormat(partial(envelope, input_field=input_field, names=names), event)


def envelope(
    error: ServiceError,
    input_field: str = "input",
    names: FieldNames = _NAMES,
    *,
    is_event: bool = False,
) -> bytes:
    """Return the error as the JSON `{"error": {"message", "type", "param", "code"}}`.

    Args:
        error: The error.
        input_field: The endpoint's name for the prompt.
        names: The endpoint's names of other fields.
        is_event: Whether the error ends a stream, whose headers are already sent. The envelope then
            also has `retry_after`, in seconds, which replaces the Retry-After header.
    """
    return msgspec.json.encode({"error": error_object(error, input_field, names, is_event)})


def error_object(
    error: ServiceError, input_field: str, names: FieldNames, is_event: bool
) -> dict[str, object]:
    """Return the value of `error` in OpenAI's envelope, as `envelope` describes it."""
    message, field = in_api_words(error, input_field, names)
    body: dict[str, object] = {
        "message": message,
        "type": error_type(error),
        "param": field,
        "code": error_code(error),
    }
    if is_event and (seconds := retry_after_s(error)) is not None:
        body["retry_after"] = seconds
    return body


def error_code(error: ServiceError) -> str:
    """Return OpenAI's code for an error, or this service's reason if OpenAI has none."""
    return _CODES.get(error.reason, error.reason)


def in_api_words(
    error: ServiceError, input_field: str, names: FieldNames
) -> tuple[str, str | None]:
    """Return an error's message and field with the field as the API names it.

    Args:
        error: The error.
        input_field: The API's name for the prompt.
        names: The API's names of other fields.
    """
    field = error.metadata.get("field")
    if field is None:
        return error.message, None
    for wire, name in names:
        if wire.match(field):
            renamed = wire.sub(name, field, count=1)
            message = wire.sub(name, error.message, count=1)
            return message, input_field if renamed == "input" else renamed
    return error.message, input_field if field == "input" else field


def sse_event(data: bytes, name: str = "") -> bytes:
    """Return JSON as a server-sent event. The JSON must not contain a line break.

    Args:
        data: The JSON.
        name: The event's name (empty for none).
    """
    line = b"data: " + data + b"\n\n"
    return b"event: " + name.encode() + b"\n" + line if name else line


def error_headers(error: ServiceError) -> Headers:
    """Return the headers that tell the client how to react to an error.

    These are `retry-after` if a retry may help, `x-should-retry: false` if a retry would do harm,
    `www-authenticate` if the API key is invalid, and the protocol to upgrade to.
    """
    seconds = retry_after_s(error)
    headers = [] if seconds is None else [(b"retry-after", str(seconds).encode())]
    if error.reason == INVALID_API_KEY:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.reason == UPGRADE_REQUIRED:
        headers += [
            (b"connection", b"upgrade"),
            (b"upgrade", b"websocket"),
            (b"sec-websocket-version", b"13"),
        ]
    if error.reason in NO_RETRY:
        # OpenAI's clients retry a 409 and a 507. The retry would replace the newer request, or
        # send the file once more.
        headers.append((b"x-should-retry", b"false"))
    return headers


def resumed_headers(finished: inference_pb2.Finished) -> Headers:
    """Return headers that name the engines that resumed an interrupted answer.

    If the rest of the answer may differ from what the first engine would have generated, another
    header says so.
    """
    headers = []
    if finished.resumed_on:
        headers.append((b"x-ullage-resumed-on", ", ".join(finished.resumed_on).encode()))
    if finished.resumed_inexact:
        headers.append((RESUMED_INEXACT.encode(), b"true"))
    return headers


def decision_headers(record: RequestRecord) -> Headers:
    """Return headers that tell the client how its request was handled.

    They contain the request id, the rate limits, the router's decision if there is one, and the
    number of cached tokens.
    """
    decision = record.decision
    named = {"x-request-id": record.request_id, **record.limits}

    if decision.action:
        named["x-ullage-action"] = decision.action
        named["x-ullage-route"] = decision.route
        named["x-ullage-degraded"] = ", ".join(decision.degraded)
        named["x-ullage-trail"] = ", ".join(decision.trail)
        if decision.predicted_bytes is not None:
            named["x-ullage-predicted-kv-bytes"] = str(decision.predicted_bytes)
        if decision.model:
            named["x-ullage-model"] = decision.model
        if decision.revision:
            named["x-ullage-revision"] = decision.revision
        if decision.engine:
            named["x-ullage-engine"] = decision.engine
        if decision.attempts:
            named["x-ullage-cascade"] = attempts_header(decision.attempts)
            if discarded := sum(attempt.discarded_tokens for attempt in decision.attempts):
                named["x-ullage-discarded-tokens"] = str(discarded)

    if record.cached:
        named["x-ullage-cached"] = _cached_header(record.cached)
    if record.ignored:
        named["x-ullage-ignored"] = ignored_header(record.ignored)
    return [(name.encode(), value.encode()) for name, value in named.items()]


def ignored_header(ignored: Sequence[str]) -> str:
    """Return the names of a request's ignored parts, and how many more there are.

    Clients choose the names, so characters that could break a header or a list are escaped.
    """
    names = [quote(name[:_MAX_IGNORED_NAME], safe="$[]:/") for name in ignored[:_MAX_IGNORED]]
    if (more := len(ignored) - len(names)) > 0:
        names.append(f"+{more}")
    return ", ".join(names)


def _cached_header(cached: Sequence[TierHit]) -> str:
    """Return the number of cached tokens by tier, as a structured-field dictionary (RFC 9651)."""
    return ", ".join(
        f"{each.tier}={each.num_tokens}"
        + (f";seconds={each.seconds:.3f}" if each.tier != DEVICE else "")
        for each in cached
    )
