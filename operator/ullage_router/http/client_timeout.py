"""Reads the time limit that an HTTP client sets for its request, like the deadline in gRPC."""

from collections.abc import Mapping

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import invalid_head

HEADER = "x-ullage-timeout"
MIN_S = 0.1


def time_limit_s(headers: Mapping[str, str], longest_s: float) -> float:
    """Return a request's time limit: seconds from its arrival to its last token.

    Args:
        headers: the request's headers, with lower-case names.
        longest_s: the service's own limit, which a client can only shorten.

    Raises:
        ServiceError: the header is not a number of seconds.
    """
    text = headers.get(HEADER)
    if text is None:
        return longest_s
    if (seconds := _seconds(text)) is None:
        raise invalid_timeout(text)
    return min(seconds, longest_s)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if MIN_S <= seconds < float("inf") else None


def invalid_timeout(text: str) -> ServiceError:
    """Return the error for a header that is not a valid number of seconds."""
    message = f"{HEADER} is {text[:40]!r}; send seconds, at least {MIN_S}, such as 30"
    return invalid_head("INVALID_TIMEOUT", message)
