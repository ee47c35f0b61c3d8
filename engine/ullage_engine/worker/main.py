"""The worker process: `python -m ullage_engine.worker.main --config F --endpoint ipc://...`.

It connects to the server's socket, loads, says Ready, and steps as long as it has work. It ends
with the server: by Shutdown, or killed by the kernel when the server is gone.

exit status: 0 after Shutdown or when the server is gone, 1 an unforeseen error, 2 wrong
configuration or model
"""

import argparse
import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from ullage_common.config.engine import BatchingSection, EngineConfig
from ullage_common.process import logs
from ullage_common.process.config_file import ConfigError, read_file
from ullage_engine.memory.ledger import LedgerError
from ullage_engine.memory.pressure import PressureController
from ullage_engine.protocol.errors import WeightsError, one_line
from ullage_engine.protocol.messages import (
    Admitted,
    Cancel,
    Fault,
    Ready,
    Rejected,
    Shutdown,
    StartFailed,
    StateReport,
    StepDone,
    Submit,
    ToServer,
    ToWorker,
    WorkerState,
)
from ullage_engine.worker.device import WorkerStartError, die_with_parent
from ullage_engine.worker.startup import RankCommand, Started, start

log = logging.getLogger("ullage.engine.worker")

_SEND_TIMEOUT_MS = 30_000
_MAX_UNSENT = 10_000
"""Number of unsent messages at which a server that reads none for the time above is gone."""
_STATE_INTERVAL_S = 0.1
_HEARTBEAT_S = 0.5
_COMPILED_S = 0.005
"""Seconds between an idle worker's looks whether a grammar is compiled."""
_EMPTY_STEP_S = 0.005
"""Seconds to sleep after a step in which nothing could be computed."""


class ServerGoneError(Exception):
    """The server no longer reads what the worker sends."""


class Link:
    """The worker's end of the socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(_MAX_UNSENT)
        self._socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        # Time for the last words, such as StartFailed, to leave before the process does.
        self._socket.setsockopt(zmq.LINGER, 2_000)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def send(self, message: ToServer) -> None:
        try:
            self._socket.send(self._encoder.encode(message))
        except zmq.Again as error:
            raise ServerGoneError from error

    def receive(self, timeout_s: float) -> ToWorker | None:
        """Returns the next message; None if none came in time."""
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            return None
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        self._socket.close()


class Worker:
    """Serves one server until it gets a Shutdown."""

    def __init__(
        self,
        started: Started,
        batching: BatchingSection,
        link: Link,
        pressure: PressureController,
    ) -> None:
        self._started = started
        self._engine = started.engine
        self._batching = batching
        self._link = link
        self._pressure = pressure
        self._compiling: list[Submit] = []
        """Requests whose grammars are not compiled yet."""
        self._is_stopping = False
        self._is_changed = False
        self._reported_at = time.monotonic()

    def run(self) -> None:
        parent = os.getppid()
        # Nothing loaded so far ever becomes garbage; leave it out of every collection.
        gc.freeze()
        self._link.send(self._ready())
        while not self._is_stopping and os.getppid() == parent:
            self._take_messages()
            self._submit_compiled()
            if self._engine.has_work:
                self._step()
            self._report()

    def _step(self) -> None:
        num_steps = self._engine.scheduler.num_steps
        outputs = self._engine.step()
        if self._engine.scheduler.num_steps == num_steps:
            time.sleep(_EMPTY_STEP_S)
        if outputs:
            self._link.send(StepDone(outputs=outputs))
        self._send_failed()
        self._is_changed = True

    def _send_failed(self) -> None:
        for failed in self._engine.take_failed():
            self._link.send(failed)

    def _take_messages(self) -> None:
        """Takes all messages there are; waits for one only when there is nothing to compute.

        A lone request starts at once. When two or more came together more are likely on their way,
        and a step shared with them is cheaper than a step before them: so wait for the rest, at
        most the prefill window, or the shorter decode window while prompts are being computed.
        Decodes wait for nobody: what comes meanwhile is in their next step.
        """
        timeout = 0.0 if self._engine.has_work else self._until_report()
        timeout = min(timeout, _COMPILED_S) if self._compiling else timeout
        is_busy = self._engine.has_work
        num_submitted = self._drain(timeout)
        if num_submitted < 2 or self._engine.scheduler.has_decodes:
            return
        window = self._batching.decode_window if is_busy else self._batching.prefill_window
        deadline = time.monotonic() + window
        while (remaining_s := deadline - time.monotonic()) > 0 and self._drain(remaining_s):
            pass

    def _drain(self, timeout_s: float) -> int:
        """Takes messages until none is there, waiting for the first; returns how many were
        requests."""
        num_submitted = 0
        while (message := self._link.receive(timeout_s)) is not None:
            timeout_s = 0.0
            num_submitted += isinstance(message, Submit)
            self._take(message)
        return num_submitted

    def _take(self, message: ToWorker) -> None:
        self._is_changed = True
        match message:
            case Submit():
                self._submit(message)
            case Cancel(request_id=request_id, is_answered=is_answered):
                self._compiling = [each for m in self._compiling for each in _left(m, request_id)]
                self._engine.cancel(request_id, is_answered=is_answered)
            case Fault(after_steps=after_steps):
                self._engine.inject_out_of_memory(after_steps)
            case Shutdown():
                self._is_stopping = True

    def _submit(self, message: Submit) -> None:
        """Submits requests, or keeps them until their grammar is compiled, beside the steps."""
        grammar = message.requests[0].grammar
        if grammar and not self._engine.grammars.compile(grammar).done():
            self._compiling.append(message)
        else:
            self._submit_now(message)

    def _submit_compiled(self) -> None:
        waiting, self._compiling = self._compiling, []
        for message in waiting:
            self._submit(message)

    def _submit_now(self, message: Submit) -> None:
        answer = self._engine.submit_group(message.requests, resumed=message.resumed)
        if isinstance(answer, Rejected):
            self._link.send(answer)
            return
        for request in message.requests:
            self._link.send(Admitted(request_id=request.request_id))
        if answer:
            self._link.send(StepDone(outputs=answer))
        self._send_failed()

    def _until_report(self) -> float:
        interval = _STATE_INTERVAL_S if self._is_changed else _HEARTBEAT_S
        return max(0.0, self._reported_at + interval - time.monotonic())

    def _report(self) -> None:
        if self._until_report() > 0:
            return
        self._reported_at = time.monotonic()
        self._is_changed = False
        self._engine.scheduler.end_idle_sessions()
        self._link.send(StateReport(state=self._judged()))

    def _judged(self) -> WorkerState:
        """Returns the present state with its pressure level, which the batch size follows."""
        self._engine.scheduler.withhold(self._started.free_memory.missing_bytes())
        state = self._pressure.judge(self._state())
        self._engine.scheduler.set_batch_share(self._pressure.batch_share)
        return state

    def _ready(self) -> Ready:
        return Ready(
            profile=self._started.profile,
            max_model_len=self._started.max_model_len,
            vocab_size=self._started.vocab_size,
            dtype=self._started.dtype,
            ranks=self._started.ranks,
            state=self._judged(),
        )

    def _state(self) -> WorkerState:
        started, scheduler = self._started, self._engine.scheduler
        return WorkerState(
            **msgspec.structs.asdict(scheduler.stats()),
            total_bytes=started.ledger.total_bytes,
            threshold=started.ledger.threshold,
            decode_tokens_per_second=started.throughput.decode_tokens_per_second,
            prefill_tokens_per_second=started.throughput.prefill_tokens_per_second,
            step_seconds=started.throughput.step_seconds,
            num_oom_events=self._engine.num_oom_events,
            num_nonfinite_logits=self._engine.num_nonfinite_logits,
            num_overlapped_steps=self._engine.num_overlapped_steps,
            releases=scheduler.releases(),
            ledger=started.ledger.states(),
            rss_bytes=started.used_bytes(),
            swap_seconds=started.swap_seconds(),
            swap_bytes_per_second=started.swap_bytes_per_second,
            kv_withheld_bytes=started.free_memory.missing_bytes(),
        )


def _left(message: Submit, cancelled: str) -> list[Submit]:
    """Returns the message without a cancelled request; empty if that was all of it."""
    requests = [request for request in message.requests if request.request_id != cancelled]
    return [msgspec.structs.replace(message, requests=requests)] if requests else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a worker; returns the exit status."""
    parent = os.getppid()
    options = _parse(arguments)
    die_with_parent(parent)
    # Ctrl-C reaches the whole group; the server decides when the worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Link(context, options.endpoint)
    try:
        return _serve(options, link)
    except ServerGoneError:
        return 0
    finally:
        link.close()
        context.term()


