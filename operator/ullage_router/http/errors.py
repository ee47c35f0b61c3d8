"""Errors and decisions as HTTP says them: the OpenAI envelope and the x-ullage headers."""

import msgspec

from ullage_router.cascade.trail import Attempt, header
from ullage_router.errors import (
    INVALID_API_KEY,
    RATE_LIMIT_EXCEEDED,
    REPLACED,
    error_type,
    retry_after_s,
)
from ullage_router.http.messages import Headers
from ullage_router.stats import Record
from ullage_rpc.errors import ServiceError

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
    "sampling.logit_bias": "logit_bias",
    "stop.stop_token_ids": "stop_token_ids",
}
"""OpenAI's and vLLM's names of fields that are known by other names on the wire, by their
beginnings."""


def envelope(error: ServiceError, input_field: str = "input") -> bytes:
    """{"error": {"message", "type", "param", "code"}}.

    Args:
        input_field: what the endpoint calls the prompt.
    """
    field, message = error.metadata.get("field"), error.message
    for wire, name in _FIELDS.items():
        if field and field.startswith(wire):
            message = message.replace(wire, name, 1)
            field = field.replace(wire, name, 1)
            break
    if field == "input":
        field = input_field
    body = {
        "message": message,
        "type": error_type(error),
        "param": field,
        "code": _CODES.get(error.reason, error.reason),
    }
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


def decision_lines(record: Record) -> bytes:
    """The request's id, and what was decided when something was, as lines of a head."""
    lines = f"x-request-id: {record.request_id}\r\n"
    for name, value in record.limits.items():
        lines += f"{name}: {value}\r\n"
    if record.action:
        lines += (
            f"x-ullage-action: {record.action}\r\nx-ullage-route: {record.route}\r\n"
            f"x-ullage-degraded: {', '.join(record.degraded)}\r\n"
            f"x-ullage-trail: {', '.join(record.trail)}\r\n"
        )
        if record.predicted_bytes is not None:
            lines += f"x-ullage-predicted-kv-bytes: {record.predicted_bytes}\r\n"
        for name, value in (
            ("model", record.model),
            ("revision", record.revision),
            ("engine", record.engine),
        ):
            if value:
                lines += f"x-ullage-{name}: {value}\r\n"
        if record.attempts:
            lines += _cascade(record.attempts)
    return lines.encode()


def _cascade(attempts: list[Attempt]) -> str:
    lines = f"x-ullage-cascade: {header(attempts)}\r\n"
    if discarded := sum(attempt.discarded_tokens for attempt in attempts):
        lines += f"x-ullage-discarded-tokens: {discarded}\r\n"
    return lines
