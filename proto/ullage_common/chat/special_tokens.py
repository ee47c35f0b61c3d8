"""Prevents client text from becoming special tokens in the prompt.

A tokenizer has three kinds of added tokens:

* Controls begin and end turns. These are tokens that the tokenizer marks as special, tokens with
  bars such as `<|user|>`, and tokens in brackets that the template writes although the tokenizer
  does not mark them as special.
* Tags look like `<think>`. The template writes them, and the tokenizer does not mark them as
  special. Models write tags in answers, which clients send back.
* All other added tokens, such as runs of blanks, are ordinary words.

Client text never becomes a control. It becomes a tag only in assistant and system turns.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenizers import Tokenizer, normalizers

from ullage_common.chat.client_text import Marks
from ullage_common.chat.token_finder import SpecialTokenError, TokenPiece, finder, parted
from ullage_common.chat.tool_formats import Turn

_MARKS = range(0xE000, 0xF900)
_MORE_MARKS = range(0xF0000, 0xFFFFE)
"""Code points for marks if `_MARKS` is too small. They need four bytes per character."""


_BARRED = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_TAG = re.compile(r"</?\w+>")
_MARKUP = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
_JSON = frozenset('"\\{}[]:,')
"""Punctuation of JSON, avoided as key characters because templates write it around client text."""

_COMMON = frozenset("_/()>")
"""Punctuation that is frequent in source code, and therefore avoided as key characters."""

_OWN_ROLES = frozenset({"assistant", "system"})
"""Roles whose text may contain tags."""

_CASED = range(0x80, 0x20000)
"""Code points to search for letters that a case conversion turns into other letters."""

_SINGLETONS = range(0x300, 0x3400)
"""Code points to search for characters that NFC normalisation turns into punctuation."""


@dataclass(frozen=True, slots=True)
class ClearMarks:
    """Replaces the marks in a rendered text with the original characters."""

    guard: "SpecialTokenGuard"
    own: Marks
    """Marks used in the text of assistant and system turns."""

    def pieces(self, text: str) -> Iterator[TokenPiece]:
        """Split a rendered text at the template's special tokens, and restore marked characters."""
        tags = self.guard.tag_finder
        for piece in parted(text, self.guard.finder):
            if piece.is_token:
                yield piece
                continue
            part = self.own.clear(piece.text)
            del piece  # every form of a long text is as large as the text
            if tags is None or not tags.search(part):
                part = self.own.clear_all(part)
                yield TokenPiece(part)
                continue
            for each in parted(part, tags):
                yield each if each.is_token else TokenPiece(self.own.clear_all(each.text))


@dataclass(frozen=True, slots=True)
class MarkedRequest:
    """A request whose texts are marked, and the object that undoes the marking after rendering."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any]
    marks: ClearMarks

    def pieces(self, text: str) -> Iterator[TokenPiece]:
        """Split a rendered text at the template's special tokens, and restore marked characters."""
        return self.marks.pieces(text)


class SpecialTokenGuard:
    """Prevents client text from becoming a model's special tokens.

    Args:
        tokenizer: the model's tokenizer.
        literals: texts that the model's chat template writes.
    """

    def __init__(self, tokenizer: Tokenizer, literals: Collection[str] = ()) -> None:
        self.controls, tags = _kinds(tokenizer, literals)
        self.guarded = self.controls | tags
        self.finder = finder(self.guarded)
        self.tag_finder = finder(tags)

        self._keys = _hitting_set(self.guarded)
        """Key characters, chosen so that every guarded token contains at least one of them."""
        # Without keys the pattern is never used.
        self._find_key = re.compile("|".join(map(re.escape, sorted(self._keys)))).search
        is_composed = _is_composed(literals, self.guarded, self._keys)
        needed = frozenset("".join(self.guarded)) if is_composed else self._keys
        self._alphabet = "".join(sorted(_with_cases(needed)))
        self._is_always = (
            is_composed
            or any(key.isalnum() for key in self._keys)
            or not _keeps_out(tokenizer.normalizer, self._keys)
        )
        """Whether even text without a key character might form a guarded token.

        If so, every request is marked. Otherwise only requests with a key character are.
        """
        self._code_points = _MARKS if 4 * len(self._alphabet) <= len(_MARKS) else _MORE_MARKS
        first = chr(self._code_points[0])
        last = chr(self._code_points[-1])
        self._find_taken = re.compile(f"[{first}-{last}]").findall
        self._usual_marks = self._free_marks(frozenset())

    def marked(
        self,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
    ) -> MarkedRequest | None:
        """Replace risky characters in a request's texts with marks (see `client_text`).

        Return None if the texts cannot form a guarded token, so that nothing needs to be replaced.

        Raises:
            SpecialTokenError: the texts contain too many private-use characters, so that too few
                are left to serve as marks.
        """
        if not self.guarded:
            return None
        texts = _texts([*turns, *tools, arguments])
        if not self._is_always and not any(map(self._find_key, texts)):
            return None
        own, others = self._marks(texts)
        return MarkedRequest(
            turns=[_marked_turn(turn, own, others) for turn in turns],
            tools=others.mark_deep(tools),
            arguments={name: others.mark_deep(value) for name, value in arguments.items()},
            marks=ClearMarks(self, own),
        )

    def _marks(self, texts: Iterable[str]) -> tuple[Marks, Marks]:
        """Return two sets of marks, one for assistant and system turns, one for all other text."""
        taken = set[str]()
        for text in texts:
            if not text.isascii():
                taken.update(self._find_taken(text))
        return self._free_marks(taken) if taken else self._usual_marks

    def _free_marks(self, taken: Collection[str]) -> tuple[Marks, Marks]:
        free = [mark for mark in map(chr, self._code_points) if mark not in taken]
        size = len(self._alphabet)
        if len(free) < 2 * size:
            first = self._code_points[0]
            last = self._code_points[-1]
            raise SpecialTokenError(
                f"the texts have {len(taken)} characters of private use (U+{first:X} to "
                f"U+{last:X}) and {len(self._code_points) - 2 * size} are possible; leave some of "
                "them out"
            )

        own = Marks(self._alphabet, "".join(free[:size]))
        others = Marks(self._alphabet, "".join(free[size : 2 * size]))
        own.others = others
        others.others = own
        return own, others


