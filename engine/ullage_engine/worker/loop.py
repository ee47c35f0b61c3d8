"""Code shared by all worker processes: the server link, the main loop and the command line.

A worker connects to the server's socket, loads the model, sends `Ready`, and computes steps as long
as it has requests. It exits on `Shutdown`, and the kernel kills it if the server exits.

exit status: 0 after Shutdown or if the server has exited, 1 unexpected error, 2 invalid
configuration or model, 3 another rank has exited, 5 other processes hold memory that steps need, 6
a step or a rank ran out of memory, 7 results differ from those of a verified start, 8 the host had
too little memory for this process or a rank
"""

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ullage_common.config.engine import BatchingSection, EngineConfig
from ullage_common.process import logs
from ullage_common.process.config_file import ConfigError, read_file
from ullage_common.process.stacks import dump_on_signal
from ullage_common.process.tracing import start_tracing
from ullage_engine.memory.ledger import Ledger, LedgerError
from ullage_engine.memory.out_of_memory import shortage_status
from ullage_engine.memory.pressure import PressureController
from ullage_engine.native.aborts import end_aborts_for_memory
from ullage_engine.protocol.errors import (
    GROUP_LOST,
    HOST_SHORT,
    MEMORY_SHORT,
    UNPROVEN,
    GroupLostError,
    MemoryShortError,
    WeightsError,
    WorkerStartError,
    is_unproven,
    one_line,
)
from ullage_engine.protocol.frames import connect
from ullage_engine.protocol.messages import (
    AdapterAdded,
    AddAdapter,
    Admitted,
    Cancel,
    Fault,
    FromKv,
    Hang,
    KvFound,
    KvGranted,
    KvSlot,
    LimitBatch,
    Loading,
    ProfileDone,
    Ready,
    Rejected,
    RemoveAdapter,
    RequestFailed,
    Shutdown,
    StartFailed,
    StartProfile,
    StateReport,
    StepDone,
    StopProfile,
    Submit,
    ToServer,
    ToWorker,
)
from ullage_engine.protocol.request_events import RequestEvents
from ullage_engine.protocol.requests import (
    Embedding,
    EngineRequest,
    PromptLogprobs,
    TokenOutput,
)
from ullage_engine.protocol.worker_state import WorkerState
from ullage_engine.worker.forks import die_with_parent
from ullage_engine.worker.profiler import Profile

log = logging.getLogger("ullage.engine.worker")

# Messages.
DRAIN_S = 0.02
"""Maximum seconds to spend receiving messages between two steps.

Any further messages have to wait until after the next step, so that they do not delay decodes.
"""
_SEND_TIMEOUT_S = 30.0
"""Seconds after which a server that does not read messages is considered dead."""
_COMPILED_S = 0.005
"""Seconds between an idle worker's checks whether pending grammars have been compiled."""
_EMPTY_STEP_S = 0.005
"""Maximum seconds to wait for messages after a step in which nothing could be computed."""

# Reports.
STATE_INTERVAL_S = 0.1
"""Minimum seconds between state reports while the state is changing."""
_HEARTBEAT_S = 0.5
"""Seconds between state reports while the state is unchanged."""
_LOG_INTERVAL_S = 10.0
"""Minimum seconds between log lines about prefix cache hits."""
TRACES_WITHIN_S = 1.0
"""Maximum seconds that an exiting worker may spend on exporting its last tracing spans.

The server is waiting for the worker to exit during this time.
"""


class ServerGoneError(Exception):
    """Raised if the server has closed the connection or no longer reads messages."""


class Link:
    """The worker's end of the socket to the server."""

    def __init__(self, endpoint: str) -> None:
        try:
            self._link = connect(endpoint, _SEND_TIMEOUT_S)
        except OSError as error:
            raise ServerGoneError from error
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: ToServer) -> None:
        """Send a message.

        Raises:
            ServerGoneError: the server no longer reads messages.
        """
        try:
            self._link.send(self._encoder.encode(message))
        except OSError as error:
            raise ServerGoneError from error

    def receive(self, timeout_s: float) -> ToWorker | None:
        """Return the next message, or None if no message arrives before the timeout.

        Raises:
            ServerGoneError: the server has closed the socket.
        """
        try:
            message = self._link.receive(timeout_s)
        except OSError as error:
            raise ServerGoneError from error
        return None if message is None else self._decoder.decode(message)

    def close(self) -> None:
        """Close the socket to the server."""
        self._link.close()


