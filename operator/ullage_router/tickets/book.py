"""Tracks open tickets, and the engine memory and tenant quota that they reserve.

A ticket allows one or more uses, each of which sends one request. A use is *unused* until the
client reports that the engine accepted its request, and *used* from then on. Its reservation is
freed as soon as the client reports the end of the request. Without such a report, it is freed when
engines no longer accept the ticket. However, if the tenant's concurrency is limited, the
reservation of an accepted request is kept until the request must have ended.

A tenant pays for every use, even without a report, because an engine could still accept an unused
ticket.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ullage_router.engines.engine import Engine
from ullage_router.policy.credit import Credit
from ullage_router.tenants.session import TenantSession

SERVED = 200
"""HTTP status under which tenant metrics count requests placed by `Pick` that have ended."""


@dataclass(frozen=True, slots=True)
class TicketCharge:
    """The price of each use of a ticket, and the tenant session that pays it."""

    session: TenantSession
    prompt_tokens: int
    output_tokens: int

    def pay(self, count: int) -> None:
        """Charge the tenant for `count` uses of the ticket."""
        self.session.settle(self.prompt_tokens, self.output_tokens, SERVED, count)

    @property
    def is_limited(self) -> bool:
        """Whether the tenant has a limit on concurrent requests."""
        return bool(self.session.rules.concurrency)


@dataclass(slots=True, eq=False)
class _OpenTicket:
    """An open ticket, with the memory reserved for each of its uses."""

    engine: Engine
    unused: list[Credit]
    charge: TicketCharge | None
    until: float
    """Time at which the ticket's remaining uses expire."""
    holder: str = ""
    """The caller that holds the ticket for free (empty if a tenant pays)."""
    used: list[Credit] = field(default_factory=list)


class OpenTickets:
    """Keeps all tickets with uses that have neither ended nor expired.

    Args:
        ticket_s: Seconds until a ticket expires. By then, engines no longer accept the ticket, and
            their reports include all requests that used it.
        request_s: Maximum duration of a request, in seconds.
        clock: Returns monotonic time in seconds.
    """

    def __init__(self, ticket_s: float, request_s: float, clock: Callable[[], float]) -> None:
        self._ticket_s = ticket_s
        self._request_s = request_s
        self._clock = clock
        # Both are in the order in which the tickets expire, since all have the same lifetime. To
        # find the first key, a plain dict passes over all that were removed before it.
        self._fresh: OrderedDict[int, _OpenTicket] = OrderedDict()
        self._running: OrderedDict[int, _OpenTicket] = OrderedDict()
        """Expired tickets whose accepted requests may still be running, by ticket id."""
        self.open = 0
        """Number of ticket uses that have neither ended nor expired."""
        self._open_by_holder: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """Number of ticket uses by outcome: placed, ended or expired."""

    def open_of(self, holder: str) -> int:
        """Return how many ticket uses are open for a caller that does not pay for tickets."""
        return self._open_by_holder[holder]

    def add(
        self,
        number: int,
        engine: Engine,
        credits: list[Credit],
        charge: TicketCharge | None,
        holder: str = "",
    ) -> None:
        """Add a ticket, with one use per credit (a memory reservation).

        Args:
            number: id of the ticket.
            engine: the engine on which the uses are placed.
            credits: the reserved memory of each use.
            charge: the price of each use, or None if there are no tenants.
            holder: name of the caller if it does not pay for its tickets, otherwise empty.
        """
        until = self._clock() + self._ticket_s
        self._fresh[number] = _OpenTicket(engine, credits, charge, until, holder)
        self.open += len(credits)
        if holder:
            self._open_by_holder[holder] += len(credits)
        self.counts["placed"] += len(credits)

    def report(self, accepted: Iterable[int], ended: Iterable[int]) -> None:
        """Record the ticket uses that a client reports as accepted or ended.

        A ticket's id appears once for each of its uses. Unknown ids are ignored, because they
        belong to expired tickets or to another router's tickets.
        """
        for number, count in Counter(accepted).items():
            if ticket := self._find(number):
                _accept(ticket, count)

        freed = _Freed()
        for number, count in Counter(ended).items():
            if ticket := self._find(number):
                freed.add(ticket, self._end(number, ticket, count))
        self._settle(freed, "ended")

    def sweep(self) -> None:
        """Free the reservations of expired ticket uses.

        By the time a ticket expires, the engine's own reports include all requests that used it.
        """
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
        """End up to `count` uses of a ticket, accepted uses first. Return their reservations."""
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
    """Collects the ticket uses that end in one pass, with their reserved memory by engine.

    Each engine's memory is then freed at once, so waiting requests are woken only once per engine.
    """

    def __init__(self) -> None:
        self.credits: dict[Engine, list[Credit]] = {}
        self.count = 0
        self.by_holder: Counter[str] = Counter()

    def add(self, ticket: _OpenTicket, ended: list[Credit]) -> None:
        """Add a ticket's ended uses, and charge the tenant for them."""
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
    """Remove and return the last `count` reservations, or all of them if there are fewer."""
    first = max(0, len(credits) - count)
    ended = credits[first:]
    del credits[first:]
    return ended


def _due(tickets: OrderedDict[int, _OpenTicket], now: float) -> Iterator[tuple[int, _OpenTicket]]:
    """Yield expired tickets, oldest first. The caller must remove each one before continuing."""
    while tickets:
        number = next(iter(tickets))
        if tickets[number].until > now:
            return
        yield number, tickets[number]
