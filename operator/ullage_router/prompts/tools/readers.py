"""Readers of answers that may contain tool calls, one for each way of writing calls.

`TaggedReader` is for calls between two tags, `WholeReader` for an answer that consists entirely of
calls, and `ForcedReader` for a call that a grammar enforces. The reader for the format of gpt-oss
is in `harmony.py`.
"""

from collections.abc import Collection, Mapping, Sequence

from ullage_router.prompts.tools.call_syntax import ParseCalls, ParsedCall, parse_json_calls
from ullage_router.prompts.tools.pieces import (
    Arguments,
    CallStart,
    Piece,
    Text,
    find_mark,
    held_back,
)

# Beginnings of answers that may consist of calls, without whitespace.
CALL_OPENINGS = ('{"', '[{"', "```json", "<|python_tag|>")


class Trimmer:
    """Removes the whitespace around calls. Text without a call is not changed."""

    def __init__(self) -> None:
        self._blank = ""
        self._has_calls = False

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces, but hold back trailing whitespace, because a call may follow."""
        return [part for piece in pieces for part in self._take(piece)]

    def close(self) -> list[Piece]:
        """Return the whitespace that was held back, or nothing if the answer has calls."""
        return [Text(self._blank)] if self._blank and not self._has_calls else []

    def _take(self, piece: Piece) -> list[Piece]:
        if not isinstance(piece, Text):
            if isinstance(piece, CallStart):
                self._blank = ""
                self._has_calls = True
            return [piece]
        whole = self._blank + piece.text
        words = whole.rstrip()
        self._blank = whole[len(words) :]
        return [Text(words)] if words else []


class TaggedReader:
    """Reads text with calls between two tags.

    Args:
        tags: the tags before and after the calls.
        parse: parses the text between the tags.
        names: the known functions. Calls of any other function are treated as text.
    """

    def __init__(self, tags: tuple[str, str], parse: ParseCalls, names: Collection[str]) -> None:
        self._opening, self._closing = tags
        self._parse = parse
        self._names = names
        self._buffer = ""
        self._is_inside = False
        self._trimmer = Trimmer()

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while match := find_mark(self._buffer, [self._mark]):
            pieces += self._inside(match.before, self._closing) if self._is_inside else []
            pieces += [] if self._is_inside else [Text(match.before)]
            self._is_inside = not self._is_inside
            self._buffer = match.after
        if not self._is_inside:
            sure = len(self._buffer) - held_back(self._buffer, [self._opening])
            pieces.append(Text(self._buffer[:sure]))
            self._buffer = self._buffer[sure:]
        return self._trimmer.push(pieces)

    def close(self) -> list[Piece]:
        rest = self._inside(self._buffer, "") if self._is_inside else [Text(self._buffer)]
        self._buffer = ""
        return self._trimmer.push(rest) + self._trimmer.close()

    @property
    def _mark(self) -> str:
        return self._closing if self._is_inside else self._opening

    def _inside(self, body: str, closing: str) -> list[Piece]:
        calls = known_calls(self._parse(body), self._names)
        return calls or [Text(self._opening + body + closing)]


class WholeReader:
    """Reads an answer that is either all tool calls or all text.

    Args:
        names: the known functions. Calls of any other function are treated as text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._may_be_calls: bool | None = None
        """Whether the answer may consist of calls, or None until enough of it has arrived."""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        if self._may_be_calls is None:
            begun = "".join(self._buffer.split())
            if any(begun.startswith(opening) for opening in CALL_OPENINGS):
                self._may_be_calls = True
            elif not any(opening.startswith(begun) for opening in CALL_OPENINGS):
                self._may_be_calls = False
        return self._release() if self._may_be_calls is False else []

    def close(self) -> list[Piece]:
        calls = known_calls(parse_json_calls(self._buffer), self._names)
        return calls or self._release()

    def _release(self) -> list[Piece]:
        text = self._buffer
        self._buffer = ""
        return [Text(text)] if text else []


class ForcedReader:
    """Reads the one call that a grammar enforces.

    Args:
        openings: the text that precedes the arguments in the answer, by function. None of these
            texts is a prefix of another.
        name: the function that the prompt already names (empty if the answer names it).
    """

    def __init__(self, openings: Mapping[str, str], name: str = "") -> None:
        self._openings = openings
        self._name = name
        self._has_started = False
        self._buffer = ""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        if not self._name and not self._choose():
            return []
        start: list[Piece] = []
        if self._buffer and not self._has_started:
            start = [CallStart(self._name)]
            self._has_started = True
        rest = self._buffer
        self._buffer = ""
        return [*start, Arguments(rest)] if rest else []

    def close(self) -> list[Piece]:
        """Return nothing. An answer that ended before naming a function has no call."""
        return []

    def _choose(self) -> bool:
        for name, opening in self._openings.items():
            if self._buffer.startswith(opening):
                self._name = name
                self._buffer = self._buffer[len(opening) :]
                break
        return bool(self._name)


def known_calls(calls: list[ParsedCall] | None, names: Collection[str]) -> list[Piece]:
    """Convert calls to pieces. Return an empty list if any call is of an unknown function."""
    if not calls or any(call.name not in names for call in calls):
        return []
    return [piece for call in calls for piece in (CallStart(call.name), Arguments(call.arguments))]
