"""Content keys: what has one key, and what must not."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_kv.keys import CHAIN_BYTES, KEY_BYTES, block_keys, extend_keys, namespace, part_key

TOKENS = st.lists(st.integers(0, 1 << 20), max_size=40)
SPACE = namespace({"model": "m", "heads": 3})


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_a_key_stands_for_all_tokens_before_its_end(
    one: list[int], other: list[int], size: int
) -> None:
    first = block_keys(SPACE, one, size)
    second = block_keys(SPACE, other, size)
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        end = (place + 1) * size
        assert (a == b) == (one[:end] == other[:end])
    assert all(len(key) == KEY_BYTES for key in first)
    assert len({key[:CHAIN_BYTES] for key in first}) <= 1


@given(TOKENS, st.integers(1, 5), st.integers(0, 8))
def test_keys_are_extended_as_if_made_at_once(tokens: list[int], size: int, known: int) -> None:
    whole = block_keys(SPACE, tokens, size)
    known = min(known, len(whole))
    assert [*whole[:known], *extend_keys(SPACE, whole[:known], tokens, size)] == whole


def test_keys_do_not_depend_on_the_machine() -> None:
    parent = hashlib.sha256(SPACE + b"tenant").digest()
    digest = hashlib.sha256(parent + struct.pack("<2I", 7, 9)).digest()
    assert block_keys(SPACE, [7, 9, 5], 2, "tenant") == [digest]


@pytest.mark.parametrize(
    "facts", [{"model": "m", "heads": 4}, {"model": "n", "heads": 3}, {"model": "m"}]
)
def test_other_facts_are_another_namespace(facts: dict[str, object]) -> None:
    assert block_keys(namespace(facts), [1], 1) != block_keys(SPACE, [1], 1)


def test_tenants_and_parts_are_apart() -> None:
    [key] = block_keys(SPACE, [1], 1)
    assert key != block_keys(SPACE, [1], 1, "tenant")[0]
    window = part_key(key, "window")
    assert window != key
    assert window[:CHAIN_BYTES] == key[:CHAIN_BYTES]
    assert namespace({"heads": 3, "model": "m"}) == SPACE
