"""A summary made of the turns' own sentences: those that say most for their length.

Sentences are taken greedily by (new facts + weight of new words) per character until the budget is
full, as maximum coverage is solved to within 1 - 1/e (Nemhauser, Wolsey, Fisher 1978); gains only
fall, so a heap needs to look again at few of them. They keep their order. Code blocks are one
sentence each.
"""

import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ullage_router.facts import facts
from ullage_rpc.tool_formats import Turn

MAX_SENTENCES = 4000
FACT_WEIGHT = 4.0
"""How many words of the usual weight a fact is worth."""

_BLOCK = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[^\n]*$|\Z)", re.DOTALL | re.MULTILINE)
_END = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])[\"')\]]*+\s++|\n++")
_WORD = re.compile(r"\w++")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One that may be taken."""

    turn: int
    text: str
    facts: frozenset[str]
    words: frozenset[str]


def summarise(turns: Sequence[Turn], budget: int) -> str:
    """At most `budget` characters of the turns, one line a turn such as `user: ...`."""
    texts = ((i, text) for i, turn in enumerate(turns) for text in _sentences(turn["content"]))
    sentences = [
        Sentence(i, text, facts(text), frozenset(_words(text)))
        for i, text in itertools.islice(texts, MAX_SENTENCES)
    ]
    lines: dict[int, list[str]] = {}
    for place in sorted(_chosen(turns, sentences, budget)):
        lines.setdefault(sentences[place].turn, []).append(sentences[place].text)
    return "\n".join(f"{_label(turns[i])}{' '.join(taken)}" for i, taken in lines.items())


def _label(turn: Turn) -> str:
    return f"{turn['role']}: "


def _sentences(text: str) -> Iterator[str]:
    at = 0
    for block in _BLOCK.finditer(text):
        yield from _prose(text[at : block.start()])
        yield f"\n{block[0]}\n"
        at = block.end()
    yield from _prose(text[at:])


def _prose(text: str) -> Iterator[str]:
    at = 0
    for match in _END.finditer(text):
        if sentence := text[at : match.end()].strip():
            yield sentence
        at = match.end()
    if sentence := text[at:].strip():
        yield sentence


def _words(text: str) -> Iterator[str]:
    """Long enough to mean something, in any language."""
    return (word for word in _WORD.findall(text.lower()) if len(word) > 3 or word.isdigit())


def _chosen(turns: Sequence[Turn], sentences: Sequence[Sentence], budget: int) -> list[int]:
    counts = Counter(word for sentence in sentences for word in sentence.words)
    seen: set[str] = set()
    known: set[str] = set()

    def gain(sentence: Sentence) -> float:
        words = sum(math.log1p(counts[word]) for word in sentence.words - seen)
        new = FACT_WEIGHT * len(sentence.facts - known)
        return (new + words) / (len(sentence.text) + 8)

    heap = [(-gain(sentence), place) for place, sentence in enumerate(sentences)]
    heapq.heapify(heap)
    chosen: list[int] = []
    labelled: set[int] = set()
    while heap:
        old, place = heapq.heappop(heap)
        sentence = sentences[place]
        now = -gain(sentence)
        if heap and now > heap[0][0] and now > old:  # it was overtaken since it was weighed
            heapq.heappush(heap, (now, place))
            continue
        label = 0 if sentence.turn in labelled else len(_label(turns[sentence.turn]))
        cost = len(sentence.text) + 1 + label
        if now == 0 or cost > budget:
            continue
        budget -= cost
        chosen.append(place)
        labelled.add(sentence.turn)
        seen |= sentence.words
        known |= sentence.facts
    return chosen
