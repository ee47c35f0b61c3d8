"""Rank 0's side of a group of ranks: the processes, the messages, and a runner for the group.

Messages are encoded as msgpack and sent over one ZeroMQ pair per rank. At startup, ranks send a
first answer when they have loaded, and then answer each of the commands `Join`, `WarmUp`,
`Allocate` and `Finalize` with `Done` or `Failed`. Rank 0 sends a command only after all ranks have
answered the previous one. During startup, ranks compute together, and thus wait for each other's
results, only in `WarmUp` and `Finalize`. Other failures, such as a lack of memory, occur in the
preceding `Join` or `Allocate`. While serving, only the rank that samples answers `Execute`, but all
ranks answer `Sync`. A rank that fails while serving exits, and so does the group. Ranks may report
their progress with `Loading` at any time.

If one process of the group exits, all others exit too. One thread per process watches for this.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import zmq
from msgspec.structs import replace

from ullage_engine.model_loader.proof import Proof
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.protocol.errors import (
    GROUP_LOST,
    HOST_SHORT,
    OUT_OF_MEMORY,
    GroupLostError,
    RankFailedError,
)
from ullage_engine.protocol.messages import Loading
from ullage_engine.protocol.requests import PromptLogprobs
from ullage_engine.protocol.step_plan import Chunk, Moves, SampledToken, StepPlan
from ullage_engine.protocol.worker_state import ReservationState
from ullage_engine.worker.forks import ForkedProcess
from ullage_engine.worker.histories import SentHistories

if TYPE_CHECKING:
    from ullage_engine.worker.engine import Runner

log = logging.getLogger("ullage.engine.group")

CANNOT_SERVE = 2
"""Exit status of a rank that has reported why it cannot serve."""
START_FAILED = 4
"""Exit status of a rank that has reported an unexpected error during its start."""

_POLL_MS = 100
"""Milliseconds between checks of whether an unresponsive rank is still alive."""
_STOP_GRACE_S = 3.0
"""Seconds that ranks have to exit after `Stop` before they are killed."""

StartProcess = Callable[[int, str], ForkedProcess]
"""Function that starts a rank's process, given the rank and an endpoint."""

Report = Callable[[Loading], None]
"""Function to call with a rank's loading progress."""


class GroupMessage(msgspec.Struct, frozen=True, tag=True):
    """The base class of all messages between ranks."""


# rank 0 → others ---------------------------------------------------------------------------------


class Join(GroupMessage, frozen=True):
    """Command to join the other ranks, and to allocate memory for steps and for the warm-up."""

    store: str
    """Path at which to create the rendezvous file, through which ranks find each other."""


class WarmUp(GroupMessage, frozen=True):
    """Command to run the largest batches as a warm-up, in lockstep with all other ranks.

    The rank answers with the number of KV blocks that still fit in its memory.
    """


class Allocate(GroupMessage, frozen=True):
    """Command to allocate the KV pool, with as many blocks as fit on every rank."""

    num_blocks: int


class Finalize(GroupMessage, frozen=True):
    """Command to run the largest steps on the KV pool, and to compute the rank's proof.

    The answer contains the ledger and the proof, which consists of results that later starts
    compare with their own.
    """

    verifies: bool = False
    """Whether to compute the proof twice and compare, because no start has been verified yet."""


class Execute(GroupMessage, frozen=True):
    """Command to compute a step."""

    plan: StepPlan


class Move(GroupMessage, frozen=True):
    """Command to copy KV blocks."""

    moves: Moves


class Sync(GroupMessage, frozen=True):
    """Command that the rank answers once it has executed all earlier commands."""


class Stop(GroupMessage, frozen=True):
    """Command to exit with status 0."""


# others → rank 0 ---------------------------------------------------------------------------------


