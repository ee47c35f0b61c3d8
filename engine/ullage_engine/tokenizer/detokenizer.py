"""Converts tokens to text as they arrive, in whole characters and up to the first stop string.

Bytes of an incomplete character are held back, and so is text that may turn out to be the start of
a stop string. The cost per token does not depend on the length of the preceding text.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

_UNSUPPORTED = "tokenizer.json: decoder {} is not supported; use a byte-level tokenizer"


class TokenBytes:
    """Looks up the bytes that each token adds to the text. Special tokens add none.

    Attributes:
        problem: error message if tokens cannot be converted to text, otherwise "". Conversion
            requires a decoder that is byte-level, or SentencePiece with byte fallback.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
        self._spell = _speller(decoder)

        # Added tokens are written as themselves, but a byte-level decoder takes their Latin-1
        # letters for bytes. SentencePiece has one spelling for all tokens.
        is_byte_level = isinstance(self._spell, _ByteLevelSpelling)
        self._added = {i: token.content for i, token in added.items()} if is_byte_level else {}
        is_supported = self._spell is not _spell_nothing
        self.problem = "" if is_supported else _UNSUPPORTED.format(decoder[:80])
        self._known: dict[int, bytes] = {}

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is special."""
        return token_id in self._special

    def text_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to the text."""
        return b"" if token_id in self._special else self.spelling(token_id)

    def spelling(self, token_id: int) -> bytes:
        """Return a token's bytes, even if the token is special, or b"" if no token has this id."""
        text = self._known.get(token_id)
        if text is None:
            added = self._added.get(token_id)
            if added is None:
                text = self._spell(self._tokenizer.id_to_token(token_id) or "")
            else:
                text = added.encode()
            self._known[token_id] = text
        return text


class TextPiece(NamedTuple):
    """New text, and the stop string that ended it (or "" if more text may follow)."""

    text: str
    stop_string: str


class Detokenizer:
    """Converts one answer's tokens to text as they arrive.

    The texts that `push` and `flush` return, joined together, are the decoded text before the first
    stop string. If one character completes two stop strings, the longer one is used. With
    `special_tokens`, the text includes special tokens. Stop strings within `reasoning`, which is
    given by the marks around it, do not count. With `include_stop`, the text includes the stop
    string.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        stop_strings: Sequence[str] = (),
        special_tokens: bool = False,
        reasoning: tuple[str, str] = ("", ""),
        include_stop: bool = False,
    ) -> None:
        self._bytes_of = token_bytes.spelling if special_tokens else token_bytes.text_bytes
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopMatcher(stop_strings, include_stop)
        self._reasoning = _Reasoning(*reasoning) if stop_strings and reasoning[1] else None

    def push(self, token_id: int) -> TextPiece:
        """Add a token and return the new text. Do not call this after a stop string was found."""
        return self._push(self._characters.decode(self._bytes_of(token_id)))

    def flush(self) -> TextPiece:
        """Return the text that was held back. An incomplete character becomes U+FFFD."""
        piece = self._push(self._characters.decode(b"", final=True), is_last=True)
        if piece.stop_string:
            return piece
        return TextPiece(piece.text + self._stops.flush(), "")

    def _push(self, text: str, is_last: bool = False) -> TextPiece:
        if self._reasoning is None:
            return self._stops.push(text)
        thought, rest = self._reasoning.split(text, is_last)
        piece = self._stops.push(rest)
        return TextPiece(thought + piece.text, piece.stop_string)


class _Reasoning:
    """Separates the reasoning with which an answer begins from the text after it.

    Args:
        begin: the mark before the reasoning, or "" if the prompt ends with it.
        end: the mark after the reasoning.
    """

    def __init__(self, begin: str, end: str) -> None:
        self._begin = begin
        self._end = end
        self._is_over = False
        self._held = ""
        """Text that may be the beginning of the first mark."""
        self._tail = ""
        """The last characters of the reasoning, which may be the beginning of its end."""

    def split(self, text: str, is_last: bool) -> tuple[str, str]:
        """Return the parts of the new text within the reasoning and after it."""
        if self._is_over:
            return "", text
        if self._begin:
            text = self._held + text
            begun = text.lstrip()
            if begun.startswith(self._begin):
                self._begin = self._held = ""
            elif self._begin.startswith(begun) and not is_last:
                self._held = text
                return "", ""
            else:
                self._is_over = True
                return "", text

        searched = self._tail + text
        place = searched.find(self._end)
        if place < 0:
            self._tail = searched[max(0, len(searched) - len(self._end) + 1) :]
            return text, ""
        self._is_over = True
        after = place + len(self._end) - len(self._tail)
        return text[:after], text[after:]


class StopMatcher:
    """Finds the first stop string in text that arrives incrementally (Knuth-Morris-Pratt).

    Args:
        stop_strings: the stop strings.
        includes_stop: whether the text includes the stop string that ends it.
    """

    def __init__(self, stop_strings: Sequence[str], includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        # Longest first, so that the longer of two matches at one character wins.
        self._stops = sorted(set(stop_strings), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> TextPiece:
        """Add text, and return all text that can no longer be part of a stop string."""
        if not self._stops:
            return TextPiece(text, "")

        pending = self._held + text
        for place, character in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop:
                end = place if self._includes_stop else place - len(stop)
                return TextPiece(pending[:end], stop)

        kept = len(pending) - max(self._matched)
        self._held = pending[kept:]
        return TextPiece(pending[:kept], "")

    def flush(self) -> str:
        """Return the text that is still held back. Call this after the last text was added."""
        held = self._held
        self._held = ""
        return held

    def _advance(self, character: str) -> str:
        """Add one character, and return the stop string that it completes, or ""."""
        completed = ""
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._borders[index][matched - 1]
            self._matched[index] = matched + (stop[matched] == character)
            if self._matched[index] == len(stop) and not completed:
                completed = stop
        return completed


def _borders(text: str) -> list[int]:
    """Compute the Knuth-Morris-Pratt failure function.

    For each prefix of `text`, it gives the length of the longest proper prefix that is also a
    suffix.
    """
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        length += text[place] == text[length]
        borders[place] = length
    return borders


def _speller(decoder: str) -> Callable[[str], bytes]:
    if '"ByteLevel"' in decoder:
        return _ByteLevelSpelling()
    if '"ByteFallback"' in decoder:
        return _spell_sentencepiece
    return _spell_nothing


def _spell_nothing(token: str) -> bytes:
    """Return b"" for every token, because the tokenizer's decoder is not supported."""
    return b""


class _ByteLevelSpelling:
    """Converts tokens back to bytes by undoing GPT-2's mapping of bytes to printable characters."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = sorted(set(range(256)) - set(printable))
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes.update({chr(256 + place): byte for place, byte in enumerate(others)})

    def __call__(self, token: str) -> bytes:
        try:
            return bytes(self._bytes[character] for character in token)
        except KeyError:
            # Not a token of a byte-level vocabulary.
            return token.encode()


def _spell_sentencepiece(token: str) -> bytes:
    """Convert a SentencePiece token to bytes. `▁` means a space and `<0xE2>` a single byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
