"""Errors and decisions as HTTP says them: the OpenAI envelope and the x-ullage headers."""

from collections.abc import Sequence

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
"""OpenAI's words where it has the same meaning."""


_FIELDS = {
    "grammar.json_schema": "response_format.json_schema.schema",
    "grammar.regex": "structured_outputs.regex",
    "grammar.choice": "structured_outputs.choice",
    "grammar.lark": "structured_outputs.grammar",
    "grammar": "response_format",
    "samples.beam": "use_beam_search",
}
"""OpenAI's and vLLM's names of fields that are known by other names on the wire, by their
beginnings."""


def envelope(error: ServiceError, input_field: str = "input", *, is_event: bool = False) -> bytes:
    """{"error": {"message", "type", "param", "code"}}.

    Args:
        input_field: what the endpoint calls the prompt.
        is_event: it ends a stream, whose headers have left: it also has `retry_after`, the seconds
            of a response's Retry-After, where that would have one.
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
    """Retry-After where coming back helps, and a word against it where that would do harm."""
    seconds = retry_after_s(error)
    headers = [] if seconds is None else [(b"retry-after", str(seconds).encode())]
    if error.reason == INVALID_API_KEY:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.reason == REPLACED:
        # OpenAI's clients send a 409 again with the same key, which would replace the newer one.
        headers.append((b"x-should-retry", b"false"))
    return headers


def resumed_headers(finished: inference_pb2.Finished) -> Headers:
    """Who went on with a whole answer after a loss, and whether they compute otherwise."""
    headers = []
    if finished.resumed_on:
        headers.append((b"x-ullage-resumed-on", ", ".join(finished.resumed_on).encode()))
    if finished.resumed_inexact:
        headers.append((RESUMED_INEXACT.encode(), b"true"))
    return headers


def decision_headers(record: RequestRecord) -> Headers:
    """The request's id, and what was decided when something was."""
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
    return [(name.encode(), value.encode()) for name, value in named.items()]


def _cached_header(cached: Sequence[TierHit]) -> str:
    """Return a dictionary of tokens by tier as structured fields (RFC 9651) have it."""
    return ", ".join(
        f"{each.tier}={each.num_tokens}"
        + (f";seconds={each.seconds:.3f}" if each.tier != DEVICE else "")
        for each in cached
    )
