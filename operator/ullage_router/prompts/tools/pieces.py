"""The pieces that answers with tool calls consist of, and the marks that separate them.

A reader gets an answer's text in pushes of any size. It returns the pieces that are certain so far
and holds back any text that may be the beginning of a mark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning, which the model's format separates from the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a call, to which the following arguments belong."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the JSON text of the arguments."""

    text: str


Piece = Text | Thought | CallStart | Arguments


class Reader(Protocol):
    """Reads one answer. All pieces together do not depend on how the text is split into pushes."""

    def push(self, text: str) -> list[Piece]:
        """Add text, and return the pieces that are now certain."""

    def close(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""


@dataclass(frozen=True, slots=True)
class Found:
    """A mark that was found in a text."""

    before: str
    mark: str
    after: str


def find_mark(text: str, marks: Sequence[str]) -> Found | None:
    """Return the mark that begins first. At the same place, the earlier of `marks` wins."""
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if not places:
        return None
    place, mark = min(places, key=lambda candidate: candidate[0])
    return Found(text[:place], mark, text[place + len(mark) :])


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return the number of characters at a text's end that may begin a mark."""
    longest = max(map(len, marks)) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    ends = (size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks))
    return next(ends, 0)
