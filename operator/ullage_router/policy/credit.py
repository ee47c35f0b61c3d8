"""Accounts for requests that an engine's memory reports do not include yet.

Bytes are reserved when a request is sent. The engine includes the request in its reports once it
has answered Accepted, but a report already in flight at that time may miss it. A reservation
therefore ends with the second report after Accepted, or when the request ends, whichever comes
first. Until then the request's bytes may be counted twice, but they are never missed.
"""

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from ullage_router.policy.balance import pairs

REPORTS_AFTER_ACCEPTED = 2
"""Number of memory reports to await after Accepted before a request's reservation ends."""
SPARE_LIMITS = 64
"""Slack in the size of the heap of step limits, before stale entries are purged.

The entries of ended requests are purged once the heap has more entries than this plus twice the
number of requests in flight.
"""


@dataclass(slots=True, eq=False)
class Credit:
    """What is reserved on an engine for one in-flight request: memory and prefill work."""

    size: int
    """Number of reserved bytes."""
    tokens: int
    """Number of prompt tokens."""
    step_limit_s: float = math.inf
    """Longest engine step, in seconds, with which the request would still meet its deadline."""
    counted_from: int | None = None
    """Number of the first report that is certain to include the request. None before Accepted."""
    holder: str = ""
    """The caller of `Pick` for which memory is reserved without charging a tenant.

    Empty if a tenant has been charged, or if the request has been sent.
    """


@dataclass(slots=True)
class PromptSums:
    """Totals over prompts that are not prefilled yet: their tokens and query-key pairs."""

    tokens: int = 0
    pairs: int = 0

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.pairs += pairs(tokens)

    def remove(self, tokens: int) -> None:
        self.tokens -= tokens
        self.pairs -= pairs(tokens)


class Held(NamedTuple):
    """How much of an engine is reserved for tickets from `Pick` that no tenant was charged for.

    Only reservations that the engine's last report might not include are counted.
    """

    requests: int = 0
    size: int = 0
    """Number of reserved bytes."""
    tokens: int = 0
    """Number of prompt tokens."""

    def plus(self, credit: Credit, sign: int = 1) -> "Held":
        """Return the totals with a reservation added, or with it subtracted if `sign` is -1."""
        return Held(
            self.requests + sign,
            self.size + sign * credit.size,
            self.tokens + sign * credit.tokens,
        )


NOTHING_HELD = Held()


