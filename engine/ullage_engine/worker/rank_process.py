"""Process of a rank other than 0, which rank 0 forks from itself.

The rank loads its part of the model, answers each startup command, and then computes its part of
every step. If rank 0 exits, the rank exits too, and the kernel kills it if necessary. An error
while serving terminates the rank, and with it the whole group.

exit status: 0 after Stop, 2 the rank cannot serve and has told rank 0 why, 4 the rank has reported
an unexpected error during startup, 6 the rank ran out of memory while serving, 8 the host had too
little memory for allocations outside the memory reserved for steps
"""

import argparse
import gc
import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from ullage_common.config.engine import EngineConfig
from ullage_common.process import logs
from ullage_common.process.config_file import ConfigError, read_file
from ullage_common.process.stacks import dump_on_signal
from ullage_engine.memory.ledger import LedgerError
from ullage_engine.memory.out_of_memory import shortage_status
from ullage_engine.native.aborts import end_aborts_for_memory
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.protocol.errors import (
    HOST_SHORT,
    ProofError,
    WeightsError,
    WorkerStartError,
    one_line,
)
from ullage_engine.protocol.messages import Loading
from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.worker.device import HostTier, with_budget
from ullage_engine.worker.engine import Runner
from ullage_engine.worker.histories import ReceivedHistories
from ullage_engine.worker.rank import RankStartup
from ullage_engine.worker.rank_group import (
    CANNOT_SERVE,
    START_FAILED,
    Allocate,
    Done,
    Execute,
    Failed,
    Finalize,
    Join,
    Move,
    Sampled,
    Stop,
    Sync,
    ToRank,
    ToRank0,
    WarmUp,
    reads_history,
)

log = logging.getLogger("ullage.engine.group")

_LINGER_MS = 2_000
"""Milliseconds for which a closed socket keeps trying to send its last messages."""
_PROGRESS_S = 1.0
"""Minimum seconds between progress reports within a loading stage."""


class Rank0Link:
    """This rank's end of the socket to rank 0."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)

    def send(self, message: ToRank0) -> None:
        """Send a message to rank 0."""
        self._socket.send(self._encoder.encode(message))

    def receive(self) -> ToRank:
        """Wait for the next command from rank 0."""
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Close the socket after sending any pending messages."""
        self._socket.close()


class Reporter:
    """Reports loading progress to rank 0 at the start and end of each stage and every second."""

    def __init__(self, rank: int, link: Rank0Link) -> None:
        self._rank = rank
        self._link = link
        self._reported = ("", 0.0)

    def __call__(self, loading: Loading) -> None:
        stage, reported_at = self._reported
        now = time.monotonic()
        is_done = loading.done_bytes >= loading.total_bytes
        if loading.stage == stage and now - reported_at < _PROGRESS_S and not is_done:
            return

        self._reported = (loading.stage, now)
        self._link.send(msgspec.structs.replace(loading, rank=self._rank))


def prepare(rank: RankStartup, link: Rank0Link) -> None:
    """Load this rank's part of the model, and execute the startup commands until `Finalize`.

    Raises:
        WorkerStartError, LedgerError, WeightsError: the rank cannot serve.
        ProofError: the rank's results differ from those of a verified start.
    """
    rank.load()
    link.send(Done(weights_key=rank.weights_key))

    while True:
        match link.receive():
            case Join(store=store):
                rank.allocate_arenas(Path(store))
                link.send(Done())
            case WarmUp():
                link.send(Done(num_blocks=rank.warm_up()))
            case Allocate(num_blocks=num_blocks):
                rank.allocate_kv(num_blocks)
                link.send(Done())
            case Finalize(verifies=verifies):
                rank.finalize(verifies=verifies)
                states = rank.ledger.states()
                total_bytes = rank.ledger.total_bytes
                link.send(Done(ledger=states, total_bytes=total_bytes, proof=rank.proof))
                return
            case command:
                raise WorkerStartError(f"{type(command).__name__} came before the rank was ready")


def serve_steps(runner: Runner, samples: bool, link: Rank0Link, max_sequences: int) -> None:
    """Compute this rank's part of every step until `Stop` arrives."""
    received = ReceivedHistories(max_sequences)

    while True:
        match link.receive():
            case Execute(plan=plan):
                tokens = runner.execute(with_histories(plan, received) if samples else plan)
                if samples:
                    link.send(Sampled(tokens, runner.take_prompt_logprobs()))
            case Move(moves=moves):
                runner.move(moves)
            case Sync():
                runner.sync()
                link.send(Done())
            case Stop():
                return
            case command:
                raise RuntimeError(f"{type(command).__name__} came while serving")


def with_histories(plan: StepPlan, received: ReceivedHistories) -> StepPlan:
    """Return a copy of the plan with complete token histories, which penalties need."""
    received.begin_plan()
    chunks = [received.complete(each) if reads_history(each) else each for each in plan.chunks]
    return StepPlan(chunks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a rank, and return the exit status."""
    options = _parse(arguments)
    dump_on_signal()
    end_aborts_for_memory(HOST_SHORT)
    # Ctrl-C reaches the whole group, but rank 0 decides when this rank ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Rank0Link(context, options.endpoint)
    try:
        return _serve(options, link)
    finally:
        link.close()
        context.term()


def _serve(options: argparse.Namespace, link: Rank0Link) -> int:
    number: int = options.rank
    try:
        config = with_budget(read_file(options.config, EngineConfig), options.device_bytes)
        logs.configure(config.server.log_level, fields={"rank": number})
        path = options.kv_arena
        host_tier = HostTier(path, options.kv_bytes) if path else None
        rank = RankStartup(config, number, Reporter(number, link), host_tier)
        prepare(rank, link)
    except (ConfigError, WorkerStartError, LedgerError, WeightsError) as error:
        link.send(Failed(str(error)))
        return CANNOT_SERVE
    except ProofError as error:
        link.send(Failed(str(error), may_retry=True, is_unproven=True))
        return START_FAILED
    except Exception as error:
        log.exception("the rank cannot start")
        link.send(Failed(one_line(error), may_retry=True))
        return START_FAILED

    # Nothing loaded so far ever becomes garbage, so no collection needs to look at it.
    gc.freeze()
    max_sequences = config.batching.max_sequences
    try:
        serve_steps(rank.runner, _samples(rank.layout, number), link, max_sequences)
    except Exception as error:
        status = shortage_status(error)
        if status is None:
            raise
        log.exception("the rank ran out of memory")
        return status

    rank.close()
    return 0


def _samples(layout: RankLayout, rank: int) -> bool:
    return layout.sampling_rank == rank


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ullage_engine.worker.rank_process",
        description="Compute one rank's part for a worker, which starts this process itself.",
    )
    parser.add_argument("--config", type=Path, required=True, help="the engine's configuration")
    parser.add_argument("--rank", type=int, required=True, help="which part to compute, from 1")
    parser.add_argument("--endpoint", required=True, help="ZeroMQ address of rank 0")
    parser.add_argument("--device-bytes", type=int, help="budget of the rank's CPU device")
    parser.add_argument("--kv-arena", help="path of the memory of the host tier")
    parser.add_argument("--kv-bytes", type=int, default=0, help="bytes of that memory")
    return parser.parse_args(arguments)
