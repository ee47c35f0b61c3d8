"""Converts HTML documents to Markdown.

This module has its own scanner, because existing parsers fail on unusual documents. Python's own
parser takes cubic time on unfinished tags. With 50,000 nested elements, html-to-markdown 3 silently
loses text, and markdownify 1 raises RecursionError. The scanner never backtracks, so it takes
linear time.
"""

import html
import re

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
    """Return whether the whole text is HTML.

    HTML starts with a doctype or the opening tag of a block, and ends with a closing tag.
    """
    begin = _BEGINS.match(text)
    if not begin or text.count("<") > MAX_TAGS:
        return False
    end = _CLOSING.search(text, max(0, len(text.rstrip()) - 32))
    name = begin[1].lower()
    return bool(end) and (name in _BLOCKS or name in _DROPPED or name.startswith("!doctype"))


def to_text(text: str) -> str:
    """Convert HTML to Markdown with headings, lists, tables, links and code.

    Scripts and styles are dropped.
    """
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
    """Process the markup that starts at index `start`. Return the index after its end."""
    for opening, closing in (("<!--", "-->"), ("<!", ">"), ("<?", ">")):
        if text.startswith(opening, start):
            end = text.find(closing, start + len(opening))
            return end + len(closing) if end >= 0 else len(text)

    if not text[start + 1 : start + 3].lstrip("/")[:1].isalpha():
        page.text("<")
        return start + 1
    tag = _TAG.match(text, start)
    if not tag:  # unfinished: the rest is text, since no text may be lost
        page.text(text[start:])
        return len(text)

    name = tag[2].lower()
    if not tag[1] and name in _END_OF:
        end_tag = _END_OF[name].search(text, tag.end())
        return end_tag.end() if end_tag else len(text)
    page.tag(name, not tag[1], tag[3])
    return tag.end()


class _Page:
    """The Markdown written so far. Whitespace between words is collapsed, except in code."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._code: list[str] | None = None
        self._fence = ""
        self._links: list[str] = []
        self._cells = 0

    def text(self, raw: str) -> None:
        """Add text from between the document's tags."""
        if self._code is not None:
            self._code.append(_unescape(raw))
        elif raw:
            self._parts.append(_SPACE.sub(" ", _unescape(raw)))

    def tag(self, name: str, is_open: bool, attributes: str) -> None:
        """Add an opening or closing HTML tag."""
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
        """Return the document as Markdown."""
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
        """Begin or end code. If code tags are nested, only the outermost tag counts."""
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
    """Replace character references such as `&amp;`. If any has too many digits, change nothing."""
    try:
        return html.unescape(text)
    except ValueError:  # of int(), which refuses more than a few thousand digits
        return text