class Done(GroupMessage, frozen=True, kw_only=True):
    """Answer from a rank that has executed the command."""

    weights_key: str = ""
    """Key of the prepared weights. Only set in the first answer, which ends loading."""
    num_blocks: int = 0
    """Number of KV blocks that fit on this rank. Only set in the answer to `WarmUp`."""
    ledger: list[ReservationState] = []
    """All memory reservations of the rank. Only set in the answer to `Finalize`."""
    total_bytes: int = 0
    """Total memory of the rank's device in bytes. Only set in the answer to `Finalize`."""
    proof: Proof | None = None
    """Digests of the rank's tensors and logits. Only set in the answer to `Finalize`."""


class Failed(GroupMessage, frozen=True):
    """Answer from a rank that cannot serve, with the reason."""

    error: str
    """One-line error message that names the configuration field or the file."""
    may_retry: bool = False
    """Whether a restart may succeed, because the error was unexpected."""
    is_unproven: bool = False
    """Whether the reason is that the rank's results differ from those of an earlier start."""


class Sampled(GroupMessage, frozen=True):
    """Answer with a step's sampled tokens."""

    tokens: list[SampledToken]
    scored: list[PromptLogprobs] = []
    """Log-probabilities of prompt tokens of the step."""


ToRank = Join | WarmUp | Allocate | Finalize | Execute | Move | Sync | Stop
Answer = Done | Failed | Sampled
ToRank0 = Answer | Loading


def for_rank(plan: StepPlan, sent: SentHistories | None) -> StepPlan:
    """Return a copy of a plan that contains only what another rank needs.

    Moves are omitted, because they are sent in a separate command before the plan. Histories and
    masks are only included for the rank that samples.

    Args:
        plan: rank 0's plan.
        sent: record of the histories that the rank already has, or None if it does not sample.
    """
    if sent is not None:
        sent.begin_plan()
    return StepPlan([_as_read(chunk, sent) for chunk in plan.chunks])


def _as_read(chunk: Chunk, sent: SentHistories | None) -> Chunk:
    if sent is None:
        return replace(chunk, history=[], allowed=None)
    return sent.shorten(chunk) if reads_history(chunk) else replace(chunk, history=[])


def reads_history(chunk: Chunk) -> bool:
    """Return whether sampling the chunk's next token requires the request's token history."""
    return chunk.sampling is not None and chunk.sampling.is_penalised


