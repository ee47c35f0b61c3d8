"""Formats errors as Anthropic's error objects."""

from collections.abc import Mapping

import msgspec

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import http_status, retry_after_s
from ullage_router.http.openai.errors import (
    ErrorFormat,
    error_code,
    field_names,
    in_api_words,
    sse_event,
)

PREFIX = "/v1/messages"
"""Beginning of the paths whose errors have this format."""
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by HTTP status.

Others are invalid_request_error below 500, and api_error from 500.
"""
_NAMES = field_names(
    {
        r"grammar\.json_schema": "output_config.format.schema",
        r"grammar": "output_config.format",
        r"response_format\.json_schema": "output_config.format",
        r"response_format": "output_config.format",
        r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"(tools\[\d+\])\.function": r"\1",
        r"tool_choice\.function": "tool_choice",
        r"stop\b": "stop_sequences",
    }
)

_THREAD = "thread"
"""Field that asks the server to keep the conversation."""
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": [_THREAD]}
"""Details by which Anthropic's SDKs see that they have to send the whole conversation."""


def error_body(error: ServiceError) -> bytes:
    """Return the error as `{"type": "error", "error": {"type", "message", "code", "param"}}`.

    `code` is this service's reason. `param` is the invalid field, or null.
    """
    return _body(error, is_event=False)


def _body(error: ServiceError, *, is_event: bool) -> bytes:
    message, field = in_api_words(error, "messages", _NAMES)
    status = http_status(error)
    other = "api_error" if status >= 500 else "invalid_request_error"
    details: dict[str, object] = {
        "type": _TYPES.get(status, other),
        "message": message,
        "code": error_code(error),
        "param": field,
    }
    if field == _THREAD:
        details["details"] = _UNTHREADED
    if is_event and (seconds := retry_after_s(error)) is not None:
        details["retry_after"] = seconds
    return msgspec.json.encode({"type": "error", "error": details})


def error_event(error: ServiceError) -> bytes:
    """Return the event that ends a stream with an error."""
    return sse_event(_body(error, is_event=True), "error")


ERRORS = ErrorFormat(error_body, error_event)
