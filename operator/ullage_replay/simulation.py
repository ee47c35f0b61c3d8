"""Replays a trace: lets each request arrive at its time, and follows it to its end."""

import asyncio
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ullage_common.config.engine import EngineConfig
from ullage_common.config.router import RouterConfig
from ullage_common.wire.errors import ServiceError
from ullage_common.wire.flow_control import SendPace
from ullage_engine.protocol.messages import Rejected
from ullage_engine.protocol.requests import EngineRequest, SamplingParams, TokenOutput
from ullage_replay.engine import EngineServer, Machine, SimulatedAnswer
from ullage_replay.hardware import Hardware
from ullage_replay.router import SimulatedRouter
from ullage_replay.tokens import STOP, TokenSource
from ullage_replay.trace import TraceRequest
from ullage_replay.virtual_time import VirtualLoop, run
from ullage_router.admission.admission import AdmissionRequest
from ullage_router.admission.prefill_window import Reservation
from ullage_router.call import Call

Ending = Literal["stop", "length", "timeout", "refused"]
OnProgress = Callable[[int], None]
"""Called now and then with the number of requests that have arrived."""

_GREEDY = SamplingParams(temperature=0.0)
_READY_S = 1.0
"""Seconds before the trace begins, in which the router finds the engines."""
_PROGRESS_EVERY = 64


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool of the replayed service."""

    config: EngineConfig
    num_engines: int


@dataclass(slots=True)
class ReplayOutcome:
    """How one request ended. Every request of a trace has exactly one outcome."""

    request: TraceRequest
    ending: Ending
    action: str
    """The router's action: accept, shrink, queue, route4 or reject."""
    reason: str
    """The reason of the router's last step, such as KV_HEADROOM."""
    pool: str = ""
    engine: str = ""
    queued_s: float = 0.0
    ttft_s: float | None = None
    """Seconds from the arrival to the first token, or None without a token."""
    end_s: float = 0.0
    """Seconds from the arrival to the last token or the refusal."""
    output_tokens: int = 0
    degraded: tuple[str, ...] = ()
    """Limits that were lowered, such as `max_tokens=64`."""
    token_gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds between the client's tokens. Tokens that arrive together share their gap evenly."""


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """One engine's memory and work over a whole replay."""

    name: str
    pool: str
    peak_kv_bytes: int
    """Most KV bytes in block tables in any step."""
    peak_promised_bytes: int
    """Most KV bytes in block tables or reserved for admitted requests, at any time."""
    kv_pool_bytes: int
    memory_bytes: int
    """Bytes of all allocations on the device, with the whole KV pool."""
    budget_bytes: int
    num_steps: int
    busy_share: float
    """Fraction of the time in which the engine computed steps."""
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    outcomes: list[ReplayOutcome]
    """Outcomes in order of arrival."""
    engines: list[EngineOutcome]
    duration_s: float
    """Seconds from the beginning of the trace to the end of the last request."""


def replay(
    trace: Sequence[TraceRequest],
    router: RouterConfig,
    pools: Mapping[str, PoolPlan],
    hardware: Hardware,
    on_progress: OnProgress = lambda _: None,
) -> Replay:
    """Replay a trace in virtual time. The same arguments always give the same result.

    Raises:
        HardwareError: no engine like a pool's was measured, or a pool's memory is too small.
    """
    sized = {
        name: hardware.engine_of(name, pool.config).resized(pool.config)
        for name, pool in pools.items()
    }
    loop = VirtualLoop()
    machine = Machine(hardware.slowdown)
    servers = {
        name: [
            EngineServer(f"{name}-{number}", pool.config, sized[name], machine, loop)
            for number in range(pool.num_engines)
        ]
        for name, pool in pools.items()
    }
    simulation = _Simulation(trace, router, servers, loop, on_progress)
    return run(simulation.run(), loop)


