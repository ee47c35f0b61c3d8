"""Makes a text shorter without changing what it says; code and JSON stay as they are, and an HTML
document becomes the Markdown that a reader would have written.

Code is fenced and indented blocks and spans between backticks, as in
https://spec.commonmark.org/0.31.2/, but in doubt a text is code: fences may stand behind quote and
list marks and at any indentation. Code is looked for in the text without its invisible characters,
so that removing them uncovers no code that was changed before: cleansing twice is cleansing once.

Every step takes time in proportion to the text, whatever it is. The HTML scanner therefore never
goes back: Python's own parser takes cubic time on unfinished tags.
"""

import bisect
import html
import re
from collections.abc import Iterator, Sequence

import msgspec

from ullage_common.chat.tool_formats import Turn
from ullage_common.config.router import CleanseSection

MAX_TAGS = 100_000

_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        """
    address article aside blockquote body dd details div dl dt fieldset figcaption figure footer
    form h1 h2 h3 h4 h5 h6 header hr html li main nav ol p pre section summary table tbody tfoot
    thead tr ul
""",
    )
)
_DROPPED = ("script", "style", "template", "noscript", "head")
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9-]*+)((?:=\s*+(?:\"[^\"]*+\"|'[^']*+')|[^>=]|=)*+)>")
_HREF = re.compile(r"\bhref\s*+=\s*+(?:\"([^\"]*+)\"|'([^']*+)'|([^\s\"'>]++))", re.I)
_ALT = re.compile(r"\balt\s*+=\s*+(?:\"([^\"]*+)\"|'([^']*+)')", re.I)
_BEGINS = re.compile(r"\s*+<(!doctype\s++html\b|[a-z][a-z0-9]*+(?=[\s>/]))", re.I)
_CLOSING = re.compile(r"</([a-z][a-z0-9]*+)\s*+>\s*+\Z", re.I)
_SPACE = re.compile(r"\s++")
_TICKS = re.compile("`++")
_END_OF = {name: re.compile(rf"</{name}\b[^>]*+>", re.I) for name in _DROPPED}


def looks_like_html(text: str) -> bool:
    """Whether the whole of it is HTML: from a first tag of a block to a last closing one."""
    begin = _BEGINS.match(text)
    if not begin or text.count("<") > MAX_TAGS:
        return False
    end = _CLOSING.search(text, max(0, len(text.rstrip()) - 32))
    name = begin[1].lower()
    return bool(end) and (name in _BLOCKS or name in _DROPPED or name.startswith("!doctype"))


def to_text(text: str) -> str:
    """Headings, lists, tables, links and code as Markdown; scripts and styles are gone."""
    page = _Page()
    at = 0
    while at < len(text):
        start = text.find("<", at)
        page.text(text[at : start if start >= 0 else len(text)])
        if start < 0:
            break
        at = _markup(page, text, start)
    return page.result()


def _markup(page: "_Page", text: str, start: int) -> int:
    """Read markup that begins with < at `start`; returns where it ends."""
    for opening, closing in (("<!--", "-->"), ("<!", ">"), ("<?", ">")):
        if text.startswith(opening, start):
            end = text.find(closing, start + len(opening))
            return end + len(closing) if end >= 0 else len(text)
    if not text[start + 1 : start + 3].lstrip("/")[:1].isalpha():
        page.text("<")
        return start + 1
    tag = _TAG.match(text, start)
    if not tag:  # unfinished: what is left is text, since nothing may be lost unseen
        page.text(text[start:])
        return len(text)
    name = tag[2].lower()
    if not tag[1] and name in _END_OF:
        end_tag = _END_OF[name].search(text, tag.end())
        return end_tag.end() if end_tag else len(text)
    page.tag(name, not tag[1], tag[3])
    return tag.end()


class _Page:
    """Text so far; blanks between words are one, but in code they stay."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._code: list[str] | None = None
        self._fence = ""
        self._links: list[str] = []
        self._cells = 0

    def text(self, raw: str) -> None:
        if self._code is not None:
            self._code.append(_unescape(raw))
        elif raw:
            self._parts.append(_SPACE.sub(" ", _unescape(raw)))

    def tag(self, name: str, is_open: bool, attributes: str) -> None:
        if name in ("pre", "code"):
            self._mark_code(name, is_open)
        elif self._code is not None:
            return
        elif name in ("td", "th"):
            self._cell(is_open)
        elif name == "a":
            self._link(is_open, attributes)
        elif name == "br":
            self._parts.append("\n")
        elif name == "img" and (alt := _ALT.search(attributes)):
            self._parts.append(_unescape(alt[1] or alt[2] or ""))
        elif name in _BLOCKS:
            self._block(name, is_open)

    def result(self) -> str:
        self._end_code()
        lines = "".join(self._parts).split("\n")
        return "\n".join(lines).strip("\n ")

    def _block(self, name: str, is_open: bool) -> None:
        self._parts.append("\n" if name in ("li", "tr", "dt", "dd") else "\n\n")
        if name == "tr":
            self._cells = 0
        if is_open and name == "li":
            self._parts.append("- ")
        elif is_open and name[0] == "h" and name[1:].isdigit():
            self._parts.append("#" * int(name[1:]) + " ")

    def _cell(self, is_open: bool) -> None:
        if is_open:
            self._parts.append(" | " if self._cells else "")
            self._cells += 1

    def _link(self, is_open: bool, attributes: str) -> None:
        if is_open:
            href = _HREF.search(attributes)
            self._links.append(_unescape(next(filter(None, href.groups()), "")) if href else "")
        elif self._links and (address := self._links.pop()):
            self._parts.append(f" ({address})")

    def _mark_code(self, name: str, is_open: bool) -> None:
        """Code in a <pre> is one block; only the outermost mark counts."""
        if is_open and self._code is None:
            self._code = []
            self._fence = name
        elif not is_open and self._fence == name:
            self._end_code()

    def _end_code(self) -> None:
        if self._code is None:
            return
        code = "".join(self._code)
        self._code = None
        longest = max((len(run) for run in _TICKS.findall(code)), default=0)
        if self._fence == "pre":
            ticks = "`" * max(3, longest + 1)
            body = code.strip("\n")
            self._parts.append(f"\n\n{ticks}\n{body}\n{ticks}\n\n")
        elif code:
            ticks = "`" * (longest + 1)
            self._parts.append(f"{ticks}{code}{ticks}")
        self._fence = ""


def _unescape(text: str) -> str:
    """Return the text without its character references; unchanged where one has too many digits."""
    try:
        return html.unescape(text)
    except ValueError:  # of int, above a few thousand
        return text


Range = tuple[int, int]

_FENCE = re.compile(r"[ \t>]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?(?:(`{3,}+)[^`]*+|(~{3,}+).*)", re.S)
_END_OF_FENCE = re.compile(r"[ \t>]*+(`{3,}+|~{3,}+)\s*+")
_INDENTED = re.compile(r"(?: {4}| {0,3}\t)[ \t]*+\S")
_CODE_BREAKS = r"\n\r\v\f\x85\u2028\u2029"
_TICKS_OR_GAP = re.compile(
    f"(?P<ticks>`++)|(?:\r\n|[{_CODE_BREAKS}])[^\\S{_CODE_BREAKS}]*+(?=[{_CODE_BREAKS}])"
)


def find_code(text: str, line_break: re.Pattern[str]) -> list[Range]:
    """Ranges [start, end) of code, in order, without the line breaks around them.

    Args:
        line_break: what ends a line.
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
    """Lines without their breaks."""
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
            # Empty lines between two indented ones are code as well.
            blocks.append((blocks.pop()[0] if indented else start, end))
            indented = True
        else:
            indented = may_indent = False
    return blocks


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


def cleanse_turns(turns: Sequence[Turn], rules: CleanseSection) -> tuple[list[Turn], int]:
    """The turns cleansed, all but system prompts, and how many characters fewer they have."""
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
    """The text by these rules; the same again when it is cleansed again."""
    if not rules.is_any or _is_json(text):
        return text
    if rules.html and looks_like_html(text):
        cleansed = _tidy(to_text(text), rules)
    else:
        cleansed = _tidy(text, rules)
    # HTML about HTML would lose more the next time.
    return text if rules.html and looks_like_html(cleansed) else cleansed


_HIDDEN_OR_BLANK = re.compile(
    f"[{_INVISIBLE}{_JOINERS}{_BLANKS}{_BREAKS}]{{2,}}+|[{_INVISIBLE}{_JOINERS}]"
)


def squeezed(text: str) -> str:
    """Return the text without anything that cleansing blanks and invisible characters may take."""
    return _HIDDEN_OR_BLANK.sub(_squeeze, text)


def _squeeze(match: re.Match[str]) -> str:
    return " " if not _HIDDEN.fullmatch(match.group()) else ""


def _is_json(text: str) -> bool:
    """Whether the whole of it is an object, an array or a string."""
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
    """What nobody sees, in order."""
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
    """The text from start to end without its hidden spans."""
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
    """Code in the text, found in what it is without its hidden spans."""
    if not hidden:
        return find_code(text, _BREAK)
    starts = []
    shifts = []
    shift = 0
    for start, end in hidden:
        starts.append(start - shift)  # where the hidden span is in what is shown
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
