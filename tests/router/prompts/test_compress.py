"""Shorter conversations: cleansed first, oldest turns dropped next, the rest untouched."""

import tracemalloc
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.chat.tool_formats import Turn
from ullage_router.prompts.cleanse import cleanse_turns
from ullage_router.prompts.truncate import INVISIBLE, droppable, truncate


def render(turns: Sequence[Turn]) -> list[int]:
    return list("".join(f"<{t['role']}>{t['content']}" for t in turns).encode())


def turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


TALK = [
    turn("system", "rules"),
    turn("user", "one " * 10),
    turn("assistant", "two " * 10),
    turn("user", "three " * 10),
    turn("assistant", "four " * 10),
    turn("user", "last"),
]


def test_the_work_on_the_last_question_is_kept() -> None:
    work = [turn("assistant", "a call"), turn("tool", "its result")]
    assert droppable([*TALK, *work]) == droppable(TALK) == [1, 2, 3, 4]


def test_cleansing_alone_may_do() -> None:
    messy = [turn("user", "a" + " " * 50 + "b"), turn("user", "c")]
    made = truncate(messy, 30, render)
    assert made.degraded == ("cleansed_chars=49",)
    assert [t["content"] for t in made.turns] == ["a b", "c"]


def test_the_oldest_go_and_a_user_begins() -> None:
    made = truncate(TALK, 150, render)
    assert made.degraded[-1] == "dropped_messages=2"
    assert [t["role"] for t in made.turns] == ["system", "user", "assistant", "user"]
    assert made.token_ids == render(made.turns)


def test_system_and_last_stay() -> None:
    made = truncate(TALK, 1, render)
    assert [t["content"] for t in made.turns] == ["rules", "last"]
    assert droppable([turn("system", "s"), turn("user", "u")]) == []


roles = st.sampled_from(("system", "user", "assistant"))
talks = st.lists(st.builds(turn, roles, st.text(max_size=30)), min_size=2, max_size=12)


@settings(max_examples=80, deadline=None)
@given(talks.filter(droppable), st.integers(0, 300))
def test_promises(talk: list[Turn], budget: int) -> None:
    made = truncate(talk, budget, render)
    assert made.token_ids == render(made.turns)
    last = made.turns[-1]
    [clean] = cleanse_turns(talk[-1:], INVISIBLE)[0]
    assert last == clean
    systems = [t["role"] for t in talk].count("system")
    assert [t["role"] for t in made.turns].count("system") == systems
    shortest = truncate(talk, 0, render)
    assert len(made.token_ids) <= max(budget, len(shortest.token_ids))


def test_tens_of_thousands_of_turns_take_little_memory() -> None:
    talk = [turn("user", "x") for _ in range(20_000)]
    tracemalloc.start()
    try:
        made = truncate(talk, 100, render)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(made.turns) == 100 // len(render(talk[:1]))
    assert peak < 50 << 20
