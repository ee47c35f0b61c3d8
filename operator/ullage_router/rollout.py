"""The router's part in a canary rollout: it draws a side for each request, tags answers with the
revision, and counts outcomes.

The operator writes a small file that says which engines are the canary's and which percentage of
requests it gets, and which adapters the stable engines have, since those of a pool that sleeps
cannot say it; the router looks at it once a second, so that a change restarts nothing.

A trial is one canary at one step. Both sides are counted over the same time and start from zero
with it, so that they can be compared as they are; the counts are bounded.
"""

import asyncio
import functools
import hashlib
import logging
import random
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import grpc
import msgspec
from msgspec.structs import replace
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ullage_common.config.router import PoolSection
from ullage_common.process.config_file import ConfigError, Strict, Text, read_file
from ullage_common.process.file_watch import Fingerprint, fingerprint, follow
from ullage_common.wire.errors import ServiceError
from ullage_router.admission.admission import NotOnCanary
from ullage_router.admission.prefill_window import Reservation
from ullage_router.call import Call, EngineStream, Event, Handler, ResponseStream
from ullage_router.engines.engines import Engines
from ullage_router.errors import LEAVING, is_failure, stopped
from ullage_router.metric_names import TRIAL
from ullage_router.policy.facts import Side
from ullage_router.prompts.prompts import PromptBuilder

GOLDEN = 0.6180339887498949
"""(√5 - 1) / 2: its multiples fall into [0, 1) more evenly than those of any other number."""

log = logging.getLogger(__name__)


class CanarySection(Strict, frozen=True, kw_only=True):
    revision: Text
    weight: Annotated[int, msgspec.Meta(ge=0, le=100)]
    """Percentage of new requests that the canary gets."""
    step: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The rollout's step; outcomes are counted anew for each."""
    pools: Annotated[tuple[PoolSection, ...], msgspec.Meta(min_length=1)]
    """The canary's pools, each named like the configured pool that it belongs to."""


class RolloutFile(Strict, frozen=True, kw_only=True):
    revision: str = ""
    """Revision of the stable engines; empty when it is not known."""
    adapters: tuple[Text, ...] | None = None
    """Names of the adapters that engines have which are woken; None where only engines say which.
    """
    canary: CanarySection | None = None
    stopped: bool = False
    """Whether the service has no engines on purpose."""


class SideDraw:
    """Draws sides.

    Sessions are drawn by their name: the same in every router, and one that is the canary's stays
    so while the weight grows. Other requests follow a low-discrepancy sequence, the fractional
    parts of multiples of the golden ratio: the count of n draws is exact to a request or two
    however they are grouped, and no period in the traffic can hide from it.
    """

    def __init__(self, start: float) -> None:
        self._point = start

    def draw(self, weight: int, session: str, salt: str) -> Side:
        """The side of a new request.

        Args:
            weight: the canary's requests of a hundred.
            session: empty when the request belongs to none.
            salt: draws sessions anew when it changes.
        """
        if session:
            digest = hashlib.blake2b(f"{salt}\0{session}".encode(), digest_size=8).digest()
            point = int.from_bytes(digest) / 2**64
        else:
            point = self._point = (self._point + GOLDEN) % 1.0
        return Side.CANARY if 100 * point < weight else Side.STABLE


