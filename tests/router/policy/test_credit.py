"""Credit: never not counted."""

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


def test_the_end_of_the_request_gives_it_back() -> None:
    book = CreditBook()
    credit = book.reserve(100, 5)
    book.release(credit)
    assert (book.total, book.inflight) == (0, 0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(("reserve", "accept", "report", "release")), max_size=60))
def test_any_order_of_events(events: list[str]) -> None:
    book, live, waiting = CreditBook(), [], []
    for event in events:
        if event == "reserve":
            live.append(book.reserve(10, 1))
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
