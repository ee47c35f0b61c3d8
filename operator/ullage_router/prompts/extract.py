"""Shortens turns to their most important sentences.

A sentence's gain is the weight of the facts and words that it adds to the extract, per character.
Sentences with the largest gain are chosen greedily until the budget is used up. The greedy choice
approximates maximum coverage within a factor of 1 - 1/e (Nemhauser, Wolsey and Fisher, 1978). Gains
only decrease as sentences are chosen, so a heap avoids re-evaluating most of them. Sentences keep
their order, and a code block counts as one sentence. The time is linear in the length of the text.
"""

import heapq
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ullage_common.chat.tool_formats import Turn
from ullage_common.chat.turns import num_characters
from ullage_router.prompts.key_facts import key_facts, share_kept

MAX_SENTENCES = 4000
"""Maximum number of sentences that are considered for an extract."""
FACT_WEIGHT = 4.0
"""Weight of a new fact. A new word that occurs in n sentences has the weight log(1 + n)."""
LENGTHS = (0.3, 0.5, 0.7)
"""Lengths of an extract to try, as fractions of the turns' total length.

The first, and thus shortest, extract that keeps enough facts is used.
"""
_BLOCK = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[^\n]*$|\Z)", re.DOTALL | re.MULTILINE)
_END = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])[\"')\]]*+\s++|\n++")
_WORD = re.compile(r"\w++")


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence that may be chosen for the extract."""

    turn: int
    text: str
    facts: frozenset[str]
    words: frozenset[str]


def extractive_summary(turns: Sequence[Turn], budget: int) -> str:
    """Summarise turns in at most `budget` characters, with one line per turn (`user: ...`)."""
    texts = ((i, text) for i, turn in enumerate(turns) for text in _sentences(turn["content"]))
    sentences = [
        Sentence(i, text, key_facts(text), frozenset(_words(text)))
        for i, text in itertools.islice(texts, MAX_SENTENCES)
    ]
    lines: dict[int, list[str]] = {}
    for place in sorted(_chosen(turns, sentences, budget)):
        lines.setdefault(sentences[place].turn, []).append(sentences[place].text)
    return "\n".join(f"{_label(turns[i])}{' '.join(taken)}" for i, taken in lines.items())


def extract(turns: Sequence[Turn], fact_share: float) -> str:
    """Return the shortest extract that keeps at least the fraction `fact_share` of the facts.

    Return an empty string if no extract keeps that many.
    """
    facts = key_facts(as_text(turns))
    size = num_characters(turns)
    for length in LENGTHS:
        summary = extractive_summary(turns, int(size * length))
        if summary and share_kept(facts, summary) >= fact_share:
            return summary
    return ""


def as_text(turns: Sequence[Turn]) -> str:
    """Join the turns, with their roles, into one text."""
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


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
    """Yield a text's numbers, and words of more than three characters, in lower case."""
    return (word for word in _WORD.findall(text.lower()) if len(word) > 3 or word.isdigit())


def _chosen(turns: Sequence[Turn], sentences: Sequence[Sentence], budget: int) -> list[int]:
    """Return the indices of the sentences to extract, within `budget` characters in total."""
    counts = Counter(word for sentence in sentences for word in sentence.words)
    taken_words: set[str] = set()
    taken_facts: set[str] = set()

    def gain(sentence: Sentence) -> float:
        words = sum(math.log1p(counts[word]) for word in sentence.words - taken_words)
        new = FACT_WEIGHT * len(sentence.facts - taken_facts)
        return (new + words) / (len(sentence.text) + 8)

    # Lazy greedy: a sentence's gain is recomputed when it reaches the top of the heap.
    heap = [(-gain(sentence), place) for place, sentence in enumerate(sentences)]
    heapq.heapify(heap)
    chosen: list[int] = []
    labelled: set[int] = set()
    while heap:
        old, place = heapq.heappop(heap)
        sentence = sentences[place]
        now = -gain(sentence)
        if heap and now > heap[0][0] and now > old:  # another sentence has a larger gain now
            heapq.heappush(heap, (now, place))
            continue

        label = 0 if sentence.turn in labelled else len(_label(turns[sentence.turn]))
        cost = len(sentence.text) + 1 + label
        if now == 0 or cost > budget:
            continue

        budget -= cost
        chosen.append(place)
        labelled.add(sentence.turn)
        taken_words |= sentence.words
        taken_facts |= sentence.facts
    return chosen
