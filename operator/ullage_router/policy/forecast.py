"""Predicts whether an engine would produce a request's first and last token in time.

In time means within the service's objectives (TTFT and end to end) and the request's own limits.
Engines report their backlog of prompt tokens, their prefill speed, and their step times by batch
size. For p prompt tokens and o expected output tokens on an engine with load L and backlog B:

    first = max(B / prefill speed, wait for a place in the batch) + p / prefill speed + step(L + 1)
    end = first + (o - 1) * step(L + 1)

Predictions miss some delays, so predicted times may use only a fraction, SHARE, of an objective or
a limit. Two rules relax this limit. A request that would miss an objective even on an idle engine
gains nothing by waiting, so it may take STRETCH times as long as on an idle engine. An idle engine
may always take a request.

Each admitted request sets a cap on the engine's step time, beyond which the request would be late.
A new request is not sent to an engine if it would push the step time above any running request's
cap. Answers that lost their engine are exempt, because a pause is worse than slower steps.
"""

import math
from collections.abc import Iterator, Sequence

from ullage_router.policy.circuit_breaker import FULL_LIMIT
from ullage_router.policy.facts import EngineView, TimeLimits
from ullage_router.policy.retry import LEAST_SPAN_S, release_s

SHARE = 0.8
"""Fraction of an objective or a limit that a prediction may use.

The rest covers unpredicted delays.
"""
STRETCH = 2.0
"""Allowed slowdown of a request that would miss an objective even on an idle engine.

The slowdown is relative to the time on an idle engine.
"""
UNMEASURED_LOAD = 4
"""Maximum number of concurrent requests on an engine that has not measured a step yet."""
PROBED_RELEASES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of memory releases after which `turn_s` checks whether a request could run."""
PROBED_ENGINES = 4
"""Number of least loaded engines that `turn_s` checks."""


def is_on_time(engine: EngineView, prompt: int, output: int, limits: TimeLimits) -> bool:
    """Return whether a request that is sent to the engine now would be on time.

    Args:
        prompt: number of prompt tokens.
        output: expected number of output tokens.
    """
    if not (engine.load or engine.backlog_tokens):
        return True
    if engine.max_sequences and not engine.decode_speed:
        return engine.load < UNMEASURED_LOAD

    wait_s = engine.backlog_s
    if engine.max_sequences and engine.load >= engine.max_sequences:
        wait_s = max(wait_s, _nth_release_s(engine, engine.load - engine.max_sequences + 1))
    step_s = engine.step_s(engine.load + 1)
    if step_s > engine.step_limit_s and not limits.may_delay_others:
        return False

    # Nearly every request passes here, without the work of `_slack_s`.
    prompt_s = prompt / engine.prefill_speed if engine.prefill_speed else 0.0
    first_s = wait_s + prompt_s + step_s
    end_s = first_s + (output - 1) * step_s
    waited_s = limits.waited_s
    if (
        first_s <= SHARE * limits.ttft_s - waited_s
        and end_s <= SHARE * limits.e2e_s - waited_s
        and first_s <= SHARE * limits.first_token_s
        and end_s <= SHARE * limits.end_s
    ):
        return True
    return _slack_s(engine, engine.load + 1, wait_s, prompt, output, limits) >= 0.0


def end_s(engine: EngineView, prompt: int, output: int) -> float:
    """Return the seconds until a request that is sent to the engine now would finish.

    Returns:
        Infinity if the engine's batch is full or the engine's speed is not measured yet.
    """
    step_s = engine.step_s(engine.load + 1)
    is_full = bool(engine.max_sequences) and engine.load >= engine.max_sequences
    if not (step_s and engine.prefill_speed) or is_full:
        return math.inf
    return engine.backlog_s + prompt / engine.prefill_speed + output * step_s


def step_limit_s(engine: EngineView, prompt: int, output: int, limits: TimeLimits) -> float:
    """Return how long an engine step may take, in seconds, for a request sent now to be on time."""
    if limits.e2e_s == math.inf:
        return math.inf
    prompt_s = prompt / engine.prefill_speed if engine.prefill_speed else 0.0
    lone_s = prompt_s + output * engine.step_s(1)
    rest_s = _allowed_s(limits.e2e_s, lone_s) - limits.waited_s - engine.backlog_s - prompt_s
    return max(rest_s / output, engine.step_s(engine.load + 1))


def longest_wait_s(engine: EngineView, prompt: int, output: int, limits: TimeLimits) -> float:
    """Return how many seconds a request may wait and still be on time on an idle engine."""
    return _slack_s(engine, 1, 0.0, prompt, output, limits)


def turn_s(
    engines: Sequence[EngineView],
    prompt: int,
    output: int,
    needed: int,
    ahead: tuple[int, int],
    limits: TimeLimits,
    *,
    comes_back: bool = False,
) -> float | None:
    """Return the seconds until one of the engines could take the request within its time limits.

    Args:
        engines: engines of one pool, at least one.
        prompt: number of prompt tokens.
        output: expected number of output tokens.
        needed: bytes that the request needs.
        ahead: total bytes and number of the requests that are queued for these engines ahead of
            this one.
        comes_back: whether the client is refused now and retries at that time, so that its time
            limits start anew, instead of waiting in the queue.

    Returns:
        Infinity if every predicted release of memory is too late. None if no release is predicted.
    """
    size, number = (-(-part // len(engines)) for part in ahead)
    probed = sorted(engines, key=lambda e: e.load)[:PROBED_ENGINES]
    turns: list[float | None] = []

    for engine in probed:
        for after_s, load in _probes(engine, needed + size, number, limits):
            wait_s = max(after_s, engine.backlog_s) - (after_s if comes_back else 0.0)
            if _slack_s(engine, load, wait_s, prompt, output, limits) >= 0.0:
                turns.append(after_s)
                break
        else:
            turns.append(math.inf if engine.releases else None)

    return min((turn for turn in turns if turn is not None), default=None)


def place_s(engine: EngineView, ahead: int) -> float:
    """Return the seconds until an engine at its circuit breaker's limit may get the request.

    Each first token of a running request doubles the limit. If a request has failed and none has
    begun since, the engine is expected to fail until the breaker's pause ends.

    Args:
        engine: an engine with a `breaker`.
        ahead: number of requests that are queued for the engine ahead of this one.

    Returns:
        Infinity if a running request's first token is late, so that nothing can be predicted.
    """
    breaker = engine.breaker
    assert breaker
    if breaker.not_begun and breaker.due_s <= 0:
        return math.inf

    first_s = engine.backlog_s + engine.step_s(max(1, engine.load))
    seconds = breaker.pause_s if breaker.limit == 1 else 0.0
    limit = breaker.limit
    running = breaker.running
    not_begun = breaker.not_begun
    while limit <= FULL_LIMIT and limit - running <= ahead:
        if not_begun:
            seconds += first_s
            limit *= 2**not_begun
            not_begun = 0
        elif running < limit:  # requests ahead of this one take the free places
            not_begun = limit - running
            ahead -= not_begun
            running = limit
        else:
            seconds = max(seconds, _nth_release_s(engine, running - limit + 1))
            running = limit - 1
    return seconds


def _probes(
    engine: EngineView, needed: int, ahead: int, limits: TimeLimits
) -> Iterator[tuple[float, int]]:
    """Yield future times at which the engine could take the request, with the load at each time.

    At these times, the engine has enough memory and a free place in its batch. Each item is a pair
    of the seconds from now and the load including this request. Releases are probed at increasing
    intervals, so that a long list is cheap to search. The last probe is at the time of the last
    known release. If more releases are needed than are known, the last probe is later, on the
    assumption that requests keep ending at the same rate.
    """
    releases = engine.releases
    available = engine.available
    count = 0
    for number in PROBED_RELEASES:
        if number > len(releases):
            break
        available += sum(release.size for release in releases[count:number])
        count = number

        load = max(1, engine.load + 1 + ahead - number)
        if available >= needed and _has_place(engine, load, limits):
            yield releases[number - 1].after_s, load

    released = sum(release.size for release in releases)
    if not released:
        return
    missing = max(0, needed - engine.available - released)
    number = len(releases) + math.ceil(missing * len(releases) / released)
    if engine.max_sequences:
        number = max(number, engine.load + 1 + ahead - engine.max_sequences)

    last_s = releases[-1].after_s
    later_s = (number - len(releases)) * max(last_s, LEAST_SPAN_S) / len(releases)
    load = max(1, engine.load + 1 + ahead - number)
    if _has_place(engine, load, limits):
        yield max(release_s(engine.available, releases, needed), last_s + later_s), load


def _has_place(engine: EngineView, load: int, limits: TimeLimits) -> bool:
    """Return whether the engine has room in its batch for this load, at an acceptable step time.

    The step time is acceptable if it makes no running request late, or if the request may do so.
    """
    is_full = bool(engine.max_sequences) and load > engine.max_sequences
    is_slow = engine.step_s(load) > engine.step_limit_s
    return not is_full and (limits.may_delay_others or not is_slow)


def _slack_s(
    engine: EngineView, load: int, wait_s: float, prompt: int, output: int, limits: TimeLimits
) -> float:
    """Return how many more seconds the request could wait (negative if it would be late).

    Args:
        load: number of requests on the engine after the wait, including this one.
        wait_s: seconds until the prefill of the request's prompt starts.
    """
    prompt_s = prompt / engine.prefill_speed if engine.prefill_speed else 0.0
    rest = output - 1

    step_s = engine.step_s(load)
    first_s = wait_s + prompt_s + step_s
    end_s = first_s + rest * step_s

    lone_step_s = engine.step_s(1)
    lone_first_s = prompt_s + lone_step_s
    lone_end_s = lone_first_s + rest * lone_step_s

    slack_s = min(
        _allowed_s(limits.ttft_s, lone_first_s) - limits.waited_s - first_s,
        _allowed_s(limits.e2e_s, lone_end_s) - limits.waited_s - end_s,
    )
    if wait_s or load == 1:  # a request whose prompt is begun at once may try
        slack_s = min(slack_s, limits.first_token_s - first_s / SHARE)
    if lone_end_s <= SHARE * limits.end_s:
        slack_s = min(slack_s, limits.end_s - end_s / SHARE)
    return slack_s


def _allowed_s(objective_s: float, lone_s: float) -> float:
    """Return how long a request may be predicted to take under an objective, in seconds.

    This is the fraction SHARE of the objective. If the request would exceed it even on an idle
    engine, the result is STRETCH times as long as on an idle engine.

    Args:
        lone_s: seconds that the request takes on an idle engine.
    """
    allowed_s = SHARE * objective_s
    return allowed_s if lone_s <= allowed_s else STRETCH * lone_s


def _nth_release_s(engine: EngineView, number: int) -> float:
    """Return the predicted seconds until `number` requests have ended (0 if unknown)."""
    releases = engine.releases
    return releases[min(number, len(releases)) - 1].after_s if releases else 0.0