class CreditBook:
    """Tracks the memory that is reserved on one engine for its in-flight requests.

    A reservation is open until a report is certain to include its request. The reported headroom
    then accounts for the request, so its bytes are no longer reserved here. The reservation is only
    kept, marked as counted, until the request ends.
    """

    def __init__(self) -> None:
        self._open: set[Credit] = set()
        self._accepted: deque[Credit] = deque()
        """Reservations of accepted requests, ordered by the report that must include them.

        Some of the requests may have ended.
        """
        self._counted: set[Credit] = set()
        self._step_limits: list[tuple[float, int, Credit]] = []
        """A heap of all in-flight requests' finite step limits.

        An ended request's limit is removed lazily: when it reaches the top of the heap, or when
        the heap has accumulated too many stale limits.
        """
        self._numbers = itertools.count()
        self._reports = 0
        self._total = 0
        self._prompts: set[Credit] = set()
        """Reservations of requests that have no first token yet."""

        # Every decision needs these sums, so they are maintained instead of computed.
        self._unsure = PromptSums()
        """Totals of the unfinished prompts that the last report may not include."""
        self._sure = PromptSums()
        """Totals of the unfinished prompts that the last report certainly includes."""

        self._held: dict[str, Held] = {}
        self.held_by_all = NOTHING_HELD
        """Totals of the uncharged reservations of all callers of `Pick`."""

    @property
    def reports(self) -> int:
        """Number of reports received so far."""
        return self._reports

    @property
    def total(self) -> int:
        """Bytes reserved for requests that the last report might not include."""
        return self._total

    @property
    def tokens(self) -> int:
        """Prompt tokens still to prefill in requests that the last report might not include."""
        return self._unsure.tokens

    def prefill_pairs(self, reported_tokens: int) -> float:
        """Estimate the number of query-key pairs in the prompts that are not prefilled yet.

        Args:
            reported_tokens: prompt tokens that the engine still had to prefill in its last report.
        """
        sure = self._sure
        remaining = min(1.0, reported_tokens / sure.tokens) if sure.tokens else 0.0
        return self._unsure.pairs + remaining * sure.pairs

    @property
    def uncounted(self) -> int:
        """Number of requests that the last report might not include."""
        return len(self._open)

    @property
    def inflight(self) -> int:
        """Number of requests that were sent and have not ended."""
        return len(self._open) + len(self._counted)

    @property
    def step_limit_s(self) -> float:
        """Longest engine step, in seconds, with which no in-flight request misses its deadline."""
        limits = self._step_limits
        while limits and not self._is_in_flight(limits[0][2]):
            heapq.heappop(limits)
        return limits[0][0] if limits else math.inf

    def held(self, holder: str) -> Held:
        """Return what is reserved for one caller of `Pick` without charging a tenant."""
        return self._held.get(holder, NOTHING_HELD)

    def reserve(
        self, size: int, tokens: int, step_limit_s: float = math.inf, holder: str = ""
    ) -> Credit:
        """Reserve memory for a request that is about to be sent.

        Args:
            size: bytes to reserve.
            tokens: prompt tokens.
            step_limit_s: longest engine step, in seconds, that still lets the request meet its
                deadline.
            holder: the caller of `Pick` for which memory is reserved, if no tenant is charged
                (empty if a tenant has been charged).
        """
        credit = Credit(size, tokens, step_limit_s, holder=holder)
        self._open.add(credit)
        if holder:
            self._held[holder] = self.held(holder).plus(credit)
            self.held_by_all = self.held_by_all.plus(credit)
        self._prompts.add(credit)
        if step_limit_s != math.inf:
            self._add_step_limit(credit)
        self._unsure.add(tokens)
        self._total += size
        return credit

    def on_accepted(self, credit: Credit) -> None:
        """Record that the engine has accepted the request."""
        if credit.counted_from is None:
            credit.counted_from = self._reports + REPORTS_AFTER_ACCEPTED
            self._accepted.append(credit)

    def on_first_token(self, credit: Credit) -> None:
        """Record the first token, which shows that the prompt is prefilled."""
        if credit in self._prompts:
            self._prompts.remove(credit)
            (self._unsure if credit in self._open else self._sure).remove(credit.tokens)

    def on_report(self) -> None:
        """Record a report, and stop reserving memory for requests that it certainly includes."""
        self._reports += 1
        while self._accepted and self._reports >= (self._accepted[0].counted_from or 0):
            credit = self._accepted.popleft()
            if credit not in self._open:
                continue
            self._leave(credit)
            self._counted.add(credit)
            if credit in self._prompts:
                self._unsure.remove(credit.tokens)
                self._sure.add(credit.tokens)

    def release(self, credit: Credit) -> None:
        """Release the reservation of a request that has ended."""
        self.on_first_token(credit)  # a prompt that was not computed will not be
        if credit in self._open:
            self._leave(credit)
        self._counted.discard(credit)

    def _leave(self, credit: Credit) -> None:
        self._open.remove(credit)
        self._total -= credit.size
        if credit.holder:
            self.held_by_all = self.held_by_all.plus(credit, -1)
            self._held[credit.holder] = self.held(credit.holder).plus(credit, -1)
            if not self._held[credit.holder].requests:
                del self._held[credit.holder]

    def _is_in_flight(self, credit: Credit) -> bool:
        return credit in self._open or credit in self._counted

    def _add_step_limit(self, credit: Credit) -> None:
        limits = self._step_limits
        heapq.heappush(limits, (credit.step_limit_s, next(self._numbers), credit))
        if len(limits) > 2 * self.inflight + SPARE_LIMITS:
            self._step_limits = [limit for limit in limits if self._is_in_flight(limit[2])]
            heapq.heapify(self._step_limits)

    def check_integrity(self) -> None:
        """Assert that all totals and indices are consistent with the reservations."""
        assert not self._open & self._counted

        inflight = self._open | self._counted
        limits = [credit.step_limit_s for credit in inflight]
        assert self.step_limit_s == min(limits, default=math.inf)
        assert len(self._step_limits) <= 2 * self.inflight + SPARE_LIMITS
        kept = {credit for _, _, credit in self._step_limits}
        assert {credit for credit in inflight if credit.step_limit_s != math.inf} <= kept
        assert self._prompts <= self._open | self._counted
        assert self._total == sum(credit.size for credit in self._open)

        of_holders = [credit for credit in self._open if credit.holder]
        assert set(self._held) == {credit.holder for credit in of_holders}
        assert self.held_by_all.requests == len(of_holders)
        assert self.held_by_all.size == sum(credit.size for credit in of_holders)

        for sums, those in ((self._unsure, self._open), (self._sure, self._counted)):
            tokens = [credit.tokens for credit in self._prompts & those]
            assert sums == PromptSums(sum(tokens), sum(map(pairs, tokens)))
