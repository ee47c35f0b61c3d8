"""Formats errors as OpenAI error objects, and the router's decisions as `x-ullage-*` headers."""

from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import (
    INVALID_API_KEY,
    RATE_LIMIT_EXCEEDED,
    REPLACED,
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

_CODES = {
    INVALID_API_KEY: "invalid_api_key",
    RATE_LIMIT_EXCEEDED: "rate_limit_exceeded",
    "CONTEXT_TOO_LONG": "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
}
"""Maps this service's error reasons to the OpenAI codes with the same meaning."""
_FIELDS = {
    "grammar.json_schema": "response_format.json_schema.schema",
    "grammar.regex": "structured_outputs.regex",
    "grammar.choice": "structured_outputs.choice",
    "grammar.lark": "structured_outputs.grammar",
    "grammar": "response_format",
    "samples.beam": "use_beam_search",
}
"""Maps prefixes of protobuf field names to the names that OpenAI or vLLM uses instead."""


_MAX_IGNORED = 16
"""Maximum number of ignored parts of a request that a header names."""
_MAX_IGNORED_NAME = 100
"""Maximum characters of each name. Longer names are cut."""


def envelope(error: ServiceError, input_field: str = "input", *, is_event: bool = False) -> bytes:
    """Return the error as the JSON `{"error": {"message", "type", "param", "code"}}`.

    Args:
        error: The error.
        input_field: The endpoint's name for the prompt.
        is_event: Whether the error ends a stream, whose headers are already sent. The envelope then
            also has `retry_after`, in seconds, which replaces the Retry-After header.
    """
    field = error.metadata.get("field")
    message = error.message
    for wire, name in _FIELDS.items():
        if field and field.startswith(wire):
            message = message.replace(wire, name, 1)
            field = field.replace(wire, name, 1)
            break
    if field == "input":
        field = input_field

    body: dict[str, object] = {
        "message": message,
        "type": error_type(error),
        "param": field,
        "code": _CODES.get(error.reason, error.reason),
    }
    if is_event and (seconds := retry_after_s(error)) is not None:
        body["retry_after"] = seconds
    return msgspec.json.encode({"error": body})


def error_headers(error: ServiceError) -> Headers:
    """Return the headers that tell the client how to react to an error.

    These are `retry-after` if a retry may help, `x-should-retry: false` if a retry would do harm,
    and `www-authenticate` if the API key is invalid.
    """
    seconds = retry_after_s(error)
    headers = [] if seconds is None else [(b"retry-after", str(seconds).encode())]
    if error.reason == INVALID_API_KEY:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.reason == REPLACED:
        # OpenAI's clients retry a 409, and the retry would replace the newer request.
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
