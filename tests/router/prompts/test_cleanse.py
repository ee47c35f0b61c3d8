"""Cleansing takes away what says nothing, never touches code, and does it once for all."""

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_common.config.router import CleanseSection
from ullage_router.prompts.cleanse import cleanse, cleanse_turns
from ullage_router.prompts.code_ranges import find_code
from ullage_router.prompts.html_markdown import looks_like_html, to_text
from ullage_router.prompts.truncate import INVISIBLE

if TYPE_CHECKING:
    StartService = Any

ALL = CleanseSection(whitespace=True, zero_width=True, html=True)
BREAK = re.compile("\r\n|[\n\r\v\f\x85\u2028\u2029]")


def codes(text: str) -> list[str]:
    return [text[start:end] for start, end in find_code(text, BREAK)]


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("a   b \r\n\r\n\n\n\nc\u200b", "a b\n\nc"),
        ("one\u2028two\u2029three\x85four", "one\ntwo\nthree\nfour"),
        ("pay\u202ecod\u202c now\u2066!\u2069", "paycod now!"),
        ("in\u00advis\u200bi\ufeffble\x00", "invisible"),
        ("a\u00a0b\u2003c", "a b c"),
        ("name\t\tage\nann\t\t7", "name\t\tage\nann\t\t7"),
        ("  indented   list\n    - deep   er", "  indented list\n    - deep er"),
        ("👩\u200d🔬 न\u200dम ig\u200dn\u200core", "👩\u200d🔬 न\u200dम ignore"),
        ("x\n\n\n\n\ny   ", "x\n\ny"),
    ],
)
def test_what_goes(given_: str, expected: str) -> None:
    assert cleanse(given_, INVISIBLE) == expected


@pytest.mark.parametrize(
    "code",
    [
        "```\na   b\n\n\n\nc\u200b \n```",
        "~~~python\nx  =  1   \n```\n~~~",
        "> ```\n> a   b\n> ```",
        "1. ```sh\n   ls    -l\n   ```",
        "    indented   code\n\n\n\n    more   of it",
        "\ttab   indented",
        "`a   b`",
        "``a ` \u200b  b``",
        "```\nnever   closed\n\n\n\n",
    ],
)
def test_code_stays(code: str) -> None:
    assert cleanse(f"before   it\n\n{code}\n\nafter   it", INVISIBLE).count(code) == 1
    assert code.strip("\n") in codes(f"x\n\n{code}")[0]


def test_what_is_no_code() -> None:
    assert codes("a `b") == []
    assert codes("a `b\n\nc` d") == []
    assert codes("\\`a  b\\`") == []
    assert codes("text\n    goes on") == []
    assert codes("\\` foo `a  b`") == ["`a  b`"]


def test_json_stays() -> None:
    text = json.dumps({"a": "x   y", "b": [1, 2]}, indent=8) + "\n\n\n\n"
    assert cleanse(text, ALL) == text
    assert cleanse("[not json   at all]", ALL) == "[not json at all]"
    deep = "[" * 100_000
    assert cleanse(deep, ALL) == deep


def test_each_kind_by_itself() -> None:
    text = "a   b\u200b"
    assert cleanse(text, CleanseSection(zero_width=True)) == "a   b"
    assert cleanse(text, CleanseSection(whitespace=True)) == "a b\u200b"
    assert cleanse(text, CleanseSection()) == text


def test_system_prompts_stay() -> None:
    turns = [
        {"role": "system", "content": "be   brief"},
        {"role": "user", "content": "a   b"},
        {"role": "tool", "content": "c  d"},
    ]
    made, saved = cleanse_turns(turns, INVISIBLE)
    assert [turn["content"] for turn in made] == ["be   brief", "a b", "c d"]
    assert saved == 3
    assert turns[1]["content"] == "a   b"


PAGE = """<!DOCTYPE html>
<html><head><title>gone</title><style>p {color: red}</style></head>
<body><h1>Prices &amp; more</h1><script>alert("<p>no</p>")</script>
<!-- nothing --><p>See <a href="https://x.org/a?b=1&amp;c=2">the   list</a>:</p>
<ul><li>one<li>two</ul>
<table><tr><th>name<th>price</tr><tr><td>tea</td><td>3 &lt; 4</td></tr></table>
<pre><code>if  a &lt; b:
    pass</code></pre><p>Use <code>a  b</code>.<br>Bye</p></body></html>
"""


