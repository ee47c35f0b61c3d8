"""An engine in virtual time: the real worker loop and scheduler, on a runner that only takes time.

The worker keeps a clock of its own, which runs ahead of the event loop while a step is computed.
What the worker sends meanwhile is delivered at the time at which it was sent, and the worker
continues once the event loop has caught up.
"""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import msgspec

from ullage_common.config.engine import EngineConfig
from ullage_common.wire.fingerprint import UNKNOWN
from ullage_engine.memory.ledger import Ledger
from ullage_engine.memory.pressure import FreeMemoryMonitor, PressureController, level_at
from ullage_engine.protocol.messages import (
    Admitted,
    Cancel,
    Ready,
    Rejected,
    StateReport,
    StepDone,
    Submit,
    ToServer,
    ToWorker,
)
from ullage_engine.protocol.requests import EngineRequest, PromptLogprobs, TokenOutput
from ullage_engine.protocol.step_plan import Moves, SampledToken, StepPlan
from ullage_engine.protocol.worker_state import SchedulerStats
from ullage_engine.scheduler.estimates import OutputLengthEstimator
from ullage_engine.scheduler.scheduler import KvPolicy, Scheduler
from ullage_engine.server.headroom import HeadroomService
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.request import changes, lowered
from ullage_engine.worker.engine import EngineCore
from ullage_engine.worker.loop import STATE_INTERVAL_S, Link, Worker
from ullage_engine.worker.started import Started
from ullage_replay.cost import StepSize
from ullage_replay.fast_forward import FastForward, StepwiseThroughput
from ullage_replay.hardware import EngineHardware
from ullage_replay.tokens import STOP
from ullage_replay.virtual_time import VirtualLoop


class EngineClient(Protocol):
    """What the router's side of a request hears from the engine."""

    def on_admitted(self) -> None:
        """Handle that the worker has admitted the request."""

    def on_rejected(self, rejected: Rejected) -> None:
        """Handle that the worker has refused the request."""

    def on_tokens(self, output: TokenOutput, times: Sequence[float]) -> None:
        """Handle tokens, each with the time at which its step ended."""


@dataclass(slots=True)
class SimulatedAnswer:
    """The answer that the trace prescribes to a request."""

    num_prompt_tokens: int
    num_tokens: int
    """Tokens after which the model stops."""
    token_at: Callable[[int], int]
    """Function from a position in the sequence to the token there."""


class Machine:
    """The machine that engines share: how many compute, and how much that slows each of them.

    Args:
        slowdown: factor of step times by the number of computing engines, or empty if they share
            nothing.
    """

    def __init__(self, slowdown: Mapping[int, float]) -> None:
        self._slowdown = slowdown
        self._busy_until: dict[str, float] = {}

    def seconds(self, engine: str, began: float, seconds: float) -> float:
        """Return how long a step takes that would take `seconds` alone, and let it begin."""
        taken = self.foresee(engine, began, seconds)
        self._busy_until[engine] = began + taken
        return taken

    def foresee(self, engine: str, began: float, seconds: float) -> float:
        """Return how long a step would take."""
        if not self._slowdown:
            return seconds
        num_busy = 1
        for name, until in self._busy_until.items():
            num_busy += until > began and name != engine
        factors = (factor for count, factor in self._slowdown.items() if count <= num_busy)
        return seconds * max(factors, default=1.0)


