"""Errors and decisions as HTTP says them: the OpenAI envelope and the x-ullage headers."""

import msgspec

from ullage_router.cascade.trail import header
from ullage_router.errors import (
    INVALID_API_KEY,
    RATE_LIMIT_EXCEEDED,
    error_type,
    retry_after_s,
)
from ullage_router.http.messages import Headers
from ullage_router.stats import Record
from ullage_rpc.errors import ServiceError

_CODES = {INVALID_API_KEY: "invalid_api_key", RATE_LIMIT_EXCEEDED: "rate_limit_exceeded"}
"""OpenAI's words where it has the same meaning."""


_FIELDS = {
    "grammar.json_schema": "response_format.json_schema.schema",
    "grammar.regex": "structured_outputs.regex",
    "grammar.choice": "structured_outputs.choice",
    "grammar.lark": "structured_outputs.grammar",
    "grammar": "response_format",
    "sampling.logit_bias": "logit_bias",
    "stop.stop_token_ids": "stop_token_ids",
}
"""OpenAI's and vLLM's names of fields that are known by other names on the wire, by their
beginnings."""


def envelope(error: ServiceError) -> bytes:
    """{"error": {"message", "type", "param", "code"}}."""
    field, message = error.metadata.get("field"), error.message
    for wire, name in _FIELDS.items():
        if field and field.startswith(wire):
            message = message.replace(wire, name, 1)
            field = field.replace(wire, name, 1)
            break
    body = {
        "message": message,
        "type": error_type(error),
        "param": field,
        "code": _CODES.get(error.reason, error.reason),
    }
    return msgspec.json.encode({"error": body})


def error_headers(error: ServiceError) -> Headers:
    """Retry-After where coming back helps."""
    seconds = retry_after_s(error)
    headers = [] if seconds is None else [(b"retry-after", str(seconds).encode())]
    if error.reason == INVALID_API_KEY:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def decision_headers(record: Record) -> Headers:
    """The request's id, and what was decided when something was."""
    headers = [(b"x-request-id", record.request_id.encode())]
    headers += [(name.encode(), value.encode()) for name, value in record.limits.items()]
    if not record.action:
        return headers
    headers += [
        (b"x-ullage-action", record.action.encode()),
        (b"x-ullage-route", record.route.encode()),
        (b"x-ullage-degraded", ", ".join(record.degraded).encode()),
        (b"x-ullage-trail", ", ".join(record.trail).encode()),
    ]
    if record.predicted_bytes is not None:
        headers.append((b"x-ullage-predicted-kv-bytes", str(record.predicted_bytes).encode()))
    if record.model:
        headers.append((b"x-ullage-model", record.model.encode()))
    if record.revision:
        headers.append((b"x-ullage-revision", record.revision.encode()))
    if record.attempts:
        headers.append((b"x-ullage-cascade", header(record.attempts).encode()))
    if discarded := sum(attempt.discarded_tokens for attempt in record.attempts):
        headers.append((b"x-ullage-discarded-tokens", str(discarded).encode()))
    if record.engine:
        headers.append((b"x-ullage-engine", record.engine.encode()))
    return headers
