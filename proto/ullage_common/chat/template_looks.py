"""Finds the words that a chat template searches for in the text of messages.

A template can branch on whether a text contains certain words. It can also compare the text's
length with a number in its own source, or truncate the text at that length. It therefore takes the
same branches for any two texts that contain these words and are longer than the largest of these
numbers. This allows a short text to stand in for a long one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

_SEEKING = frozenset(
    {"split", "rsplit", "partition", "rpartition", "find", "rfind", "index", "rindex", "replace"}
    | {"count", "splitlines"}
)
"""Methods and filters that search for their arguments within a text."""
_WRITING = frozenset({"d", "default", "format", "indent", "join", "tojson"})
"""Methods and filters that only output their arguments, or use them for formatting."""
_COUNTING = frozenset({"truncate", "wordcount", "wordwrap", "random"})
"""Filters whose results depend on the entire text, so that no shorter text can replace it."""


@dataclass(frozen=True, slots=True)
class Looks:
    """The words and text lengths that affect how a template renders a message.

    They determine which short texts can stand in for long ones.
    """

    words: frozenset[str] = frozenset()
    """Words that the template may search for within a text."""
    size: int = 0
    """Largest number in the template's source.

    The template may truncate a text at this length, or compare the text's length with it.
    """
    is_known: bool = True
    """Whether a short text can stand in for a long one.

    This is False if the template inspects every character of a text.
    """

    def __or__(self, other: "Looks") -> "Looks":
        return Looks(
            self.words | other.words,
            max(self.size, other.size),
            self.is_known and other.is_known,
        )


def looks_of(parsed: nodes.Template) -> Looks:
    """Determine from a template's syntax tree how the template inspects messages."""
    words = frozenset(word for word in _words(parsed, False) if len(word) > 1 and word.strip())
    numbers = (
        abs(constant.value)
        for constant in parsed.find_all(nodes.Const)
        if isinstance(constant.value, int)
    )
    return Looks(words, max(numbers, default=0), not _looks_closely(parsed))


def _words(node: nodes.Node, is_written: bool) -> Iterator[str]:
    """Yield the string constants that the template may search for within a text.

    Constants that the template only writes, compares with whole texts, or uses as names are
    skipped.
    """
    if isinstance(node, nodes.Const):
        if isinstance(node.value, str) and not is_written:
            yield node.value
        return
    if isinstance(node, nodes.Call) and getattr(node.node, "name", "") == "raise_exception":
        return
    if isinstance(node, nodes.Filter) and node.name in _WRITING:
        if node.node:
            yield from _words(node.node, is_written)
        return
    if isinstance(node, nodes.Getattr) and node.attr in _WRITING:
        yield from _words(node.node, True)
        return

    if isinstance(node, nodes.Compare | nodes.Getitem):
        yield from _compared(node)
        return
    # Jinja has already folded concatenations of constants.
    joins = isinstance(node, nodes.Add | nodes.Concat | nodes.Output)
    joins = joins or (isinstance(node, nodes.CondExpr) and is_written)
    for child in node.iter_child_nodes():
        yield from _words(child, joins)


def _compared(node: nodes.Compare | nodes.Getitem) -> Iterator[str]:
    """Yield the string constants that a comparison or a subscript may search for within a text.

    Member names and constants that are compared with whole texts are skipped.
    """
    if isinstance(node, nodes.Getitem):
        parts = [node.node] if isinstance(node.arg, nodes.Const) else [node.node, node.arg]
    else:
        is_whole = isinstance(node.expr, nodes.Const) and not _is_in(node)
        parts = [] if is_whole else [node.expr]
        wholes = (nodes.Const, nodes.List, nodes.Tuple)
        parts += [operand.expr for operand in node.ops if not isinstance(operand.expr, wholes)]
    for part in parts:
        yield from _words(part, False)


def _is_in(node: nodes.Compare) -> bool:
    return any(operand.op in ("in", "notin") for operand in node.ops)


def _looks_closely(parsed: nodes.Template) -> bool:
    for filtered in parsed.find_all(nodes.Filter):
        if filtered.name in _COUNTING:
            return True
        if filtered.name in _SEEKING and any(map(_is_short, filtered.args)):
            return True
    for call in parsed.find_all(nodes.Call):
        is_seeking = isinstance(call.node, nodes.Getattr) and call.node.attr in _SEEKING
        if is_seeking and (not call.args or any(map(_is_short, call.args))):
            return True
    return any(_is_in(node) and _is_short(node.expr) for node in parsed.find_all(nodes.Compare))


def _is_short(node: nodes.Node) -> bool:
    """Return whether a syntax tree node is a string so short that almost any text contains it.

    Such a string is a single character, or consists only of white space.
    """
    if not isinstance(node, nodes.Const) or not isinstance(node.value, str):
        return False
    return len(node.value) == 1 or node.value.isspace()
