"""Credit: never not counted."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from ullage_router.policy.credit import CreditBook


def test_the_second_report_after_accepted_includes_it() -> None:
    book = CreditBook()
    credit = book.reserve(100, 5)
    book.on_report()
    book.on_report()
    assert book.total == 100
    book.on_accepted(credit)
    book.on_report()
    assert book.total == 100
    book.on_report()
    assert (book.total, book.tokens, book.inflight) == (0, 0, 1)
    book.release(credit)
    book.release(credit)
    assert book.inflight == 0


def test_the_shortest_step_limit_is_that_of_a_request_in_flight() -> None:
    """However many ended before, whose limits are not kept."""
    book = CreditBook()
    lasting = book.reserve(1, 1, step_limit_s=2.0)
    for number in range(1000):
        book.release(book.reserve(1, 1, step_limit_s=3.0 + number))
    short = book.reserve(1, 1, step_limit_s=1.0)
    assert book.step_limit_s == 1.0
    book.release(short)
    assert book.step_limit_s == 2.0
    book.check_integrity()
    book.release(lasting)
    assert book.step_limit_s == math.inf


def test_the_end_of_the_request_gives_it_back() -> None:
    book = CreditBook()
    credit = book.reserve(100, 5)
    book.release(credit)
    assert (book.total, book.inflight) == (0, 0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(("reserve", "accept", "report", "release")), max_size=60))
def test_any_order_of_events(events: list[str]) -> None:
    book = CreditBook()
    live = []
    waiting = []
    for event in events:
        if event == "reserve":
            live.append(book.reserve(10, 1, step_limit_s=(7 * len(events) + len(live)) % 5 + 0.5))
            waiting.append(live[-1])
        elif event == "accept" and waiting:
            book.on_accepted(waiting.pop(0))
        elif event == "report":
            book.on_report()
        elif event == "release" and live:
            gone = live.pop(0)
            waiting = [credit for credit in waiting if credit is not gone]
            book.release(gone)
        book.check_integrity()
        assert book.inflight == len(live)
        assert len(waiting) * 10 <= book.total <= len(live) * 10
