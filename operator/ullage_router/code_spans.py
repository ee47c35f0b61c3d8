"""Where Markdown's code is: fenced and indented blocks and spans between backticks.

As https://spec.commonmark.org/0.31.2/ has them, but in doubt a text is code: fences may stand
behind quote and list marks and at any indentation, since what is taken for code is left alone.
"""

import bisect
import re
from collections.abc import Iterator

Range = tuple[int, int]

_FENCE = re.compile(r"[ \t>]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?(?:(`{3,}+)[^`]*+|(~{3,}+).*)", re.S)
_END_OF_FENCE = re.compile(r"[ \t>]*+(`{3,}+|~{3,}+)\s*+")
_INDENTED = re.compile(r"(?: {4}| {0,3}\t)[ \t]*+\S")
_BREAKS = r"\n\r\v\f\x85\u2028\u2029"
_TICKS_OR_GAP = re.compile(f"(?P<ticks>`++)|(?:\r\n|[{_BREAKS}])[^\\S{_BREAKS}]*+(?=[{_BREAKS}])")


def find_code(text: str, line_break: re.Pattern[str]) -> list[Range]:
    """Ranges [start, end) of code, in order, without the line breaks around them.

    Args:
        line_break: what ends a line.
    """
    found: list[Range] = []
    at = 0
    for start, end in (*_blocks(text, line_break), (len(text), len(text))):
        found += _inline(text, at, start)
        if end > start:
            found.append((start, end))
        at = end
    return found


def _lines(text: str, line_break: re.Pattern[str]) -> Iterator[Range]:
    """Lines without their breaks."""
    at = 0
    for match in line_break.finditer(text):
        yield at, match.start()
        at = match.end()
    yield at, len(text)


def _blocks(text: str, line_break: re.Pattern[str]) -> list[Range]:
    found: list[Range] = []
    fence, indented, may_indent = "", False, True
    for start, end in _lines(text, line_break):
        line = text[start:end]
        if fence:
            found[-1] = (found[-1][0], end)
            fence = "" if _closes(line, fence) else fence
            indented, may_indent = False, True
        elif not line or line.isspace():
            may_indent = True
        elif opening := _FENCE.fullmatch(line):
            fence = opening[1] or opening[2]
            found.append((start, end))
        elif may_indent and _INDENTED.match(line):
            # Empty lines between two indented ones are code as well.
            found.append((found.pop()[0] if indented else start, end))
            indented = True
        else:
            indented = may_indent = False
    return found


def _closes(line: str, fence: str) -> bool:
    match = _END_OF_FENCE.fullmatch(line)
    return match is not None and match[1].startswith(fence)


def _inline(text: str, start: int, end: int) -> Iterator[Range]:
    """Spans between two runs of equally many backticks in one paragraph."""
    runs, by_kind = _runs(text, start, end)
    i = 0
    while i < len(runs):
        at, length, paragraph = runs[i]
        if _is_escaped(text, at, start):
            at, length = at + 1, length - 1
        closers = by_kind.get((paragraph, length), [])
        following = bisect.bisect_right(closers, i)
        if length and following < len(closers):
            i = closers[following]
            yield at, runs[i][0] + length
        i += 1


def _runs(
    text: str, start: int, end: int
) -> tuple[list[tuple[int, int, int]], dict[tuple[int, int], list[int]]]:
    """Runs of backticks as (place, length, paragraph), and which there are of each kind."""
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
    """Whether an odd number of backslashes precedes it."""
    first = at
    while first > start and text[first - 1] == "\\":
        first -= 1
    return (at - first) % 2 == 1
