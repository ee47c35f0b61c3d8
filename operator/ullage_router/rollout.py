"""A rollout as the router takes part in it: sides drawn, answers tagged, outcomes counted."""

from ullage_router.canary import Canary, Side
from ullage_router.config import PoolSection
from ullage_router.engines import Engines
from ullage_router.outcomes import Observation, Outcomes
from ullage_router.stats import Record


class Rollout:
    """Args:
    path: the file that says which engines are the canary's; None: there is never one.
    engines: told about the canary's.
    """

    def __init__(self, path: str | None, engines: Engines) -> None:
        self._engines = engines
        self.canary = Canary(path, self._changed)
        self.outcomes = Outcomes(engines.workers_lost)

    def _changed(self, pools: tuple[PoolSection, ...], trial: str) -> None:
        self._engines.set_canary(pools)
        self.outcomes.follow(trial, self.canary.revision(Side.CANARY))

    def side_of(self, session: str) -> Side:
        """Where a new request goes: where it is drawn, or where an engine is ready."""
        drawn = self.canary.draw(session)
        other = Side.STABLE if drawn is Side.CANARY else Side.CANARY
        is_ready = self._engines.is_ready_on
        return other if not is_ready(drawn) and is_ready(other) else drawn

    def is_trial(self, side: Side) -> bool:
        """Whether stable engines stand by for a request of that side."""
        return side is Side.CANARY and self._engines.is_ready_on(Side.STABLE)

    def observe(self, side: Side, record: Record) -> Observation:
        """A request is sent to an engine of that side."""
        record.side, record.revision = side.value, self.canary.revision(side)
        return self.outcomes.observe(side)

    def as_json(self) -> dict[str, object]:
        """For /stats."""
        canary = self.canary
        return {
            "stable_revision": canary.revision(Side.STABLE),
            "canary_revision": canary.revision(Side.CANARY),
            "weight": canary.weight,
            "problem": canary.problem,
            **self.outcomes.as_json(),
        }
