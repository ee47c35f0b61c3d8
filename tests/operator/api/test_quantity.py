"""Quantities and durations."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_operator.api import schema
from ullage_operator.api.quantities import canonical, parse_bytes, parse_decimal, parse_seconds

FIELDS = schema.load_schema()["properties"]["spec"]["properties"]
QUANTITY = FIELDS["memory"]["properties"]["maxKV"]["pattern"]
DURATION = FIELDS["limits"]["properties"]["requestTimeout"]["pattern"]
DECIMAL = FIELDS["slo"]["properties"]["errorPercent"]["pattern"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("2Gi", 2 << 30),
        ("512Mi", 512 << 20),
        ("1.5Gi", 3 << 29),
        ("500M", 500_000_000),
        ("1k", 1000),
        ("0.3", 1),
        ("1Ei", 1 << 60),
    ],
)
def test_bytes(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.integers(-5, 10**12), st.from_regex(DECIMAL, fullmatch=True), st.text()))
def test_a_decimal_is_read_where_the_definition_takes_it(value: int | str) -> None:
    if re.fullmatch(DECIMAL.strip("^$"), str(value)):
        assert parse_decimal(value) == float(value)
    else:
        with pytest.raises(ValueError, match="is not a number; write 2 or, in quotes"):
            parse_decimal(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10s", 10.0), ("6ms", 0.006), ("1m30s", 90.0), ("1h", 3600.0), ("0.5s", 0.5), ("20us", 2e-5)],
)
def test_seconds(text: str, expected: float) -> None:
    assert parse_seconds(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["", "2Gb", "-1", "Gi", "1e3", "1 Gi", "0x10"])
def test_bad_bytes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="512Mi"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "1s!", "1 s"])
def test_bad_seconds_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="1m30s"):
        parse_seconds(text)


@settings(max_examples=60, deadline=None)
@given(st.from_regex(QUANTITY, fullmatch=True))
def test_whatever_the_api_takes_is_a_number_of_bytes(text: str) -> None:
    if re.fullmatch(r"[\x00-\x7f]+", text):
        assert parse_bytes(text.strip()) >= 0


@settings(max_examples=60, deadline=None)
@given(st.from_regex(DURATION, fullmatch=True))
def test_whatever_the_api_takes_is_a_time(text: str) -> None:
    if re.fullmatch(r"[\x00-\x7f]+", text):
        assert parse_seconds(text.strip()) >= 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**50), st.sampled_from(["", "Ki", "Mi", "Gi", "k", "M"]))
def test_units_scale(number: int, unit: str) -> None:
    one = parse_bytes(f"1{unit}")
    assert parse_bytes(f"{number}{unit}") == number * one


STORED = [
    *((4, "4"), ("4", "4"), ("1000", "1k"), ("1500", "1500"), ("0", "0"), ("0Gi", "0")),
    *(("1000m", "1"), ("500m", "500m"), ("0.5", "500m"), ("1.5", "1500m"), ("0.0001", "1m")),
    *(("1024Mi", "1Gi"), ("1.5Gi", "1536Mi"), ("1000Ki", "1000Ki"), ("512Mi", "512Mi")),
    *(("1Ki", "1Ki"), ("0.5Ki", "512"), ("1000k", "1M"), ("0.3", "300m"), ("2000000000", "2G")),
    *(("1073741824", "1073741824"), ("1Ei", "1Ei"), ("0.1Gi", "107374182400m"), ("1.0", "1")),
]


def test_quantities_are_written_as_the_api_server_stores_them(subtests: pytest.Subtests) -> None:
    for quantity, stored in STORED:
        with subtests.test(quantity=quantity):
            assert canonical(quantity) == stored
            assert canonical(stored) == stored


def test_what_is_no_quantity_has_no_canonical_form() -> None:
    with pytest.raises(ValueError, match="write 500m, 2, 512Mi or 2Gi"):
        canonical("two")