def _serve(options: argparse.Namespace, link: Link) -> int:
    try:
        config = read_file(options.config, EngineConfig)
        logs.configure(config.server.log_level, fields={"rank": 0} if config.gpus > 1 else {})
        group_path = Path(options.endpoint.removeprefix("ipc://"))
        started = start(config, link.send, group_path, _rank_command(options.config))
    except (ConfigError, WorkerStartError, LedgerError, WeightsError) as error:
        link.send(StartFailed(error=str(error)))
        return 2
    except ServerGoneError:
        raise
    except Exception as error:
        log.exception("the worker cannot start")
        link.send(StartFailed(error=one_line(error), may_retry=True))
        return 1
    _log_start(config, started)
    try:
        Worker(started, config.batching, link, PressureController(config.degrade)).run()
    finally:
        started.stop()
    return 0


def _rank_command(config: Path) -> RankCommand:
    base = [sys.executable, "-m", "ullage_engine.worker.rank_process", "--config", str(config)]
    base += ["--parent", str(os.getpid())]

    def command(rank: int, endpoint: str, device_bytes: int | None) -> Sequence[str]:
        budget = [] if device_bytes is None else ["--device-bytes", str(device_bytes)]
        return [*base, "--rank", str(rank), "--endpoint", endpoint, *budget]

    return command


def _log_start(config: EngineConfig, started: Started) -> None:
    for place in started.ranks:
        log.info("%s", place)
    for line in started.ledger.table():
        log.info(line)
    facts = {"dtype": started.dtype, "max_model_len": started.max_model_len}
    log.info("worker serves %s", config.model.name, extra=facts)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ullage_engine.worker.main",
        description="Compute for one ullage-engine, which starts this process itself.",
    )
    parser.add_argument("--config", type=Path, required=True, help="the engine's configuration")
    parser.add_argument("--endpoint", required=True, help="ZeroMQ address of the server")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
