"""Converts tokens to text as they arrive, in whole characters and up to the first stop string.

Bytes of an incomplete character are held back, and so is text that may turn out to be the start of
a stop string. The cost per token does not depend on the length of the preceding text.
"""

import codecs
import functools
import json
from array import array
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
        self._blanks: list[str] = []
        """Whitespace before the held text, in pieces: an answer may consist of nothing else."""
        self._held = ""
        """Text that may be the beginning of the first mark."""
        self._tail = ""
        """The last characters of the reasoning, which may be the beginning of its end."""

    def split(self, text: str, is_last: bool) -> tuple[str, str]:
        """Return the parts of the new text within the reasoning and after it."""
        if self._is_over:
            return "", text
        if self._begin:
            if not self._held:
                words = text.lstrip()
                self._blanks.append(text[: len(text) - len(words)])
                text = words
            begun = self._held + text
            if self._begin.startswith(begun) and begun != self._begin and not is_last:
                self._held = begun
                return "", ""
            text = "".join(self._blanks) + begun
            if not begun.startswith(self._begin):
                self._is_over = True
                return "", text
            self._begin = self._held = ""

        searched = self._tail + text
        place = searched.find(self._end)
        if place < 0:
            self._tail = searched[max(0, len(searched) - len(self._end) + 1) :]
            return text, ""
        self._is_over = True
        after = place + len(self._end) - len(self._tail)
        return text[:after], text[after:]


class StopMatcher:
    """Finds the first stop string in text that arrives incrementally.

    Args:
        stop_strings: the stop strings.
        includes_stop: whether the text includes the stop string that ends it.
    """

    def __init__(self, stop_strings: Sequence[str], includes_stop: bool = False) -> None:
        self._includes_stop = includes_stop
        self._stops = _automaton(tuple(stop_strings)) if stop_strings else None
        self._state = 0
        self._held = ""

    def push(self, text: str) -> TextPiece:
        """Add text, and return all text that can no longer be part of a stop string."""
        if self._stops is None:
            return TextPiece(text, "")

        pending = self._held + text
        self._state, num_read = self._stops.read(text, self._state)
        if stop := self._stops.completed(self._state):
            place = len(self._held) + num_read
            end = place if self._includes_stop else place - len(stop)
            return TextPiece(pending[:end], stop)

        kept = len(pending) - self._stops.num_matched(self._state)
        self._held = pending[kept:]
        return TextPiece(pending[:kept], "")

    def flush(self) -> str:
        """Return the text that is still held back. Call this after the last text was added."""
        held = self._held
        self._held = ""
        return held


class StopAutomaton:
    """Reads text for all stop strings at once (Aho and Corasick, 1975).

    A client chooses the stop strings, and may choose tokens with many characters. A character
    therefore takes the same few steps however many stop strings there are.

    A state is the longest end of the text that begins a stop string. The states of a stop string
    follow one another, so that most transitions lead to the next number.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._next = [""]
        """The character that leads from each state to the next number (empty for none)."""
        self._branches: dict[tuple[int, str], int] = {}
        """All other transitions to longer beginnings, by state and character."""
        self._lengths = array("H", [0])
        """Number of characters of each state."""
        self._ends = array("h", [-1])
        """Index of the longest stop string that each state ends with, or -1."""
        paths = [self._add(index, stop) for index, stop in enumerate(stops)]
        self._shorter = array("H", bytes(2 * len(self._next)))
        """The longest other state that each state ends with."""
        self._link(paths)

    def _add(self, index: int, stop: str) -> list[int]:
        """Add the states of a stop string, and return the states of all its beginnings."""
        path = [0]
        for character in stop:
            state = path[-1]
            is_next = self._next[state] == character
            longer = state + 1 if is_next else self._branches.get((state, character))
            if longer is None:
                break
            path.append(longer)

        num_shared = len(path) - 1
        if rest := stop[num_shared:]:
            first = len(self._next)
            if first == path[-1] + 1:
                self._next[-1] = rest[0]
            else:
                self._branches[path[-1], rest[0]] = first
            self._next += [*rest[1:], ""]
            self._lengths.extend(range(num_shared + 1, len(stop) + 1))
            self._ends.extend([-1] * len(rest))
            path += range(first, first + len(rest))
        self._ends[path[-1]] = index
        return path

    def _link(self, paths: Sequence[Sequence[int]]) -> None:
        """Find for each state the state at which reading goes on if no transition matches."""
        has_link = {0}
        for place in range(max(map(len, self._stops))):
            for stop, path in zip(self._stops, paths, strict=True):
                if place >= len(stop) or (longer := path[place + 1]) in has_link:
                    continue
                has_link.add(longer)
                if place:
                    shorter, _ = self.read(stop[place], self._shorter[path[place]])
                    self._shorter[longer] = shorter
                if self._ends[longer] < 0:
                    self._ends[longer] = self._ends[self._shorter[longer]]

    def read(self, text: str, state: int) -> tuple[int, int]:
        """Read text up to the first character that completes a stop string.

        Returns:
            The state after the text, and the number of characters read.
        """
        followers = self._next
        branches = self._branches
        for place, character in enumerate(text, start=1):
            while followers[state] != character:
                branch = branches.get((state, character)) if branches else None
                if branch is not None or not state:
                    state = branch or 0
                    break
                state = self._shorter[state]
            else:
                state += 1
            if self._ends[state] >= 0:
                return state, place
        return state, len(text)

    def completed(self, state: int) -> str:
        """Return the longest stop string that a state ends with, or ""."""
        return self._stops[self._ends[state]] if self._ends[state] >= 0 else ""

    def num_matched(self, state: int) -> int:
        """Return how many of the last characters may begin a stop string."""
        return self._lengths[state]


@functools.lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return an automaton, which the answers of a request share."""
    return StopAutomaton(stops)


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
