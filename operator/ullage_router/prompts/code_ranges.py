"""Finds code in Markdown: fenced blocks, indented blocks, and spans between backticks.

The rules follow https://spec.commonmark.org/0.31.2/, except that ambiguous text counts as code. For
example, fences may follow quote and list markers, and may have any indentation.
"""

import bisect
import re
from collections.abc import Iterator

Range = tuple[int, int]
_FENCE = re.compile(r"[ \t>]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?(?:(`{3,}+)[^`]*+|(~{3,}+).*)", re.S)
_END_OF_FENCE = re.compile(r"[ \t>]*+(`{3,}+|~{3,}+)\s*+")
_INDENTED = re.compile(r"(?: {4}| {0,3}\t)[ \t]*+\S")
_CODE_BREAKS = r"\n\r\v\f\x85\u2028\u2029"
_TICKS_OR_GAP = re.compile(
    f"(?P<ticks>`++)|(?:\r\n|[{_CODE_BREAKS}])[^\\S{_CODE_BREAKS}]*+(?=[{_CODE_BREAKS}])"
)


def find_code(text: str, line_break: re.Pattern[str]) -> list[Range]:
    """Return the ranges [start, end) of code, in order, without the line breaks around them.

    Args:
        line_break: pattern that matches a line break.
    """
    ranges: list[Range] = []
    at = 0
    for start, end in (*_blocks(text, line_break), (len(text), len(text))):
        ranges += _inline(text, at, start)
        if end > start:
            ranges.append((start, end))
        at = end
    return ranges


def _lines(text: str, line_break: re.Pattern[str]) -> Iterator[Range]:
    """Yield each line's range, excluding its line break."""
    at = 0
    for match in line_break.finditer(text):
        yield at, match.start()
        at = match.end()
    yield at, len(text)


def _blocks(text: str, line_break: re.Pattern[str]) -> list[Range]:
    blocks: list[Range] = []
    fence = ""
    indented = False
    may_indent = True

    for start, end in _lines(text, line_break):
        line = text[start:end]
        if fence:
            blocks[-1] = (blocks[-1][0], end)
            fence = "" if _closes(line, fence) else fence
            indented = False
            may_indent = True
        elif not line or line.isspace():
            may_indent = True
        elif opening := _FENCE.fullmatch(line):
            fence = opening[1] or opening[2]
            blocks.append((start, end))
        elif may_indent and _INDENTED.match(line):
            # Empty lines between two indented lines are also code.
            blocks.append((blocks.pop()[0] if indented else start, end))
            indented = True
        else:
            indented = may_indent = False

    return blocks


def _closes(line: str, fence: str) -> bool:
    match = _END_OF_FENCE.fullmatch(line)
    return match is not None and match[1].startswith(fence)


def _inline(text: str, start: int, end: int) -> Iterator[Range]:
    """Yield the ranges of inline code, which is enclosed by equally long backtick runs."""
    runs, by_kind = _runs(text, start, end)
    i = 0
    while i < len(runs):
        at, length, paragraph = runs[i]
        if _is_escaped(text, at, start):
            at = at + 1
            length = length - 1
        closers = by_kind.get((paragraph, length), [])
        following = bisect.bisect_right(closers, i)
        if length and following < len(closers):
            i = closers[following]
            yield at, runs[i][0] + length
        i += 1


def _runs(
    text: str, start: int, end: int
) -> tuple[list[tuple[int, int, int]], dict[tuple[int, int], list[int]]]:
    """Find all runs of backticks, and index them by paragraph and length.

    Returns:
        A (start, length, paragraph) tuple for each run, and the positions of the runs in this list
        by (paragraph, length).
    """
    runs: list[tuple[int, int, int]] = []
    by_kind: dict[tuple[int, int], list[int]] = {}
    if text.find("`", start, end) < 0:
        return runs, by_kind
    paragraph = 0
    for match in _TICKS_OR_GAP.finditer(text, start, end):
        if match["ticks"] is None:
            paragraph += 1
            continue
        length = match.end() - match.start()
        by_kind.setdefault((paragraph, length), []).append(len(runs))
        runs.append((match.start(), length, paragraph))
    return runs, by_kind


def _is_escaped(text: str, at: int, start: int) -> bool:
    """Return whether the character at the index is escaped by an odd number of backslashes."""
    first = at
    while first > start and text[first - 1] == "\\":
        first -= 1
    return (at - first) % 2 == 1
