"""A short window under load in which prompts wait for one another, to be spread well.

A request whose engine has prompts to compute for longer than the window loses nothing by waiting in
it: its place could not be used yet. It holds its memory meanwhile. When the window closes, all that
are in it are balanced over the engines of their pool (`prefill.py`) and move with their memory.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from ullage_router.config import PrefillSection
from ullage_router.credit import Credit
from ullage_router.engine import Engine
from ullage_router.engines import Engines
from ullage_router.prefill import Job, Lane, balance, work
from ullage_router.views import Standing


@dataclass(slots=True, eq=False)
class Seat:
    """A request's reserved place on an engine."""

    engine: Engine
    credit: Credit
    choices: Mapping[str, int]
    """Bytes on each engine that it may go to, by address; empty: it stays."""
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self, engine: Engine) -> None:
        """Takes its memory there."""
        before, credit = self.engine, self.credit
        self.credit = engine.reserve(self.choices[engine.address], credit.tokens)
        self.engine = engine
        before.release(credit)


class PrefillWindow:
    """The windows of all pools.

    Args:
        section: how long one is open, and what prompts cost.
        engines: where seats may move.
    """

    def __init__(self, section: PrefillSection, engines: Engines) -> None:
        self._length_s = section.window
        self._mlp_products = section.mlp_products
        self._engines = engines
        self._seats: dict[str, list[Seat]] = {}
        self.waited = 0
        """Requests that were in a window."""
        self.balanced = 0
        """Those of them that moved to another engine."""

    def __len__(self) -> int:
        return sum(map(len, self._seats.values()))

    async def settle(self, seat: Seat) -> None:
        """Returns when the seat's engine is final; a cancelled request's memory is released."""
        if not seat.choices:
            return
        pool = seat.engine.pool
        if pool not in self._seats:
            self._seats[pool] = []
            asyncio.get_running_loop().call_later(self._length_s, self._close, pool)
        self._seats[pool].append(seat)
        self.waited += 1
        try:
            await seat.is_settled.wait()
        except BaseException:
            if seat in self._seats.get(pool, ()):
                self._seats[pool].remove(seat)
            seat.engine.release(seat.credit)
            raise

    def _close(self, pool: str) -> None:
        seats = self._seats.pop(pool)
        engines = {
            engine.address: engine
            for engine in self._engines.all()
            if engine.pool == pool and engine.standing is Standing.USABLE
        }
        if all(seat.engine.address in engines for seat in seats):
            self._move(seats, engines)
        for seat in seats:
            seat.is_settled.set()

    def _move(self, seats: list[Seat], engines: Mapping[str, Engine]) -> None:
        jobs = [
            Job(work(seat.credit.tokens, self._mlp_products), seat.engine.address, seat.choices)
            for seat in seats
        ]
        lanes = [self._lane(engine, seats) for engine in engines.values()]
        for seat, address in zip(seats, balance(jobs, lanes), strict=True):
            if address != seat.engine.address:
                seat.move(engines[address])
                self.balanced += 1

    def _lane(self, engine: Engine, seats: list[Seat]) -> Lane:
        """The engine as it would be without those who are in the window."""
        own = [seat.credit for seat in seats if seat.engine is engine]
        return Lane(
            engine.address,
            engine.prefill_work(self._mlp_products)
            - sum(work(credit.tokens, self._mlp_products) for credit in own),
            engine.available + sum(credit.size for credit in own),
        )