class _Simulation:
    """One replay: a router, its engines and the clients."""

    def __init__(
        self,
        trace: Sequence[TraceRequest],
        router: RouterConfig,
        servers: Mapping[str, list[EngineServer]],
        loop: VirtualLoop,
        on_progress: OnProgress,
    ) -> None:
        self._trace = trace
        self._config = router
        self._servers = servers
        self._loop = loop
        self._on_progress = on_progress
        self._tokens = TokenSource()

    async def run(self) -> Replay:
        for servers in self._servers.values():
            for server in servers:
                server.start()
        router = SimulatedRouter(self._config, self._servers)
        await asyncio.sleep(_READY_S)
        began = self._loop.time()

        tasks: list[asyncio.Task[ReplayOutcome]] = []
        for number, request in enumerate(self._trace):
            await asyncio.sleep(began + request.at - self._loop.time())
            client = _Client(str(number), request, self._tokens, router)
            tasks.append(asyncio.create_task(client.run()))
            if number % _PROGRESS_EVERY == 0:
                self._on_progress(number)
        outcomes = [await task for task in tasks]

        duration_s = self._loop.time() - began
        await router.close()
        engines = [
            _engine_outcome(pool, server, duration_s)
            for pool, servers in self._servers.items()
            for server in servers
        ]
        return Replay(outcomes, engines, duration_s)


class _Client:
    """Sends one request through the router, as often as the router would retry it."""

    def __init__(
        self, name: str, request: TraceRequest, tokens: TokenSource, router: SimulatedRouter
    ) -> None:
        self._name = name
        self._request = request
        self._tokens = tokens
        self._router = router

    async def run(self) -> ReplayOutcome:
        """Serve the request to its end."""
        request = self._request
        token_ids = self._tokens.prompt(request)
        answer = SimulatedAnswer(
            len(token_ids), request.output_tokens, self._tokens.output(request)
        )
        call = self._router.call(self._name, request, token_ids)
        outcome = ReplayOutcome(request, "refused", "", "")
        try:
            async with asyncio.timeout(call.deadline.remaining_s):
                await self._until_answered(call, answer, outcome)
        except ServiceError as error:
            outcome.reason = error.reason
        except TimeoutError:
            outcome.ending = "timeout"
        self._note_decision(call, outcome)
        outcome.end_s = max(outcome.ttft_s or 0.0, time.monotonic() - call.record.arrived)
        return outcome

    async def _until_answered(
        self, call: Call, answer: SimulatedAnswer, outcome: ReplayOutcome
    ) -> None:
        self._router.on_request()
        refused_by: dict[str, int] = {}
        while True:
            # The client's time for the first token covers all attempts.
            async with asyncio.timeout(call.deadline.first_token_remaining_s) as first_token:
                reservation = await self._router.admit(
                    AdmissionRequest(call, refused_by=refused_by)
                )
                attempt = _Attempt(self._router, reservation, call, answer, outcome, first_token)
                refusal = await attempt.run()
            if refusal is None:
                return
            engine = reservation.engine
            refused_by[engine.key] = engine.reports
            call.decisions.add_step("engine", "KV_HEADROOM", degraded=call.prompt.degraded)

    def _note_decision(self, call: Call, outcome: ReplayOutcome) -> None:
        decision = call.decisions.latest
        outcome.action = decision.action
        outcome.reason = decision.reason or outcome.reason
        outcome.pool = decision.pool
        outcome.engine = decision.engine
        outcome.queued_s = decision.queued_s
        outcome.degraded = decision.degraded


