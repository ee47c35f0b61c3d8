"""Readers of answers that may have calls in them, one for each way to write calls."""

from collections.abc import Collection, Mapping

from ullage_router.tools.pieces import (
    Arguments,
    CallStart,
    Piece,
    Text,
    Trimmer,
    find_mark,
    held_back,
)
from ullage_router.tools.syntax import Call, ParseCalls, parse_json_calls

# How an answer begins that may be calls as a whole, blank space left out.
CALL_OPENINGS = ('{"', '[{"', "```json", "<|python_tag|>")


class TaggedReader:
    """Text with calls between two tags.

    Args:
        tags: what calls begin and end with.
        parse: reads what is between them.
        names: functions there are; what calls another is text.
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
        while found := find_mark(self._buffer, [self._mark]):
            pieces += self._inside(found.before, self._closing) if self._is_inside else []
            pieces += [] if self._is_inside else [Text(found.before)]
            self._is_inside, self._buffer = not self._is_inside, found.after
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
    """An answer that is calls as a whole, or else text.

    Args:
        names: functions there are; what calls another is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._may_be_calls: bool | None = None
        """None: too little has come to tell."""

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
        text, self._buffer = self._buffer, ""
        return [Text(text)] if text else []


class ForcedReader:
    """An answer that a grammar makes one call.

    Args:
        openings: by function, what precedes its arguments; none is the beginning of another.
        name: function whose opening was in the prompt already; empty for none.
    """

    def __init__(self, openings: Mapping[str, str], name: str = "") -> None:
        self._openings = openings
        self._name = name
        self._is_told = False
        self._buffer = ""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        if not self._name and not self._choose():
            return []
        start: list[Piece] = [] if self._is_told or not self._buffer else [CallStart(self._name)]
        self._is_told = self._is_told or bool(start)
        rest, self._buffer = self._buffer, ""
        return [*start, Arguments(rest)] if rest else []

    def close(self) -> list[Piece]:
        """What was cut off before it named a function says nothing."""
        return []

    def _choose(self) -> bool:
        for name, opening in self._openings.items():
            if self._buffer.startswith(opening):
                self._name, self._buffer = name, self._buffer[len(opening) :]
        return bool(self._name)


def known_calls(calls: list[Call] | None, names: Collection[str]) -> list[Piece]:
    """The calls as pieces; none when one of them is of no function that there is."""
    if not calls or any(call.name not in names for call in calls):
        return []
    return [piece for call in calls for piece in (CallStart(call.name), Arguments(call.arguments))]
