"""Readers of answers that may contain tool calls, one for each way of writing calls.

`MarkedReader` is for calls that begin with a mark and are streamed (`call_formats.py`).
`TaggedReader` is for calls between two tags, `WholeReader` for an answer that consists entirely of
calls, and `ForcedReader` for a call that a grammar enforces. The reader for the format of gpt-oss
is in `harmony.py`.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from ullage_router.prompts.tools.call_formats import CallFormat, Functions
from ullage_router.prompts.tools.call_syntax import ParseCalls, ParsedCall, parse_json_calls
from ullage_router.prompts.tools.cursor import Cursor, CutOff, NoCall, Steps
from ullage_router.prompts.tools.json_scanner import JsonScanner, NotJson
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
_MAX_BEGINNING = 1024
"""Maximum number of characters that are searched for the beginning of a call."""
_OBJECT = r"\s*(?:<\|python_tag\|>|```(?:json)?)?\s*\[?\s*\{\s*"
_FIRST_KEY = re.compile(_OBJECT + r'"([^"\\]*)"')
_FIRST_NAME = re.compile(_OBJECT + r'"name"\s*:\s*"([^"\\]*)"')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "function", "type", "id"})


class Trimmer:
    """Removes the whitespace around calls. Text without a call is not changed."""

    def __init__(self) -> None:
        self._blanks: list[str] = []
        """Whitespace that is held back, in pieces: an answer may consist of nothing else."""
        self._has_calls = False

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces, but hold back trailing whitespace, because a call may follow."""
        return [part for piece in pieces for part in self._take(piece)]

    def close(self) -> list[Piece]:
        """Return the whitespace that was held back, or nothing if the answer has calls."""
        blank = "".join(self._blanks)
        return [Text(blank)] if blank and not self._has_calls else []

    def _take(self, piece: Piece) -> list[Piece]:
        if not isinstance(piece, Text):
            if isinstance(piece, CallStart):
                self._blanks.clear()
                self._has_calls = True
            return [piece]
        words = piece.text.rstrip()
        blank = piece.text[len(words) :]
        if not words:
            self._blanks.append(blank)
            return []
        whole = "".join(self._blanks) + words
        self._blanks = [blank]
        return [Text(whole)]


class MarkedReader:
    """Reads text with calls that begin with a mark, and streams their arguments.

    Args:
        form: the format of the calls.
        functions: the known functions. Calls of any other function are treated as text.
    """

    is_thinking = False

    def __init__(self, form: CallFormat, functions: Functions) -> None:
        self._form = form
        self._functions = functions
        self._buffer = ""
        self._cursor: Cursor | None = None
        """The text after a mark, or None while there is no mark."""
        self._steps: Steps[None] | None = None
        self._has_call = False
        """Whether the text after the mark has begun a call."""
        self._trimmer = Trimmer()

    def push(self, text: str) -> list[Piece]:
        if self._cursor:
            self._cursor.add(text)
        else:
            self._buffer += text
        return self._trimmer.push(self._read(is_last=False))

    def close(self) -> list[Piece]:
        if self._cursor:
            self._cursor.is_closed = True
        return self._trimmer.push(self._read(is_last=True)) + self._trimmer.close()

    def _read(self, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            if self._steps is None:
                match = find_mark(self._buffer, [self._form.mark])
                if not match:
                    break
                pieces.append(Text(match.before))
                self._begin(match.after, is_last)
            if not self._advance(pieces):
                return pieces
        held = 0 if is_last else held_back(self._buffer, [self._form.mark])
        sure = len(self._buffer) - held
        pieces.append(Text(self._buffer[:sure]))
        self._buffer = self._buffer[sure:]
        return pieces

    def _begin(self, text: str, is_last: bool) -> None:
        self._cursor = Cursor(text)
        self._cursor.is_closed = is_last
        self._steps = self._form.read(self._cursor, self._functions)
        self._has_call = False

    def _advance(self, pieces: list[Piece]) -> bool:
        """Read on in the calls. Return whether they have ended, or False if more text is needed."""
        assert self._steps
        assert self._cursor
        try:
            for piece in self._steps:
                if piece is None:
                    return False
                self._has_call = True
                pieces.append(piece)
        except CutOff:
            pieces.append(Arguments(self._cursor.rest))
            self._cursor.rest = ""
        except NoCall:
            if not self._has_call:
                pieces.append(Text(self._form.mark))
        self._buffer = self._cursor.rest
        self._cursor = self._steps = None
        return True


class TaggedReader:
    """Reads text with calls between two tags.

    Args:
        tags: the tags before and after the calls.
        parse: parses the text between the tags.
        names: the known functions. Calls of any other function are treated as text.
    """

    is_thinking = False

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

    Text is released as soon as the answer cannot consist of calls.

    Args:
        names: the known functions. Calls of any other function are treated as text.
    """

    is_thinking = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._is_text = False
        self._scanner = JsonScanner()
        self._place: int | None = None
        """Place in the buffer up to which its first object was checked, or None without one."""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        self._is_text = self._is_text or not self._may_be_calls()
        return self._release() if self._is_text else []

    def close(self) -> list[Piece]:
        calls = None if self._is_text else parse_json_calls(self._buffer)
        return known_calls(calls, self._names) or self._release()

    def _may_be_calls(self) -> bool:
        if self._place is None:
            begun = "".join(self._buffer[:_MAX_BEGINNING].split())
            if any(opening.startswith(begun) for opening in CALL_OPENINGS):
                return True
            if not any(begun.startswith(opening) for opening in CALL_OPENINGS):
                return False
        return self._has_call_names() and self._is_json_so_far()

    def _has_call_names(self) -> bool:
        """Return whether the first member of the first object may be a call's."""
        start = self._buffer[:_MAX_BEGINNING]
        key = _FIRST_KEY.match(start)
        name = _FIRST_NAME.match(start)
        return not ((key and key[1] not in _CALL_KEYS) or (name and name[1] not in self._names))

    def _is_json_so_far(self) -> bool:
        if self._place is None:
            brace = self._buffer.find("{")
            if brace < 0:
                return True
            self._place = brace
        try:
            self._place = self._scanner.scan(self._buffer, self._place)
        except NotJson:
            return False
        return True

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

    is_thinking = False

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
