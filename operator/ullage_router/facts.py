"""Key facts of a text: what a summary must not lose. Linear in the text.

Numbers with their units, dates and times, addresses of pages and people, names (words with capitals
that do not merely begin a sentence) and identifiers of code.
"""

import re

MAX_FACTS = 20_000
"""Of one text; what comes after them is not looked at."""

_URL = r"(?:https?|ftp)://[^\s<>\"'`)\]}]++"
_EMAIL = r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}"
_NUMBER = r"(?<!\w)[$€£¥#]?\d++(?:[.,:/-]\d++)*+(?:[ ]?[%°€]|[a-zA-Z]{1,3}\b)?"
_CODE = (
    r"(?<!\w)(?:[A-Za-z]\w{0,80}(?:\.[A-Za-z_]\w{0,80}){0,6}\(\)"  # call()
    r"|[A-Za-z]\w{0,80}_\w++|[a-z]{1,80}[A-Z]\w*+)"  # snake_case, camelCase
)
_NAME = r"(?<!\w)[A-Z]\w*+(?:[ -][A-Z]\w*+)*+"
_FACT = re.compile(
    f"(?P<url>{_URL})|(?P<email>{_EMAIL})|(?P<code>{_CODE})|(?P<number>{_NUMBER})|(?P<name>{_NAME})"
)
_ENDS_SENTENCE = re.compile(r"[.!?:\n\"'(*#>|\u2022-]\s*+\Z")
_INLINE_CODE = re.compile(r"`([^`\n]{1,200})`")


def facts(text: str) -> frozenset[str]:
    """The facts, as they are written, numbers and names without surrounding marks."""
    found: set[str] = {match[1].strip() for match in _INLINE_CODE.finditer(text)} - {""}
    for match in _FACT.finditer(text):
        if len(found) >= MAX_FACTS:
            break
        fact = match[0].rstrip(".,;:!?-/")
        # What merely begins a sentence may be any word.
        if (
            match.lastgroup != "name"
            or _is_surely_name(fact)
            or not _begins_sentence(text, match.start())
        ):
            found.add(fact)
    found.discard("I")
    return frozenset(found)


def share_kept(wanted: frozenset[str], text: str) -> float:
    """The share of the facts that the text has, word for word; 1 when there are none."""
    if not wanted:
        return 1.0
    there = facts(text)
    return sum(fact in there or _has(text, fact) for fact in wanted) / len(wanted)


def _has(text: str, fact: str) -> bool:
    """Whether the fact stands there as a whole and not inside another word or number."""
    at = text.find(fact)
    while at >= 0:
        end = at + len(fact)
        before = text[at - 1 : at] if at else ""
        is_whole = not (before.isalnum() or text[end : end + 1].isalnum())
        if is_whole and not (text[end : end + 1] in ".,:" and text[end + 1 : end + 2].isdigit()):
            return True
        at = text.find(fact, at + 1)
    return False


def _begins_sentence(text: str, start: int) -> bool:
    before = text[max(0, start - 8) : start]
    return not before.strip() or bool(_ENDS_SENTENCE.search(before))


def _is_surely_name(fact: str) -> bool:
    """Several words with capitals, or letters and digits in capitals such as NASA or B2B."""
    return " " in fact or "-" in fact or (len(fact) > 1 and fact.isupper())
