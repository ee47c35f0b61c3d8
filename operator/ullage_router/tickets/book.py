"""Open picks: what each holds of its engine's memory and its tenant's quota, and until when.

A ticket's uses are *unused* until the client reports that the engine accepted them, and *used* from
then on. A client's reports give credit back early; where no client reports, time gives it back:

    unused    when the ticket can no longer be taken
    used      with the ticket too, but where the tenant's concurrency is limited: there the place
              stays taken until the request must have ended

A tenant pays for every use, reported or not: a ticket that was revoked could still be taken.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ullage_router.engines.engine import Engine
from ullage_router.policy.credit import Credit
from ullage_router.tenants.session import TenantSession

SERVED = 200
"""HTTP status that stands for them in the tenants' metrics."""


@dataclass(frozen=True, slots=True)
class TicketCharge:
    """What a tenant pays for each use of a ticket."""

    session: TenantSession
    prompt_tokens: int
    output_tokens: int

    def pay(self, count: int) -> None:
        self.session.settle(self.prompt_tokens, self.output_tokens, SERVED, count)

    @property
    def is_limited(self) -> bool:
        """Whether the tenant may have only so many requests at once."""
        return bool(self.session.rules.concurrency)


@dataclass(slots=True, eq=False)
class _OpenTicket:
    """One ticket with its uses."""

    engine: Engine
    unused: list[Credit]
    charge: TicketCharge | None
    until: float
    """Time at which what remains of the ticket is forgotten."""
    holder: str = ""
    """Who picked it and pays nothing; empty where somebody pays."""
    used: list[Credit] = field(default_factory=list)


class OpenTickets:
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
        self._fresh: dict[int, _OpenTicket] = {}
        self._running: dict[int, _OpenTicket] = {}
        """Expired tickets whose accepted uses may run still."""
        self.open = 0
        """Uses that have neither ended nor expired."""
        self._open_by_holder: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """placed, ended, expired."""

    def open_of(self, holder: str) -> int:
        """Return the open uses of one holder that pays nothing."""
        return self._open_by_holder[holder]

    def add(
        self,
        number: int,
        engine: Engine,
        credits: list[Credit],
        charge: TicketCharge | None,
        holder: str = "",
    ) -> None:
        """Add a ticket with as many uses as there are credits.

        Args:
            holder: the caller that pays nothing; empty if the caller pays.
        """
        until = self._clock() + self._ticket_s
        self._fresh[number] = _OpenTicket(engine, credits, charge, until, holder)
        self.open += len(credits)
        if holder:
            self._open_by_holder[holder] += len(credits)
        self.counts["placed"] += len(credits)

    def report(self, accepted: Iterable[int], ended: Iterable[int]) -> None:
        """What a client says of tickets, each as often as it was used; strangers are left out."""
        for number, count in Counter(accepted).items():
            if ticket := self._find(number):
                _accept(ticket, count)
        freed = _Freed()
        for number, count in Counter(ended).items():
            if ticket := self._find(number):
                freed.add(ticket, self._end(number, ticket, count))
        self._settle(freed, "ended")

    def sweep(self) -> None:
        """Free what expired: by now the engine counts the request, or never will."""
        now = self._clock()
        freed = _Freed()
        for number, ticket in _due(self._fresh, now):
            del self._fresh[number]
            freed.add(ticket, ticket.unused)
            if ticket.used and ticket.charge and ticket.charge.is_limited:
                ticket.unused = []
                ticket.until = ticket.until + self._request_s
                self._running[number] = ticket
            else:
                freed.add(ticket, ticket.used)
        for number, ticket in _due(self._running, now):
            del self._running[number]
            freed.add(ticket, ticket.used)
        self._settle(freed, "expired")

    def _find(self, number: int) -> _OpenTicket | None:
        return self._fresh.get(number) or self._running.get(number)

    def _end(self, number: int, ticket: _OpenTicket, count: int) -> list[Credit]:
        """End uses; those that were accepted end first."""
        ended = _cut(ticket.used, count)
        ended += _cut(ticket.unused, count - len(ended))
        if not (ticket.used or ticket.unused):
            (self._fresh if number in self._fresh else self._running).pop(number)
        return ended

    def _settle(self, freed: "_Freed", how: str) -> None:
        for engine, credits in freed.credits.items():
            engine.release(*credits)
        self.open -= freed.count
        for holder, count in freed.by_holder.items():
            self._open_by_holder[holder] -= count
            if not self._open_by_holder[holder]:
                del self._open_by_holder[holder]
        self.counts[how] += freed.count


class _Freed:
    """Uses that are over; each engine gets all of its own at once, and wakes waiters once."""

    def __init__(self) -> None:
        self.credits: dict[Engine, list[Credit]] = {}
        self.count = 0
        self.by_holder: Counter[str] = Counter()

    def add(self, ticket: _OpenTicket, ended: list[Credit]) -> None:
        self.credits.setdefault(ticket.engine, []).extend(ended)
        self.count += len(ended)
        if ticket.holder and ended:
            self.by_holder[ticket.holder] += len(ended)
        if ticket.charge and ended:
            ticket.charge.pay(len(ended))


def _accept(ticket: _OpenTicket, count: int) -> None:
    for credit in _cut(ticket.unused, count):
        ticket.engine.on_accepted(credit)
        ticket.engine.on_first_token(credit)
        ticket.used.append(credit)


def _cut(credits: list[Credit], count: int) -> list[Credit]:
    """Take out that many uses, or as many as there are."""
    first = max(0, len(credits) - count)
    ended = credits[first:]
    del credits[first:]
    return ended


def _due(tickets: dict[int, _OpenTicket], now: float) -> Iterator[tuple[int, _OpenTicket]]:
    """Yield entries whose time has come; each must be taken out before the next is asked for."""
    while tickets:
        number = next(iter(tickets))
        if tickets[number].until > now:
            return
        yield number, tickets[number]
