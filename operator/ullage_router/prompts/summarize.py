"""Sums up the oldest turns of a conversation that fills most of the context.

One labelled turn of the user and one word of the assistant replace them, so that roles alternate as
strict templates require. The summary consists of the turns' own sentences. A summary that lost
facts (numbers with their units, dates, addresses, names, identifiers of code) is not used, and the
conversation stays as it is.

Sentences are taken greedily by (new facts + weight of new words) per character until the budget is
full, as maximum coverage is solved to within 1 - 1/e (Nemhauser, Wolsey, Fisher 1978); gains only
fall, so a heap needs to look again at few of them. They keep their order; a code block is one
sentence. The time is linear in the text.
"""

import hashlib
import heapq
import itertools
import json
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ullage_common.chat.template import num_characters
from ullage_common.chat.tool_formats import Turn
from ullage_common.config.router import CompressSection
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.prompts.truncate import KEPT_ROLES, droppable
from ullage_router.tokenizer.model import PromptError

MAX_FACTS = 20_000
"""Number of facts of one text; what comes after them is not looked at."""

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
    """The facts of a text, as they are written, numbers and names without surrounding marks."""
    result: set[str] = {match[1].strip() for match in _INLINE_CODE.finditer(text)} - {""}
    for match in _FACT.finditer(text):
        if len(result) >= MAX_FACTS:
            break
        fact = match[0].rstrip(".,;:!?-/")
        # What merely begins a sentence may be any word.
        if (
            match.lastgroup != "name"
            or _is_surely_name(fact)
            or not _begins_sentence(text, match.start())
        ):
            result.add(fact)
    result.discard("I")
    return frozenset(result)


def share_kept(facts: frozenset[str], text: str) -> float:
    """The share of the facts that the text has, word for word; 1 when there are none."""
    if not facts:
        return 1.0
    present = key_facts(text)
    return sum(fact in present or _has(text, fact) for fact in facts) / len(facts)


MAX_PLACES = 100
"""Number of places at which a fact is looked for: a run of digits has it at each of them."""


def _has(text: str, fact: str) -> bool:
    """Return whether the fact occurs as a whole and not inside another word or number; False where
    it is part of too many of these."""
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
    """Several words with capitals, or letters and digits in capitals such as NASA or B2B."""
    return " " in fact or "-" in fact or (len(fact) > 1 and fact.isupper())


MAX_SENTENCES = 4000
FACT_WEIGHT = 4.0
"""Number of words of the usual weight that a fact is worth."""

