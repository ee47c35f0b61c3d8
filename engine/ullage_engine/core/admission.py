"""Whether requests may come in: a pure function of their price and of what is free.

Samples of one prompt come in together or not at all; a refusal names the first of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ullage_engine.core.request import EngineRequest
from ullage_engine.memory.ledger import mib
from ullage_engine.messages import Profile, Rejected, ReleaseState

_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 30.0
_MAX_RELEASES = 32


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine has left at one moment."""

    available_bytes: int
    """KV that nobody holds and nobody was promised."""
    waiting_places: int
    """Requests that may still be admitted to wait for a place in the batch."""
    releases: Iterable[tuple[float, int]]
    """(seconds from now, bytes) that will come back; read only when a request is refused."""


def refuse_forever(
    requests: list[EngineRequest], profile: Profile, max_model_len: int, needed_bytes: int
) -> Rejected | None:
    """Refuses what an empty engine, in which it needs `needed_bytes`, could not serve either."""
    length = max(len(request.token_ids) for request in requests)
    reason = ""
    if any(not request.token_ids for request in requests):
        reason = "prompt: is empty"
    elif length >= max_model_len:
        reason = f"prompt: {length} tokens leave no room in the model's {max_model_len}; shorten it"
    elif needed_bytes > profile.kv_pool_bytes:
        several = f" of {len(requests)} samples" if len(requests) > 1 else ""
        remedy = "shorten it or ask for fewer" if several else "shorten it"
        reason = (
            f"prompt: {length} tokens and the first of the output{several} need "
            f"{mib(needed_bytes)} of KV, more than the whole pool of "
            f"{mib(profile.kv_pool_bytes)}; {remedy}"
        )
    return _never(requests[0], needed_bytes, profile.kv_pool_bytes, reason) if reason else None


def refuse_now(requests: list[EngineRequest], needed_bytes: int, room: Room) -> Rejected | None:
    """Refuses what does not fit beside the requests admitted already."""
    if needed_bytes > room.available_bytes:
        reason = f"KV memory: {mib(needed_bytes)} needed, {mib(room.available_bytes)} available"
    elif room.waiting_places < len(requests):
        reason = "the waiting room is full"
    else:
        return None
    return Rejected(
        request_id=requests[0].request_id,
        needed_bytes=needed_bytes,
        available_bytes=room.available_bytes,
        never=False,
        retry_after_s=_retry_after(needed_bytes - room.available_bytes, room.releases),
        message=f"{reason}; try again later",
    )


def refuse_double(request: EngineRequest, profile: Profile) -> Rejected:
    """Refuses a request id that is in use; the request that has it is not touched."""
    reason = f"request_id: {request.request_id} is being served already; choose another"
    return _never(request, 0, profile.kv_pool_bytes, reason)


def soonest(releases: Iterable[tuple[float, int]]) -> list[ReleaseState]:
    """Memory that comes back, soonest first; the last of at most 32 entries holds all the rest."""
    coming = sorted(releases)
    head, rest = coming[: _MAX_RELEASES - 1], coming[_MAX_RELEASES - 1 :]
    if rest:
        head.append((rest[-1][0], sum(num_bytes for _, num_bytes in rest)))
    return [ReleaseState(after_s=after, num_bytes=num_bytes) for after, num_bytes in head]


def _never(request: EngineRequest, needed: int, available: int, reason: str) -> Rejected:
    return Rejected(
        request_id=request.request_id,
        needed_bytes=needed,
        available_bytes=available,
        never=True,
        retry_after_s=0.0,
        message=reason,
    )


def _retry_after(missing_bytes: int, releases: Iterable[tuple[float, int]]) -> float:
    """When what is missing will have come back; after the last release if it never does."""
    coming = sorted(releases)
    for seconds, num_bytes in coming:
        missing_bytes -= num_bytes
        if missing_bytes <= 0:
            return _clipped(seconds)
    return _clipped(coming[-1][0] if coming else _LONGEST_RETRY_S)


def _clipped(seconds: float) -> float:
    return min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, seconds))