class Canary:
    """The canary that the file names now.

    Args:
        path: the file; None: there never is a canary.
        on_change: called with the file's present content.
    """

    def __init__(self, path: str | None, on_change: Callable[[RolloutFile], None]) -> None:
        self._path = Path(path) if path else None
        self._on_change = on_change
        self._file = RolloutFile()
        self._split = SideDraw(random.random())
        self._task: asyncio.Task[None] | None = None
        self.problem = ""
        """Why the file cannot be used; what it said before holds."""

    async def start(self) -> None:
        if self._path is None:
            return
        folder = self._path.parent
        seen: Fingerprint = fingerprint([folder])
        await self._read()
        self._task = asyncio.create_task(follow([folder], seen, self._read), name="follow rollout")

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def draw(self, session: str) -> Side:
        """The side of a new request."""
        if (canary := self._file.canary) is None:
            return Side.STABLE
        return self._split.draw(canary.weight, session, canary.revision)

    def revision(self, side: Side) -> str:
        """Empty when it is not known."""
        if side is Side.STABLE:
            return self._file.revision
        return self._file.canary.revision if self._file.canary else ""

    @property
    def is_stopped(self) -> bool:
        """Whether the service has no engines on purpose."""
        return self._file.stopped

    @property
    def weight(self) -> int:
        return self._file.canary.weight if self._file.canary else 0

    @property
    def step(self) -> int:
        return self._file.canary.step if self._file.canary else 0

    async def _read(self) -> None:
        assert self._path is not None
        try:
            content = await asyncio.to_thread(self._load, self._path)
        except ConfigError as error:
            self.problem = str(error)
            log.error("rollout file cannot be used", extra={"reason": self.problem})
            return
        self.problem = ""
        if content != self._file:
            self._on_change_of_file(content)

    def _load(self, path: Path) -> RolloutFile:
        return read_file(path, RolloutFile) if path.exists() else RolloutFile()

    def _on_change_of_file(self, content: RolloutFile) -> None:
        self._file = content
        canary = content.canary
        self._on_change(content)
        log.info(
            "rollout",
            extra={
                "stable": content.revision,
                "canary": canary.revision if canary else "",
                "weight": self.weight,
            },
        )


def trial(canary: CanarySection | None) -> str:
    """Names what is being tried; nothing is while the canary gets no requests.

    The weight is no part of it: it follows the pools' sizes, and may change in the midst of a step.
    """
    return f"{canary.revision}/{canary.step}" if canary and canary.weight else ""


Send = Callable[[Call, Reservation], Awaitable[EngineStream]]
"""Sends a request to the engine that is reserved and waits for its first token."""

BOUNDS_S = tuple(round(0.01 * 2 ** (n / 2), 4) for n in range(28))
"""Upper ends of the buckets, 10 ms to 116 s, two for every doubling."""


@dataclass(slots=True)
class DurationHistogram:
    """Durations by bucket; the last bucket has no upper end."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1


@dataclass(slots=True)
class SideCounts:
    """Counts of one side of a trial."""

    succeeded: int = 0
    failed: int = 0
    """Requests that failed through the engine, or that the canary refused and stable engines
    served."""
    declined: int = 0
    """Drawn for the canary, which had no room for them at once."""
    ttft: DurationHistogram = field(default_factory=DurationHistogram)
    """Histogram of the times from sending to the first token: the wait before is the pool's, not
    the revision's."""
    e2e: DurationHistogram = field(default_factory=DurationHistogram)
    """Histogram of the times from sending to the last token."""


class Observation:
    """One request on an engine; counts for the trial in which it was sent."""

    def __init__(self, tally: SideCounts) -> None:
        self._tally = tally
        self._sent = time.monotonic()

    def on_first_token(self) -> None:
        """Its first token came."""
        self._tally.ttft.add(time.monotonic() - self._sent)

    def on_success(self) -> None:
        self._tally.succeeded += 1
        self._tally.e2e.add(time.monotonic() - self._sent)

    def on_failure(self, error: ServiceError) -> None:
        """Count a failure that is the engine's."""
        self._tally.failed += is_failure(error)

    def on_timeout(self) -> None:
        """No token came for too long."""
        self._tally.failed += 1


