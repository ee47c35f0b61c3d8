"""A string type that keeps client text from forging special tokens in a chat template.

A special token in a prompt begins or ends a turn, so only the template may write special tokens.
Text from clients or tools may spell them, but must not produce them. Before a template renders,
every character of client text that could form a special token is therefore replaced by a mark,
which is a private-use character. No operation of a template, such as slicing, joining or JSON
encoding, turns a mark back into its character. All special tokens in the rendered text then come
from the template. The text is split at these tokens before the original characters are restored.

`ClientText` is a string that contains marks. Operations that templates use for decisions (`in`,
`split`, `==`) return the same results as for the original text, so the template renders the same
prompt. Operations that `ClientText` does not override work on the marks. They may change the words
between special tokens, but they never forge a special token.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, SupportsIndex

import markupsafe

_NOT_ASCII = re.compile(r"[^\x00-\x7e]")
_FEW = 8
"""Up to this many characters, repeated `replace` calls are faster than `translate`."""


class Marks:
    """Maps characters one-to-one to the private-use characters (marks) that stand in for them.

    Args:
        characters: the characters to replace, without duplicates.
        marks: the same number of other characters, none of which occurs in the texts.
    """

    def __init__(self, characters: str, marks: str) -> None:
        self.others: Marks | None = None
        """A second set of marks that may occur in the same text (None without one)."""
        self._pairs = list(zip(characters, marks, strict=True))
        self._marked = str.maketrans(dict(self._pairs))
        self._cleared = str.maketrans(dict(zip(marks, characters, strict=True)))

    def __contains__(self, character: str) -> bool:
        return ord(character) in self._cleared

    def mark(self, text: str) -> str:
        """Replace characters with their marks. Return the same object if nothing changes."""
        if len(self._pairs) > _FEW:
            marked = text.translate(self._marked)
            return text if marked == text else marked
        for character, mark in self._pairs:
            text = text.replace(character, mark)
        return text

    def clear(self, text: str) -> str:
        """Undo `mark` by replacing each mark in a text with the character that it stands for."""
        if len(self._pairs) > _FEW:
            return text.translate(self._cleared)
        for character, mark in self._pairs:
            text = text.replace(mark, character)
        return text

    def clear_all(self, text: str) -> str:
        """Replace both sets of marks (this one and `others`) with the original characters."""
        text = self.clear(text)
        return self.others.clear(text) if self.others else text

    def mark_deep(self, value: Any) -> Any:
        """Return a JSON value with all its strings marked, including the keys."""
        if isinstance(value, str):
            marked = self.mark(value)
            return value if marked is value else ClientText(marked, self)
        if isinstance(value, Mapping):
            return {self.mark_deep(key): self.mark_deep(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_deep(item) for item in value]
        return value


def plain_text(value: Any) -> Any:
    """Return the original text of a `ClientText`, and any other value unchanged."""
    return value.plain if isinstance(value, ClientText) else value


class ClientText(str):
    """A string with marks that compares, searches and splits like the original text.

    Args:
        text: the text with its marks.
        marks: the marks, or None for a text without marks.
    """

    __slots__ = ("_marks", "_text")
    _marks: Marks | None
    _text: str | None

    def __new__(cls, text: str, marks: Marks | None = None) -> "ClientText":
        client_text = super().__new__(cls, text)
        client_text._marks = marks
        client_text._text = None
        return client_text

    @property
    def plain(self) -> str:
        """The original text without marks, which has the same length."""
        if self._text is None:
            raw = str.__str__(self)
            self._text = self._marks.clear_all(raw) if self._marks else raw
        return self._text

    @property
    def marks(self) -> Marks | None:
        """The marks in the text, or None for a text without marks."""
        return self._marks

    def _kept(self, text: str) -> "ClientText":
        """Convert a text to `ClientText` as it is, because it already has its marks.

        Such a text results from operations on marked text, such as slicing.
        """
        return ClientText(text, self._marks)

    def _changed(self, text: str) -> "ClientText":
        """Convert a text to `ClientText`, and mark it again.

        Such a text results from operations on the original characters, such as `lower`.
        """
        return ClientText(self._marks.mark(text) if self._marks else text, self._marks)

    def _slice(self, start: int, end: int | None) -> "ClientText":
        return self._kept(str.__getitem__(self, slice(start, end)))

    # Texts of the same characters are equal, marked or not.

    def __hash__(self) -> int:
        return hash(self.plain)

    def __eq__(self, other: object) -> bool:
        return bool(self.plain == plain_text(other))

    def __ne__(self, other: object) -> bool:
        return bool(self.plain != plain_text(other))

    def __lt__(self, other: str) -> bool:
        return bool(self.plain < plain_text(other))

    def __le__(self, other: str) -> bool:
        return bool(self.plain <= plain_text(other))

    def __gt__(self, other: str) -> bool:
        return bool(self.plain > plain_text(other))

    def __ge__(self, other: str) -> bool:
        return bool(self.plain >= plain_text(other))

    def __contains__(self, part: object) -> bool:
        return plain_text(part) in self.plain

    def __str__(self) -> "ClientText":
        return self

    def __repr__(self) -> str:
        return self._changed(repr(self.plain))

    def __add__(self, other: str) -> "ClientText":
        return self._kept(str.__add__(self, other))

    def __radd__(self, other: str) -> "ClientText":
        return self._kept(str.__add__(other, self))

    def __mul__(self, count: SupportsIndex) -> "ClientText":
        return self._kept(str.__mul__(self, count))

    __rmul__ = __mul__

    def __getitem__(self, place: SupportsIndex | slice) -> "ClientText":
        return self._kept(str.__getitem__(self, place))

    def __iter__(self) -> Iterator[str]:
        return map(self._kept, str.__iter__(self))

    # Questions. An index into the plain text is an index into the text with marks.

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        return self.plain.startswith(_plains(prefix), *bounds)

    def endswith(self, suffix: Any, *bounds: Any) -> bool:
        return self.plain.endswith(_plains(suffix), *bounds)

    def find(self, part: str, *bounds: Any) -> int:
        return self.plain.find(plain_text(part), *bounds)

    def rfind(self, part: str, *bounds: Any) -> int:
        return self.plain.rfind(plain_text(part), *bounds)

    def index(self, part: str, *bounds: Any) -> int:
        return self.plain.index(plain_text(part), *bounds)

    def rindex(self, part: str, *bounds: Any) -> int:
        return self.plain.rindex(plain_text(part), *bounds)

    def count(self, part: str, *bounds: Any) -> int:
        return self.plain.count(plain_text(part), *bounds)

    def isspace(self) -> bool:
        return self.plain.isspace()

    def isdigit(self) -> bool:
        return self.plain.isdigit()

    def isalpha(self) -> bool:
        return self.plain.isalpha()

    def isalnum(self) -> bool:
        return self.plain.isalnum()

    def isupper(self) -> bool:
        return self.plain.isupper()

    def islower(self) -> bool:
        return self.plain.islower()

    # Parts of the text.

    def strip(self, characters: str | None = None) -> "ClientText":
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> "ClientText":
        return self._slice(len(self) - len(self.plain.lstrip(plain_text(characters))), None)

    def rstrip(self, characters: str | None = None) -> "ClientText":
        return self._slice(0, len(self.plain.rstrip(plain_text(characters))))

    def removeprefix(self, prefix: str) -> "ClientText":
        return self._slice(len(prefix), None) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> "ClientText":
        return self._slice(0, len(self) - len(suffix)) if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(self.plain.split(plain_text(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._parts(self.plain.rsplit(plain_text(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = list[str]()
        start = 0
        for whole, line in zip(
            self.plain.splitlines(True), self.plain.splitlines(keepends), strict=True
        ):
            lines.append(self._slice(start, start + len(line)))
            start += len(whole)
        return lines

    def partition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(*self.plain.partition(plain_text(sep)))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return self._parted(*self.plain.rpartition(plain_text(sep)))

    def _parted(self, before: str, sep: str, after: str) -> tuple[str, str, str]:
        start = len(before)
        end = len(self) - len(after)
        return self._slice(0, start), self._slice(start, end), self._slice(end, None)

    def _parts(self, parts: list[str], sep: str | None) -> list[str]:
        """Return the marked form of each of the parts into which the plain text was split.

        Two consecutive parts may be separated only by `sep`, or by white space if `sep` is None.
        """
        marked_parts = list[str]()
        start = 0
        for part in parts:
            place = self.plain.index(part, start)
            marked_parts.append(self._slice(place, place + len(part)))
            start = place + len(part) + (len(sep) if sep else 0)
        return marked_parts

    # Changed text. Characters that a template inserts stay unmarked where they can be told apart.

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "ClientText":
        if not old:
            return self._kept(str.replace(self, old, new, count))
        parts = self.split(old, count)
        return self._kept(str.__str__(new).join(map(str.__str__, parts)))

    def join(self, parts: Iterable[str]) -> "ClientText":
        return self._kept(str.__str__(self).join(map(str.__str__, parts)))

    def lower(self) -> "ClientText":
        return self._changed(self.plain.lower())

    def upper(self) -> "ClientText":
        return self._changed(self.plain.upper())

    def title(self) -> "ClientText":
        return self._changed(self.plain.title())

    def capitalize(self) -> "ClientText":
        return self._changed(self.plain.capitalize())

    def casefold(self) -> "ClientText":
        return self._changed(self.plain.casefold())

    def swapcase(self) -> "ClientText":
        return self._changed(self.plain.swapcase())


def _plains(value: Any) -> Any:
    return tuple(map(plain_text, value)) if isinstance(value, tuple) else plain_text(value)


def joined(parts: Iterable[str]) -> str:
    """Concatenate texts. The result is a `ClientText` if any of the texts is one."""
    listed = list(parts)
    return _of("".join(listed), listed)


def interposed(between: str, parts: Iterable[Any]) -> str:
    """Join texts with a separator, like `str.join`, and keep the marks of client text."""
    listed = list(map(str, parts))
    return _of(str.join(between, listed), [between, *listed])


def formatted(form: str, values: Any) -> str:
    """Return `form % values`, and keep the marks of client text."""
    listed = values.values() if isinstance(values, Mapping) else values
    parts = listed if isinstance(listed, Iterable) and not isinstance(listed, str) else [listed]
    return _of(str.__mod__(form, values), [form, *parts])


def _of(text: str, parts: Iterable[Any]) -> str:
    """Return the text, converted to `ClientText` if any of the parts is a `ClientText`."""
    for part in parts:
        if type(part) is ClientText:
            return ClientText(text, part.marks)
    return text


def escaped(value: Any) -> str:
    """Escape HTML's special characters as entities, and keep the marks of client text."""
    if not isinstance(value, ClientText):
        return markupsafe.escape(value)
    text = str(markupsafe.escape(value.plain))
    return ClientText(value.marks.mark(text) if value.marks else text, value.marks)


def ascii_json(value: Any, dump: Callable[[Any], str]) -> str:
    """Serialise a value as ASCII JSON, but leave the marks of ASCII characters unescaped.

    Args:
        dump: serialises a value as JSON without escaping non-ASCII characters.
    """
    first = next(_marks_in(value), None)
    kinds = [marks for marks in (first, first and first.others) if marks]

    def escaped(match: re.Match[str]) -> str:
        character = match.group()
        marks = next((each for each in kinds if character in each), None)
        if marks is None:
            return json.dumps(character)[1:-1]
        plain = marks.clear(character)
        return character if plain.isascii() else marks.mark(json.dumps(plain)[1:-1])

    return _NOT_ASCII.sub(escaped, dump(value))


def _marks_in(value: Any) -> Iterator[Marks]:
    if isinstance(value, ClientText) and value.marks:
        yield value.marks
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _marks_in(key)
            yield from _marks_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _marks_in(item)