class _Clock:
    """The worker's own time, in seconds."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class _Runner:
    """Takes the time of a step, and returns the tokens that the trace prescribes.

    Args:
        name: the engine's id.
        clock: the worker's time.
        hardware: the measured engine.
        machine: the machine that the engine shares with others.
        next_event: returns the time of the next event outside of this worker.
    """

    def __init__(
        self,
        name: str,
        clock: _Clock,
        hardware: EngineHardware,
        machine: Machine,
        next_event: Callable[[], float],
    ) -> None:
        self._name = name
        self._clock = clock
        self._cost = hardware.cost
        self._between_steps = hardware.overheads.between_steps
        self._machine = machine
        self._next_event = next_event
        self.report_due = 0.0
        """Time from which the worker reports its state after a step."""
        self.answers: dict[str, SimulatedAnswer] = {}
        """Answers of the worker's requests, by request id."""
        self.throughput = StepwiseThroughput()
        self.pause_s = 0.0
        """Seconds between the latest step and the next one."""
        self.step_ends: list[float] = []
        """Times at which the latest steps ended, several if they were computed as one."""
        self.num_steps = 0
        self.busy_s = 0.0

    def move(self, moves: Moves) -> None: ...

    def sync(self) -> None: ...

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return []

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        sampled: list[SampledToken] = []
        decodes = prompt_tokens = decode_context = 0
        prompt_context = 0.0
        num_steps = 1
        for chunk in plan.chunks:
            start = chunk.start
            if chunk.is_decode:
                decodes += 1
                decode_context += start
                num_steps = chunk.num_sampled
            else:
                count = len(chunk.token_ids)
                prompt_tokens += count
                prompt_context += count * (start + count / 2)
            if chunk.sampling is not None:
                request_id = chunk.request_id
                end = chunk.end + 1 - chunk.num_sampled
                tokens = self.next_tokens(request_id, end, chunk.num_sampled)
                sampled += [SampledToken(request_id, token, 0.0, [], []) for token in tokens]

        self.pause_s = self._between_steps.at(len(plan.chunks))
        size = StepSize(decodes, prompt_tokens, decode_context, prompt_context)
        self._compute(size, num_steps)
        return sampled

    def _compute(self, size: StepSize, num_steps: int) -> None:
        """Let the time of this step pass, or of several that only decode."""
        clock = self._clock
        ends: list[float] = []
        seconds: list[float] = []
        alone = self._cost.seconds(size)
        for number in range(num_steps):
            if number:
                clock.now += self.pause_s
                alone += self._cost.per_decode_context * size.decodes
            taken = self._machine.seconds(self._name, clock.now, alone)
            clock.now += taken
            ends.append(clock.now)
            seconds.append(taken)
        self.step_ends = ends
        self.throughput.step_seconds_of_latest = seconds
        self.num_steps += num_steps
        self.busy_s += sum(seconds)

    def next_tokens(self, request_id: str, length: int, count: int) -> list[int]:
        answer = self.answers[request_id]
        token_at = answer.token_at
        last = answer.num_prompt_tokens + answer.num_tokens - 1
        return [
            STOP if position >= last else token_at(position)
            for position in range(length, length + count)
        ]

    def num_more_steps(self, lengths: Mapping[str, int], most: int) -> int:
        # The answer that ends first, with the last of the steps.
        for request_id, length in lengths.items():
            answer = self.answers[request_id]
            most = min(most, answer.num_prompt_tokens + answer.num_tokens - length - 1)

        event = self._next_event()
        now = self._clock.now
        decodes = len(lengths)
        pause = self._between_steps.at(decodes)
        size = StepSize(decodes, 0, sum(lengths.values()) - decodes, 0.0)
        alone = self._cost.seconds(size)
        for number in range(most):
            end = now + self._machine.foresee(self._name, now, alone)
            now = end + pause
            # The worker would look at its messages now, and would have reported its state.
            if now >= event or end >= self.report_due:
                return number
            alone += self._cost.per_decode_context * decodes
        return max(0, most)