class Outcomes:
    """Both sides of the present trial.

    Args:
        falls: how often engines of a side lost their worker or process.
        falls_before: the same of engines that are gone or about to go.
    """

    def __init__(self, falls: Callable[[Side], int], falls_before: Callable[[Side], int]) -> None:
        self._falls = falls
        self._falls_of_gone = falls_before
        self._falls_before = dict.fromkeys(Side, 0)
        self._tallies = {side: SideCounts() for side in Side}
        self._canary = self.trial = ""

    def follow(self, trial: str, canary: str) -> None:
        """Reset the counts if the trial is another one.

        Falls are counted from the canary's beginning, over all its steps: a router hears of a step
        up to a minute late, and what fell meanwhile would belong to none.

        Args:
            trial: a step of a canary; empty while it gets no requests.
            canary: its revision; empty without one.
        """
        if canary != self._canary:
            self._canary = canary
            # The canaries of a service have one name in DNS, one after the other: a router that
            # reads its file late follows this canary's engines already, and may have seen a fall.
            self._falls_before = {
                Side.STABLE: self._falls(Side.STABLE),
                Side.CANARY: self._falls_of_gone(Side.CANARY),
            }
        if trial != self.trial:
            self.trial = trial
            self._tallies = {side: SideCounts() for side in Side}

    def observe(self, side: Side) -> "Observation":
        """Begin to observe a request that is sent now."""
        return Observation(self._tallies[side])

    def on_declined(self) -> None:
        """The canary had no room for a request at once."""
        self._tallies[Side.CANARY].declined += 1

    def on_contradicted(self, error: ServiceError) -> None:
        """Stable engines served what the canary answered so; its failures are counted already."""
        tally = self._tallies[Side.CANARY]
        code = error.code
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            tally.declined += 1
        elif not is_failure(error) and error.reason not in LEAVING:
            tally.failed += 1

    def falls(self, side: Side) -> int:
        return max(0, self._falls(side) - self._falls_before[side])

    def as_json(self) -> dict[str, object]:
        """Return the counts for /stats."""
        return {"trial": self.trial} | {
            side.value: {
                "succeeded": tally.succeeded,
                "failed": tally.failed,
                "declined": tally.declined,
                "restarts": self.falls(side),
                "ttft_counts": list(tally.ttft.counts),
                "e2e_counts": list(tally.e2e.counts),
            }
            for side, tally in self._tallies.items()
        }

    def samples(self) -> Iterator[tuple[Side, str, str, int]]:
        """(side, what, upper end of the bucket, count)."""
        for side, tally in self._tallies.items():
            yield side, "succeeded", "", tally.succeeded
            yield side, "failed", "", tally.failed
            yield side, "declined", "", tally.declined
            yield side, "restarts", "", self.falls(side)
            ends = [*map(str, BOUNDS_S), "+Inf"]
            for what, times in (("ttft", tally.ttft), ("e2e", tally.e2e)):
                for end, count in zip(ends, times.counts, strict=True):
                    yield side, what, end, count


