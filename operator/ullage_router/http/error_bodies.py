"""Chooses the format of errors that occur before a request reaches its endpoint."""

from ullage_common.wire.errors import ServiceError
from ullage_router.http.anthropic.errors import PREFIX
from ullage_router.http.anthropic.errors import error_body as anthropic_body
from ullage_router.http.openai.errors import envelope


def error_body(path: str, error: ServiceError) -> bytes:
    """Return an error's body in the format of the API to which the path belongs."""
    is_anthropic = path == PREFIX or path.startswith(PREFIX + "/")
    return anthropic_body(error) if is_anthropic else envelope(error)
