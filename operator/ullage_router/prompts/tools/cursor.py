"""Reads the text of a tool call step by step while it arrives.

A format of calls is written as a generator that takes a `Cursor` and consumes the text with its
methods (`yield from cursor.literal("<arg_key>")`). It yields the pieces that are certain, and None
whenever it needs more text. Any text that the format does not allow raises `NoCall`.
"""

import json
import re
from collections.abc import Generator
from typing import TypeVar

from ullage_router.prompts.tools.json_scanner import JsonScanner, NotJson
from ullage_router.prompts.tools.pieces import Arguments, Piece
from ullage_router.prompts.tools.toolbox import NAME_CHARACTERS

T = TypeVar("T")
Steps = Generator[Piece | None, None, T]
"""Steps of reading, which end with a result of type T."""

_SPACES = re.compile(r"\s*")
_NAME = re.compile(NAME_CHARACTERS + "*")


class NoCall(Exception):
    """Raised where the text is not in the format."""


class CutOff(NoCall):
    """Raised if the answer ends within the arguments of a call."""


class Cursor:
    """The text of a call, as far as it has arrived.

    rest
        text that no piece covers yet, from the beginning if no piece was made
    is_closed
        whether no more text follows
    """

    def __init__(self, text: str) -> None:
        self.rest = text
        self.is_closed = False
        self._place = 0

    def add(self, text: str) -> None:
        """Append text that has arrived."""
        self.rest += text

    def cut(self) -> None:
        """Drop the text that was consumed, since pieces cover it."""
        self.rest = self.rest[self._place :]
        self._place = 0

    def mark(self) -> int:
        """Return the current place, to which `back` can return as long as no piece is made."""
        return self._place

    def back(self, place: int) -> None:
        """Return to a place that `mark` returned."""
        self._place = place

    def spaces(self) -> Steps[None]:
        """Skip whitespace."""
        while True:
            self._place = _SPACES.match(self.rest, self._place).end()  # type: ignore[union-attr]
            if self._place < len(self.rest) or self.is_closed:
                return
            yield None

    def peek(self, *options: str) -> Steps[str]:
        """Return which of the options comes next, or "" if none does. No option begins another."""
        while True:
            for option in options:
                if self.rest.startswith(option, self._place):
                    return option
            ahead = self.rest[self._place : self._place + max(map(len, options))]
            if self.is_closed or not any(option.startswith(ahead) for option in options):
                return ""
            yield None

    def literal(self, *options: str) -> Steps[str]:
        """Consume one of the options, and return it.

        Raises:
            NoCall: something else comes next.
        """
        option = yield from self.peek(*options)
        if not option:
            raise NoCall
        self._place += len(option)
        return option

    def finish(self, *options: str) -> Steps[str]:
        """Consume one of the options, or return "" at the end of the answer.

        An answer may also end within the first option, because it ends a call by itself.

        Raises:
            NoCall: something else comes next.
        """
        option = yield from self.peek(*options)
        ahead = self.rest[self._place :]
        if not option and not (self.is_closed and options[0].startswith(ahead)):
            raise NoCall
        self._place += len(option or ahead)
        return option

    def until(self, *marks: str) -> Steps[tuple[str, str]]:
        """Consume text up to the first of the marks, and the mark. Return both.

        Raises:
            NoCall: the answer ends before.
        """
        start = searched = self._place
        overlap = max(map(len, marks)) - 1
        while True:
            found = [(at, mark) for mark in marks if (at := self.rest.find(mark, searched)) >= 0]
            if found:
                at, mark = min(found)
                self._place = at + len(mark)
                return self.rest[start:at], mark
            if self.is_closed:
                raise NoCall
            searched = max(start, len(self.rest) - overlap)
            yield None

    def name(self) -> Steps[str]:
        """Consume a function's name, and return it (empty if there is none)."""
        while True:
            match = _NAME.match(self.rest, self._place)
            assert match
            if match.end() < len(self.rest) or self.is_closed:
                self._place = match.end()
                return match[0]
            yield None

    def string(self) -> Steps[str]:
        """Consume a JSON string without escapes, and return what it says.

        Raises:
            NoCall: something else comes next.
        """
        yield from self.literal('"')
        text, _ = yield from self.until('"')
        if "\\" in text or not text.isprintable():
            raise NoCall
        return text

    def arguments(self) -> Steps[None]:
        """Consume a JSON object as the arguments of a call, except for its last brace.

        The brace comes last of all, when the rest of the call is as it should be. So a call whose
        end is wrong has incomplete arguments, and nobody takes it for a call.

        Raises:
            NoCall: the text is not a JSON object.
            CutOff: the answer ends within the object.
        """
        scanner = JsonScanner()
        while True:
            is_json = True
            try:
                end = scanner.scan(self.rest, self._place)
            except NotJson as error:
                end = error.place
                is_json = False
            told = end - 1 if scanner.is_complete else end
            text = self.rest[self._place : told]
            self._place = told
            self.cut()
            if text:
                yield Arguments(text)
            if not is_json:
                raise NoCall
            if scanner.is_complete:
                self._place = 1
                return
            if self.is_closed:
                raise CutOff
            yield None

    def whole_object(self, is_inside: bool = False) -> Steps[str]:
        """Consume a JSON object without making pieces of it, and return its text.

        Args:
            is_inside: whether the object has begun, and the text goes on after one of its values.

        Raises:
            NoCall: the text is not a JSON object, or the answer ends within it.
        """
        start = self._place
        scanner = JsonScanner(is_inside)
        while True:
            try:
                self._place = scanner.scan(self.rest, self._place)
            except NotJson as error:
                raise NoCall from error
            if scanner.is_complete:
                return self.rest[start : self._place]
            if self.is_closed:
                raise NoCall
            yield None

    def last_brace(self) -> Arguments:
        """Return the piece that ends the arguments, whose call is complete."""
        self.cut()
        return Arguments("}")


def parsed(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        NoCall: it is not JSON, or has numbers that JSON does not allow.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NoCall from error


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
