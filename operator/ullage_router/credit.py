"""Bytes reserved on an engine for requests that its reports may not include yet.

The rule: bytes are reserved when a request is sent. The engine counts the request from the moment
it answers Accepted, but a report that is already under way may not. So the reservation ends with
the second report after Accepted, or when the request ends, whichever comes first: until then bytes
may count twice, but never not at all.
"""

from dataclasses import dataclass

from ullage_router.prefill import pairs

REPORTS_AFTER_ACCEPTED = 2


@dataclass(slots=True, eq=False)
class Credit:
    """One request in flight."""

    size: int
    tokens: int
    """Of the prompt."""
    counted_from: int | None = None
    """Which report must include the request, counted as they arrive; None before Accepted."""


@dataclass(slots=True)
class Prompts:
    """Prompts that are not computed yet, summed up."""

    tokens: int = 0
    pairs: int = 0

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.pairs += pairs(tokens)

    def remove(self, tokens: int) -> None:
        self.tokens -= tokens
        self.pairs -= pairs(tokens)


class CreditBook:
    """The requests in flight on one engine."""

    def __init__(self) -> None:
        self._open: set[Credit] = set()
        self._counted: set[Credit] = set()
        self._reports = 0
        self._total = 0
        self._prompts: set[Credit] = set()
        """Those without a first token."""
        # Sums over prompts by whether a report includes them: every decision asks for them.
        self._unsure, self._sure = Prompts(), Prompts()

    @property
    def reports(self) -> int:
        """Reports that arrived so far."""
        return self._reports

    @property
    def total(self) -> int:
        """Bytes that no report is sure to include."""
        return self._total

    @property
    def tokens(self) -> int:
        """Prompt tokens to compute that no report is sure to include."""
        return self._unsure.tokens

    def prefill_pairs(self, told_tokens: int) -> float:
        """Products of queries and keys in the prompts that are not computed yet.

        Args:
            told_tokens: prompt tokens that the engine has yet to compute, in its last report.
        """
        sure = self._sure
        left = min(1.0, told_tokens / sure.tokens) if sure.tokens else 0.0
        return self._unsure.pairs + left * sure.pairs

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
        self._prompts.add(credit)
        self._unsure.add(tokens)
        self._total += size
        return credit

    def accepted(self, credit: Credit) -> None:
        """The engine took the request."""
        credit.counted_from = self._reports + REPORTS_AFTER_ACCEPTED

    def began(self, credit: Credit) -> None:
        """Its first token came."""
        if credit in self._prompts:
            self._prompts.remove(credit)
            (self._unsure if credit in self._open else self._sure).remove(credit.tokens)

    def reported(self) -> None:
        """A report arrived; it includes every request accepted long enough before."""
        self._reports += 1
        counted = {c for c in self._open if c.counted_from and self._reports >= c.counted_from}
        for credit in counted:
            self._leave(credit)
            if credit in self._prompts:
                self._unsure.remove(credit.tokens)
                self._sure.add(credit.tokens)
        self._counted |= counted

    def release(self, credit: Credit) -> None:
        """The request ended."""
        self.began(credit)  # or will not begin
        if credit in self._open:
            self._leave(credit)
        self._counted.discard(credit)

    def _leave(self, credit: Credit) -> None:
        self._open.remove(credit)
        self._total -= credit.size

    def check_integrity(self) -> None:
        assert not self._open & self._counted
        assert self._prompts <= self._open | self._counted
        assert self._total == sum(credit.size for credit in self._open)
        for sums, those in ((self._unsure, self._open), (self._sure, self._counted)):
            tokens = [credit.tokens for credit in self._prompts & those]
            assert sums == Prompts(sum(tokens), sum(map(pairs, tokens)))
