"""Token ids of prompts of which most was tokenised before.

A conversation comes back with every turn, and all conversations begin with the same instructions.
Tokenizers cut a text at their special tokens first and look at what is between two of them by
itself, so the ids of such a segment are the same wherever it stands: they are kept, and only what
is new is tokenised. Segments are known by their digests; no text is kept.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import cast

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Digits,
    PreTokenizer,
    Punctuation,
    Sequence,
    Split,
)

MAX_BYTES = 16 << 20
# Of the digest, the array and their places in the table.
ENTRY_BYTES = 250

# What these make of a segment depends on nothing before it. `Metaspace`, for one, looks whether it
# is the text's first.
_LOCAL = (ByteLevel, Digits, Punctuation, Split)


_Tree = dict[str, "_Tree"]


class SegmentEncoder:
    """Encodes as the tokenizer does, whole where its special tokens are no such boundaries.

    May be used by several threads.

    Args:
        tokenizer: of the model.
        max_bytes: that may be kept.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._special_ids = _special_ids(tokenizer)
        self._boundaries = _finder(self._special_ids)
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()
        """By the segment's digest; the latest used is last."""
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return self._bytes

    @property
    def pattern(self) -> str:
        """What finds the places to cut at; empty where there are none."""
        return self._boundaries.pattern if self._boundaries else ""

    def encode(self, text: str) -> list[int]:
        """Token ids, without any that the text does not ask for."""
        if self._boundaries is None:
            return self._tokenise(text)
        ids: list[int] = []
        start = 0
        for found in self._boundaries.finditer(text):
            if start < found.start():
                ids.extend(self._segment(text[start : found.start()]))
            ids.append(self._special_ids[found.group()])
            start = found.end()
        if start < len(text):
            ids.extend(self._segment(text[start:]))
        return ids

    def _segment(self, segment: str) -> "array[int]":
        key = blake2b(segment.encode(), digest_size=16).digest()
        with self._lock:
            ids = self._kept.get(key)
            if ids is not None:
                self._kept.move_to_end(key)
                return ids
        ids = array("I", self._tokenise(segment))
        with self._lock:
            self._keep(key, ids)
        return ids

    def _keep(self, key: bytes, ids: "array[int]") -> None:
        if key not in self._kept:
            self._kept[key] = ids
            self._bytes += _size(ids)
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)

    def _tokenise(self, text: str) -> list[int]:
        # Without offsets, which nobody here reads and which take a fifth of the time.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids


def _size(ids: "array[int]") -> int:
    return len(ids) * ids.itemsize + ENTRY_BYTES


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens and their ids; none where they do not part a text for the tokenizer."""
    added = tokenizer.get_added_tokens_decoder()
    is_cut = isinstance(tokenizer.model, BPE) and not tokenizer.model.dropout
    if not is_cut or any(map(_looks_around, added.values())):
        return {}
    if not all(isinstance(step, _LOCAL) for step in _steps(tokenizer.pre_tokenizer)):
        return {}
    return {token.content: token_id for token_id, token in added.items()}


def _looks_around(token: AddedToken) -> bool:
    """Whether what is beside it decides if it is one, or goes into it."""
    return bool(token.single_word or token.lstrip or token.rstrip or token.normalized)


def _steps(pre_tokenizer: PreTokenizer | None) -> Iterator[PreTokenizer]:
    """What a pre-tokenizer is made of."""
    if isinstance(pre_tokenizer, Sequence):
        for part in cast(Iterable[PreTokenizer], pre_tokenizer):  # by __getitem__
            yield from _steps(part)
    elif pre_tokenizer is not None:
        yield pre_tokenizer


def _finder(special_ids: Iterable[str]) -> re.Pattern[str] | None:
    """Finds special tokens: of those that begin at one place the longest.

    A thousand of them are no slower than one: at each character one branch is left.
    """
    tree: _Tree = {}
    for text in special_ids:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_pattern(tree)) if tree else None


def _pattern(tree: _Tree) -> str:
    """Matches what is in a tree of characters; a place where a text may end has the key ''."""
    branches = [re.escape(c) + _pattern(node) for c, node in tree.items() if c]
    if "" not in tree and len(branches) == 1:
        return branches[0]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
