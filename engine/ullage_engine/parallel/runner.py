"""The whole group as one runner: what rank 0's engine computes with."""

from typing import Protocol

from ullage_engine.core.plan import Moves, SampledToken, StepPlan
from ullage_engine.parallel.commands import Execute, Move, for_rank
from ullage_engine.parallel.errors import GroupLostError
from ullage_engine.parallel.followers import Followers
from ullage_engine.parallel.layout import RankLayout


class RankRunner(Protocol):
    """One rank's part of every step; the same plans in the same order on every rank."""

    def move(self, moves: Moves) -> None: ...

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Tokens on the rank that samples, nothing on others."""
        ...


class GroupRunner:
    """Tells every rank the plan, computes rank 0's own part, and has the tokens of the last stage.

    A step that fails on any rank ends the group: the others wait in a collective that this rank
    has left, so nothing can be computed again before all of them have started anew.
    """

    def __init__(self, own: RankRunner, followers: Followers, layout: RankLayout) -> None:
        self._own = own
        self._followers = followers
        self._sampling_rank = layout.sampling_rank

    def move(self, moves: Moves) -> None:
        """See `ullage_engine.core.engine.Runner`."""
        self._followers.tell_all(Move(moves))
        try:
            self._own.move(moves)
        except Exception as error:
            raise GroupLostError(f"rank 0 cannot move blocks: {error}") from error

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """See `ullage_engine.core.engine.Runner`.

        Raises:
            GroupLostError: the group is of no more use.
        """
        plans = {samples: Execute(for_rank(plan, samples)) for samples in (True, False)}
        for rank in self._followers.ranks:
            self._followers.tell(rank, plans[rank == self._sampling_rank])
        try:
            tokens = self._own.execute(plan)
        except Exception as error:
            raise GroupLostError(f"rank 0: {error}") from error
        if self._sampling_rank == 0:
            return tokens
        return self._followers.sampled(self._sampling_rank).tokens
