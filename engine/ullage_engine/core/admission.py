"""Whether a request may come in: a pure function of its price and of what is free."""

from collections.abc import Iterable
from dataclasses import dataclass

from ullage_engine.core.request import EngineRequest
from ullage_engine.memory.ledger import mib
from ullage_engine.memory.predictor import expected_length, sequence_bytes
from ullage_engine.messages import Profile, Rejected

_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine has left at one moment."""

    available_bytes: int
    """KV that nobody holds and nobody was promised."""
    waiting_places: int
    """Requests that may still be admitted to wait for a place in the batch."""
    expected_output: int
    """Output a request is charged for at most, tokens."""
    releases: Iterable[tuple[float, int]]
    """(seconds from now, bytes) that will come back; read only when a request is refused."""


def refuse_forever(
    request: EngineRequest, profile: Profile, max_model_len: int, expected_output: int
) -> Rejected | None:
    """Refuses what an empty engine could not serve either."""
    length = len(request.token_ids)
    needed = _price(request, profile, max_model_len, expected_output)
    reason = ""
    if length == 0:
        reason = "prompt: is empty"
    elif length >= max_model_len:
        reason = f"prompt: {length} tokens leave no room in the model's {max_model_len}; shorten it"
    elif needed > profile.kv_pool_bytes:
        reason = (
            f"prompt: {length} tokens and their expected output need {mib(needed)} of KV, more "
            f"than the whole pool of {mib(profile.kv_pool_bytes)}; shorten it"
        )
    return _never(request, needed, profile.kv_pool_bytes, reason) if reason else None


def refuse_now(
    request: EngineRequest, profile: Profile, max_model_len: int, room: Room
) -> Rejected | None:
    """Refuses what does not fit beside the requests admitted already."""
    needed = _price(request, profile, max_model_len, room.expected_output)
    if needed > room.available_bytes:
        reason = f"KV memory: {mib(needed)} needed, {mib(room.available_bytes)} available"
    elif room.waiting_places <= 0:
        reason = "the waiting room is full"
    else:
        return None
    return Rejected(
        request_id=request.request_id,
        needed_bytes=needed,
        available_bytes=room.available_bytes,
        never=False,
        retry_after_s=_retry_after(needed - room.available_bytes, room.releases),
        message=f"{reason}; try again later",
    )


def refuse_double(request: EngineRequest, profile: Profile) -> Rejected:
    """Refuses a request id that is in use; the request that has it is not touched."""
    reason = f"request_id: {request.request_id} is being served already; choose another"
    return _never(request, 0, profile.kv_pool_bytes, reason)


def _price(request: EngineRequest, profile: Profile, limit: int, expected_output: int) -> int:
    return sequence_bytes(profile, expected_length(request, expected_output, limit))


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
