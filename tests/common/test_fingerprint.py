"""A fingerprint changes with every fact and nothing else; differences are told in words."""

import random

from hypothesis import given
from hypothesis import strategies as st

from ullage_common.wire.fingerprint import (
    DIGEST_DIGITS,
    UNKNOWN,
    Fingerprint,
    describe,
    differences,
    fingerprint_of,
    num_kinds,
)

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
facts = st.dictionaries(names, st.text(st.characters(codec="utf-8"), max_size=20), max_size=8)


@given(facts, st.randoms(use_true_random=False))
def test_the_order_of_facts_does_not_matter(
    given_facts: dict[str, str], draw: random.Random
) -> None:
    shuffled = list(given_facts.items())
    draw.shuffle(shuffled)
    assert fingerprint_of(dict(shuffled)) == fingerprint_of(given_facts)
    digest = fingerprint_of(given_facts).digest
    assert len(digest) == DIGEST_DIGITS
    assert set(digest) <= set("0123456789abcdef")


@given(facts, facts)
def test_any_change_of_a_fact_changes_the_fingerprint_and_nothing_else_does(
    one: dict[str, str], other: dict[str, str]
) -> None:
    digests = fingerprint_of(one).digest, fingerprint_of(other).digest
    assert (digests[0] == digests[1]) == (one == other)


@given(facts.filter(bool), st.data(), st.text(max_size=5))
def test_one_changed_fact_is_the_difference(
    given_facts: dict[str, str], data: st.DataObject, suffix: str
) -> None:
    changed = data.draw(st.sampled_from(sorted(given_facts)))
    value = f"{given_facts[changed]}+{suffix}"
    before = fingerprint_of(given_facts)
    after = fingerprint_of({**given_facts, changed: value})
    assert before.digest != after.digest
    found = differences({"a": before, "b": after})
    assert found == {changed: {given_facts[changed]: ["a"], value: ["b"]}}


def test_engines_that_are_alike_have_no_differences() -> None:
    same = fingerprint_of({"weights": "1"})
    assert differences({}) == differences({"a": same}) == differences({"a": same, "b": same}) == {}
    assert differences({"a": UNKNOWN, "b": UNKNOWN}) == {}
    assert num_kinds([same, same]) == 1
    assert num_kinds([]) == 0


def test_differences_name_the_engines_by_value() -> None:
    engines = {
        "s-0": fingerprint_of({"weights": "3f1a", "torch": "2.11", "dtype": "bfloat16"}),
        "s-1": fingerprint_of({"weights": "91bc", "torch": "2.11", "dtype": "bfloat16"}),
        "s-2": fingerprint_of({"weights": "3f1a", "dtype": "bfloat16"}),
    }
    assert describe(differences(engines)) == (
        "torch differs: none (s-2), 2.11 (s-0, s-1); weights differ: 3f1a (s-0, s-2), 91bc (s-1)"
    )


def test_of_many_engines_few_are_named() -> None:
    engines = {f"s-{n}": fingerprint_of({"order": "avx2"}) for n in range(9)}
    engines["t-0"] = fingerprint_of({"order": "avx512"})
    assert describe(differences(engines)) == (
        "order differs: avx2 (s-0, s-1, s-2 and 6 more), avx512 (t-0)"
    )


def test_an_engine_without_a_fingerprint_differs_from_those_that_have_one() -> None:
    known = fingerprint_of({"weights": "1"})
    found = differences({"new": known, "old": UNKNOWN, "newer": Fingerprint(known.digest)})
    assert found["fingerprint"] == {"none": ["old"], "reported": ["new", "newer"]}
