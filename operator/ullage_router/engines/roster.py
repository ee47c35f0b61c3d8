"""The engines that may take requests, kept up to date by their reports, so that a decision about a
request looks at a few of them instead of all.

A roster holds until an engine comes, goes or changes its state; what changes with every request,
whether an engine has prompts to compute, is changed in place.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ullage_router.policy.affinity import HashRing
from ullage_router.policy.facts import EngineState, Side

if TYPE_CHECKING:
    from ullage_router.engines.engine import Engine
    from ullage_router.tokenizer import Model

MAX_DRAWN = 4
"""Number of engines that are drawn for a decision; of so few engines all are."""
MIXING = 2654435761
"""Knuth's multiplier, so that which engines are drawn says nothing about the choice among them."""


T = TypeVar("T")


@dataclass(slots=True)
class DrawGroup(Generic[T]):
    """Usable engines, a few of which are drawn for each decision."""

    usable: list[T] = field(default_factory=list)
    idle: list[T] = field(default_factory=list)
    """Those of them without prompts to compute, in any order."""
    places: dict[T, int] = field(default_factory=dict)
    """Indices in `idle`."""

    def set_idle(self, engine: T, is_idle: bool) -> None:
        place = self.places.pop(engine, None)
        if is_idle:
            self.places[engine] = len(self.idle) if place is None else place
            if place is None:
                self.idle.append(engine)
        elif place is not None:  # the last one takes its place
            last = self.idle.pop()
            if last is not engine:
                self.idle[place] = last
                self.places[last] = place

    def draw(self, number: int) -> list[T]:
        """Return at most MAX_DRAWN engines, idle ones where there are any; each is as often among
        the first ones, which a decision takes where they fit.

        Args:
            number: random.
        """
        source = self.idle or self.usable
        count = len(source)
        mixed = number * MIXING >> 8
        if count <= MAX_DRAWN:
            first = mixed % count if count else 0
            return source[first:] + source[:first]
        # So far apart that no two of them are the same, and each has many others beside it.
        step = 1 + mixed // count % ((count - 1) // (MAX_DRAWN - 1))
        return [source[(mixed + i * step) % count] for i in range(MAX_DRAWN)]


@dataclass(slots=True)
class _Group(DrawGroup["Engine"]):
    """The usable engines of one pool, side and model."""

    ring: HashRing | None = None
    """The usable engines by their keys; None until it was asked for."""


GroupKey = tuple[Side, str, str]
"""(side, pool, fingerprint of the model)"""


class Roster:
    """The states of all engines at one moment, and the usable ones by group.

    Args:
        engines: all of them, in the order in which they are preferred.
        now: on the monotonic clock.

    until
        when a state may change without a report, because none came
    models
        the model of each side, as far as it was asked for
    """

    def __init__(self, engines: "Iterable[Engine]", now: float) -> None:
        self.engines = tuple(engines)
        self.until = min((engine.state_until(now) for engine in self.engines), default=now)
        self.models: dict[Side, Model | None] = {}
        self._states: dict[Engine, tuple[EngineState, str, frozenset[str]]] = {}
        self._groups: dict[GroupKey, _Group] = {}
        self._group_of: dict[Engine, _Group] = {}
        for engine in self.engines:
            self._add(engine)
        self.ready_sides = frozenset(
            engine.side for engine, (state, *_) in self._states.items() if state is USABLE
        )
        self._ready_adapters = frozenset(
            (engine.side, adapter)
            for engine, (state, _, adapters) in self._states.items()
            if state is USABLE
            for adapter in adapters
        )
        self.common_adapters = self._common_adapters()
        """Adapters that all usable engines have; while there is none, those that any has which may
        come back: nobody runs before it, whatever adapter the request has that waits first."""

    def _add(self, engine: "Engine") -> None:
        state, fingerprint, _ = self._states[engine] = _state_of(engine)
        if state is not USABLE:
            return
        group = self._groups.setdefault((engine.side, engine.pool, fingerprint), _Group())
        group.usable.append(engine)
        self._group_of[engine] = group
        self.on_load_change(engine)

    def _common_adapters(self) -> frozenset[str]:
        states = self._states.values()
        if usable := [adapters for state, _, adapters in states if state is USABLE]:
            return usable[0].intersection(*usable)
        return frozenset[str]().union(*(a for state, _, a in states if state is RECOVERING))

    def is_right_about(self, engine: "Engine") -> bool:
        """Whether the engine is in the state that it was in."""
        return self._states.get(engine) == _state_of(engine)

    def is_ready(self, side: Side, adapter: str = "") -> bool:
        """Whether an engine of that side, with the adapter if one is named, takes requests."""
        return (side, adapter) in self._ready_adapters if adapter else side in self.ready_sides

    def on_load_change(self, engine: "Engine") -> None:
        """Record whether the engine has prompts to compute."""
        if group := self._group_of.get(engine):
            group.set_idle(engine, engine.is_idle)

    def num_usable(self, side: Side, pool: str) -> int:
        """Return the number of engines of a pool that take requests."""
        groups = self._groups.items()
        return sum(len(group.usable) for key, group in groups if key[:2] == (side, pool))

    def draw(self, key: GroupKey, number: int) -> "list[Engine]":
        """Return a few engines of a group.

        Args:
            number: random.
        """
        group = self._groups.get(key)
        return group.draw(number) if group else []

    def nearest_two(self, key: GroupKey, point: int) -> tuple[str, ...]:
        """Return the keys of two usable engines of a group by a request's place on the ring, or of
        as many as there are."""
        group = self._groups.get(key)
        if group is None:
            return ()
        if group.ring is None:
            group.ring = HashRing(engine.key for engine in group.usable)
        return group.ring.nearest_two(point)

    def has(self, key: GroupKey, engine: "Engine") -> bool:
        """Whether the engine is a usable one of the group."""
        group = self._group_of.get(engine)
        return group is not None and self._groups.get(key) is group


def _state_of(engine: "Engine") -> tuple[EngineState, str, frozenset[str]]:
    return engine.standing, engine.fingerprint, engine.adapters


USABLE = EngineState.USABLE
RECOVERING = EngineState.RECOVERING
