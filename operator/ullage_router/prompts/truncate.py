"""Shortens a conversation to a token budget by cleansing it, then by dropping its oldest turns.

System prompts and the last turn are always kept. In contrast, `summarize.py` shortens conversations
that would fit unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ullage_common.chat.tool_formats import Turn
from ullage_common.config.router import CleanseSection
from ullage_router.prompts.cleanse import cleanse_turns

KEPT_ROLES = frozenset({"system"})
INVISIBLE = CleanseSection(whitespace=True, zero_width=True)
"""Cleansing rules that are applied whenever a conversation must become shorter."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """A shortened conversation, and the changes made to it."""

    turns: Sequence[Turn]
    token_ids: Sequence[int]
    degraded: tuple[str, ...]


def droppable(turns: Sequence[Turn], keep: int = 1) -> list[int]:
    """Return the indices of the turns that may be dropped, oldest first.

    All of these turns precede the user's last question, because the calls and results after the
    question belong to its answer.

    Args:
        keep: number of newest turns that are always kept.
    """
    end = min(_last_question(turns), len(turns) - keep)
    return [i for i in range(end) if turns[i]["role"] not in KEPT_ROLES]


def _last_question(turns: Sequence[Turn]) -> int:
    """Return the index of the user's last turn, or of the last turn if there is no user turn."""
    places = range(len(turns) - 1, -1, -1)
    return next((i for i in places if turns[i]["role"] == "user"), max(0, len(turns) - 1))


def truncate(
    turns: Sequence[Turn],
    budget: int,
    render: Callable[[Sequence[Turn]], Sequence[int]],
    keep: int = 1,
) -> Truncated:
    """Make a conversation fit the budget, dropping as few turns as possible.

    If the conversation never fits, all droppable turns are dropped.

    Args:
        budget: maximum number of tokens.
        render: renders turns to token ids.
        keep: number of newest turns that are always kept.
    """
    clean, saved = cleanse_turns(turns, INVISIBLE)
    words = (f"cleansed_chars={saved}",) if saved else ()
    ids = render(clean)
    if len(ids) <= budget:
        return Truncated(clean, ids, words)
    dropped, kept = _fewest_dropped(clean, budget, render, keep)
    return Truncated(kept, render(kept), (*words, f"dropped_messages={dropped}"))


def _fewest_dropped(
    turns: Sequence[Turn],
    budget: int,
    render: Callable[[Sequence[Turn]], Sequence[int]],
    keep: int,
) -> tuple[int, list[Turn]]:
    """Return the minimum number of turns to drop, and the turns that remain.

    The number is found by bisection, because a prompt becomes shorter with each turn that is
    dropped.
    """
    places = droppable(turns, keep)
    cuts = _cuts(turns, places)
    low = 0
    high = len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if len(render(_without(turns, places[: cuts[middle]]))) <= budget:
            high = middle
        else:
            low = middle + 1
    return cuts[low], _without(turns, places[: cuts[low]])


def _cuts(turns: Sequence[Turn], places: Sequence[int]) -> list[int]:
    """Return the possible numbers of turns to drop, in ascending order.

    Each number is chosen so that the first remaining turn is a user turn. The last number is an
    exception: it drops all droppable turns.
    """
    begins = [n for n in range(1, len(places)) if turns[places[n]]["role"] == "user"]
    return [*begins, len(places)]


def _without(turns: Sequence[Turn], places: Sequence[int]) -> list[Turn]:
    gone = frozenset(places)
    return [turn for i, turn in enumerate(turns) if i not in gone]
