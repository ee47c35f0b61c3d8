"""Reads the harmony format of gpt-oss: messages on channels, each with a header and a body.

https://developers.openai.com/cookbook/articles/openai-harmony

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{arguments}<|call|>

The prompt ends with <|start|>assistant, so an answer begins within a header.
"""

import re
from collections.abc import Callable, Collection

from ullage_router.tools.pieces import (
    Arguments,
    CallStart,
    Piece,
    Text,
    Thought,
    find_mark,
    held_back,
)

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MESSAGE = "<|message|>"
# What a header begins with; an answer that begins otherwise has none and is text.
_HEADS = ("<|channel|>", "<|start|>", "<|message|>", "assistant", " to=")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_ADDRESSED = re.compile(r"to=\S")

MakePiece = Callable[[str], Piece]


class HarmonyReader:
    """Thoughts, text and calls of one answer.

    Args:
        names: functions there are; what is said to another is a thought.
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
        """A header that was cut off says nothing."""
        rest, self._buffer = self._buffer, ""
        return [self._make(rest)] if rest and self._make else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Reads as far as the next mark; False where more text is needed."""
        return self._header(pieces) if self._make is None else self._body(pieces, self._make)

    def _header(self, pieces: list[Piece]) -> bool:
        if not any(h.startswith(self._buffer) or self._buffer.startswith(h) for h in _HEADS):
            self._make = Text
            return True
        found = find_mark(self._buffer, [_MESSAGE])
        if not found:
            return False
        self._buffer = found.after
        self._make = self._opened(found.before, pieces)
        return True

    def _opened(self, header: str, pieces: list[Piece]) -> MakePiece:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient and recipient[1] in self._names:
            pieces.append(CallStart(recipient[1]))
            return Arguments
        is_thought = bool(channel and channel[1] == "analysis") or bool(_ADDRESSED.search(header))
        return Thought if is_thought else Text

    def _body(self, pieces: list[Piece], make: MakePiece) -> bool:
        found = find_mark(self._buffer, _ENDS)
        sure = len(found.before) if found else len(self._buffer) - held_back(self._buffer, _ENDS)
        if sure:
            pieces.append(make(self._buffer[:sure]))
        if found is None:
            self._buffer = self._buffer[sure:]
            return False
        opens = found.mark in ("<|start|>", "<|channel|>")
        self._buffer = (found.mark if opens else "") + found.after
        self._make = None
        return True
