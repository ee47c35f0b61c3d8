"""Parts of JSON texts are counted as a parser would make them, wherever blocks end."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.wire import json_size
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.json_size import BLOCK_BYTES, JsonCounter, JsonLimits

TEXTS = st.text(alphabet='ab"\\[]{}:,\n\u00e9')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


def parts(value: Any) -> tuple[int, int, int]:
    """Lists, objects with their entries, and commas."""
    if isinstance(value, dict):
        inner = list(map(parts, value.values()))
        own = (0, 1 + len(value), max(0, len(value) - 1))
    elif isinstance(value, list):
        inner = list(map(parts, value))
        own = (1, 0, max(0, len(value) - 1))
    else:
        return 0, 0, 0
    return tuple(map(sum, zip(own, *inner, strict=True)))  # type: ignore[return-value]


@given(VALUES, st.integers(min_value=1, max_value=20), st.booleans())
def test_counts_are_exact(value: Any, block: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    lists, entries, items = parts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "BLOCK_BYTES", block)
        JsonCounter("x", JsonLimits(lists, entries, items)).add(text)
        for short in range(3):
            limits = [lists, entries, items]
            limits[short] -= 1
            if min(limits) >= 0:
                with pytest.raises(ServiceError, match="x has more than"):
                    JsonCounter("x", JsonLimits(*limits)).add(text)


@given(st.binary(max_size=60))
def test_any_bytes_can_be_counted(text: bytes) -> None:
    JsonCounter("x", JsonLimits(60, 60, 60)).add(text)


def test_several_texts_count_together() -> None:
    counter = JsonCounter("x", JsonLimits(10, 10, 10))
    for _ in range(5):
        counter.add(b'[["')  # what one leaves open is none of the next one's business
    with pytest.raises(ServiceError, match="x has more than 10 lists outside of strings"):
        counter.add(b"[")


def test_an_escape_at_the_end_of_a_block() -> None:
    for shift in range(4):
        inside = "x" * (BLOCK_BYTES - 4 + shift) + '\\"[[[' + "\\" * BLOCK_BYTES + '"[['
        JsonCounter("x", JsonLimits(1, 0, 0)).add(json.dumps([inside]).encode())
