"""The order of reports: gaps are counted, old ones passed over, new lives noticed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_router.engines.reports import ReportSequence, report_interval_ms


def test_kinds() -> None:
    order = ReportSequence()
    order.on_connect()
    assert [order.take(7, n) for n in (5, 6, 9, 9, 8, 10)] == [
        *("next", "next", "gap", "old", "old", "next")
    ]
    assert (order.missed, order.old) == (2, 2)
    assert order.take(8, 1) == "restart"
    order.on_connect()
    assert order.take(8, 1) == "next"
    assert (order.restarts, order.epoch, order.missed) == (1, 8, 2)


def test_what_was_lost_before_the_first_report_is_not_counted() -> None:
    order = ReportSequence()

    def told(epoch: int, sequence: int, restarts: int) -> int:
        order.take(epoch, sequence)
        order.on_worker_restarts(restarts)
        return order.workers_lost

    assert told(7, 5, 3) == 0, "the router is younger than the engine"
    assert told(7, 6, 4) == 1
    assert told(8, 1, 1) == 3, "the server ended, and then its worker"


def test_a_canary_that_fell_before_a_router_heard_of_it_fell() -> None:
    order = ReportSequence(counts_earlier=True)
    order.take(7, 5)
    order.on_worker_restarts(1)
    assert order.workers_lost == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1))
def test_within_a_stream_only_what_is_newer_counts(sequences: list[int]) -> None:
    order = ReportSequence()
    taken = list[int]()
    order.on_connect()
    for sequence in sequences:
        if order.take(1, sequence) != "old":
            taken.append(sequence)
    assert taken == sorted(set(taken))
    assert order.old == len(sequences) - len(taken)
    assert order.missed == taken[-1] - taken[0] + 1 - len(taken)


def test_reports_are_as_fresh_as_their_number_allows() -> None:
    assert [report_interval_ms(n) for n in (1, 10, 25, 100, 1000)] == [20, 20, 50, 200, 200]
