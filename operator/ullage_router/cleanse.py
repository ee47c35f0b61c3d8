"""Makes a text shorter without changing what it says; code and JSON stay as they are.

Where code is, is found in the text as it would be without its invisible characters, so that taking
them away uncovers no code that was changed before: cleansing twice is cleansing once. Every step
takes time in proportion to the text, whatever it is.
"""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ullage_router.code_spans import find_code
from ullage_router.html_text import looks_like_html, to_text
from ullage_rpc.tool_formats import Turn

Span = tuple[int, int]

# Joiners shape letters of many scripts and emoji; after ASCII they do nothing.
_JOINERS = "\u200c\u200d"
_INVISIBLE = (
    "\x00-\x08\x0e-\x1f\x7f\u00ad\u061c\u180e\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb"
)
_EXOTIC = "\u00a0\u1680\u2000-\u200a\u202f\u205f"
_BREAKS = "\n\r\v\f\x85\u2028\u2029"
_BLANKS = f" \t{_EXOTIC}\u3000"

_HIDDEN = re.compile(f"[{_INVISIBLE}{_JOINERS}]++")
_ALWAYS_HIDDEN = re.compile(f"[{_INVISIBLE}]++")
_JOINS_NOTHING = re.compile(f"[\x00-\x7f{_EXOTIC}\u3000{_BREAKS}]")
_BREAK = re.compile(f"\r\n|[{_BREAKS}]")
# These are linear: each begins where a run begins and gives nothing back. That they begin with a
# set and look back only then makes them fast, too.
_TRAILING = re.compile(f"[{_BLANKS}](?<![{_BLANKS}].)[{_BLANKS}]*+(?=\n|\\Z)")
# Runs with a tab are columns and stay.
_RUN = re.compile(
    f"[ {_EXOTIC}\u3000](?<=\\S.)(?:[ {_EXOTIC}\u3000]++|(?<=[{_EXOTIC}]))(?=\\S)", re.DOTALL
)
_BLANK_LINES = re.compile("\n{3,}+")

# Stands for code meanwhile; a lone surrogate has no UTF-8, so no request can contain it.
_CODE = "\ud800"
MAX_MARKS = 200_000
"""Line breaks, backticks or invisible runs; a text with more of them is left as it is."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is taken away."""

    whitespace: bool = True
    zero_width: bool = True
    html: bool = False
    """Texts that are plainly HTML become what a reader would see."""

    @property
    def is_any(self) -> bool:
        return self.whitespace or self.zero_width or self.html


def cleanse_turns(turns: Sequence[Turn], rules: Rules) -> tuple[list[Turn], int]:
    """The turns cleansed, all but system prompts, and how many characters fewer they have."""
    made, saved = [], 0
    for turn in turns:
        if turn["role"] != "system":
            text = cleanse(turn["content"], rules)
            saved += len(turn["content"]) - len(text)
            turn = {**turn, "content": text}
        made.append(turn)
    return made, saved


def cleanse(text: str, rules: Rules) -> str:
    """The text by these rules; the same again when it is cleansed again."""
    if not rules.is_any or _is_json(text):
        return text
    if rules.html and looks_like_html(text):
        made = _tidy(to_text(text), rules)
    else:
        made = _tidy(text, rules)
    # HTML about HTML would lose more the next time.
    return text if rules.html and looks_like_html(made) else made


def _is_json(text: str) -> bool:
    """Whether the whole of it is an object, an array or a string."""
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return False
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def _tidy(text: str, rules: Rules) -> str:
    hidden = _hidden(text) if rules.zero_width else []
    if _CODE in text or len(hidden) > MAX_MARKS or _num_marks(text) > MAX_MARKS:
        return text
    codes = _code_ranges(text, hidden)
    prose, at = [], 0
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
    """What nobody sees, in order."""
    found: list[Span] = []
    for match in _HIDDEN.finditer(text):
        start, end = match.span()
        if start == 0 or _JOINS_NOTHING.match(text, start - 1):
            found.append((start, end))
        else:
            found += (inner.span() for inner in _ALWAYS_HIDDEN.finditer(text, start, end))
        if len(found) > MAX_MARKS:
            break
    return found


def _without(text: str, start: int, end: int, hidden: Sequence[Span]) -> str:
    """The text from start to end without its hidden spans."""
    pieces, at = [], start
    for i in range(bisect.bisect_left(hidden, (start, 0)), len(hidden)):
        if hidden[i][0] >= end:
            break
        pieces.append(text[at : hidden[i][0]])
        at = hidden[i][1]
    pieces.append(text[at:end])
    return "".join(pieces)


def _code_ranges(text: str, hidden: Sequence[Span]) -> list[Span]:
    """Code in the text, found in what it is without its hidden spans."""
    if not hidden:
        return find_code(text, _BREAK)
    starts, shifts, shift = [], [], 0
    for start, end in hidden:
        starts.append(start - shift)  # where the hidden span is in what is shown
        shift += end - start
        shifts.append(shift)

    def place(index: int) -> int:
        before = bisect.bisect_right(starts, index)
        return index + (shifts[before - 1] if before else 0)

    found = find_code(_without(text, 0, len(text), hidden), _BREAK)
    return [(place(start), place(end - 1) + 1) for start, end in found]


def _tidy_blanks(text: str) -> str:
    text = _TRAILING.sub("", _BREAK.sub("\n", text))
    return _BLANK_LINES.sub("\n\n", _RUN.sub(" ", text))