class _Link:
    """Collects what the worker sends, each message with its time."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self.sent: list[tuple[float, ToServer]] = []

    def send(self, message: ToServer) -> None:
        self.sent.append((self._clock.now, message))


class EngineServer:
    """One engine: its worker, and the part of its server that routers see.

    Args:
        name: the engine's id.
        config: the engine's configuration.
        hardware: the measured engine, sized for this configuration.
        machine: the machine that the engine shares with others.
        loop: the virtual event loop.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        hardware: EngineHardware,
        machine: Machine,
        loop: VirtualLoop,
    ) -> None:
        server = msgspec.structs.replace(config.server, engine_id=name)
        self.config = msgspec.structs.replace(config, server=server)
        self.name = name
        self.hardware = hardware
        self._loop = loop
        self._clock = _Clock(loop.time())
        self.status = EngineStatus()
        self.headroom = HeadroomService(self.config, self.status)

        self._runner = _Runner(name, self._clock, hardware, machine, lambda: loop.next_event)
        self._link = _Link(self._clock)
        self._started = _started(self.config, hardware, self._runner, self._clock)
        self.num_reports = 0
        """Number of reports that the worker has sent."""
        self.on_report: Callable[[], None] = lambda: None
        """Called with each of the worker's reports."""
        self._clients: dict[str, EngineClient] = {}
        self._inbox: deque[ToWorker] = deque()
        self._timer: asyncio.TimerHandle | None = None
        """Wakes the worker, which waits for a message or until a time."""
        self._waits = False
        """Whether a message ends the worker's wait."""
        self._ends_of: deque[Sequence[float]] = deque()
        """Ends of the steps whose outputs are still to be delivered."""
        worker = Worker(
            self._started,
            self.config.batching,
            cast(Link, self._link),
            PressureController(self.config.degrade),
            self._clock,
        )
        self._turns = worker.turns()

    def start(self) -> None:
        """Start the worker's loop."""
        self._go_on(next(self._turns))

    @property
    def num_steps(self) -> int:
        return self._runner.num_steps

    @property
    def busy_s(self) -> float:
        """Seconds that steps have taken so far."""
        return self._runner.busy_s

    @property
    def ledger(self) -> Ledger:
        return self._started.ledger

    def stats(self) -> SchedulerStats:
        """Return the counters and the peaks of the engine's scheduler, as of now."""
        return self._started.engine.scheduler.stats()

    def submit(
        self, request: EngineRequest, answer: SimulatedAnswer, client: EngineClient
    ) -> tuple[str, ...]:
        """Send a request to the worker. Return the limits that memory pressure lowered."""
        section = self.config.degrade
        state = self.status.state
        level = level_at(section, state.pressure_level if state else 0)
        granted = request
        if level is not None:
            granted = lowered(request, level, change_sampling=section.change_sampling)
        self._clients[request.request_id] = client
        self._runner.answers[request.request_id] = answer
        self._post(Submit(requests=[granted]))
        return changes(request, granted)

    def cancel(self, request_id: str) -> None:
        """Drop a request whose client has left."""
        self._clients.pop(request_id, None)
        self._post(Cancel(request_id=request_id))

    def _post(self, message: ToWorker) -> None:
        self._inbox.append(message)
        if self._waits:
            assert self._timer
            self._timer.cancel()
            self._waits = False
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        """Continue the worker, with the oldest message if there is one."""
        self._waits = False
        self._timer = None
        self._clock.now = max(self._clock.now, self._loop.time())
        message = self._inbox.popleft() if self._inbox else None
        self._go_on(self._turns.send(message))

    def _go_on(self, timeout_s: float) -> None:
        """Let the worker go on until it has to wait for a message or for other events."""
        clock = self._clock
        loop = self._loop
        while True:
            while clock.now <= loop.time() and (self._inbox or timeout_s <= 0):
                message = self._inbox.popleft() if self._inbox else None
                timeout_s = self._turns.send(message)

            if clock.now <= loop.time():
                self._deliver()
                self._waits = True
                self._timer = loop.call_at(loop.time() + timeout_s, self._wake)
                return

            # A step has been computed. The worker looks for messages again after a while.
            is_delivered = self._deliver()
            clock.now += self._runner.pause_s
            if not (is_delivered and loop.advance(clock.now)):
                self._timer = loop.call_at(clock.now, self._wake)
                return
            timeout_s = 0.0

    def _deliver(self) -> bool:
        """Handle the worker's messages at the times at which it sent them.

        Return whether all of them could be handled at once, as nothing else happens before.
        """
        sent = self._link.sent
        self._link.sent = []
        loop = self._loop
        is_all = True
        for at, message in sent:
            if isinstance(message, StepDone):
                self._ends_of.append(self._runner.step_ends)
            elif isinstance(message, StateReport):
                self._runner.report_due = at + STATE_INTERVAL_S
            if is_all and (at <= loop.time() or loop.advance(at)):
                self._handle(message)
            else:
                is_all = False
                loop.call_at(at, self._handle, message)
        return is_all

    def _handle(self, message: ToServer) -> None:
        match message:
            case StepDone(outputs=outputs):
                ends = self._ends_of.popleft()
                for output in outputs:
                    self._on_output(output, ends)
            case StateReport(state=state):
                self.status.worker_state(state)
                self.num_reports += 1
                self.on_report()
            case Admitted(request_id=request_id):
                if client := self._clients.get(request_id):
                    client.on_admitted()
            case Rejected(request_id=request_id):
                self._runner.answers.pop(request_id, None)
                if client := self._clients.pop(request_id, None):
                    client.on_rejected(message)
            case Ready():
                self.status.worker_ready(message)
            case _:
                raise AssertionError(f"the replay has no use for {message}")

    def _on_output(self, output: TokenOutput, ends: Sequence[float]) -> None:
        request_id = output.request_id
        client = self._clients.get(request_id)
        if output.finish:
            self._clients.pop(request_id, None)
            self._runner.answers.pop(request_id, None)
        if client:
            client.on_tokens(output, ends)


def _started(
    config: EngineConfig, hardware: EngineHardware, runner: _Runner, clock: _Clock
) -> Started:
    """Return a worker that has started, with everything that a start measures taken from a file."""
    memory = config.memory
    profile = hardware.profile
    policy = KvPolicy(
        prefix_cache=memory.prefix_cache,
        session_blocks=profile.session_kv_bytes // profile.block_bytes,
        session_idle=memory.session_idle,
    )
    scheduler = Scheduler(
        profile,
        dataclasses.replace(hardware.limits, num_speculative_tokens=1),
        runner.throughput,
        OutputLengthEstimator(hardware.max_model_len),
        policy,
        clock,
        partial(FastForward, horizon=runner),
    )
    return Started(
        engine=EngineCore(scheduler, runner, runner.throughput, clock=clock),
        ledger=_ledger(hardware),
        used_bytes=lambda: 0,
        swap_seconds=lambda: 0.0,
        swap_bytes_per_second=0.0,
        free_memory=FreeMemoryMonitor(lambda: memory.safety_reserve, memory.safety_reserve, clock),
        stop_ranks=lambda: None,
        throughput=runner.throughput,
        profile=profile,
        max_model_len=hardware.max_model_len,
        vocab_size=1 << 31,
        dtype="",
        name=config.model.name,
        ranks=[],
        fingerprint=UNKNOWN,
        kv_space=b"",
        longest_step_s=hardware.longest_step_s,
    )


def _ledger(hardware: EngineHardware) -> Ledger:
    ledger = Ledger(hardware.total_bytes, hardware.threshold, configurable=True)
    for entry in hardware.ledger:
        if entry.on_host:
            ledger.record_on_host(entry.name, entry.reserved_bytes)
        else:
            ledger.reserve(entry.name, entry.reserved_bytes)
            ledger.allocated(entry.name, entry.allocated_bytes)
    return ledger
