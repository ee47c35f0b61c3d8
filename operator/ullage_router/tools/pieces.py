"""What an answer consists of, and finding marks in text that arrives in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Words that the model's format sets apart from the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; the arguments that follow are its own."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the JSON text of the arguments."""

    text: str


Piece = Text | Thought | CallStart | Arguments


class Reader(Protocol):
    """Reads one answer; how the text is cut into pushes makes no difference to the whole."""

    def push(self, text: str) -> list[Piece]:
        """Takes text; the pieces that are certain now."""

    def close(self) -> list[Piece]:
        """What was held back, for no more is coming."""


@dataclass(frozen=True, slots=True)
class Found:
    """A mark in a text."""

    before: str
    mark: str
    after: str


def find_mark(text: str, marks: Sequence[str]) -> Found | None:
    """The first of the marks to begin; of two that begin there, the one named first."""
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if not places:
        return None
    place, mark = min(places, key=lambda found: found[0])
    return Found(text[:place], mark, text[place + len(mark) :])


def held_back(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of the text that may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    ends = (size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks))
    return next(ends, 0)


class Trimmer:
    """Leaves out blank space around calls; text without a call stays as it is."""

    def __init__(self) -> None:
        self._blank = ""
        self._has_calls = False

    def push(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [told for piece in pieces for told in self._take(piece)]

    def close(self) -> list[Piece]:
        return [Text(self._blank)] if self._blank and not self._has_calls else []

    def _take(self, piece: Piece) -> list[Piece]:
        if not isinstance(piece, Text):
            if isinstance(piece, CallStart):
                self._blank, self._has_calls = "", True
            return [piece]
        whole = self._blank + piece.text
        words = whole.rstrip()
        self._blank = whole[len(words) :]
        return [Text(words)] if words else []
