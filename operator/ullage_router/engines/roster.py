"""An index of engines that accept requests, so that each decision examines only a few of them.

A roster is rebuilt whenever an engine is added, removed or changes its state. Whether an engine is
idle changes with every request, so this flag is updated in place.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ullage_router.policy.affinity import HashRing
from ullage_router.policy.facts import EngineState, Side

if TYPE_CHECKING:
    from ullage_router.engines.engine import Engine
    from ullage_router.tokenizer.model import Model

MAX_DRAWN = 4
"""Maximum number of engines sampled from a group for each decision."""
MIXING = 2654435761
"""Multiplier of Knuth's multiplicative hash.

The same random number determines which engines are sampled and which of them is chosen. Hashing it
first makes these two choices independent.
"""
USABLE = EngineState.USABLE
RECOVERING = EngineState.RECOVERING
NONE: frozenset[str] = frozenset()


T = TypeVar("T")


@dataclass(slots=True)
class DrawGroup(Generic[T]):
    """Usable engines among which decisions choose, each by sampling only a few of them."""

    usable: list[T] = field(default_factory=list)
    idle: list[T] = field(default_factory=list)
    """Usable engines that have no prompts to prefill, in any order."""
    places: dict[T, int] = field(default_factory=dict)
    """Each idle engine's index in the list `idle`."""

    def set_idle(self, engine: T, is_idle: bool) -> None:
        """Add an engine to the `idle` list or remove it from the list, in constant time."""
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
        """Sample at most MAX_DRAWN engines, from the idle engines if there are any.

        Decisions prefer engines near the start of the result. The order is therefore varied, so
        that every engine is equally likely to come first.

        Args:
            number: the random number that determines the sample.
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
    """The usable engines of one side and pool that serve the same model."""

    ring: HashRing | None = None
    """Hash ring of the usable engines' keys, or None until the ring is first needed."""


GroupKey = tuple[Side, str, str]
"""A group's key: (side, pool, model fingerprint)."""


class Roster:
    """A snapshot of all engines' states, with the usable engines divided into groups.

    Args:
        engines: all engines, in order of preference.
        now: current time on the monotonic clock.
    """

    def __init__(self, engines: "Iterable[Engine]", now: float) -> None:
        self.engines = tuple(engines)
        self.until = min((engine.state_until(now) for engine in self.engines), default=now)
        """Time until which the snapshot is valid if no report arrives."""
        self.models: dict[Side, Model | None] = {}
        """Each side's model, once it has been looked up."""

        self._states: dict[Engine, _State] = {}
        self._groups: dict[GroupKey, _Group] = {}
        self._group_of: dict[Engine, _Group] = {}
        for engine in self.engines:
            self._add(engine)

        self.ready_sides = frozenset(
            engine.side for engine, state in self._states.items() if state.standing is USABLE
        )
        self._ready_adapters = frozenset(
            (engine.side, adapter)
            for engine, state in self._states.items()
            if state.standing is USABLE
            for adapter in state.adapters
        )
        self.common_adapters = self._common_adapters()
        """Adapters that all usable engines have.

        If no engine is usable, these are the adapters of all engines that may come back. No request
        can run until then, so no adapter needs a separate subqueue.
        """
        self.unknown_fields = NONE.union(*(s.unknown_fields for s in self._states.values()))
        """Paths of the request fields that at least one engine does not know."""

    def _add(self, engine: "Engine") -> None:
        state = self._states[engine] = _state_of(engine)
        if state.standing is not USABLE:
            return
        group = self._groups.setdefault((engine.side, engine.pool, state.fingerprint), _Group())
        group.usable.append(engine)
        self._group_of[engine] = group
        self.on_load_change(engine)

    def _common_adapters(self) -> frozenset[str]:
        states = self._states.values()
        if usable := [state.adapters for state in states if state.standing is USABLE]:
            return usable[0].intersection(*usable)
        return NONE.union(*(s.adapters for s in states if s.standing is RECOVERING))

    def is_right_about(self, engine: "Engine") -> bool:
        """Return whether the engine's current state is the same as in this snapshot.

        If it is not, the roster must be rebuilt.
        """
        return self._states.get(engine) == _state_of(engine)

    def is_ready(self, side: Side, adapter: str = "", needed: frozenset[str] = NONE) -> bool:
        """Return whether the stable or canary side has a usable engine.

        Args:
            side: the side.
            adapter: the adapter that the engine must serve, or empty for none.
            needed: paths of the request fields that the engine must know.
        """
        if needed:
            return any(
                engine.side is side
                and state.standing is USABLE
                and (not adapter or adapter in state.adapters)
                and needed.isdisjoint(state.unknown_fields)
                for engine, state in self._states.items()
            )
        return (side, adapter) in self._ready_adapters if adapter else side in self.ready_sides

    def on_load_change(self, engine: "Engine") -> None:
        """Update whether the engine counts as idle."""
        if group := self._group_of.get(engine):
            group.set_idle(engine, engine.is_idle)

    def num_usable(self, side: Side, pool: str) -> int:
        """Return the number of a pool's usable engines on one side, stable or canary."""
        groups = self._groups.items()
        return sum(len(group.usable) for key, group in groups if key[:2] == (side, pool))

    def draw(self, key: GroupKey, number: int) -> "list[Engine]":
        """Sample a few of a group's usable engines.

        Args:
            number: the random number that determines the sample.
        """
        group = self._groups.get(key)
        return group.draw(number) if group else []

    def nearest_two(self, key: GroupKey, point: int) -> tuple[str, ...]:
        """Return the keys of the group's two engines to which consistent hashing maps a point."""
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


class _State(NamedTuple):
    """The state of one engine."""

    standing: EngineState
    fingerprint: str
    adapters: frozenset[str]
    unknown_fields: frozenset[str]


def _state_of(engine: "Engine") -> _State:
    return _State(engine.standing, engine.fingerprint, engine.adapters, engine.unknown_fields)
