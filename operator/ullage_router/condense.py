"""Sums up the oldest turns of a conversation that fills most of the context.

What replaces them is one labelled turn of the user and one word of the assistant, so that roles
alternate as strict templates want them. A summary that lost facts is not used, and then the
conversation stays as it is.
"""

import asyncio
import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ullage_router.compress import KEPT_ROLES, droppable
from ullage_router.config import CompressSection
from ullage_router.facts import facts, share_kept
from ullage_router.summarise import summarise
from ullage_router.tenants import Errand, Errands
from ullage_router.tokenize import PromptError, TokenizerThreads
from ullage_rpc.tool_formats import Turn
from ullage_rpc.turns import num_characters, weight

LENGTHS = (0.3, 0.5, 0.7)
"""Of what is summed up: the shortest extract that keeps the facts is taken."""
MAX_ASKING = 4
"""Summaries that the model writes at once; others are extracted."""
MAX_KEPT = 256
MAX_KEPT_CHARACTERS = 4 << 20
LABEL = "[Summary of the first {count} messages of this conversation, which were long]\n"
REPLY = "Understood."

Render = Callable[[Sequence[Turn]], list[int]]
Write = Callable[[str, int, Errand], Awaitable[str]]
"""(the turns as text, most tokens, who pays) -> the model's summary, empty when there is none."""
UNPAID = "unpaid"
"""Extracted, since the tenant's tokens do not suffice for the model's summary."""


@dataclass(frozen=True, slots=True)
class Condensed:
    """A shorter conversation."""

    turns: tuple[Turn, ...]
    token_ids: list[int]
    num_turns: int
    """That the summary stands for."""
    method: str


def oldest(turns: Sequence[Turn], share: float, keep: int) -> list[int]:
    """Places of the oldest turns to sum up, about this share of all; empty when there are none.

    The cut is before a user's turn, so calls stay with their results and roles alternate.
    """
    places = droppable(turns, keep)
    roles = [turn["role"] for turn in turns if turn["role"] not in KEPT_ROLES]
    wanted = math.ceil(share * len(roles))
    # What may go is where the conversation begins, so roles[n] follows the first n of it.
    cuts = [n for n in range(1, len(places) + 1) if roles[n : n + 1] == ["user"]]
    fitting = [n for n in cuts if n <= wanted] or cuts[:1]
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
    wanted, size = facts(as_text(turns)), num_characters(turns)
    for length in LENGTHS:
        summary = summarise(turns, int(size * length))
        if summary and share_kept(wanted, summary) >= fact_share:
            return summary
    return ""


def as_text(turns: Sequence[Turn]) -> str:
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns)


class Condenser:
    """Condenses conversations; keeps its latest summaries, since clients send all turns each time.

    Args:
        section: when, how much and how.
        threads: where long texts are worked on.
        write: has the model write a summary.
        on_done: told the outcome (extractive, model, unpaid, or refused since facts were lost or
            nothing was gained) and the prompt tokens that were saved.
    """

    def __init__(
        self,
        section: CompressSection,
        threads: TokenizerThreads,
        write: Write,
        on_done: Callable[[str, int], None],
    ) -> None:
        self._section = section
        self._threads = threads
        self._write = write
        self._asking = 0
        self._kept = _Kept()
        self._on_done = on_done
        self._counts: Counter[str] = Counter()
        self._saved_tokens = 0

    def as_json(self) -> dict[str, int]:
        """Counts since the start, for /stats."""
        outcomes = {name: self._counts[name] for name in ("extractive", "model", UNPAID, "refused")}
        return outcomes | {"saved_tokens": self._saved_tokens}

    async def condense(
        self, turns: Sequence[Turn], num_tokens: int, context: int, render: Render, errands: Errands
    ) -> Condensed | None:
        """A shorter conversation; None when it is short enough or cannot be summed up.

        Args:
            num_tokens: of the whole prompt.
            context: the longest there may be, tokens.
            errands: pay for what the model writes.
        """
        section = self._section
        if section.method == "off" or num_tokens <= section.threshold * context:
            return None
        places, old = await self._threads.run(weight(turns), lambda: self._old(turns))
        if not places:
            return None
        method, summary = await self._summary(old, errands(num_tokens))
        made = await self._made(turns, places, summary, render) if summary else None
        if made is None or len(made[1]) >= num_tokens:
            self._count("refused", 0)
            return None
        self._count(method, num_tokens - len(made[1]))
        return Condensed(*made, len(places), method)

    def _old(self, turns: Sequence[Turn]) -> tuple[list[int], list[Turn]]:
        """Places of what is to be summed up, and that as text."""
        places = oldest(turns, self._section.share, self._section.keep_turns)
        return places, [_plain(turns[i]) for i in places]

    def _count(self, outcome: str, saved_tokens: int) -> None:
        self._counts[outcome] += 1
        self._saved_tokens += saved_tokens
        self._on_done(outcome, saved_tokens)

    async def _made(
        self, turns: Sequence[Turn], places: Sequence[int], summary: str, render: Render
    ) -> tuple[tuple[Turn, ...], list[int]] | None:
        made = with_summary(turns, places, summary)
        try:
            ids = await self._threads.run(weight(made), lambda: render(made))
        except PromptError:  # the template refuses it; the conversation itself was fine
            return None
        return made, ids

    async def _summary(self, old: Sequence[Turn], errand: Errand) -> tuple[str, str]:
        """(method, summary); the summary is empty when facts would be lost."""
        text = f"{errand.tenant}\0{as_text(old)}"
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if known := self._kept.get(key):
            return known
        made = await self._new_summary(old, errand)
        if made[0] != UNPAID:
            self._kept.put(key, made)
        return made

    async def _new_summary(self, old: Sequence[Turn], errand: Errand) -> tuple[str, str]:
        share, size = self._section.fact_share, num_characters(old)
        if self._section.method == "model" and (written := await self._written(old, size, errand)):
            wanted = await self._threads.run(weight(old), lambda: facts(as_text(old)))
            if share_kept(wanted, written) >= share:
                return "model", written
        method = UNPAID if errand.is_unpaid else "extractive"
        return method, await self._threads.run(weight(old), lambda: extract(old, share))

    async def _written(self, old: Sequence[Turn], size: int, errand: Errand) -> str:
        """The model's summary; empty when it is busy with others, failed or took too long."""
        if self._asking >= MAX_ASKING:
            return ""
        self._asking += 1
        try:
            async with asyncio.timeout(self._section.timeout):
                return await self._write(as_text(old), max(64, size // 8), errand)
        except TimeoutError:
            return ""
        finally:
            self._asking -= 1


def _plain(turn: Turn) -> Turn:
    """The turn as text, with what it called."""
    calls = [
        json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())
    ]
    return {"role": turn["role"], "content": "\n".join([turn["content"], *calls]).strip()}


class _Kept:
    """The summaries that were used last, bounded by count and characters."""

    def __init__(self) -> None:
        self._summaries: OrderedDict[bytes, tuple[str, str]] = OrderedDict()
        self._characters = 0

    def get(self, key: bytes) -> tuple[str, str] | None:
        if key in self._summaries:
            self._summaries.move_to_end(key)
        return self._summaries.get(key)

    def put(self, key: bytes, made: tuple[str, str]) -> None:
        if old := self._summaries.pop(key, None):
            self._characters -= len(old[1])
        self._summaries[key] = made
        self._characters += len(made[1])
        while len(self._summaries) > MAX_KEPT or self._characters > MAX_KEPT_CHARACTERS:
            _, (_, summary) = self._summaries.popitem(last=False)
            self._characters -= len(summary)