class TrialCollector(Collector):
    """Exports the present trial to Prometheus, and so to the operator; nothing without one."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if not self._outcomes.trial:
            return
        family = TRIAL.family()
        for side, what, end, count in self._outcomes.samples():
            family.add_metric([self._outcomes.trial, side.value, what, end], count)
        yield family

    def describe(self) -> list[GaugeMetricFamily]:
        return []


class ObservedStream:
    """The part of an answer that one engine generates, whose end is counted."""

    def __init__(self, stream: EngineStream, observation: Observation) -> None:
        self.accepted = stream.accepted
        self._stream = stream
        self._observation = observation

    @property
    def is_over(self) -> bool:
        return self._stream.is_over

    @property
    def has_stalled(self) -> bool:
        return self._stream.has_stalled

    async def read(self) -> Event:
        try:
            event = await self._stream.read()
        except ServiceError as error:
            self._observation.on_failure(error)
            raise
        if self.has_stalled:
            self._observation.on_timeout()
        elif self.is_over:
            self._observation.on_success()
        return event

    def close(self) -> None:
        self._stream.close()


class Rollout:
    """Draws sides for requests, tries canaries, and counts how each side does.

    Args:
        path: the file that says which engines are the canary's; None: there is never one.
        engines: where the canary's are followed.
        model: the service's model, which refusals name.
        prompts: render a request anew for the stable engines' model.
        on_stop: called with whether the service is stopped, whenever the file changes.
    """

    def __init__(
        self,
        path: str | None,
        engines: Engines,
        prompts: PromptBuilder,
        model: str,
        on_stop: Callable[[bool], None],
    ) -> None:
        self._model = model
        self._on_stop = on_stop
        self._engines = engines
        self._prompts = prompts
        self.canary = Canary(path, self._on_file_change)
        self.outcomes = Outcomes(engines.workers_lost, engines.workers_lost_before)

    def _on_file_change(self, file: RolloutFile) -> None:
        self._engines.declare_adapters(file.adapters)
        self._engines.set_canary(file.canary.pools if file.canary else ())
        self.outcomes.follow(trial(file.canary), self.canary.revision(Side.CANARY))
        self._on_stop(file.stopped)

    async def refuse_when_stopped(self, call: Call, proceed: Handler) -> ResponseStream:
        """Refuse every request of a service that is stopped.

        Raises:
            ServiceError: the service is stopped.
        """
        if self.canary.is_stopped:
            raise stopped(self._model)
        return await proceed(call)

    async def draw_side(self, call: Call, proceed: Handler) -> ResponseStream:
        """Send a request where it is drawn, or where an engine is ready."""
        drawn = self.canary.draw(call.request.session_id)
        other = Side.STABLE if drawn is Side.CANARY else Side.CANARY
        is_ready = functools.partial(self._engines.is_ready_on, adapter=call.adapter)
        call.side = other if not is_ready(drawn) and is_ready(other) else drawn
        return await proceed(call)

    async def try_canary(self, call: Call, proceed: Handler, once: Handler) -> ResponseStream:
        """Give the canary one try at once; stable engines have the request otherwise.

        Args:
            once: one attempt on one engine.
        """
        has_stable = self._engines.is_ready_on(Side.STABLE, call.adapter)
        if call.side is Side.STABLE or not has_stable:
            return await proceed(call)
        call.is_trial = True
        failure = None
        try:
            return await once(call)
        except NotOnCanary:
            self.outcomes.on_declined()
        except ServiceError as error:
            if call.deadline.first_token_remaining_s <= 0:
                raise
            call.decision = call.decision.after("engine", error.reason)
            failure = error
        stream = await proceed(await self._for_stable(call))
        if failure:
            self.outcomes.on_contradicted(failure)
        return stream

    async def _for_stable(self, call: Call) -> Call:
        """Return the call for the stable engines, with the tokens of their model."""
        call.side = Side.STABLE
        call.is_trial = False
        call.refused_by.clear()
        model = self._engines.served_model(
            call.request.model, Side.STABLE, call.tenant.rules.models
        )
        if model.fingerprint != call.prompt.model.fingerprint:
            call.prompt = await self._prompts.build(
                model, call.request, call.tenant.name, call.path
            )
        call.decision = replace(call.decision, degraded=call.prompt.degraded)
        call.decision = call.decision.after("stable", "CANARY")
        return call

    async def observe(self, call: Call, reservation: Reservation, send: Send) -> EngineStream:
        """Count what becomes of a request on the engine that it is sent to."""
        side = reservation.engine.side
        call.decision = replace(call.decision, revision=self.canary.revision(side))
        observation = self.outcomes.observe(side)
        try:
            stream = await send(call, reservation)
        except ServiceError as error:
            observation.on_failure(error)
            raise
        except BaseException:
            if call.deadline.first_token_remaining_s <= 0:
                observation.on_timeout()
            raise
        observation.on_first_token()
        return ObservedStream(stream, observation)

    def as_json(self) -> dict[str, object]:
        """Return the state for /stats."""
        canary = self.canary
        return {
            "stable_revision": canary.revision(Side.STABLE),
            "canary_revision": canary.revision(Side.CANARY),
            "weight": canary.weight,
            "problem": canary.problem,
            **self.outcomes.as_json(),
        }
