"""Pure functions that decide whether to refuse requests, based on their cost and free memory.

Samples of one prompt are admitted together or not at all, and a refusal names the first sample. The
scheduler and the vLLM worker share these rules.
"""

from collections.abc import Container, Iterable

from ullage_common.request_cost import MemoryProfile
from ullage_engine.memory.ledger import mib
from ullage_engine.protocol.messages import Rejected
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.protocol.worker_state import ReleaseState

_SHORTEST_RETRY_S = 0.1
_LONGEST_RETRY_S = 30.0

_MAX_RELEASES = 32
"""Maximum number of expected memory releases to list."""


def refuse_never_fits(
    requests: list[EngineRequest], profile: MemoryProfile, max_model_len: int, needed_bytes: int
) -> Rejected | None:
    """Refuse requests that would not fit even in an empty engine, or in an empty session.

    Args:
        requests: samples of one prompt.
        profile: the engine's memory capacity, and how much KV memory requests cost.
        max_model_len: maximum sequence length in tokens.
        needed_bytes: minimum KV bytes that the requests need in an empty engine.

    Returns:
        The refusal, or None if the requests fit.
    """
    session_bytes = profile.session_kv_bytes if requests[0].session_id else 0
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
    elif session_bytes and needed_bytes > session_bytes:
        reason = (
            f"prompt: {length} tokens and the first of the output need {mib(needed_bytes)} of KV, "
            f"more than the {mib(session_bytes)} that one session may hold; shorten it, send it "
            "without a session, or raise memory.sessionKVLimit"
        )

    return _never(requests[0], needed_bytes, profile.kv_pool_bytes, reason) if reason else None


def refuse_now(
    requests: list[EngineRequest],
    needed_bytes: int,
    available_bytes: int,
    session_bytes: int | None,
    queue_slots: int,
    releases: Iterable[tuple[float, int]],
) -> Rejected | None:
    """Refuse requests that do not fit in memory alongside the admitted ones.

    Args:
        requests: samples of one prompt.
        needed_bytes: KV bytes to reserve for the requests.
        available_bytes: KV bytes that are neither in use nor reserved.
        session_bytes: KV bytes that the requests' session may still use, or None if the session has
            no limit.
        queue_slots: number of further requests that may wait in the queue.
        releases: expected memory releases, as (seconds from now, bytes).

    Returns:
        The refusal, or None if the requests fit.
    """
    if needed_bytes > available_bytes:
        reason = f"KV memory: {mib(needed_bytes)} needed, {mib(available_bytes)} available"
    elif session_bytes is not None and needed_bytes > session_bytes:
        available_bytes = session_bytes
        reason = (
            f"session: its other requests leave {mib(available_bytes)} of its KV, and "
            f"{mib(needed_bytes)} are needed"
        )
    elif queue_slots < len(requests):
        reason = "the waiting queue is full"
    else:
        return None

    return Rejected(
        request_id=requests[0].request_id,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        never=False,
        retry_after_s=_retry_after(needed_bytes - available_bytes, releases),
        message=f"{reason}; try again later",
    )


def refuse_duplicates(
    requests: list[EngineRequest], served: Container[str], pool_bytes: int
) -> Rejected | None:
    """Return a refusal if a request id is already being served or occurs twice, otherwise None."""
    ids = [request.request_id for request in requests]
    for request in requests:
        if request.request_id in served or ids.count(request.request_id) > 1:
            reason = f"request_id: {request.request_id} is being served already; choose another"
            return _never(request, 0, pool_bytes, reason)
    return None


def soonest_releases(releases: Iterable[tuple[float, int]]) -> list[ReleaseState]:
    """List at most 32 expected memory releases, soonest first.

    If more are expected, the last entry combines all remaining releases, at the time of the latest.
    """
    ordered = sorted(releases)
    head = ordered[: _MAX_RELEASES - 1]
    rest = ordered[_MAX_RELEASES - 1 :]
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
    """Return the number of seconds until enough memory is expected to be free.

    If all expected releases together free too little, return the seconds until the last one.
    """
    ordered = sorted(releases)
    for seconds, num_bytes in ordered:
        missing_bytes -= num_bytes
        if missing_bytes <= 0:
            return _clipped(seconds)
    return _clipped(ordered[-1][0] if ordered else _LONGEST_RETRY_S)


def _clipped(seconds: float) -> float:
    return min(_LONGEST_RETRY_S, max(_SHORTEST_RETRY_S, seconds))