class RankProcesses:
    """Starts, commands and watches the processes of all ranks except rank 0.

    If one of these processes dies, this process exits immediately. Otherwise, a collective
    operation would hang waiting for the dead rank until it times out. The supervisor restarts the
    whole group in any case.
    """

    def __init__(
        self, world: int, endpoint_base: Path, start: StartProcess, report: Report
    ) -> None:
        """Start the processes.

        Args:
            world: number of ranks.
            endpoint_base: path prefix of the sockets, to which each rank's number is appended.
            start: starts a rank.
            report: called with the ranks' loading progress while waiting for answers.
        """
        self._report = report
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToRank0] = msgspec.msgpack.Decoder(ToRank0)
        self._links: dict[int, zmq.Socket[bytes]] = {}
        self._processes: dict[int, ForkedProcess] = {}
        self._is_stopping = threading.Event()

        for rank in range(1, world):
            endpoint = f"ipc://{endpoint_base}-{rank}"
            self._links[rank] = self._bind(endpoint)
            self._processes[rank] = start(rank, endpoint)

        for rank in self._processes:
            threading.Thread(
                target=self._watch, args=(rank,), name="group-watch", daemon=True
            ).start()

    @property
    def ranks(self) -> list[int]:
        """Numbers of all ranks except rank 0."""
        return list(self._links)

    def send(self, rank: int, command: ToRank) -> None:
        """Send a command to one rank."""
        self._links[rank].send(self._encoder.encode(command))

    def broadcast(self, command: ToRank) -> None:
        """Send a command to all ranks, encoding it only once."""
        encoded = self._encoder.encode(command)
        for link in self._links.values():
            link.send(encoded)

    def wait_done(self) -> list[Done]:
        """Wait for every rank's answer to the last command, and return the answers in rank order.

        Raises:
            RankFailedError: a rank cannot continue.
        """
        answers = {rank: self._answer(rank) for rank in self._links}
        failed = {rank: each for rank, each in answers.items() if isinstance(each, Failed)}
        if failed:
            raise rank_failed(failed)
        return [answer for answer in answers.values() if isinstance(answer, Done)]

    def wait_failure(self, timeout_s: float) -> RankFailedError | None:
        """Wait for ranks to report errors, and combine the errors into one.

        Other answers are discarded.

        Returns:
            The combined error, or None if no rank reported an error.
        """
        deadline = time.monotonic() + timeout_s
        failed = dict[int, Failed]()

        while True:
            # Checked before the links: the last message of an ended rank arrives soon after.
            are_gone = all(each.poll() is not None for each in self._processes.values())

            for rank, link in self._links.items():
                while link.poll(_POLL_MS // len(self._links)):
                    answer = self._decoder.decode(link.recv())
                    if isinstance(answer, Failed):
                        failed[rank] = answer

            is_final = any(not each.may_retry for each in failed.values())
            if is_final or are_gone or time.monotonic() > deadline:
                return rank_failed(failed) if failed else None

    def wait_sampled(self, rank: int) -> Sampled:
        """Wait until a rank sends the tokens of the oldest step not collected yet.

        Raises:
            GroupLostError: the rank has exited or has sent a different answer.
        """
        answer = self._answer(rank)
        if not isinstance(answer, Sampled):
            raise GroupLostError(f"rank {rank} answered {type(answer).__name__}, not tokens")
        return answer

    def resident_bytes(self) -> int:
        """Return the total resident memory of the processes in bytes, not counting rank 0."""
        total = 0
        for process in self._processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += psutil.Process(process.pid).memory_info().rss
        return total

    def stop(self) -> None:
        """Ask the processes to exit, and kill those that are still running after a grace period."""
        self._is_stopping.set()
        encoded = self._encoder.encode(Stop())
        for link in self._links.values():
            # A rank that is gone reads nothing, so a blocking send would never return.
            with contextlib.suppress(zmq.Again):
                link.send(encoded, zmq.DONTWAIT)

        deadline = time.monotonic() + _STOP_GRACE_S
        for process in self._processes.values():
            process.wait(max(0.0, deadline - time.monotonic()))

        self.kill()

    def kill(self) -> None:
        """Kill the processes without sending `Stop`, because loading ranks do not read commands."""
        self._is_stopping.set()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._context.destroy(linger=0)

    def _bind(self, endpoint: str) -> zmq.Socket[bytes]:
        link = self._context.socket(zmq.PAIR)
        link.set_hwm(0)
        link.setsockopt(zmq.LINGER, 0)
        link.bind(endpoint)
        return link

    def _answer(self, rank: int) -> Answer:
        """Wait for a rank's next answer, and report its loading progress in the meantime."""
        while isinstance(answer := self._message(rank), Loading):
            self._report(answer)
        return answer

    def _message(self, rank: int) -> ToRank0:
        link = self._links[rank]
        process = self._processes[rank]
        # A rank that has just ended may have sent a message before: poll once more.
        is_gone = False
        while not link.poll(_POLL_MS):
            if is_gone:
                raise GroupLostError(f"rank {rank} ended with status {process.returncode}")
            is_gone = process.poll() is not None
        return self._decoder.decode(link.recv())

    def _watch(self, rank: int) -> None:
        """Exit this process as soon as another rank exits without reporting an error."""
        status = self._processes[rank].wait()
        # A shortage of memory is reported even while the group is about to end because of it.
        if status in (OUT_OF_MEMORY, HOST_SHORT):
            log.error("rank %d ran out of memory, so the group starts again", rank)
            sys.stderr.flush()
            os._exit(status)
        if self._is_stopping.is_set() or status in (CANNOT_SERVE, START_FAILED):
            return

        log.error("rank %d ended with status %d, so the group starts again", rank, status)
        sys.stderr.flush()
        os._exit(GROUP_LOST)


def rank_failed(failed: Mapping[int, Failed]) -> RankFailedError:
    """Combine the errors reported by ranks into one.

    If a restart cannot fix one of the errors, only that error is returned, because it has probably
    caused the others.
    """
    for rank, each in failed.items():
        if not each.may_retry:
            return RankFailedError(f"rank {rank}: {each.error}")

    lines = (f"rank {rank}: {each.error}" for rank, each in failed.items())
    is_unproven = any(each.is_unproven for each in failed.values())
    return RankFailedError("; ".join(lines), may_retry=True, is_unproven=is_unproven)


class DistributedRunner:
    """The runner for a group: computes rank 0's part, and collects the last stage's tokens.

    Every rank executes moves and steps in the order in which they are sent. With several pipeline
    stages, the first stage computes a plan while the next stage is still computing the previous
    one.

    If a step fails on any rank, the whole group has to restart, because the other ranks are stuck
    in a collective operation that the failed rank has abandoned.
    """

    def __init__(
        self, own_runner: "Runner", processes: RankProcesses, layout: RankLayout, max_sequences: int
    ) -> None:
        """Create a runner that computes steps on `own_runner` and on the ranks of `processes`.

        `max_sequences` is the maximum number of sequences per step.
        """
        self._own_runner = own_runner
        self._processes = processes
        self._sampling_rank = layout.sampling_rank
        self._sent = SentHistories(max_sequences)
        self._scored: list[PromptLogprobs] = []

    def move(self, moves: Moves) -> None:
        """Copy KV blocks on every rank. See `ullage_engine.worker.engine.Runner`."""
        self._processes.broadcast(Move(moves))
        try:
            self._own_runner.move(moves)
        except Exception as error:
            raise GroupLostError(f"rank 0 cannot move blocks: {error}") from error

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        """Compute a step on every rank. See `ullage_engine.worker.engine.Runner`.

        Raises:
            GroupLostError: the group can no longer compute.
        """
        tokens = self._begin(plan)
        return tokens if self._sampling_rank == 0 else self.collect()

    def submit(self, plan: StepPlan) -> None:
        """Start a step of a group with several pipeline stages.

        Return once the first stage has computed its part and the next stage has received the
        result.

        Raises:
            GroupLostError: the group can no longer compute.
        """
        self._begin(plan)

    def collect(self) -> list[SampledToken]:
        """Wait for the tokens of the oldest submitted step that has not been collected yet.

        Raises:
            GroupLostError: the group can no longer compute.
        """
        answer = self._processes.wait_sampled(self._sampling_rank)
        self._scored += answer.scored
        return answer.tokens

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        """Return what the collected steps have scored. See `ullage_engine.worker.engine.Runner`."""
        scored = self._scored + self._own_runner.take_prompt_logprobs()
        self._scored = []
        return scored

    def sync(self) -> None:
        """Wait until all ranks have finished their commands. No step may be in flight."""
        self._processes.broadcast(Sync())
        self._own_runner.sync()
        self._processes.wait_done()

    def _begin(self, plan: StepPlan) -> list[SampledToken]:
        """Send a plan to every rank, compute rank 0's part, and return the tokens sampled there."""
        unsampled = Execute(for_rank(plan, None))
        for rank in self._processes.ranks:
            is_sampling = rank == self._sampling_rank
            command = Execute(for_rank(plan, self._sent)) if is_sampling else unsampled
            self._processes.send(rank, command)
        try:
            return self._own_runner.execute(plan)
        except Exception as error:
            raise GroupLostError(f"rank 0: {error}") from error
