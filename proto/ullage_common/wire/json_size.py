"""Limits the number of values in JSON text before the text is parsed.

A JSON parser creates one object for every two bytes of `[[],[],...]`. It holds the GIL throughout,
and needs a hundred times the text's memory. The number of brackets, braces, colons and commas
outside of strings is an upper bound on the number of objects.
"""

from dataclasses import dataclass

from ullage_common.wire.errors import invalid
from ullage_common.wire.limits import MAX_PROMPT_TOKENS

BLOCK_BYTES = 64 << 10
"""Number of bytes that are scanned at a time while the GIL is held."""


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Maximum numbers of lists, object entries and commas in one or more JSON texts combined."""

    max_lists: int
    max_entries: int
    """Maximum total number of JSON objects and their entries."""
    max_items: int
    """Maximum number of commas, which bounds the number of list items."""


BODY_LIMITS = JsonLimits(1 << 16, 1 << 18, MAX_PROMPT_TOKENS + (1 << 18))
"""Limits for a request body.

They are three times as high as necessary for a conversation with 8192 turns and equally many tool
calls, text parts and tool results.
"""
VALUE_LIMITS = JsonLimits(1 << 14, 1 << 16, 1 << 17)
"""Limits for values that are parsed together: the tools, and the arguments of all tool calls."""


class JsonCounter:
    """Counts the lists, object entries and commas in JSON texts, and refuses texts with too many.

    Args:
        field: name of the request's field, for error messages.
        limits: limits on the totals over all texts.
        name: what error messages call the texts (empty to use `field`).
    """

    def __init__(self, field: str, limits: JsonLimits, name: str = "") -> None:
        self._field = field
        self._name = name or field
        self._limits = limits
        self._lists = 0
        self._entries = 0
        self._items = 0

    def add(self, text: bytes) -> None:
        """Count one more text against the limits. The text need not be valid JSON.

        Raises:
            ServiceError: INVALID_ARGUMENT, the texts exceed a limit.
        """
        start = 0
        is_inside = False
        while start < len(text):
            end = _end_of_block(text, start)
            is_inside = self._add_block(text[start:end], is_inside)
            start = end

    def _add_block(self, block: bytes, is_inside: bool) -> bool:
        """Count one block of a text, and return whether the block ends inside a string.

        The block must not split an escape sequence.
        """
        if b"\\" in block:
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = block.split(b'"')
        outside = b"".join(parts[is_inside::2])

        self._lists += outside.count(b"[")
        self._entries += outside.count(b"{") + outside.count(b":")
        self._items += outside.count(b",")
        limits = self._limits
        self._check(self._lists, limits.max_lists, "lists")
        self._check(self._entries, limits.max_entries, "objects and entries of objects")
        self._check(self._items, limits.max_items, "commas")

        return is_inside != (len(parts) % 2 == 0)

    def _check(self, count: int, limit: int, parts: str) -> None:
        if count > limit:
            message = f"{self._name} has more than {limit} {parts} outside of strings; send fewer"
            raise invalid(self._field, message)


def _end_of_block(text: bytes, start: int) -> int:
    """Return the end of the block that begins at `start`, without splitting an escape sequence."""
    end = min(start + BLOCK_BYTES, len(text))
    last = end - 1
    while last >= start and text[last] == ord("\\"):
        last -= 1
    is_cut = (end - 1 - last) % 2 == 1
    return min(end + is_cut, len(text))
