"""What a summary must keep is found, and its loss is noticed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_router.prompts.key_facts import key_facts, share_kept

TEXT = (
    "Hello, I'm Anna Schmidt from Berlin. The deadline is 2026-03-14 at 10:30 and costs $1,200.50, "
    "15 % less. See https://x.org/a?b=1. Mail a.b@c.de, call get_user() or parseJson, set MAX_LEN. "
    "Thank you so much! Use `rm -rf build`. NASA pays 10ms for numpy 1.2.3."
)


def test_what_is_a_fact() -> None:
    assert key_facts(TEXT) == {
        "$1,200.50", "1.2.3", "10:30", "10ms", "15 %", "2026-03-14", "Anna Schmidt", "Berlin",
        "MAX_LEN", "NASA", "a.b@c.de", "get_user()", "https://x.org/a?b=1", "parseJson",
        "rm -rf build",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "Thanks. That is all! Where is it?", "nothing to see here"])
def test_what_is_none(text: str) -> None:
    assert key_facts(text) == frozenset()
    assert share_kept(key_facts(text), "") == 1.0


def test_losses_are_counted() -> None:
    wanted = frozenset({"Berlin", "2026-03-14", "12", "parseJson"})
    assert share_kept(wanted, "In Berlin on 2026-03-14 parseJson gave 12.") == 1.0
    assert share_kept(wanted, "In Berliner on 2026-03-14 it gave 120.") == 0.25
    assert share_kept(frozenset({"1.2"}), "version 1.2.3") == 0.0


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_a_text_keeps_its_own_facts(text: str) -> None:
    assert share_kept(key_facts(text), text) == 1.0


@pytest.mark.parametrize(
    "piece", ["a_", "A ", "A-", "1.", "a.", "a@", "http://", "`", "aB", "x.y(", " "]
)
def test_much_of_anything_ends(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    assert share_kept(key_facts(text), text[:10_000]) <= 1.0


def test_facts_within_long_words_are_lost() -> None:
    """What looks at each of a million places for each fact takes longer than the test may."""
    digits = frozenset("1" * length for length in range(1, 1500))
    assert share_kept(digits, "1" * 1_000_000) == 0.0
    assert share_kept(digits, f"{'1' * 1_000_000} 11") == 1 / 1499
