"""Memory that is reserved on engines for requests their reports do not include yet, and prefill
work that is balanced over engines.

Reservations: bytes are reserved when a request is sent. The engine counts the request from the
moment it answers Accepted, but a report that is already under way may not. So the reservation ends
with the second report after Accepted, or when the request ends, whichever comes first: until then
bytes may count twice, but never not at all.

Balance: a prompt of N tokens multiplies N * (N + 1) / 2 pairs of queries and keys and sends N
tokens through everything else of a layer. In units of one pair's products that is

    work(N) = N * (N + 1) / 2 + mlp_products * N

`balance` gives prompts, longest first, to the engine with the least work (Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969: at most 4/3 of the shortest critical path when engines are
idle), as far as their memory allows.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


def pairs(tokens: int) -> int:
    """Products of queries and keys that causal attention over a prompt takes."""
    return tokens * (tokens + 1) // 2


def work(tokens: int, mlp_products: int) -> int:
    """Return the cost of computing a prompt, in products of a query and a key."""
    return pairs(tokens) + mlp_products * tokens


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine that may get prompts."""

    id: str
    work: int
    """Work that the engine has before any of the prompts."""
    room: int
    """Bytes available to all of the prompts."""


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """A prompt to be placed."""

    work: int
    lane: str
    """The engine that the prompt is on now, which holds its bytes."""
    sizes: Mapping[str, int]
    """Bytes that the prompt takes on each engine that it may go to."""


def balance(jobs: Sequence[PrefillTask], lanes: Sequence[EngineLoad]) -> list[str]:
    """The lane of each job; where they are, unless another way ends sooner.

    What is on lanes that no job may take, such as a canary's, has no say in that.
    """
    possible = {lane for job in jobs for lane in (job.lane, *job.sizes)}
    lanes = [lane for lane in lanes if lane.id in possible]
    present = [job.lane for job in jobs]
    balanced = _longest_first(jobs, lanes)
    if balanced and critical_path(jobs, balanced, lanes) < critical_path(jobs, present, lanes):
        return balanced
    return present


def critical_path(
    jobs: Sequence[PrefillTask], places: Sequence[str], lanes: Sequence[EngineLoad]
) -> int:
    """Work of the engine that has most to do."""
    total = {lane.id: lane.work for lane in lanes}
    for job, place in zip(jobs, places, strict=True):
        total[place] = total.get(place, 0) + job.work
    return max(total.values(), default=0)


def _longest_first(jobs: Sequence[PrefillTask], lanes: Sequence[EngineLoad]) -> list[str]:
    """Empty when the memory does not allow it."""
    total = {lane.id: lane.work for lane in lanes}
    room = {lane.id: lane.room for lane in lanes}
    places = [""] * len(jobs)
    for number, job in sorted(enumerate(jobs), key=lambda item: -item[1].work):
        fits = [lane for lane, size in job.sizes.items() if size <= room.get(lane, -1)]
        if not fits:
            return []
        best = min(fits, key=lambda lane: (total[lane], lane))
        places[number] = best
        total[best] += job.work
        room[best] -= job.sizes[best]
    return places


REPORTS_AFTER_ACCEPTED = 2
SPARE_LIMITS = 64
"""Number of limits of ended requests, besides as many as are in flight, that are kept at most."""


@dataclass(slots=True, eq=False)
class Credit:
    """Credit of one request in flight."""

    size: int
    tokens: int
    """Tokens of the prompt."""
    step_limit_s: float = math.inf
    """Longest seconds of a step with which the request would still end in time."""
    counted_from: int | None = None
    """Which report must include the request, counted as they arrive; None before Accepted."""
    holder: str = ""
    """Who reserved it and pays nothing for that; empty where somebody pays, or a request is sent.
    """


@dataclass(slots=True)
class PromptSums:
    """PromptSums that are not computed yet, summed up."""

    tokens: int = 0
    pairs: int = 0

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.pairs += pairs(tokens)

    def remove(self, tokens: int) -> None:
        self.tokens -= tokens
        self.pairs -= pairs(tokens)


class Held(NamedTuple):
    """Reservations that no report is sure to include."""

    requests: int = 0
    size: int = 0
    tokens: int = 0
    """Prompt tokens."""

    def plus(self, credit: Credit, sign: int = 1) -> "Held":
        return Held(
            self.requests + sign,
            self.size + sign * credit.size,
            self.tokens + sign * credit.tokens,
        )


NOTHING_HELD = Held()


class CreditBook:
    """The requests in flight on one engine."""

    def __init__(self) -> None:
        self._open: set[Credit] = set()
        self._accepted: deque[Credit] = deque()
        """Accepted credits in the order of the reports that must include them; some may have ended.
        """
        self._counted: set[Credit] = set()
        self._step_limits: list[tuple[float, int, Credit]] = []
        """A heap of all finite limits of requests in flight, and of some that have ended, which
        leave it when they are the shortest or too many."""
        self._numbers = itertools.count()
        self._reports = 0
        self._total = 0
        self._prompts: set[Credit] = set()
        """Credits of requests without a first token."""
        # Sums over prompts by whether a report includes them: every decision asks for them.
        self._unsure, self._sure = PromptSums(), PromptSums()
        self._held: dict[str, Held] = {}
        self.held_by_all = NOTHING_HELD
        """Reservations of everybody who pays nothing for them."""

    @property
    def reports(self) -> int:
        """Number of reports that arrived so far."""
        return self._reports

    @property
    def total(self) -> int:
        """Bytes that no report is sure to include."""
        return self._total

    @property
    def tokens(self) -> int:
        """Prompt tokens to compute that no report is sure to include."""
        return self._unsure.tokens

    def prefill_pairs(self, reported_tokens: int) -> float:
        """Products of queries and keys in the prompts that are not computed yet.

        Args:
            reported_tokens: prompt tokens that the engine has yet to compute, in its last report.
        """
        sure = self._sure
        remaining = min(1.0, reported_tokens / sure.tokens) if sure.tokens else 0.0
        return self._unsure.pairs + remaining * sure.pairs

    @property
    def uncounted(self) -> int:
        """Requests that no report is sure to include."""
        return len(self._open)

    @property
    def inflight(self) -> int:
        """Requests sent and not ended."""
        return len(self._open) + len(self._counted)

    @property
    def step_limit_s(self) -> float:
        """Longest seconds of a step with which every request in flight would still end in time."""
        limits = self._step_limits
        while limits and not self._is_in_flight(limits[0][2]):
            heapq.heappop(limits)
        return limits[0][0] if limits else math.inf

    def held(self, holder: str) -> Held:
        """Return the unpaid reservations of one holder."""
        return self._held.get(holder, NOTHING_HELD)

    def reserve(
        self, size: int, tokens: int, step_limit_s: float = math.inf, holder: str = ""
    ) -> Credit:
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
        """The engine took the request."""
        if credit.counted_from is None:
            credit.counted_from = self._reports + REPORTS_AFTER_ACCEPTED
            self._accepted.append(credit)

    def on_first_token(self, credit: Credit) -> None:
        """Its first token came."""
        if credit in self._prompts:
            self._prompts.remove(credit)
            (self._unsure if credit in self._open else self._sure).remove(credit.tokens)

    def on_report(self) -> None:
        """A report arrived; it includes every request accepted long enough before."""
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
        """The request ended."""
        self.on_first_token(credit)  # or will not begin
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
