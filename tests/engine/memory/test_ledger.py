"""The ledger, the device's size and the price of a sequence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_engine.memory.ledger import Ledger, LedgerError, wrong_price

MIB = 1 << 20


@given(st.lists(st.integers(0, 400 * MIB), max_size=12), st.floats(0.1, 1.0))
@settings(max_examples=60, deadline=None)
def test_reservations_never_exceed_the_budget(sizes: list[int], threshold: float) -> None:
    ledger = Ledger(1024 * MIB, threshold, configurable=True)
    for number, size in enumerate(sizes):
        fits = size <= ledger.available_bytes
        if fits:
            ledger.reserve(f"part{number}", size)
        else:
            with pytest.raises(LedgerError):
                ledger.reserve(f"part{number}", size)
    assert ledger.reserved_bytes <= threshold * 1024 * MIB
    assert ledger.available_bytes == ledger.budget_bytes - ledger.reserved_bytes


def test_a_shortage_names_field_need_and_remedy() -> None:
    ledger = Ledger(1000 * MIB, 0.5, configurable=True)
    ledger.record("weights", 400 * MIB)
    with pytest.raises(LedgerError) as raised:
        ledger.reserve("kv_pool", 200 * MIB)
    assert str(raised.value) == (
        "memory.deviceBytes: kv_pool needs 200 MiB, but 100 MiB of the 500 MiB budget (0.5 of "
        "1000 MiB) are available after weights 400 MiB; set it to 1201 MiB or more, or lower "
        "memory.safetyReserve"
    )


def test_following_the_remedy_makes_it_fit() -> None:
    ledger = Ledger(1201 * MIB, 0.5, configurable=True)
    ledger.record("weights", 400 * MIB)
    ledger.reserve("kv_pool", 200 * MIB)
    assert ledger.reserved_bytes == 600 * MIB


def test_a_real_device_cannot_be_made_larger() -> None:
    with pytest.raises(LedgerError, match=r"^memory\.thresholdPercent: weights needs .*; raise it"):
        Ledger(MIB, 0.85, configurable=False).reserve("weights", 2 * MIB)


def test_the_table_shows_every_reservation() -> None:
    ledger = Ledger(1000 * MIB, 0.85, configurable=True)
    ledger.record("weights", 256 * MIB)
    ledger.reserve("safety_reserve", 100 * MIB)
    text = "\n".join(ledger.table())
    assert [state.name for state in ledger.states()] == ["weights", "safety_reserve"]
    assert "weights" in text
    assert "356 MiB" in text
    assert "850 MiB" in text


@pytest.mark.parametrize("allocated", [950, 1000, 1050])
def test_prices_within_five_percent_are_right(allocated: int) -> None:
    assert wrong_price({"kv_pool": 1000, "arena": 0}, {"kv_pool": allocated, "arena": 0}) is None


@pytest.mark.parametrize(("allocated", "ratio"), [(949, "0.949"), (1051, "1.051"), (0, "0.000")])
def test_a_wrong_price_is_told_with_both_figures(allocated: int, ratio: str) -> None:
    error = wrong_price({"arena": 5, "kv_pool": 1000}, {"arena": 5, "kv_pool": allocated})
    assert error is not None
    assert error.startswith(f"kv_pool: allocated {allocated} bytes, {ratio} times the 1000 bytes")


def test_what_was_priced_at_nothing_must_be_nothing() -> None:
    error = wrong_price({"arena": 0}, {"arena": 1})
    assert error is not None
    assert "1 bytes, not 0" in error


def test_pinned_memory_of_the_host_is_a_line_beside_the_budget() -> None:
    ledger = Ledger(1000 * MIB, 0.5, configurable=False)
    ledger.record("weights", 400 * MIB)
    ledger.record_on_host("pinned_host_kv", 8000 * MIB)
    assert ledger.available_bytes == 100 * MIB
    line = ledger.states()[-1]
    assert (line.name, line.on_host, line.allocated_bytes) == ("pinned_host_kv", True, 8000 * MIB)
    assert any("pinned_host_kv" in text and "8000 MiB" in text for text in ledger.table())


def test_what_others_hold_is_named_where_nothing_fits_beside_them() -> None:
    ledger = Ledger(1000 * MIB, 0.5, configurable=False)
    ledger.record("weights", 100 * MIB)
    ledger.reserve_for_others(380 * MIB, "process 7 with 600 MiB")
    assert (ledger.promised_bytes, ledger.available_bytes) == (100 * MIB, 20 * MIB)
    with pytest.raises(LedgerError) as raised:
        ledger.reserve("kv_pool", 50 * MIB)
    assert str(raised.value) == (
        "memory: kv_pool needs 50 MiB, but 20 MiB of the 500 MiB budget are available, since "
        "process 7 with 600 MiB hold 380 MiB of it; end them, or give the engine a GPU of its own"
    )
    # Without them it would not fit either.
    with pytest.raises(
        LedgerError, match=r"^memory\.thresholdPercent: kv_pool needs 500 MiB.*raise it"
    ):
        ledger.reserve("kv_pool", 500 * MIB)
    assert any("others" in line and "380 MiB" in line for line in ledger.table())