class KvTransfers(Protocol):
    """The loop's interface for offloading KV to tiers outside the device and loading it back.

    The native engine and the vLLM engine have different implementations.
    """

    def take_messages(self) -> list[FromKv]:
        """Return the messages to the server that have been queued since the last call."""

    def on_granted(self, slots: list[KvSlot]) -> None:
        """Handle the server's answer to the oldest unanswered offer of KV blocks."""

    def on_found(self, answer: KvFound) -> None:
        """Handle the server's answer to a query for KV blocks."""


class LoraAdapters(Protocol):
    """The loop's interface for adding and removing LoRA adapters while serving."""

    def add(self, name: str, folder: str, *, is_checked: bool) -> str:
        """Load an adapter. Return an error message, or an empty string on success.

        Args:
            name: name by which requests select the adapter.
            folder: folder of the adapter's files.
            is_checked: whether an earlier worker has already loaded the adapter successfully.
        """

    def remove(self, name: str) -> None:
        """Remove an adapter that no request uses. Ignore unknown names."""


class WorkerEngine(Protocol):
    """The loop's interface to the engine that executes requests, native or vLLM."""

    @property
    def tiers(self) -> KvTransfers | None:
        """Offloads KV to tiers outside the device and loads it back. None without tiers."""

    @property
    def adapters(self) -> LoraAdapters | None:
        """LoRA adapters, or None if the engine serves no adapters."""

    @property
    def events(self) -> RequestEvents:
        """Request lifecycle events, for logging and tracing."""

    @property
    def has_work(self) -> bool:
        """Whether there is work for `step` to do."""

    @property
    def has_decodes(self) -> bool:
        """Whether the next step produces a token for a running sequence."""

    @property
    def num_steps(self) -> int:
        """Number of steps so far, not counting steps that computed nothing."""

    def is_compiled(self, request: EngineRequest) -> bool:
        """Return whether a request's grammar is compiled. If not, start compiling it."""

    def submit_group(
        self, requests: list[EngineRequest], *, resumed: bool = False
    ) -> Rejected | list[TokenOutput]:
        """Admit all samples of one prompt together, or refuse all of them.

        Returns:
            The outputs of requests that are already complete, or the refusal.
        """

    def cancel(self, request_id: str, *, is_answered: bool = False) -> None:
        """Drop a request. Ignore unknown ids."""

    def inject_out_of_memory(self, after_steps: int) -> None:
        """Inject a fault: after `after_steps` more steps, make a step run out of memory."""

    def step(self) -> Sequence[TokenOutput | Embedding]:
        """Compute one step and return its outputs."""

    def take_scored(self) -> list[PromptLogprobs]:
        """Return the log-probabilities of prompt tokens since the last call."""

    def take_failed(self) -> list[RequestFailed]:
        """Return the requests that have failed since the last call, each with its error message."""

    def set_batch_share(self, share: float) -> None:
        """Limit the batch to a fraction (0 to 1) of `batching.max_sequences`."""


class StartedEngine(Protocol):
    """The loop's interface to a worker whose startup is complete, native or vLLM."""

    @property
    def engine(self) -> WorkerEngine:
        """The engine that executes requests."""

    @property
    def ledger(self) -> Ledger:
        """Memory reservations of all ranks together."""

    def state(self) -> WorkerState:
        """End sessions that were idle for too long, and return current memory usage and load."""

    def ready(self, state: WorkerState) -> Ready:
        """Return the message that describes the model, the worker and its initial state."""

    def log_start(self) -> None:
        """Log which model and devices the worker has started with."""

    def stop(self) -> None:
        """Stop the engine's other processes."""


Turns = Generator[float, ToWorker | None, None]
"""The worker's loop, which leaves waiting for messages to its caller.

It yields the seconds to wait for the next message, and is sent that message, or None if none
arrived in time.
"""

Report = Callable[[Loading], None]
"""Function that reports startup progress to the server."""

Start = Callable[[EngineConfig, Report, argparse.Namespace], StartedEngine]
"""Function that loads the model, given the configuration, a progress callback and the command-line
options."""


