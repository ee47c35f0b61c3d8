"""Parsers of answers that may contain tool calls, one for each format in which models write calls.

A parser gets the answer's text in pieces of any size and returns what is certain so far: text,
reasoning and calls. Calls are JSON objects, or a list of calls in Python's syntax, which is parsed
and never evaluated: names, calls and literals are all there may be.

The harmony format of gpt-oss (https://developers.openai.com/cookbook/articles/openai-harmony) sends
messages on channels, each with a header and a body:

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{arguments}<|call|>

The prompt ends with <|start|>assistant, so an answer begins within a header.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
        """Take text; return the pieces that are certain now."""

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
    place, mark = min(places, key=lambda candidate: candidate[0])
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
        return [part for piece in pieces for part in self._take(piece)]

    def close(self) -> list[Piece]:
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


_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MESSAGE = "<|message|>"
_ROLE = "assistant"
_HEADS = ("<|channel|>", "<|start|>", "<|message|>", " to=")
"""What a header begins with, perhaps behind the role; an answer that begins otherwise has none and
is text."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_ADDRESSED = re.compile(r"to=\S")

MakePiece = Callable[[str], Piece]


class HarmonyReader:
    """Thoughts, text and calls of one answer.

    Args:
        names: the known functions; a message to another one is a thought.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._make: MakePiece | None = None
        """Makes pieces of the body; None: within a header."""

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """Return the rest of the answer, without a truncated header; `assistant` alone is text."""
        rest = self._buffer
        self._buffer = ""
        if self._make is None and not any(head in rest for head in _HEADS):
            self._make = Text
        return [self._make(rest)] if rest and self._make else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Reads as far as the next mark; False where more text is needed."""
        return self._header(pieces) if self._make is None else self._body(pieces, self._make)

    def _header(self, pieces: list[Piece]) -> bool:
        if not _may_be_header(self._buffer):
            self._make = Text
            return True
        match = find_mark(self._buffer, [_MESSAGE])
        if not match:
            return False
        self._buffer = match.after
        self._make = self._opened(match.before, pieces)
        return True

    def _opened(self, header: str, pieces: list[Piece]) -> MakePiece:
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient and recipient[1] in self._names:
            pieces.append(CallStart(recipient[1]))
            return Arguments
        is_thought = bool(channel and channel[1] == "analysis") or bool(_ADDRESSED.search(header))
        return Thought if is_thought else Text

    def _body(self, pieces: list[Piece], make: MakePiece) -> bool:
        match = find_mark(self._buffer, _ENDS)
        sure = len(match.before) if match else len(self._buffer) - held_back(self._buffer, _ENDS)
        if sure:
            pieces.append(make(self._buffer[:sure]))
        if match is None:
            self._buffer = self._buffer[sure:]
            return False
        opens = match.mark in ("<|start|>", "<|channel|>")
        self._buffer = (match.mark if opens else "") + match.after
        self._make = None
        return True


def _may_be_header(text: str) -> bool:
    """Return whether a text begins as a header does, or may do so once more of it arrives."""
    if _ROLE.startswith(text):
        return True
    rest = text.removeprefix(_ROLE)
    return any(head.startswith(rest) or rest.startswith(head) for head in _HEADS)


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is complete; its arguments are text of a JSON object."""

    name: str
    arguments: str


ParseCalls = Callable[[str], list[Call] | None]
"""None: the text is not calls and nothing but calls."""

_BETWEEN = re.compile(r"[\s;,]*")


def parse_json_calls(text: str) -> list[Call] | None:
    """Parse one or several objects, perhaps in a list: {"name", "arguments" or "parameters"}."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if text.startswith("```"):
        text = text.removeprefix("```").removeprefix("json").removesuffix("```").strip()
    objects = _json_objects(text)
    calls = [_from_json(item) for item in objects or ()]
    whole = [call for call in calls if call]
    return whole if whole and len(whole) == len(calls) else None


def parse_python_calls(text: str) -> list[Call] | None:
    """[name(argument=literal, ...), ...]; the models that write so write JSON sometimes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as \d, which mean themselves
            tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_from_python(node) for node in nodes] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return parse_json_calls(text)


def _json_objects(text: str) -> list[Any] | None:
    decoder = json.JSONDecoder()
    place = 0
    values = []
    try:
        while place < len(text):
            value, place = decoder.raw_decode(text, place)
            values.extend(value if isinstance(value, list) else [value])
            place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return None
    return values


def _from_json(item: object) -> Call | None:
    if not isinstance(item, dict):
        return None
    inner = item.get("function")
    call = inner if isinstance(inner, dict) else item
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict):
        return None
    try:
        return Call(call["name"], _text(arguments))
    except ValueError:
        return None


def _from_python(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    values = {key.arg: ast.literal_eval(key.value) for key in node.keywords if key.arg}
    if len(values) != len(node.keywords):
        raise ValueError("unpacked arguments, or one given twice")
    return Call(_name(node.func), _text(values))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("not a name")
    return node.id


def _text(arguments: dict[str, Any]) -> str:
    """Raise TypeError or ValueError for what JSON or UTF-8 cannot say: a set, NaN, a surrogate."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


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
    """An answer that is calls as a whole, or else text.

    Args:
        names: functions there are; what calls another is text.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._may_be_calls: bool | None = None
        """None until enough has come."""

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
        rest = self._buffer
        self._buffer = ""
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