def _kinds(
    tokenizer: Tokenizer, literals: Collection[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the texts of a tokenizer's control tokens and of its tag tokens.

    The module's docstring defines both classes of tokens.
    """
    controls = set[str]()
    tags = set[str]()
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        if not text.strip():
            continue
        if token.special or _BARRED.fullmatch(text):
            controls.add(text)
        elif _MARKUP.fullmatch(text) and any(text in literal for literal in literals):
            (tags if _TAG.fullmatch(text) else controls).add(text)
    return frozenset(controls), frozenset(tags)


def _hitting_set(texts: Collection[str]) -> frozenset[str]:
    """Return a small set of characters such that every text contains at least one of them.

    The set is a greedy hitting set, which prefers rare punctuation over letters.
    """
    chosen = set[str]()
    unhit = set(texts)
    while unhit:
        counts = dict.fromkeys(sorted(set("".join(unhit))), 0)
        for text in unhit:
            for character in set(text):
                counts[character] += 1
        best = max(counts, key=lambda c: (*_rank(c), counts[c], c not in _COMMON, ord(c)))
        chosen.add(best)
        unhit = {text for text in unhit if best not in text}
    return frozenset(chosen)


def _rank(character: str) -> tuple[bool, bool]:
    is_punctuation = not character.isalnum() and not character.isspace()
    return is_punctuation, character not in _JSON


def _is_composed(literals: Collection[str], texts: Collection[str], keys: Collection[str]) -> bool:
    """Return whether client text and adjacent template text could together form a guarded token.

    For example, a template writes `<|` and the client's text continues with `user|>`. This can
    happen if one of the template's texts equals, begins with or ends with a fragment of a guarded
    token, and the fragment contains one of the key characters.

    Args:
        literals: texts that the template writes.
        texts: texts of the guarded tokens.
        keys: the key characters. Every guarded token contains at least one of them.
    """

    def has_key(part: str) -> bool:
        return any(key in part for key in keys)

    starts = {text[:n] for text in texts for n in range(1, len(text))}
    ends = {text[n:] for text in texts for n in range(1, len(text))}
    longest = max(map(len, texts), default=0)
    for literal in literals:
        if literal in texts or not has_key(literal):
            continue
        sizes = range(1, min(len(literal), longest) + 1)
        if any(literal[-n:] in starts and has_key(literal[-n:]) for n in sizes):
            return True
        if any(literal[:n] in ends and has_key(literal[:n]) for n in sizes):
            return True
        if len(literal) < longest and any(literal in text for text in texts):
            return True
    return False


def _with_cases(characters: Collection[str]) -> set[str]:
    """Return the characters, plus all others that a change of case turns into one of them.

    A template may change the case of client text, for example by `lower`.
    """
    letters = {character for character in characters if character.isalpha()}
    related = {*characters}
    if not letters:
        return related
    for code_point in (*range(0x80), *_CASED):
        character = chr(code_point)
        changed = {character.lower(), character.upper(), character.title(), character.casefold()}
        if not letters.isdisjoint("".join(changed)):
            related.add(character)
    return related


def _keeps_out(normalizer: Any, keys: Collection[str]) -> bool:
    """Return whether normalising a text can never create one of the key characters.

    Otherwise, even a text without key characters might form a guarded token.
    """
    if normalizer is None:
        return True
    if isinstance(normalizer, normalizers.Sequence):
        steps = cast(Iterable[Any], normalizer)  # by __getitem__
        return all(_keeps_out(step, keys) for step in steps)
    if isinstance(normalizer, normalizers.NFC):
        return not any(_composes(key) for key in keys)
    if isinstance(normalizer, normalizers.Strip | normalizers.Lowercase):
        return True
    if isinstance(normalizer, normalizers.Replace):
        return not any(key in normalizer.content for key in keys)
    if isinstance(normalizer, normalizers.Prepend):
        return not any(key in normalizer.prepend for key in keys)
    return False


def _composes(key: str) -> bool:
    """Return whether the Unicode normal form NFC replaces another character by this one.

    For example, NFC replaces U+037E (the Greek question mark) by `;`.
    """
    others = (chr(code_point) for code_point in _SINGLETONS if chr(code_point) != key)
    return any(key in unicodedata.normalize("NFC", other) for other in others)


def _texts(values: list[Any]) -> list[str]:
    """Return all strings in JSON values, including keys."""
    texts = list[str]()
    for item in values:  # the list grows during the loop
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, Mapping):
            values += item
            values += item.values()
        elif isinstance(item, list | tuple):
            values += item
    return texts


def _marked_turn(turn: Turn, own: Marks, others: Marks) -> Turn:
    """Mark all texts of a turn except its role.

    The role is left unmarked because templates build special tokens from it.
    """
    marks = own if turn["role"] in _OWN_ROLES else others
    marked = dict[int, Any]()
    for value in turn.values():
        # Two fields may have the same text, of megabytes.
        if id(value) not in marked:
            marked[id(value)] = marks.mark_deep(value)
    return {name: value if name == "role" else marked[id(value)] for name, value in turn.items()}