class Worker:
    """The worker's main loop, which serves one server until it receives `Shutdown`."""

    def __init__(
        self,
        started: StartedEngine,
        batching: BatchingSection,
        link: Link,
        pressure: PressureController,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a loop for a started engine.

        Args:
            started: the engine and its memory.
            batching: settings for how long to wait for more requests before a step.
            link: connection to the server.
            pressure: controller that adjusts the batch size to the worker's state.
            clock: returns monotonic time in seconds, for waits and reports.
        """
        self._clock = clock
        self._started = started
        self._engine = started.engine
        self._batching = batching
        self._link = link
        self._pressure = pressure
        self._profile: Profile | None = None

        self._compiling: list[Submit] = []
        """Requests whose grammars are not compiled yet."""
        self._is_stopping = False
        self._is_changed = False
        self._reported_at = clock()
        self._log_at = self._reported_at
        """Time at which prefix cache hits may be logged again."""

    def run(self) -> None:
        """Send `Ready`, and serve until `Shutdown` arrives or the server's process exits."""
        parent = os.getppid()
        # Nothing loaded so far ever becomes garbage, so no collection needs to look at it.
        gc.freeze()
        turns = self.turns()
        with contextlib.suppress(StopIteration):
            timeout_s = next(turns)
            while os.getppid() == parent:
                timeout_s = turns.send(self._link.receive(timeout_s))

    def turns(self) -> Turns:
        """Send `Ready`, and serve until `Shutdown` arrives, without waiting for messages itself.

        `run` waits on the server's socket. A replay in virtual time has no socket to wait on.
        """
        self._logged = self._judged()
        self._link.send(self._started.ready(self._logged))

        while not self._is_stopping:
            yield from self._take_messages()
            self._submit_compiled()
            if self._engine.has_work:
                yield from self._step()
            self._send_kv()
            self._report()
            if self._profile:
                self._advance_profile(self._profile)

    def _step(self) -> Turns:
        num_steps = self._engine.num_steps
        try:
            outputs = self._engine.step()
        except Exception:
            self._send_last_state()
            raise

        # KV messages go before tokens, since an answer says from its beginning where its KV was.
        self._send_kv()
        scored = self._engine.take_scored()
        if outputs or scored:
            self._send_outputs(outputs, scored)
        self._send_failed()

        self._is_changed = True
        if self._engine.num_steps == num_steps:
            yield from self._drain(_EMPTY_STEP_S)

    def _send_last_state(self) -> None:
        """Send a final state report, with the number of steps that ran out of memory.

        The report does not count the step that is terminating the worker. The server counts that
        step by the worker's exit status.
        """
        # Measuring the state may fail, since the device may be lost.
        with contextlib.suppress(Exception):
            self._link.send(StateReport(state=self._started.state()))

    def _advance_profile(self, profile: Profile) -> None:
        try:
            done = profile.advance(self._engine.num_steps)
        # A profile that fails must not end the worker.
        except Exception as error:
            log.exception("a profile cannot be ended")
            done = ProfileDone(num_steps=0, error=one_line(error))
        if done:
            self._profile = None
            self._link.send(done)

    def _start_profile(self, start: StartProfile) -> None:
        try:
            self._profile = Profile(start, self._engine.events, self._engine.num_steps)
        # A profile that fails must not end the worker.
        except Exception as error:
            log.exception("a profile cannot be begun")
            self._link.send(ProfileDone(num_steps=0, error=one_line(error)))

    def _send_kv(self) -> None:
        if self._engine.tiers is not None:
            for message in self._engine.tiers.take_messages():
                self._link.send(message)

    def _send_outputs(
        self, outputs: Sequence[TokenOutput | Embedding], scored: Sequence[PromptLogprobs] = ()
    ) -> None:
        done = _step_done(outputs, scored)
        self._link.send(done)
        self._engine.events.on_outputs(done.outputs)
        for embedding in done.embeddings:
            self._engine.events.forget(embedding.request_id, "stop")

    def _send_failed(self) -> None:
        for failed in self._engine.take_failed():
            self._link.send(failed)
            self._engine.events.forget(failed.request_id, "failed")

    def _take_messages(self) -> Turns:
        """Receive pending messages, waiting for them only if there is nothing to compute.

        A single request starts immediately. If two or more requests arrive together, more are
        likely to follow, and computing them all in one step is cheaper than in several. The loop
        therefore waits for more: up to the prefill window if idle, or up to the shorter decode
        window if it is already computing prompts. It never waits while sequences are decoding.
        Requests that arrive during a decode join the next step.
        """
        timeout = 0.0 if self._engine.has_work else self._until_report()
        timeout = min(timeout, _COMPILED_S) if self._compiling else timeout
        is_busy = self._engine.has_work
        num_submitted = yield from self._drain(timeout)
        if num_submitted < 2 or self._engine.has_decodes:
            return

        window = self._batching.decode_window if is_busy else self._batching.prefill_window
        deadline = self._clock() + window
        while (remaining_s := deadline - self._clock()) > 0:
            if not (yield from self._drain(remaining_s)):
                return

    def _drain(self, timeout_s: float) -> Generator[float, ToWorker | None, int]:
        """Receive messages until none are pending, for at most `DRAIN_S` seconds after the first.

        Args:
            timeout_s: seconds to wait for the first message.

        Returns:
            The number of `Submit` messages received.
        """
        message = yield timeout_s
        deadline = self._clock() + DRAIN_S
        num_submitted = 0

        while message is not None:
            num_submitted += isinstance(message, Submit)
            self._take(message)
            if self._clock() >= deadline:
                break
            message = yield 0.0

        return num_submitted

    def _take(self, message: ToWorker) -> None:
        self._is_changed = True
        match message:
            case Submit():
                self._submit(message)
            case Cancel(request_id=request_id, is_answered=is_answered):
                self._compiling = [each for m in self._compiling for each in _left(m, request_id)]
                self._engine.cancel(request_id, is_answered=is_answered)
                self._engine.events.forget(request_id, "stop" if is_answered else "cancelled")
                self._send_failed()
            case KvGranted(slots=slots) if self._engine.tiers is not None:
                self._engine.tiers.on_granted(slots)
            case KvFound() if self._engine.tiers is not None:
                self._engine.tiers.on_found(message)
            case AddAdapter(name=name) if self._engine.adapters is not None:
                error = self._engine.adapters.add(
                    name, message.folder, is_checked=message.is_checked
                )
                self._link.send(AdapterAdded(name=name, error=error))
            case RemoveAdapter(name=name) if self._engine.adapters is not None:
                self._engine.adapters.remove(name)
            case Fault(after_steps=after_steps):
                self._engine.inject_out_of_memory(after_steps)
            case Hang():
                _hang()
            case LimitBatch(share=share):
                self._pressure.limit_batch(share)
                # Set at once: requests behind this message must not start in a larger batch.
                self._engine.set_batch_share(self._pressure.batch_share)
            case StartProfile() if self._profile is None:
                self._start_profile(message)
            case StopProfile() if self._profile is not None:
                self._profile.stop_soon()
            case Shutdown():
                self._is_stopping = True

    def _submit(self, message: Submit) -> None:
        """Submit requests, or hold them back until their grammar is compiled in the background."""
        first = message.requests[0]
        if first.grammar and not self._engine.is_compiled(first):
            self._compiling.append(message)
        else:
            self._submit_now(message)

    def _submit_compiled(self) -> None:
        """Submit held-back requests whose grammars have been compiled by now."""
        waiting = self._compiling
        self._compiling = []
        for message in waiting:
            self._submit(message)

    def _submit_now(self, message: Submit) -> None:
        answer = self._engine.submit_group(message.requests, resumed=message.resumed)
        if isinstance(answer, Rejected):
            self._link.send(answer)
            return

        for request in message.requests:
            self._link.send(Admitted(request_id=request.request_id))
            self._engine.events.on_admitted(request)
        if answer:
            self._send_outputs(answer)
        self._send_failed()

    def _until_report(self) -> float:
        """Return the number of seconds until the next report of the worker's state is due."""
        interval = STATE_INTERVAL_S if self._is_changed else _HEARTBEAT_S
        return max(0.0, self._reported_at + interval - self._clock())

    def _report(self) -> None:
        if self._until_report() > 0:
            return
        self._reported_at = self._clock()
        self._is_changed = False
        state = self._judged()
        self._link.send(StateReport(state=state))
        self._log_prefix_hits(state)

    def _log_prefix_hits(self, state: WorkerState) -> None:
        """Log the prefix cache's hit rate, at most once per `_LOG_INTERVAL_S`."""
        looked_up = state.prefix_lookup_tokens - self._logged.prefix_lookup_tokens
        if looked_up <= 0 or self._reported_at < self._log_at:
            return

        hits = state.prefix_hit_tokens - self._logged.prefix_hit_tokens
        fields = {"looked_up_tokens": looked_up, "hit_tokens": hits}
        log.info("prefix cache", extra={**fields, "hit_ratio": round(hits / looked_up, 4)})
        self._logged = state
        self._log_at = self._reported_at + _LOG_INTERVAL_S

    def _judged(self) -> WorkerState:
        """Measure the worker's state, rate its memory pressure, and limit the batch accordingly.

        Returns:
            The worker's state, including the pressure level.
        """
        state = self._pressure.judge(self._started.state())
        if self._profile:
            self._profile.on_state(state)
        self._engine.set_batch_share(self._pressure.batch_share)
        return state


def _hang() -> None:
    """Compute without end, as in a kernel that never returns."""
    while True:
        pass


def _step_done(
    outputs: Sequence[TokenOutput | Embedding], scored: Sequence[PromptLogprobs]
) -> StepDone:
    return StepDone(
        outputs=[each for each in outputs if isinstance(each, TokenOutput)],
        embeddings=[each for each in outputs if isinstance(each, Embedding)],
        prompts=list(scored),
    )


def _left(message: Submit, cancelled: str) -> list[Submit]:
    """Remove a cancelled request from a `Submit` message.

    Returns:
        A list that contains the shortened message, or an empty list if no request remains.
    """
    requests = [request for request in message.requests if request.request_id != cancelled]
    return [msgspec.structs.replace(message, requests=requests)] if requests else []


def run(
    parser: argparse.ArgumentParser,
    start: Start,
    arguments: Sequence[str] | None,
    import_libraries: Callable[[], object] = lambda: None,
) -> int:
    """Run a worker from its command line, and return the exit status.

    Args:
        parser: parser with the options specific to this kind of worker, to which the common options
            are added.
        start: loads the model.
        arguments: the command line, or None for the command line of this process.
        import_libraries: imports the libraries that `start` needs. A standby worker calls this in
            advance.
    """
    parent = os.getppid()
    parser.add_argument("--config", type=Path, required=True, help="the engine's configuration")
    parser.add_argument("--endpoint", required=True, help="path of the server's socket")
    parser.add_argument(
        "--standby", action="store_true", help="import libraries, then wait for a line of input"
    )
    parser.add_argument("--kv-arena", help="path of the memory of the host tier")
    parser.add_argument("--kv-bytes", type=int, default=0, help="bytes of that memory")
    options = parser.parse_args(arguments)

    die_with_parent(parent)
    dump_on_signal()
    end_aborts_for_memory(HOST_SHORT)
    # Ctrl-C reaches the whole group, but the server decides when the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    if options.standby:
        import_libraries()
        # The pipe is broken if the worker had to take over before its libraries were imported.
        with contextlib.suppress(BrokenPipeError):
            os.write(sys.stdin.fileno(), b"\n")
        if not sys.stdin.readline():
            return 0

    try:
        with contextlib.closing(Link(options.endpoint)) as link:
            return _serve(options, link, start)
    except ServerGoneError as error:
        log.error("the server is gone, so this worker ends: %s", error.__cause__)
        return 0


def _serve(options: argparse.Namespace, link: Link, start: Start) -> int:
    try:
        config = read_file(options.config, EngineConfig)
        logs.configure(config.server.log_level, fields={"rank": 0} if config.gpus > 1 else {})
        started = start(config, link.send, options)
    except (ConfigError, WorkerStartError, LedgerError, WeightsError) as error:
        link.send(StartFailed(error=str(error)))
        return 2
    except ServerGoneError:
        raise
    except Exception as error:
        if is_unproven(error):
            log.error("this worker ends before it serves: %s", error)
            link.send(StartFailed(error=str(error), may_retry=True, is_unproven=True))
            return UNPROVEN
        log.exception("the worker cannot start")
        link.send(StartFailed(error=one_line(error), may_retry=True))
        return 1

    started.log_start()
    for line in started.ledger.table():
        log.info(line)

    identity = {"service.instance.id": config.server.engine_id, "ullage.process": "worker"}
    tracer = start_tracing(config.tracing, "ullage-engine", identity)
    if tracer:
        started.engine.events.trace_to(tracer)

    try:
        Worker(started, config.batching, link, PressureController(config.degrade)).run()
    except GroupLostError as error:
        log.exception("the group of ranks is lost")
        return shortage_status(error.__cause__) or GROUP_LOST
    except MemoryShortError as error:
        log.error("this worker ends, and the next one continues its requests: %s", error)
        return MEMORY_SHORT
    except Exception as error:
        status = shortage_status(error)
        if status is None:
            raise
        log.exception("this worker ends, since it ran out of memory")
        return status
    finally:
        started.stop()
        if tracer:
            tracer.close(TRACES_WITHIN_S)
    return 0
