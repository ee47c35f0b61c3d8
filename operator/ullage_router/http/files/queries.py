"""Reads the queries and ids of requests for stored objects: files, batches and responses."""

from collections.abc import Mapping

from ullage_common.wire.validation import invalid_value
from ullage_router.http.messages import Request, without_slash

MAX_DIGITS = 9


def read_limit(query: Mapping[str, str], most: int, default: int) -> int:
    """Return the number of objects that a list may have.

    Raises:
        ServiceError: `limit` is not a number from 1 to `most`.
    """
    text = query.get("limit")
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
    if not is_number or not 1 <= int(text) <= most:
        raise invalid_value("limit", text, f"1 to {most}")
    return int(text)


def read_word(query: Mapping[str, str], name: str, words: tuple[str, ...], default: str) -> str:
    """Return a parameter that has one of a few values.

    Raises:
        ServiceError: The parameter has another value.
    """
    word = query.get(name, default)
    if word != default and word not in words:
        raise invalid_value(name, word, ", ".join(words))
    return word


def object_id(request: Request, prefix: str, action: str = "") -> str:
    """Return the id in a path.

    Args:
        request: The request.
        prefix: Beginning of the path, before the id.
        action: End of the path, after the id.
    """
    return without_slash(request.path).removeprefix(prefix).removesuffix(action)
