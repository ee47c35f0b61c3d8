"""An index of the engines that may take requests, so that a decision looks at only a few engines.

A roster is valid until an engine is added, removed or changes its state. Whether an engine has
prompts to prefill changes with every request, so this flag is updated in place.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ullage_router.policy.affinity import HashRing
from ullage_router.policy.facts import EngineState, Side

if TYPE_CHECKING:
    from ullage_router.engines.engine import Engine
    from ullage_router.tokenizer.model import Model

MAX_DRAWN = 4
"""Number of engines drawn for a decision. If there are fewer engines, all are drawn."""
MIXING = 2654435761
"""Knuth's multiplicative hash.

The draw of engines and the choice among them use the same random number. The hash makes them
independent.
"""
USABLE = EngineState.USABLE
RECOVERING = EngineState.RECOVERING


T = TypeVar("T")


@dataclass(slots=True)
class DrawGroup(Generic[T]):
    """A group of usable engines, of which each decision draws a few."""

    usable: list[T] = field(default_factory=list)
    idle: list[T] = field(default_factory=list)
    """Usable engines that have no prompts to prefill, in any order."""
    places: dict[T, int] = field(default_factory=dict)
    """Index of each engine in `idle`."""

    def set_idle(self, engine: T, is_idle: bool) -> None:
        """Add an engine to the idle engines, or remove it from them, in O(1)."""
        place = self.places.pop(engine, None)
        if is_idle:
            self.places[engine] = len(self.idle) if place is None else place
            if place is None:
                self.idle.append(engine)
        elif place is not None:  # the last engine takes its place
            last = self.idle.pop()
            if last is not engine:
                self.idle[place] = last
                self.places[last] = place

    def draw(self, number: int) -> list[T]:
        """Return at most MAX_DRAWN engines, and only idle engines if there are any.

        A decision prefers the first engines, so every engine is equally likely to be among them.

        Args:
            number: a random number.
        """
        source = self.idle or self.usable
        count = len(source)
        mixed = number * MIXING >> 8
        if count <= MAX_DRAWN:
            first = mixed % count if count else 0
            return source[first:] + source[:first]
        # The step is small enough for MAX_DRAWN different engines, and random, so that the pairs of
        # neighbours vary.
        step = 1 + mixed // count % ((count - 1) // (MAX_DRAWN - 1))
        return [source[(mixed + i * step) % count] for i in range(MAX_DRAWN)]


@dataclass(slots=True)
class _Group(DrawGroup["Engine"]):
    """The usable engines of one pool, side and model."""

    ring: HashRing | None = None
    """The usable engines' keys on a hash ring, or None until the ring is needed."""


GroupKey = tuple[Side, str, str]
"""The key of a group: side, pool, and fingerprint of the model."""


class Roster:
    """The states of all engines at one moment, and the usable ones by group.

    Args:
        engines: all engines in order of preference.
        now: current time on the monotonic clock.
    """

    def __init__(self, engines: "Iterable[Engine]", now: float) -> None:
        self.engines = tuple(engines)
        self.until = min((engine.state_until(now) for engine in self.engines), default=now)
        """Time at which the silence of an engine may change its state."""
        self.models: dict[Side, Model | None] = {}
        """The cached model of each side."""

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
        """Adapters that all usable engines have.

        If no engine is usable, these are the adapters of any engine that may come back. Nothing
        runs before an engine is back, so no requests need a separate queue.
        """

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
        """Return whether the engine's state is still the same as in the roster."""
        return self._states.get(engine) == _state_of(engine)

    def is_ready(self, side: Side, adapter: str = "") -> bool:
        """Return whether an engine on a side takes requests, with the given adapter if any."""
        return (side, adapter) in self._ready_adapters if adapter else side in self.ready_sides

    def on_load_change(self, engine: "Engine") -> None:
        """Update whether the engine has prompts to prefill."""
        if group := self._group_of.get(engine):
            group.set_idle(engine, engine.is_idle)

    def num_usable(self, side: Side, pool: str) -> int:
        """Return the number of engines of a pool that take requests."""
        groups = self._groups.items()
        return sum(len(group.usable) for key, group in groups if key[:2] == (side, pool))

    def draw(self, key: GroupKey, number: int) -> "list[Engine]":
        """Return a few usable engines of a group at random.

        Args:
            number: a random number.
        """
        group = self._groups.get(key)
        return group.draw(number) if group else []

    def nearest_two(self, key: GroupKey, point: int) -> tuple[str, ...]:
        """Return the keys of the two usable engines of a group that come next on the hash ring."""
        group = self._groups.get(key)
        if group is None:
            return ()
        if group.ring is None:
            group.ring = HashRing(engine.key for engine in group.usable)
        return group.ring.nearest_two(point)

    def has(self, key: GroupKey, engine: "Engine") -> bool:
        """Return whether the engine is usable and belongs to the group."""
        group = self._group_of.get(engine)
        return group is not None and self._groups.get(key) is group


def _state_of(engine: "Engine") -> tuple[EngineState, str, frozenset[str]]:
    return engine.standing, engine.fingerprint, engine.adapters
