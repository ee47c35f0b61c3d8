"""Open picks: what each holds of its engine's memory and its tenant's quota, and until when.

A ticket's uses are *unused* until the client reports that the engine accepted them, and *used* from
then on. What a client reports gives credit back early; time gives it back where nobody reports:

    unused    when the ticket can no longer be taken
    used      with the ticket too, but where the tenant's concurrency is limited: there the place
              stays taken until the request must have ended

A tenant pays for every use, reported or not: a ticket that was called back could still be taken.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ullage_router.credit import Credit
from ullage_router.engine import Engine
from ullage_router.tenants import Visit

SERVED = 200
"""HTTP status that stands for them in the tenants' metrics."""


@dataclass(frozen=True, slots=True)
class Bill:
    """What a tenant pays for each use of a ticket."""

    visit: Visit
    prompt_tokens: int
    output_tokens: int

    def pay(self, count: int) -> None:
        self.visit.settle(self.prompt_tokens, self.output_tokens, SERVED, count)

    @property
    def is_limited(self) -> bool:
        """The tenant may have so many requests at once and no more."""
        return bool(self.visit.rules.concurrency)


@dataclass(slots=True, eq=False)
class _Lease:
    """One ticket."""

    engine: Engine
    unused: list[Credit]
    bill: Bill | None
    until: float
    """Time of forgetting what is left of it."""
    used: list[Credit] = field(default_factory=list)


class Book:
    """Every pick that has neither ended nor expired.

    Args:
        ticket_s: after this long an engine takes the ticket no more, and reports what it took.
        request_s: the longest that a request runs.
        clock: monotonic, seconds.
    """

    def __init__(self, ticket_s: float, request_s: float, clock: Callable[[], float]) -> None:
        self._ticket_s = ticket_s
        self._request_s = request_s
        self._clock = clock
        # Both in the order in which they end.
        self._fresh: dict[int, _Lease] = {}
        self._running: dict[int, _Lease] = {}
        """Of tickets that have expired: what was accepted and may run still."""
        self.open = 0
        """Uses that have neither ended nor expired."""
        self.counts: Counter[str] = Counter()
        """placed, ended, expired."""

    def add(self, number: int, engine: Engine, credits: list[Credit], bill: Bill | None) -> None:
        """A ticket for as many uses as there are credits."""
        until = self._clock() + self._ticket_s
        self._fresh[number] = _Lease(engine, credits, bill, until)
        self.open += len(credits)
        self.counts["placed"] += len(credits)

    def report(self, accepted: Iterable[int], ended: Iterable[int]) -> None:
        """What a client says of tickets, each as often as it was used; strangers are left out."""
        for number, count in Counter(accepted).items():
            if lease := self._find(number):
                _accept(lease, count)
        freed = _Freed()
        for number, count in Counter(ended).items():
            if lease := self._find(number):
                freed.add(lease, self._end(number, lease, count))
        self._settle(freed, "ended")

    def sweep(self) -> None:
        """Frees what expired: by now the engine counts the request, or never will."""
        now, freed = self._clock(), _Freed()
        for number, lease in _due(self._fresh, now):
            del self._fresh[number]
            freed.add(lease, lease.unused)
            if lease.used and lease.bill and lease.bill.is_limited:
                lease.unused, lease.until = [], lease.until + self._request_s
                self._running[number] = lease
            else:
                freed.add(lease, lease.used)
        for number, lease in _due(self._running, now):
            del self._running[number]
            freed.add(lease, lease.used)
        self._settle(freed, "expired")

    def _find(self, number: int) -> _Lease | None:
        return self._fresh.get(number) or self._running.get(number)

    def _end(self, number: int, lease: _Lease, count: int) -> list[Credit]:
        """Those that were accepted end first."""
        gone = _cut(lease.used, count)
        gone += _cut(lease.unused, count - len(gone))
        if not (lease.used or lease.unused):
            (self._fresh if number in self._fresh else self._running).pop(number)
        return gone

    def _settle(self, freed: "_Freed", how: str) -> None:
        for engine, credits in freed.credits.items():
            engine.release(*credits)
        self.open -= freed.count
        self.counts[how] += freed.count


class _Freed:
    """Uses that are over; each engine gets all of its own at once, and tells waiters once."""

    def __init__(self) -> None:
        self.credits: dict[Engine, list[Credit]] = {}
        self.count = 0

    def add(self, lease: _Lease, gone: list[Credit]) -> None:
        self.credits.setdefault(lease.engine, []).extend(gone)
        self.count += len(gone)
        if lease.bill and gone:
            lease.bill.pay(len(gone))


def _accept(lease: _Lease, count: int) -> None:
    for credit in _cut(lease.unused, count):
        lease.engine.accepted(credit)
        lease.engine.began(credit)
        lease.used.append(credit)


def _cut(credits: list[Credit], count: int) -> list[Credit]:
    """Takes so many out, or as many as there are."""
    first = max(0, len(credits) - count)
    gone = credits[first:]
    del credits[first:]
    return gone


def _due(leases: dict[int, _Lease], now: float) -> Iterator[tuple[int, _Lease]]:
    """Those whose time has come; each must be taken out before the next is asked for."""
    while leases:
        number = next(iter(leases))
        if leases[number].until > now:
            return
        yield number, leases[number]
