"""The input of custom calls, however the arguments are cut into pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_router.http.openai.custom_tools import InputReader, as_arguments, as_input

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join([*map(reader.push, pieces), reader.close()])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@given(
    TEXTS,
    st.lists(st.integers(0, 1000), max_size=8),
    st.booleans(),
    st.sampled_from(["", " ", "\n "]),
)
def test_any_text_comes_back(text: str, places: list[int], is_ascii: bool, blank: str) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    arguments = arguments.replace('{"input": ', f'{blank}{{{blank}"input"{blank}:{blank}', 1)
    assert read(cut(arguments, places)) == text
    assert as_input(as_arguments(text)) == text


@given(TEXTS, st.integers(0, 1000))
def test_a_call_that_breaks_off_has_the_beginning_of_its_input(text: str, place: int) -> None:
    [arguments, _] = cut(json.dumps({"input": text}), [place])
    if arguments.startswith('{"input": "'):
        assert text.startswith(as_input(arguments).rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("", ""),
        ("{}", "{}"),
        ('{"inp', '{"inp'),
        ('{"code": "x"}', '{"code": "x"}'),
        ('{"input": 7}', '{"input": 7}'),
        ('{"a": 1, "input": "x"}', "x"),
        ("plain text", "plain text"),
        ('{"input": "a"} and more', "a"),
        ('{"input": "a\\qb"}', "a\\qb"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\ud83dx"}', "\ufffdx"),
        ('{"input": "\\ude00\\ud83d\\ude00"}', "\ufffd\U0001f600"),
    ],
)
def test_other_arguments(arguments: str, wanted: str) -> None:
    for places in ([], [1], [4, 12], [13, 14, 15, 16, 17], list(range(40))):
        assert read(cut(arguments, places)) == wanted