_BLOCK = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[^\n]*$|\Z)", re.DOTALL | re.MULTILINE)
_END = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])[\"')\]]*+\s++|\n++")
_WORD = re.compile(r"\w++")


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence that may be part of the summary."""

    turn: int
    text: str
    facts: frozenset[str]
    words: frozenset[str]


def extractive_summary(turns: Sequence[Turn], budget: int) -> str:
    """Return at most `budget` characters of the turns, one line a turn such as `user: ...`."""
    texts = ((i, text) for i, turn in enumerate(turns) for text in _sentences(turn["content"]))
    sentences = [
        Sentence(i, text, key_facts(text), frozenset(_words(text)))
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
    taken_words: set[str] = set()
    taken_facts: set[str] = set()

    def gain(sentence: Sentence) -> float:
        words = sum(math.log1p(counts[word]) for word in sentence.words - taken_words)
        new = FACT_WEIGHT * len(sentence.facts - taken_facts)
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
        taken_words |= sentence.words
        taken_facts |= sentence.facts
    return chosen


LENGTHS = (0.3, 0.5, 0.7)
"""Lengths of an extract as shares of its turns: the shortest that keeps the facts is taken."""
"""Summaries that the model writes at once; others are extracted."""
MAX_KEPT = 256
MAX_KEPT_CHARACTERS = 4 << 20
LABEL = "[Summary of the first {count} messages of this conversation, which were long]\n"
REPLY = "Understood."

Render = Callable[[Sequence[Turn]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class SummarizedHistory:
    """A shorter conversation."""

    turns: tuple[Turn, ...]
    token_ids: Sequence[int]
    num_turns: int
    """Number of turns that the summary stands for."""


def oldest(turns: Sequence[Turn], share: float, keep: int) -> list[int]:
    """Places of the oldest turns to sum up, about this share of all; empty when there are none.

    The cut is before a user's turn, so calls stay with their results and roles alternate.
    """
    places = droppable(turns, keep)
    roles = [turn["role"] for turn in turns if turn["role"] not in KEPT_ROLES]
    target = math.ceil(share * len(roles))
    # What may go is where the conversation begins, so roles[n] follows the first n of it.
    cuts = [n for n in range(1, len(places) + 1) if roles[n : n + 1] == ["user"]]
    fitting = [n for n in cuts if n <= target] or cuts[:1]
    return places[: fitting[-1]] if fitting else []


def with_summary(turns: Sequence[Turn], places: Sequence[int], summary: str) -> tuple[Turn, ...]:
    """The conversation with a summary where these turns were."""
    gone = frozenset(places)
    kept = [(i, turn) for i, turn in enumerate(turns) if i not in gone]
    before = [turn for i, turn in kept if i < places[0]]
    after = [turn for i, turn in kept if i > places[0]]
    label = LABEL.format(count=len(places))
    inserted = [
        {"role": "user", "content": label + summary},
        {"role": "assistant", "content": REPLY},
    ]
    return (*before, *inserted, *after)


def extract(turns: Sequence[Turn], fact_share: float) -> str:
    """The shortest extract that keeps this share of the facts; empty when none does."""
    facts = key_facts(as_text(turns))
    size = num_characters(turns)
    for length in LENGTHS:
        summary = extractive_summary(turns, int(size * length))
        if summary and share_kept(facts, summary) >= fact_share:
            return summary
    return ""


def as_text(turns: Sequence[Turn]) -> str:
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


class HistorySummarizer:
    """Replaces the oldest turns of long conversations by a summary; keeps its latest summaries,
    since clients send all turns each time.

    Args:
        section: when, how much and which facts must be kept.
        threads: where long texts are worked on.
        on_done: called with the outcome (extractive, or refused since facts were lost or nothing
            was gained) and the prompt tokens that were saved.
    """

    def __init__(
        self,
        section: CompressSection,
        threads: TokenizerThreads,
        on_done: Callable[[str, int], None],
    ) -> None:
        self._section = section
        self._threads = threads
        self._cache = _SummaryCache()
        self._on_done = on_done
        self._counts: Counter[str] = Counter()
        self._saved_tokens = 0

    def as_json(self) -> dict[str, int]:
        """Count since the start, for /stats."""
        outcomes = {name: self._counts[name] for name in ("extractive", "refused")}
        return outcomes | {"saved_tokens": self._saved_tokens}

    async def summarize_history(
        self,
        turns: Sequence[Turn],
        num_tokens: int,
        context: int,
        render: Render,
        tenant: str,
        size: int,
    ) -> SummarizedHistory | None:
        """Return a shorter conversation; None if it is short enough or cannot be summed up.

        Args:
            num_tokens: of the whole prompt.
            context: the longest there may be, tokens.
            tenant: whose conversation it is; tenants share no summaries.
            size: characters of the conversation (`template.weight`).
        """
        if num_tokens <= self._section.threshold * context:
            return None
        places, oldest_turns = await self._threads.run(size, lambda: self._oldest(turns), tenant)
        if not places:
            return None
        summary = await self._summary(oldest_turns, tenant, size)
        result = None
        if summary:
            result = await self._rendered(turns, places, summary, render, tenant, size)
        if result is None or len(result[1]) >= num_tokens:
            self._count("refused", 0)
            return None
        self._count("extractive", num_tokens - len(result[1]))
        return SummarizedHistory(*result, len(places))

    def _oldest(self, turns: Sequence[Turn]) -> tuple[list[int], list[Turn]]:
        """Places of what is to be summed up, and that as text."""
        places = oldest(turns, self._section.share, self._section.keep_turns)
        return places, [_plain(turns[i]) for i in places]

    def _count(self, outcome: str, saved_tokens: int) -> None:
        self._counts[outcome] += 1
        self._saved_tokens += saved_tokens
        self._on_done(outcome, saved_tokens)

    async def _rendered(
        self,
        turns: Sequence[Turn],
        places: Sequence[int],
        summary: str,
        render: Render,
        tenant: str,
        size: int,
    ) -> tuple[tuple[Turn, ...], Sequence[int]] | None:
        shorter = with_summary(turns, places, summary)
        try:
            ids = await self._threads.run(size, lambda: render(shorter), tenant)
        except PromptError:  # the template refuses it; the conversation itself was fine
            return None
        return shorter, ids

    async def _summary(self, turns: Sequence[Turn], tenant: str, size: int) -> str:
        """Return the summary; empty if facts would be lost."""
        key = await self._threads.run(size, lambda: _digest(turns, tenant), tenant)
        summary = self._cache.get(key)
        if summary is None:
            fact_share = self._section.fact_share
            summary = await self._threads.run(size, lambda: extract(turns, fact_share), tenant)
            self._cache.put(key, summary)
        return summary


def _digest(turns: Sequence[Turn], tenant: str) -> bytes:
    text = f"{tenant}\0{as_text(turns)}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _plain(turn: Turn) -> Turn:
    """The turn as text, with what it called."""
    calls = [
        json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())
    ]
    return {"role": turn["role"], "content": "\n".join([turn["content"], *calls]).strip()}


class _SummaryCache:
    """The summaries that were used last, bounded by count and characters."""

    def __init__(self) -> None:
        self._summaries: OrderedDict[bytes, str] = OrderedDict()
        self._characters = 0

    def get(self, key: bytes) -> str | None:
        if key in self._summaries:
            self._summaries.move_to_end(key)
        return self._summaries.get(key)

    def put(self, key: bytes, summary: str) -> None:
        self._characters -= len(self._summaries.pop(key, ""))
        self._summaries[key] = summary
        self._characters += len(summary)
        while len(self._summaries) > MAX_KEPT or self._characters > MAX_KEPT_CHARACTERS:
            _, dropped = self._summaries.popitem(last=False)
            self._characters -= len(dropped)
