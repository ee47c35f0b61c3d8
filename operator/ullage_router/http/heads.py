"""Refuses request heads that a proxy and this server could interpret differently.

Such a head lets a client smuggle a request past a proxy's checks (RFC 9112, section 11.2).
"""

from ullage_common.wire.errors import ServiceError
from ullage_router.errors import (
    invalid_head,
    malformed,
)
from ullage_router.http.messages import Headers

_RARE = frozenset({b"transfer-encoding", b"content-encoding", b"expect"})


def head_error(version: str, headers: Headers) -> ServiceError | None:
    """Return the error to send for an invalid request head, or None if the head is valid.

    Args:
        version: The HTTP version, such as `1.1`.
        headers: The headers, with lower-case names.
    """
    if version not in ("1.0", "1.1"):
        return unknown_version(version)

    names = [name for name, _ in headers]
    hosts = names.count(b"host")
    if hosts > 1 or (not hosts and version == "1.1"):
        return malformed("it has no Host header" if not hosts else "it has several Host headers")
    if _RARE.isdisjoint(names):
        return None

    for name, value in headers:
        if name == b"transfer-encoding":
            if version == "1.0":
                return malformed("HTTP/1.0 has no Transfer-Encoding")
            if value.lower() != b"chunked":
                return invalid_head(
                    "TRANSFER_ENCODING_NOT_SUPPORTED",
                    f"transfer-encoding is {_shown(value)}; possible: chunked",
                )
        elif name == b"content-encoding" and value.lower() != b"identity":
            return invalid_head(
                "CONTENT_ENCODING_NOT_SUPPORTED",
                f"content-encoding is {_shown(value)}; send the body as it is",
            )
        elif name == b"expect" and value.lower() != b"100-continue":
            return invalid_head(
                "EXPECTATION_FAILED", f"expect is {_shown(value)}; possible: 100-continue"
            )
    return None


def unknown_version(version: str) -> ServiceError:
    """Return the error for a request with an unsupported HTTP version."""
    message = f"HTTP/{version} is not supported; use HTTP/1.1"
    return invalid_head("HTTP_VERSION_NOT_SUPPORTED", message)


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:60])
