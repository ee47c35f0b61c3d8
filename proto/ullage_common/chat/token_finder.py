"""Finds the special tokens that are spelled out in a text."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_Tree = dict[str, "_Tree"]


class SpecialTokenError(Exception):
    """Raised if text cannot be kept from becoming a special token. The message is one line."""


class TokenPiece(NamedTuple):
    """A piece of a prompt: either a special token or ordinary text."""

    text: str
    is_token: bool = False
    """Whether the piece is a special token."""


def finder(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a regular expression that matches the longest of the given texts at each position.

    The expression encodes a trie, in which each character leaves only one branch to try. Searching
    for a thousand texts is therefore no slower than searching for one.
    """
    tree: _Tree = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_pattern(tree)) if tree else None


def _pattern(tree: _Tree) -> str:
    """Convert a trie of characters to a regular expression. The key '' marks the end of a text."""
    branches = [re.escape(c) + _pattern(node) for c, node in tree.items() if c]
    if "" not in tree and len(branches) == 1:
        return branches[0]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


def parted(text: str, pattern: re.Pattern[str] | None) -> Iterator[TokenPiece]:
    """Split a text into the special tokens that a pattern finds and the text between them."""
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        token_start, end = match.span()
        if start < token_start:
            yield TokenPiece(text[start:token_start])
        yield TokenPiece(match.group(), is_token=True)
        start = end
    if start < len(text):
        yield TokenPiece(text[start:])
