"""Checks JSON while it arrives, so that arguments can be streamed before they are complete."""

import re
from enum import Enum, auto

MAX_DEPTH = 128
"""Maximum nesting depth of arguments."""

_SPACES = re.compile(r"[ \t\n\r]*")
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


class _Next(Enum):
    """What may come next in the JSON text."""

    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    IN_STRING = auto()
    IN_KEY = auto()


class NotJson(Exception):
    """Raised at the first token that no JSON object can have there.

    place
        where the token begins
    """

    def __init__(self, place: int) -> None:
        super().__init__(f"not JSON at {place}")
        self.place = place


class JsonScanner:
    """Finds the end of one JSON object in a text that arrives in chunks.

    Args:
        is_inside: whether the text begins within the object, after one of its values.

    is_complete
        whether the object has ended
    """

    def __init__(self, is_inside: bool = False) -> None:
        self._closers = ["}"] if is_inside else []
        self._next = _Next.COMMA_OR_END if is_inside else _Next.VALUE
        self.is_complete = False

    def scan(self, text: str, place: int) -> int:
        """Read on in the text, and return the place up to which it is certain.

        Text after that place is the beginning of a number, a word or an escape, and has to be given
        again together with what follows it.

        Raises:
            NotJson: the text is no JSON object.
        """
        while not self.is_complete:
            if self._next in (_Next.IN_STRING, _Next.IN_KEY):
                after = self._string(text, place)
            else:
                place = _SPACES.match(text, place).end()  # type: ignore[union-attr]
                after = self._token(text, place) if place < len(text) else None
            if after is None:
                return place
            place, is_stuck = after
            if is_stuck:
                return place
        return place

    def _string(self, text: str, place: int) -> tuple[int, bool] | None:
        end = _CHARACTERS.match(text, place).end()  # type: ignore[union-attr]
        if end == len(text) or _PART_OF_ESCAPE.fullmatch(text, end):
            return end, True
        if text[end] != '"':
            raise NotJson(end)
        self._next = _Next.COLON if self._next is _Next.IN_KEY else _Next.COMMA_OR_END
        return end + 1, False

    def _token(self, text: str, place: int) -> tuple[int, bool] | None:
        """Read one token. Return None if it may go on after the text's end."""
        character = text[place]
        if self._is_end(character):
            self._closers.pop()
            self._next = _Next.COMMA_OR_END
            self.is_complete = not self._closers
        elif self._next is _Next.COLON and character == ":":
            self._next = _Next.VALUE
        elif self._next is _Next.COMMA_OR_END and character == ",":
            self._next = _Next.KEY if self._closers[-1] == "}" else _Next.VALUE
        elif self._next in (_Next.KEY, _Next.KEY_OR_END) and character == '"':
            self._next = _Next.IN_KEY
        elif self._next in (_Next.VALUE, _Next.VALUE_OR_END):
            return self._value(text, place)
        else:
            raise NotJson(place)
        return place + 1, False

    def _is_end(self, character: str) -> bool:
        ends = (_Next.COMMA_OR_END, _Next.KEY_OR_END, _Next.VALUE_OR_END)
        return self._next in ends and bool(self._closers) and character == self._closers[-1]

    def _value(self, text: str, place: int) -> tuple[int, bool] | None:
        character = text[place]
        if not self._closers and character != "{":
            raise NotJson(place)
        if character in "{[":
            if len(self._closers) >= MAX_DEPTH:
                raise NotJson(place)
            self._closers.append("}" if character == "{" else "]")
            self._next = _Next.KEY_OR_END if character == "{" else _Next.VALUE_OR_END
            return place + 1, False
        if character == '"':
            self._next = _Next.IN_STRING
            return place + 1, False
        end = _WORD.match(text, place).end()  # type: ignore[union-attr]
        if end == len(text):
            return None
        if not _SCALAR.fullmatch(text, place, end):
            raise NotJson(place)
        self._next = _Next.COMMA_OR_END
        return end, False
