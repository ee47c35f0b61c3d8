"""The format of errors of /v1/responses."""

import msgspec

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import http_status
from ullage_router.http.openai.errors import (
    DONE,
    STRUCTURED_OUTPUTS,
    ErrorFormat,
    error_object,
    field_names,
    openai_errors,
    sse_event,
)

NAMES = field_names(
    {
        r"grammar\.json_schema": "text.format.schema",
        **STRUCTURED_OUTPUTS,
        r"grammar": "text.format",
        r"response_format\.json_schema": "text.format",
        r"response_format": "text.format",
        r"(tools\[\d+\])\.function": r"\1",
        r"tool_choice\.function": "tool_choice",
        r"messages": "input",
        r"max_tokens": "max_output_tokens",
    }
)
"""The API's names of fields."""


def _event(error: ServiceError) -> bytes:
    """Return the event for a stream that fails before the response was created."""
    details = error_object(error, "input", NAMES, is_event=True)
    event = {
        "type": "error",
        "sequence_number": 0,
        "code": details["code"],
        "message": details["message"],
        "param": details["param"],
        "error": details,
    }
    return sse_event(msgspec.json.encode(event), "error") + DONE


def _message(error: ServiceError) -> bytes:
    """Return the WebSocket message for a request that fails before its response was created."""
    details = error_object(error, "input", NAMES, is_event=True)
    message = {"type": "error", "status": http_status(error), "error": details}
    return msgspec.json.encode(message) + b"\n"


ERRORS = ErrorFormat(openai_errors("input", NAMES).body, _event)
MESSAGE_ERRORS = ErrorFormat(_message, _message)
"""The format on a WebSocket, where each message is followed by a line break."""
