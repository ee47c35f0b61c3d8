"""Bytes reserved on an engine for requests that its reports may not include yet.

The rule: bytes are reserved when a request is sent. The engine counts the request from the moment
it answers Accepted, but a report that is already under way may not. So the reservation ends with
the second report after Accepted, or when the request ends, whichever comes first: until then bytes
may count twice, but never not at all.
"""

from dataclasses import dataclass

REPORTS_AFTER_ACCEPTED = 2


@dataclass(slots=True, eq=False)
class Credit:
    """One request in flight."""

    size: int
    tokens: int
    """Of the prompt."""
    counted_from: int | None = None
    """Which report must include the request, counted as they arrive; None before Accepted."""


class CreditBook:
    """The requests in flight on one engine."""

    def __init__(self) -> None:
        self._open: set[Credit] = set()
        self._counted: set[Credit] = set()
        self._reports = 0

    @property
    def reports(self) -> int:
        """Reports that arrived so far."""
        return self._reports

    @property
    def total(self) -> int:
        """Bytes that no report is sure to include."""
        return sum(credit.size for credit in self._open)

    @property
    def tokens(self) -> int:
        """Prompt tokens that no report is sure to include."""
        return sum(credit.tokens for credit in self._open)

    @property
    def uncounted(self) -> int:
        """Requests that no report is sure to include."""
        return len(self._open)

    @property
    def inflight(self) -> int:
        """Requests sent and not ended."""
        return len(self._open) + len(self._counted)

    def reserve(self, size: int, tokens: int) -> Credit:
        credit = Credit(size, tokens)
        self._open.add(credit)
        return credit

    def accepted(self, credit: Credit) -> None:
        """The engine took the request."""
        credit.counted_from = self._reports + REPORTS_AFTER_ACCEPTED

    def reported(self) -> None:
        """A report arrived; it includes every request accepted long enough before."""
        self._reports += 1
        counted = {c for c in self._open if c.counted_from and self._reports >= c.counted_from}
        self._open -= counted
        self._counted |= counted

    def release(self, credit: Credit) -> None:
        """The request ended."""
        self._open.discard(credit)
        self._counted.discard(credit)

    def check_integrity(self) -> None:
        assert not self._open & self._counted
        assert self.total >= 0
