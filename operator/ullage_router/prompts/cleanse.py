"""Shortens a text without changing its meaning.

Invisible characters and superfluous whitespace are removed, and HTML is converted to Markdown.
JSON and code are left alone. Every step takes linear time.

Cleansing is idempotent, because the search for code ignores invisible characters. Otherwise,
removing them could reveal code after its whitespace has already been changed.
"""

import bisect
import re
from collections.abc import Sequence

import msgspec

from ullage_common.chat.tool_formats import Turn
from ullage_common.config.router import CleanseSection
from ullage_router.prompts.code_ranges import find_code
from ullage_router.prompts.html_markdown import looks_like_html, to_text

Span = tuple[int, int]

# Joiners shape letters of many scripts, and emoji. After ASCII, they have no effect.
_JOINERS = "\u200c\u200d"
_INVISIBLE = (
    "\x00-\x08\x0e-\x1f\x7f\u00ad\u061c\u180e\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
)
_EXOTIC = "\u00a0\u1680\u2000-\u200a\u202f\u205f"
_BREAKS = "\n\r\v\f\x85\u2028\u2029"
_BLANKS = f" \t{_EXOTIC}\u3000"

_HIDDEN = re.compile(f"[{_INVISIBLE}{_JOINERS}]++")
_HIDDEN_OR_BLANK = re.compile(
    f"[{_INVISIBLE}{_JOINERS}{_BLANKS}{_BREAKS}]{{2,}}+|[{_INVISIBLE}{_JOINERS}]"
)
_ALWAYS_HIDDEN = re.compile(f"[{_INVISIBLE}]++")
_JOINS_NOTHING = re.compile(f"[\x00-\x7f{_EXOTIC}\u3000{_BREAKS}]")
_BREAK = re.compile(f"\r\n|[{_BREAKS}]")
# These patterns are linear, because each match begins where a run begins and never backtracks. They
# are fast because they look back only after a character of the set.
_TRAILING = re.compile(f"[{_BLANKS}](?<![{_BLANKS}].)[{_BLANKS}]*+(?=\n|\\Z)")
# Runs with a tab separate columns and stay.
_RUN = re.compile(
    f"[ {_EXOTIC}\u3000](?<=\\S.)(?:[ {_EXOTIC}\u3000]++|(?<=[{_EXOTIC}]))(?=\\S)", re.DOTALL
)
_BLANK_LINES = re.compile("\n{3,}+")

# Placeholder of code. A lone surrogate has no UTF-8, so no request can contain it.
_CODE = "\ud800"
MAX_MARKS = 200_000
"""Maximum number of line breaks and backticks in a text, and of runs of invisible characters.

A text that exceeds either limit is not changed.
"""


def cleanse_turns(turns: Sequence[Turn], rules: CleanseSection) -> tuple[list[Turn], int]:
    """Cleanse all turns except system prompts.

    Return the cleansed turns, and the number of characters saved.
    """
    cleansed = []
    saved = 0
    for turn in turns:
        if turn["role"] != "system":
            text = cleanse(turn["content"], rules)
            saved += len(turn["content"]) - len(text)
            turn = {**turn, "content": text}
        cleansed.append(turn)
    return cleansed, saved


def cleanse(text: str, rules: CleanseSection) -> str:
    """Shorten the text by the enabled rules. Cleansing the result again does not change it.

    JSON is returned unchanged.
    """
    if not rules.is_any or _is_json(text):
        return text
    if rules.html and looks_like_html(text):
        cleansed = _tidy(to_text(text), rules)
    else:
        cleansed = _tidy(text, rules)
    # A document about HTML may become HTML again, which a second cleansing would change.
    return text if rules.html and looks_like_html(cleansed) else cleansed


def squeezed(text: str) -> str:
    """Return the text without the whitespace and invisible characters that cleansing may remove.

    The result shows whether a text would be too long even after cleansing.
    """
    return _HIDDEN_OR_BLANK.sub(_squeeze, text)


def _squeeze(match: re.Match[str]) -> str:
    return " " if not _HIDDEN.fullmatch(match.group()) else ""


def _is_json(text: str) -> bool:
    """Return whether the whole text is a JSON object, array or string."""
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return False
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def _tidy(text: str, rules: CleanseSection) -> str:
    hidden = _hidden(text) if rules.zero_width else []
    if _CODE in text or len(hidden) > MAX_MARKS or _num_marks(text) > MAX_MARKS:
        return text
    codes = _code_ranges(text, hidden)
    prose = []
    at = 0
    for start, end in codes:
        prose.append(_without(text, at, start, hidden))
        at = end
    prose.append(_without(text, at, len(text), hidden))
    if rules.whitespace:
        prose = _tidy_blanks(_CODE.join(prose)).split(_CODE)
    kept = [text[start:end] for start, end in codes] + [""]
    return "".join(piece + code for piece, code in zip(prose, kept, strict=True))


def _num_marks(text: str) -> int:
    return sum(text.count(mark) for mark in _BREAKS + "`")


def _hidden(text: str) -> list[Span]:
    """Return the spans of invisible characters that may be removed, in order."""
    spans: list[Span] = []
    for match in _HIDDEN.finditer(text):
        start, end = match.span()
        if start == 0 or _JOINS_NOTHING.match(text, start - 1):
            spans.append((start, end))
        else:
            spans += (inner.span() for inner in _ALWAYS_HIDDEN.finditer(text, start, end))
        if len(spans) > MAX_MARKS:
            break
    return spans


def _without(text: str, start: int, end: int, hidden: Sequence[Span]) -> str:
    """Return the text between `start` and `end` without the spans in `hidden`."""
    pieces = []
    at = start
    for i in range(bisect.bisect_left(hidden, (start, 0)), len(hidden)):
        if hidden[i][0] >= end:
            break
        pieces.append(text[at : hidden[i][0]])
        at = hidden[i][1]
    pieces.append(text[at:end])
    return "".join(pieces)


def _code_ranges(text: str, hidden: Sequence[Span]) -> list[Span]:
    """Return the spans of code in a text, ignoring the invisible characters in `hidden`.

    The spans are positions in the original text, which includes the invisible characters.
    """
    if not hidden:
        return find_code(text, _BREAK)
    starts = []
    shifts = []
    shift = 0
    for start, end in hidden:
        starts.append(start - shift)  # the place of the hidden span in the visible text
        shift += end - start
        shifts.append(shift)

    def place(index: int) -> int:
        before = bisect.bisect_right(starts, index)
        return index + (shifts[before - 1] if before else 0)

    code = find_code(_without(text, 0, len(text), hidden), _BREAK)
    return [(place(start), place(end - 1) + 1) for start, end in code]


def _tidy_blanks(text: str) -> str:
    text = _TRAILING.sub("", _BREAK.sub("\n", text))
    return _BLANK_LINES.sub("\n\n", _RUN.sub(" ", text))