class _Attempt:
    """One attempt to run a request on the engine on which memory is reserved."""

    def __init__(
        self,
        router: SimulatedRouter,
        reservation: Reservation,
        call: Call,
        answer: SimulatedAnswer,
        outcome: ReplayOutcome,
        first_token: asyncio.Timeout,
    ) -> None:
        self._reservation = reservation
        self._call = call
        self._answer = answer
        self._outcome = outcome
        self._first_token = first_token
        self._server = router.engines.server_of[reservation.engine.key]
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Rejected | None] = self._loop.create_future()
        streaming = router.streaming
        self._times = _TokenTimes(
            SendPace(streaming.coalesce_window, streaming.coalesce_tokens), outcome.token_gaps_s
        )

    async def run(self) -> Rejected | None:
        """Send the request, and return the engine's refusal, or None once it is answered."""
        reservation = self._reservation
        try:
            await asyncio.sleep(self._server.hardware.overheads.before)
            lowered = self._server.submit(self._engine_request(), self._answer, self)
            if lowered:
                decisions = self._call.decisions
                decisions.adopt(decisions.latest.lowered(lowered))
            return await self._ended
        finally:
            if not self._ended.done() or self._ended.cancelled():
                self._server.cancel(self._call.record.request_id)
            reservation.engine.release(reservation.credit)

    def _engine_request(self) -> EngineRequest:
        request = self._call.request
        token_ids = list(self._reservation.prompt.token_ids)
        return EngineRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            max_tokens=self._reservation.max_tokens,
            sampling=_GREEDY,
            stop_token_ids=[STOP],
            priority=request.priority,
            session_id=request.session_id,
            accepted_at=self._loop.time(),
        )

    def on_admitted(self) -> None:
        self._reservation.engine.on_accepted(self._reservation.credit)

    def on_rejected(self, rejected: Rejected) -> None:
        if self._ended.done():
            return
        if rejected.never:
            self._outcome.reason = "KV_NEVER_FITS"
            self._ended.set_result(None)
        else:
            self._ended.set_result(rejected)

    def on_tokens(self, output: TokenOutput, times: Sequence[float]) -> None:
        outcome = self._outcome
        if outcome.ttft_s is None:
            after_s = self._server.hardware.overheads.after
            outcome.ttft_s = times[0] + after_s - self._call.record.arrived
            self._first_token.reschedule(None)
            self._reservation.engine.on_first_token(self._reservation.credit)
        outcome.output_tokens += len(output.token_ids)
        for at in times:
            self._times.add(at)
        if output.finish and not self._ended.done():
            self._times.end(times[-1])
            outcome.ending = output.finish
            self._reservation.engine.breaker.on_success(self._reservation.credit)
            self._ended.set_result(None)


class _TokenTimes:
    """Records when a client gets its tokens, which the engine sends at its pace.

    Args:
        pace: how long the engine holds tokens back in order to send several together.
        gaps: the list to which the gaps between tokens are added.
    """

    def __init__(self, pace: SendPace, gaps: "array[float]") -> None:
        self._pace = pace
        self._gaps = gaps
        self._sent_at: float | None = None
        self._due = 0.0
        self._num_held = 0

    def add(self, now: float) -> None:
        """Record that the engine has computed a token."""
        if self._num_held and now >= self._due:
            self._send(self._due)
        self._num_held += 1
        if now >= self._due or self._num_held >= self._pace.max_tokens:
            self._send(now)

    def end(self, now: float) -> None:
        """Record the end of the answer, with which the tokens that are held back are sent."""
        if self._num_held:
            self._send(now)

    def _send(self, now: float) -> None:
        count = self._num_held
        if self._sent_at is not None:  # the first token has no gap before it
            self._gaps.extend([(now - self._sent_at) / count] * count)
        self._sent_at = now
        self._due = self._pace.next_tick(now)
        self._num_held = 0


def _engine_outcome(pool: str, server: EngineServer, duration_s: float) -> EngineOutcome:
    ledger = server.ledger
    stats = server.stats()
    return EngineOutcome(
        name=server.name,
        pool=pool,
        peak_kv_bytes=stats.kv_peak_bytes,
        peak_promised_bytes=stats.kv_peak_promised_bytes,
        kv_pool_bytes=server.hardware.profile.kv_pool_bytes,
        memory_bytes=ledger.allocated_bytes,
        budget_bytes=ledger.budget_bytes,
        num_steps=server.num_steps,
        busy_share=server.busy_s / duration_s if duration_s else 0.0,
        num_preemptions=stats.num_preemptions,
    )
