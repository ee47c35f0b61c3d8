"""The pieces of answers with tool calls, and the marks that separate the pieces.

A piece is some text, reasoning, or part of a tool call. A mark is a string such as `<tool_call>`. A
reader gets an answer's text in chunks of any size. It returns the pieces that are certain so far,
and holds back any text that may be the start of a mark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning, which the model's format separates from the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call, whose arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the JSON text of a call's arguments."""

    text: str


Piece = Text | Thought | CallStart | Arguments


class Reader(Protocol):
    """Reads one answer. How the text is split into chunks does not affect the result."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""

    def push(self, text: str) -> list[Piece]:
        """Feed in more text, and return the text, reasoning and calls that are now certain."""

    def close(self) -> list[Piece]:
        """End the answer, and return the pieces that were held back."""


@dataclass(frozen=True, slots=True)
class Found:
    """A mark that was found in a text."""

    before: str
    mark: str
    after: str


def find_mark(text: str, marks: Sequence[str]) -> Found | None:
    """Find the mark that occurs first in the text. Return None if there is none.

    If two marks start at the same position, the one listed first in `marks` wins.
    """
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if not places:
        return None
    place, mark = min(places, key=lambda candidate: candidate[0])
    return Found(text[:place], mark, text[place + len(mark) :])


def held_back(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of a text could be the start of a mark."""
    longest = max(map(len, marks)) - 1
    sizes = range(min(longest, len(text)), 0, -1)
    ends = (size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks))
    return next(ends, 0)
