"""Balances prompts across a pool's engines before their prefill begins.

Under load, requests wait briefly in a prefill window before they are sent. A request enters the
window only if its engine needs longer than the window to prefill the prompts that are already
queued. The wait therefore costs nothing: the prompt could not start earlier, and its memory stays
reserved. When the window closes, its requests are balanced across the pool's engines
(`policy/balance.py`). If a request moves to another engine, so does its reservation. No request
moves to an engine that gets few requests at once because it failed recently.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from ullage_common.config.router import PrefillSection
from ullage_router.engines.engine import Engine
from ullage_router.engines.engines import Engines
from ullage_router.policy.balance import EngineLoad, PrefillTask, balance, work
from ullage_router.policy.credit import Credit
from ullage_router.policy.facts import EngineState
from ullage_router.prompts.prompts import Prompt


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory that is reserved for a request on an engine.

    The owner must release `credit`, the reserved amount, when the request is done.
    """

    engine: Engine
    credit: Credit
    prompt: Prompt
    max_tokens: int
    choices: Mapping[str, int]
    """Bytes that the request would need on each engine to which it may move, by engine key.

    Empty if the request cannot move.
    """
    is_final: asyncio.Event | None = None
    """Event that is set when the prefill window closes. None if the request skipped the window."""

    def move(self, engine: Engine) -> None:
        """Move the reserved memory to another engine."""
        before = self.engine
        credit = self.credit
        # Reserve before releasing, so that the request always counts on an engine.
        self.credit = engine.reserve(self.choices[engine.key], credit.tokens, credit.step_limit_s)
        self.engine = engine
        before.release(credit)


class PrefillWindow:
    """Manages the prefill windows, one for each pool.

    Args:
        section: the window length, and the cost model for prompts.
        engines: the engines to which reservations may move.
    """

    def __init__(self, section: PrefillSection, engines: Engines) -> None:
        self._length_s = section.window
        self._mlp_products = section.mlp_products
        self._engines = engines
        self._open: dict[str, list[Reservation]] = {}
        self.waited = 0
        """Number of requests that have waited in a window."""
        self.balanced = 0
        """Number of requests that moved to another engine when their window closed."""

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def as_json(self) -> dict[str, int]:
        """Return how many requests wait now, and how many ever waited or moved, for /stats."""
        return {"waiting": len(self), "waited": self.waited, "balanced": self.balanced}

    async def settle(self, reservation: Reservation) -> None:
        """Wait until the prefill window of the reservation's pool closes.

        If the request is cancelled while it waits, it leaves the window and its memory is released.
        """
        pool = reservation.engine.pool
        is_final = asyncio.Event()
        reservation.is_final = is_final
        if pool not in self._open:
            self._open[pool] = []
            asyncio.get_running_loop().call_later(self._length_s, self._close, pool)
        self._open[pool].append(reservation)
        self.waited += 1

        try:
            await is_final.wait()
        except BaseException:
            if reservation in self._open.get(pool, ()):
                self._open[pool].remove(reservation)
            reservation.engine.release(reservation.credit)
            raise

    def _close(self, pool: str) -> None:
        """Close a pool's window, and rebalance its requests if none of their engines was lost."""
        reservations = self._open.pop(pool)
        try:
            keys = {key for reservation in reservations for key in reservation.choices}
            present = {key: engine for key in sorted(keys) if (engine := self._engines.get(key))}
            engines = {k: e for k, e in present.items() if e.standing is EngineState.USABLE}
            if all(reservation.engine.key in engines for reservation in reservations):
                self._move(reservations, engines)
        finally:  # no request may wait forever, even after an error
            for reservation in reservations:
                assert reservation.is_final
                reservation.is_final.set()

    def _move(self, reservations: list[Reservation], engines: Mapping[str, Engine]) -> None:
        tasks = [
            PrefillTask(
                work(r.credit.tokens, self._mlp_products), r.engine.key, _choices(r, engines)
            )
            for r in reservations
        ]
        loads = [self._load(engine, reservations) for engine in engines.values()]
        for reservation, key in zip(reservations, balance(tasks, loads), strict=True):
            if key != reservation.engine.key:
                reservation.move(engines[key])
                self.balanced += 1

    def _load(self, engine: Engine, reservations: list[Reservation]) -> EngineLoad:
        """Return an engine's load without the requests that are still in the window."""
        own = [r.credit for r in reservations if r.engine is engine]
        return EngineLoad(
            engine.key,
            engine.prefill_work(self._mlp_products)
            - sum(work(credit.tokens, self._mlp_products) for credit in own),
            engine.available + sum(credit.size for credit in own),
        )


def _choices(reservation: Reservation, engines: Mapping[str, Engine]) -> dict[str, int]:
    """Return the request's choices without other engines that are on trial.

    An engine on trial seems idle, but its circuit breaker's limit would not hold for requests that
    move to it.
    """
    own = reservation.engine.key
    return {
        key: size
        for key, size in reservation.choices.items()
        if key == own or (key in engines and not engines[key].is_on_trial)
    }
