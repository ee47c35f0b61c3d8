"""Tools of type `custom`, whose input is free text instead of JSON.

Models know only functions. They therefore see a custom tool as a function with one string, `input`,
and the arguments of its calls are converted back to that text.
"""

import re

import msgspec

from ullage_common.wire.validation import invalid_value

INPUT = "input"
PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_BEGINNING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_TEXT = re.compile(r'[^"\\]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW_SURROGATE = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BEGUN_ESCAPE = re.compile(r"(\\(u[0-9a-fA-F]{0,3})?)?")


class _Arguments(msgspec.Struct):
    """The arguments of a call, as far as they are those of a custom tool."""

    input: str


_decode = msgspec.json.Decoder(_Arguments).decode
_decode_text = msgspec.json.Decoder(str).decode


class CustomFormat(msgspec.Struct, frozen=True):
    """The format of a custom tool's input."""

    type: str = "text"


class DefinedCustom(msgspec.Struct, frozen=True):
    """A custom tool that the model may call."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


def as_chat_tool(field: str, tool: DefinedCustom) -> dict[str, object]:
    """Return the function by which the model knows a custom tool, as chat templates expect it.

    Args:
        field: Path of the tool's definition in errors.
        tool: The custom tool.

    Raises:
        ServiceError: The format of the input is another one than text.
    """
    if tool.format and tool.format.type != "text":
        raise invalid_value(f"{field}.format.type", tool.format.type, "text")
    function: dict[str, object] = {"name": tool.name, "parameters": PARAMETERS}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def as_arguments(text: str) -> str:
    """Return the arguments of the function call that stands for a custom call with this input."""
    return msgspec.json.encode({INPUT: text}).decode()


def as_input(arguments: str) -> str:
    """Return the input of a custom call whose function call has these arguments."""
    reader = InputReader()
    return reader.push(arguments) + reader.close()


class InputReader:
    """Reads the input of a custom call from the arguments of its function call, piece by piece.

    Models that are not forced may write other arguments than the function has. Their text as a
    whole is the input then.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._is_begun = False
        self._is_over = False

    def push(self, arguments: str) -> str:
        """Add a piece of the arguments, and return the input that it adds."""
        if self._is_over:
            return ""
        self._unread += arguments
        if not self._is_begun:
            begun = _BEGINNING.match(self._unread)
            if begun is None:
                return ""
            self._is_begun = True
            self._unread = self._unread[begun.end() :]
        return self._read()

    def close(self) -> str:
        """Return the rest of the input, at the end of the arguments."""
        if self._is_begun or self._is_over:
            return ""
        text = self._unread
        self._is_over = True
        try:
            return _decode(text).input
        except (msgspec.DecodeError, UnicodeError):
            return text

    def _read(self) -> str:
        """Return the decoded text up to the end of the string, or to an incomplete escape."""
        parts: list[str] = []
        place = 0
        while place < len(self._unread):
            plain = _TEXT.match(self._unread, place)
            assert plain is not None, "matches an empty text"
            parts.append(plain.group())
            place = plain.end()
            if self._unread[place : place + 1] == '"':
                self._is_over = True
                break
            escaped = self._escape_at(place)
            if escaped is None:
                break
            parts.append(_decoded(escaped))
            place += len(escaped)
        self._unread = self._unread[place:]
        return "".join(parts)

    def _escape_at(self, place: int) -> str | None:
        """Return the escape at a place, with both halves of a pair. None if it is incomplete."""
        escape = _ESCAPE.match(self._unread, place)
        if escape is None:
            rest = self._unread[place:]
            # A backslash before any other character is no escape, and stands for itself.
            is_wrong = len(rest) > 1 and (rest[1] not in '"\\/bfnrtu' or len(rest) >= 6)
            return rest[:1] if is_wrong else None
        if not _HIGH_SURROGATE.fullmatch(escape.group()):
            return escape.group()
        if _BEGUN_ESCAPE.fullmatch(self._unread, escape.end()):
            return None
        low = _LOW_SURROGATE.match(self._unread, escape.end())
        return escape.group() + (low.group() if low else "")


def _decoded(escape: str) -> str:
    """Return the characters of an escape. A half of a pair becomes a replacement character."""
    if escape == "\\":
        return escape
    try:
        return _decode_text(f'"{escape}"'.encode())
    except msgspec.DecodeError:
        return "\ufffd"
