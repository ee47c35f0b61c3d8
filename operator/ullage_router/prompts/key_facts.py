"""Finds the key facts in a text: numbers with units, dates, addresses, names and identifiers."""

import re

MAX_FACTS = 20_000
"""Maximum number of facts to find in one text. The rest of the text is not searched."""
MAX_PLACES = 100
"""Maximum number of occurrences that are checked per fact.

A long run of digits may contain the fact many times.
"""
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


def key_facts(text: str) -> frozenset[str]:
    """Return the facts in a text verbatim, without surrounding punctuation."""
    result: set[str] = {match[1].strip() for match in _INLINE_CODE.finditer(text)} - {""}
    for match in _FACT.finditer(text):
        if len(result) >= MAX_FACTS:
            break
        fact = match[0].rstrip(".,;:!?-/")
        # At the beginning of a sentence, any word is capitalised.
        if (
            match.lastgroup != "name"
            or _is_surely_name(fact)
            or not _begins_sentence(text, match.start())
        ):
            result.add(fact)
    result.discard("I")
    return frozenset(result)


def share_kept(facts: frozenset[str], text: str) -> float:
    """Return the fraction of the facts that occur verbatim in the text (1 if there are none)."""
    if not facts:
        return 1.0
    present = key_facts(text)
    return sum(fact in present or _has(text, fact) for fact in facts) / len(facts)


def _has(text: str, fact: str) -> bool:
    """Return whether the fact occurs in the text on its own, not just within a word or number.

    Only the first MAX_PLACES occurrences are checked.
    """
    at = text.find(fact)
    for _ in range(MAX_PLACES):
        if at < 0:
            return False
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
    """Return whether a fact is clearly a name: several capitalised words, or capitals like NASA."""
    return " " in fact or "-" in fact or (len(fact) > 1 and fact.isupper())
