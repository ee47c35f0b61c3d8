"""What rank 0 tells the other ranks and what they answer: msgpack over a ZeroMQ pair each.

At the start every command of `Join`, `WarmUp`, `Allocate` and `Settle` is answered by `Done` or
`Failed`, and none is sent before all ranks have answered the one before, the first by the loading
itself. Only in `WarmUp` and `Settle` do ranks wait for each other's part of a computation: whatever
else may fail comes in the others. While serving only `Execute` is answered, by the rank that
samples; a rank that fails then ends, and the group with it. `Loading` comes at any time.
"""

from dataclasses import replace

import msgspec

from ullage_engine.core.plan import Chunk, Moves, SampledToken, StepPlan
from ullage_engine.messages import Loading, ReservationState


class GroupMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


# rank 0 → others ---------------------------------------------------------------------------------


class Join(GroupMessage, frozen=True):
    """Meet the other ranks, allocate the arenas and all else that the warm-up needs."""

    store: str
    """A file that does not exist yet."""


class WarmUp(GroupMessage, frozen=True):
    """Run the largest steps with all ranks; tell how many KV blocks fit beside what they took."""


class Allocate(GroupMessage, frozen=True):
    """Allocate the KV pool, as many blocks as the rank with the least room has."""

    num_blocks: int


class Settle(GroupMessage, frozen=True):
    """Run the largest steps on that pool; tell what all of it took."""


class Execute(GroupMessage, frozen=True):
    plan: StepPlan


class Move(GroupMessage, frozen=True):
    moves: Moves


class Stop(GroupMessage, frozen=True):
    """Exit with status 0."""


# others → rank 0 ---------------------------------------------------------------------------------


class Done(GroupMessage, frozen=True, kw_only=True):
    """The command is carried out."""

    num_blocks: int = 0
    """After `WarmUp`: KV blocks that fit this rank."""
    ledger: list[ReservationState] = []
    """After `Settle`: everything the rank has reserved."""
    total_bytes: int = 0
    """After `Settle`: of the rank's device."""


class Failed(GroupMessage, frozen=True):
    """The rank cannot serve; one line naming field or file."""

    error: str
    may_retry: bool = False
    """Nobody foresaw it, so another start may do better."""


class Sampled(GroupMessage, frozen=True):
    tokens: list[SampledToken]


ToFollower = Join | WarmUp | Allocate | Settle | Execute | Move | Stop
Answer = Done | Failed | Sampled
ToLeader = Answer | Loading


def for_rank(plan: StepPlan, samples: bool) -> StepPlan:
    """The plan as another rank gets it: histories are long, and all that reads them is a penalty
    on the rank that samples, which alone reads masks, too. Moves go before, by themselves."""
    return StepPlan([_as_read(chunk, samples) for chunk in plan.chunks])


def _as_read(chunk: Chunk, samples: bool) -> Chunk:
    is_read = samples and chunk.sampling is not None and chunk.sampling.is_penalised
    history = chunk.history if is_read else []
    allowed = chunk.allowed if samples else None
    return replace(chunk, history=history, allowed=allowed)
