"""Reads answers in the harmony format of gpt-oss.

An answer (https://developers.openai.com/cookbook/articles/openai-harmony) consists of messages on
channels, each with a header and a body:

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{arguments}<|call|>

The prompt ends with <|start|>assistant, so an answer begins within a header.
"""

import re
from collections.abc import Callable, Collection

from ullage_router.prompts.tools.pieces import (
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
_ROLE = "assistant"
_HEADS = ("<|channel|>", "<|start|>", "<|message|>", " to=")
"""Possible beginnings of a header, after an optional role. An answer without any is all text."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_ADDRESSED = re.compile(r"to=\S")
MakePiece = Callable[[str], Piece]


class HarmonyReader:
    """Reads the reasoning, text and calls of one answer.

    Args:
        names: the known functions. A message to any other recipient is treated as reasoning.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = ""
        self._make: MakePiece | None = None
        """Creates pieces from the current body's text, or None while a header is being read."""

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends within a message that is reasoning."""
        return self._make is Thought

    def push(self, text: str) -> list[Piece]:
        """Feed in more text, and return the text, reasoning and calls that are now certain."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """Return the rest of the answer, dropping a truncated header.

        The word `assistant` alone counts as text.
        """
        rest = self._buffer
        self._buffer = ""
        if self._make is None and not any(head in rest for head in _HEADS):
            self._make = Text
        return [self._make(rest)] if rest and self._make else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Read the current header or body to its end. Return False if more text is needed first."""
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
        """Return whether the body after this header is text, reasoning or a call's arguments.

        The result is the type of piece to make from the body. If the header names a known function,
        also append the start of a call to `pieces`.
        """
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
    """Return whether a text starts like a header, or may do so as more text arrives."""
    if _ROLE.startswith(text):
        return True
    rest = text.removeprefix(_ROLE)
    return any(head.startswith(rest) or rest.startswith(head) for head in _HEADS)
