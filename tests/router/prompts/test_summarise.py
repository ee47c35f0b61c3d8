"""Summaries are made of the turns' own sentences, in their order, within the budget."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.chat.tool_formats import Turn
from ullage_router.prompts.extract import extractive_summary
from ullage_router.prompts.key_facts import key_facts, share_kept

CHATTER = "Well, that is very nice of you to say and I am so glad that we can talk about it. " * 6
TALK: list[Turn] = [
    {"role": "user", "content": f"{CHATTER}Ms Ada Lovelace pays $120 on 2026-05-01. {CHATTER}"},
    {"role": "assistant", "content": f"{CHATTER}\nThen call `pay_now()` first.\n{CHATTER}"},
]


def test_facts_come_before_chatter() -> None:
    size = sum(len(turn["content"]) for turn in TALK)
    summary = extractive_summary(TALK, size // 5)
    assert len(summary) <= size // 5
    assert "user: " in summary
    assert "assistant: " in summary
    assert summary.index("Lovelace") < summary.index("pay_now()")
    assert share_kept(key_facts(TALK[0]["content"] + TALK[1]["content"]), summary) == 1.0


def test_code_blocks_are_whole_or_gone() -> None:
    block = "```python\nx = 1. Then\n\ny = 2\n```"
    turns: list[Turn] = [{"role": "assistant", "content": f"Do this:\n{block}\nBye."}]
    assert block in extractive_summary(turns, 200)
    assert "x = 1" not in extractive_summary(turns, len(block) - 5)


def test_nothing_fits_into_nothing() -> None:
    assert extractive_summary(TALK, 5) == ""
    assert extractive_summary([], 100) == ""


talks = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text()}),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(talks, st.integers(0, 300))
def test_never_longer_than_the_budget(turns: list[Turn], budget: int) -> None:
    assert len(extractive_summary(turns, budget)) <= budget


def test_much_of_anything_ends() -> None:
    for piece in ("a. ", "\n", "```\n", "word ", " ", ". "):
        text = piece * (50_000 // len(piece))
        assert len(extractive_summary([{"role": "user", "content": text}], 1000)) <= 1000