def test_html_becomes_readable() -> None:
    assert cleanse(PAGE, ALL) == (
        "# Prices & more\n\nSee the list (https://x.org/a?b=1&c=2):\n\n- one\n- two\n\n"
        "name | price\n\ntea | 3 < 4\n\n```\nif  a < b:\n    pass\n```\n\nUse `a  b`.\nBye"
    )
    assert cleanse(PAGE, INVISIBLE).startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    "text",
    ["mend this: <p>a</p>", "a < b and c > d", "<3", "<p>open", "<custom>x</custom>", "`<p>`</p>"],
)
def test_what_is_not_plainly_html_stays(text: str) -> None:
    assert not looks_like_html(text)
    assert cleanse(text, ALL) == text


def test_html_about_html_stays() -> None:
    text = "<p>&lt;p&gt;x&lt;/p&gt;</p>"
    assert cleanse(text, ALL) == text


def test_unfinished_html_loses_nothing() -> None:
    assert to_text("<p>a <b class='x") == "a <b class='x"
    assert to_text("<p>1 < 2") == "1 < 2"


def test_character_references_may_be_of_any_length() -> None:
    assert to_text("<p>&#65; &lt;</p>").strip() == "A <"
    endless = f"&#{'9' * 5000};"
    assert to_text(f"<p>{endless}</p><p>&lt;</p>").split() == [endless, "<"]


ROUGH = st.lists(
    st.sampled_from([*'ab  \t\n\n\r`~\\->1.{}"', "    ", "```", "\u200b", "\u200d", "é", "\u00a0"])
    | st.sampled_from(["\u2028", "\u3000", "\x1c", "\x85", "<p>", "</p>", "&lt;", "<pre>", "</b"]),
    max_size=40,
).map("".join)
RULES = st.builds(
    CleanseSection, whitespace=st.booleans(), zero_width=st.booleans(), html=st.booleans()
)


@settings(max_examples=600, deadline=None)
@given(ROUGH, RULES)
def test_once_is_enough(text: str, rules: CleanseSection) -> None:
    once = cleanse(text, rules)
    assert cleanse(once, rules) == once


@settings(max_examples=400, deadline=None)
@given(ROUGH)
def test_words_and_code_survive(text: str) -> None:
    made = cleanse(text, INVISIBLE)
    assert re.findall(r"[ab.1>]", made) == re.findall(r"[ab.1>]", text)
    assert len(made) <= len(text)
    visible = re.sub("[\u200b\u200d\x1c]", "", text)
    if visible == text:
        assert codes(made) == codes(text)


HOSTILE = [" ", "\t ", "a  ", "`", "`a", "\n", "\u200b", "a\u200b", "\\`", "<", "<a ", "<!--"]
HOSTILE += ['<a x="', "<a b='\"", "</p>", "&lt", "~~~\n", "    a\n\n", "``a`", "[", "\u2028 ", "> "]
HOSTILE += ["&#9", "9"]


@pytest.mark.parametrize("piece", HOSTILE)
def test_much_of_anything_ends(piece: str) -> None:
    """What is quadratic in half a megabyte takes longer than the test may."""
    text = piece * (500_000 // len(piece))
    assert len(cleanse(text, ALL)) <= len(text)
    page = f"<p>{text}</p>"
    assert len(cleanse(page, ALL)) <= len(page)


def test_a_service_cleanses_when_told_to_and_says_so(start_service: "StartService") -> None:
    async def scenario() -> None:
        text = "tea   &   milk\u200b"
        async with start_service() as service:
            answer = await service.chat(text)
            assert answer.headers["x-ullage-degraded"] == ""
            untouched = len(service.engine.requests[0].token_ids.ids)
        prompts = {"cleanse": {"whitespace": True, "zero_width": True}}
        async with start_service(prompts=prompts) as service:
            answer = await service.chat(text)
            assert answer.headers["x-ullage-degraded"] == "cleansed_chars=5"
            assert len(service.engine.requests[0].token_ids.ids) == untouched - 7
            assert (await service.stats())["latest"][0]["degraded"] == ["cleansed_chars=5"]

    asyncio.run(scenario())
