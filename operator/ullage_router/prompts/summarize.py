"""Summarises the oldest turns of a conversation that fills most of the context.

The summary is inserted as a labelled user turn, followed by a one-word assistant turn, so that
roles alternate as strict templates require. The summary consists of sentences from the replaced
turns (`extract.py`). If too many facts would be lost (`key_facts.py`), the conversation is not
changed.
"""

import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ullage_common.chat.tool_formats import Turn
from ullage_common.config.router import CompressSection
from ullage_router.prompts.extract import as_text, extract
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.prompts.truncate import KEPT_ROLES, droppable
from ullage_router.tokenizer.model import PromptError

MAX_KEPT = 256
"""Maximum number of summaries in the cache."""
MAX_KEPT_CHARACTERS = 4 << 20
"""Maximum total characters of the summaries in the cache."""
LABEL = "[Summary of the first {count} messages of this conversation, which were long]\n"
REPLY = "Understood."

Render = Callable[[Sequence[Turn]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class SummarizedHistory:
    """A conversation with a summary of its oldest turns."""

    turns: tuple[Turn, ...]
    token_ids: Sequence[int]
    num_turns: int
    """Number of turns that the summary replaces."""


def oldest(turns: Sequence[Turn], share: float, keep: int) -> list[int]:
    """Return the indices of the oldest turns to summarise, about a fraction `share` of all turns.

    The first turn after them is a user turn, so that tool calls stay with their results and roles
    alternate.
    """
    places = droppable(turns, keep)
    roles = [turn["role"] for turn in turns if turn["role"] not in KEPT_ROLES]
    target = math.ceil(share * len(roles))
    # Droppable turns are at the beginning, so roles[n] is the role after the first n of them.
    cuts = [n for n in range(1, len(places) + 1) if roles[n : n + 1] == ["user"]]
    fitting = [n for n in cuts if n <= target] or cuts[:1]
    return places[: fitting[-1]] if fitting else []


def with_summary(turns: Sequence[Turn], places: Sequence[int], summary: str) -> tuple[Turn, ...]:
    """Return the conversation with a summary in place of the turns at the given indices."""
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


class HistorySummarizer:
    """Replaces the oldest turns of long conversations with a summary.

    The latest summaries are cached, since clients send all turns each time.

    Args:
        section: the threshold, the fraction of turns to summarise, and the fraction of facts that
            the summary must keep.
        threads: threads that process long texts.
        on_done: called with the outcome and the number of prompt tokens saved. The outcome is
            `extractive`, or `refused` if too many facts were lost or no tokens were saved.
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
        """Return the counts of outcomes and saved tokens since the start, for /stats."""
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
        """Return a shorter conversation, or None if it is short enough or cannot be summarised.

        Args:
            num_tokens: number of tokens in the whole prompt.
            context: maximum context length, in tokens.
            render: renders turns to token ids.
            tenant: tenant of the conversation. Summaries are not shared between tenants.
            size: number of characters of the conversation (`turns.weight`).
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
        """Return the indices of the turns to summarise, and the turns themselves as plain text."""
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
        except PromptError:  # the template accepts the conversation, but not with the summary
            return None
        return shorter, ids

    async def _summary(self, turns: Sequence[Turn], tenant: str, size: int) -> str:
        """Return a summary of the turns (empty if it would lose too many facts)."""
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
    """Return a turn as plain text, including its tool calls."""
    calls = [
        json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())
    ]
    return {"role": turn["role"], "content": "\n".join([turn["content"], *calls]).strip()}


class _SummaryCache:
    """An LRU cache of summaries, bounded by their number and total characters."""

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
