"""What parts of a spec are made of, and the part about the router's streams."""

import msgspec

_WORDS = {"kv": "KV", "e2e": "E2E", "ca": "CA"}


def camel(name: str) -> str:
    """`session_kv_limit` is `sessionKVLimit` in the API."""
    first, *rest = name.split("_")
    return first + "".join(_WORDS.get(word, word.capitalize()) for word in rest)


class Bytes(int):
    """A quantity of bytes."""


class Seconds(float):
    """A duration."""


class Section(msgspec.Struct, frozen=True, kw_only=True, rename=camel):
    """Base of all parts of a spec; field names are those of the API in snake case."""


class Streaming(Section, frozen=True, kw_only=True):
    buffer_tokens: int
    coalesce_tokens: int
    coalesce_window: Seconds
    tokens_per_second: float
    keepalive: Seconds
