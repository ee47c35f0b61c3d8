"""Keeps a worker running and every accepted request alive across the worker's deaths.

SupervisorError
    StartError    the worker says that it cannot serve: a configuration or model error
    GaveUpError   workers keep dying without serving
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
import zmq.asyncio

from ullage_engine.messages import (
    Admitted,
    Cancel,
    Fault,
    Loading,
    Ready,
    Rejected,
    RequestFailed,
    Shutdown,
    StartFailed,
    State,
    StepDone,
    Submit,
    ToServer,
)
from ullage_engine.server.board import Board
from ullage_engine.server.child import ChildProcess
from ullage_engine.server.ipc import ServerLink, clear_endpoints, endpoint
from ullage_engine.server.journal import Entry, Journal, Submission
from ullage_engine.server.life import WorkerLife
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.policy import RestartPolicy
from ullage_engine.server.watch import Watch
from ullage_rpc.errors import ServiceError, invalid

log = logging.getLogger("ullage.engine.supervisor")

WorkerCommand = Callable[[str], Sequence[str]]
"""The command line of a worker that connects to the given endpoint."""

# How often a worker is looked at.
_CHECK_S = 0.25
# What a dead worker sent last is still in the socket; more than this it cannot be.
_LAST_WORDS_S = 0.05


class SupervisorError(Exception):
    """The engine cannot go on; one line."""


class StartError(SupervisorError):
    """The first worker cannot serve and starting it again would not help."""


class GaveUpError(SupervisorError):
    """The restart budget is spent."""


class Supervisor:
    """Owner of the worker process, its link and its restarts."""

    def __init__(
        self,
        *,
        command: WorkerCommand,
        environment: Mapping[str, str],
        run_dir: Path,
        board: Board,
        journal: Journal,
        metrics: EngineMetrics,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008 - immutable
    ) -> None:
        self._command = command
        self._environment = environment
        self._run_dir = run_dir
        self._board = board
        self._journal = journal
        self._metrics = metrics
        self._policy = policy
        self._life: WorkerLife | None = None
        self._num_lives = 0
        self._num_failures = 0
        self._suspect: Submission | None = None
        """Runs alone until it has a token; everything else waits for that."""
        self._stopping = asyncio.Event()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the present worker; None between two."""
        return self._life.process.pid if self._life else None

    def submit(self, entries: list[Entry]) -> None:
        """Sends a request's open entries to the worker, now or when the next one is ready."""
        if self._life and self._life.ready_at is not None and self._suspect is None:
            self._send(self._life, Submission(entries, resumed=False))

    def cancel(self, entry: Entry) -> None:
        """Tells the worker that nobody waits for an entry any more."""
        if self._life and entry.submitted:
            is_answered = entry.finish is not None and entry.finish.reason == "stop"
            self._life.link.post(Cancel(request_id=entry.key, is_answered=is_answered))

    def inject_oom(self, after_steps: int) -> int | None:
        """Makes a coming step of the worker run out of memory; its process id, None if none."""
        if self._life is None or self._life.ready_at is None:
            return None
        self._life.link.post(Fault(after_steps=after_steps))
        return self._life.process.pid

    def kill_worker(self) -> int | None:
        """SIGKILL to the worker; its process id, None if there is none."""
        if self._life is None:
            return None
        self._life.process.kill()
        return self._life.process.pid

    async def run(self) -> None:
        """Runs workers, one after the other, until `stop`.

        Raises:
            SupervisorError: no worker can be had.
        """
        with zmq.asyncio.Context() as context:
            while not self._stopping.is_set():
                life = await self._live(context)
                if not self._stopping.is_set():
                    await self._recover(life)

    async def stop(self) -> None:
        """Ends the worker: asked, then made to. Returns when its process is gone."""
        self._stopping.set()
        life = self._life
        if life is None:
            return
        if life.ready_at is not None:
            life.link.post(Shutdown())
        else:  # one that is loading does not listen yet
            life.process.terminate()
        await asyncio.wait({life.exited}, timeout=self._policy.stop_grace_s)
        life.process.kill()
        await asyncio.wait({life.exited})

    async def _live(self, context: zmq.asyncio.Context) -> WorkerLife:
        """One worker from start to end, its last words included."""
        self._num_lives += 1
        life = await self._start(context)
        receiving = asyncio.create_task(self._receive(life))
        try:
            while not life.exited.done():
                await asyncio.wait(
                    {life.exited, receiving, life.link.sending},
                    timeout=_CHECK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if self._kill_if_useless(life, receiving):
                    await asyncio.wait({life.exited})
            await self._hear_last_words(life, receiving)
        finally:
            self._life = None
            life.process.kill()
            receiving.cancel()
            await asyncio.gather(receiving, life.exited, return_exceptions=True)
            await life.link.close()
        return life

    async def _start(self, context: zmq.asyncio.Context) -> WorkerLife:
        clear_endpoints(self._run_dir)
        address = endpoint(self._run_dir, self._num_lives)
        link = ServerLink(context, address)
        try:
            process = ChildProcess(self._command(address), self._environment)
        except OSError:
            await link.close()  # an open socket would keep the context from ending
            raise
        log.info("worker started", extra={"pid": process.pid, "start": self._num_lives})
        self._life = WorkerLife(process, link, Watch(self._policy))
        return self._life

    async def _receive(self, life: WorkerLife) -> None:
        while True:
            message = await life.link.receive()
            life.heard(message)
            self._handle(life, message)
            if self._suspect is not None and not self._policy.is_suspect(_stalls(self._suspect)):
                self._send_waiting(life)

    async def _hear_last_words(self, life: WorkerLife, receiving: asyncio.Task[None]) -> None:
        heard_at = None
        while heard_at != life.heard_at and not receiving.done():
            heard_at = life.heard_at
            await asyncio.wait({receiving}, timeout=_LAST_WORDS_S)

    def _kill_if_useless(self, life: WorkerLife, receiving: asyncio.Task[None]) -> bool:
        """A worker that speaks nonsense, or cannot be reached, is worth no more than a dead one."""
        if life.exited.done():
            return False
        pid = life.process.pid
        if receiving.done():
            log.error("worker sent what is not a message", exc_info=receiving.exception())
        elif life.link.sending.done():
            error = life.link.sending.exception()
            log.error("nothing can be sent to the worker; killing it", exc_info=error)
        elif reason := life.look(has_work=bool(self._journal.unfinished())):
            log.error("worker hangs; killing it", extra={"pid": pid, "reason": reason})
        else:
            return False
        life.process.kill()
        return True

    def _handle(self, life: WorkerLife, message: ToServer) -> None:
        match message:
            case StepDone(outputs=outputs):
                self._metrics.step_done()
                for output in outputs:
                    entry = self._journal.get(output.request_id)
                    if entry is not None and not entry.is_over:
                        self._metrics.tokens(entry, len(output.token_ids))
                        entry.take(output)
                        if entry.is_over and not output.finish:
                            self.cancel(entry)
            case State(state=state):
                self._metrics.worker_state(state)
                self._board.worker_state(state)
            case Admitted(request_id=request_id):
                self._admitted(request_id)
            case Rejected():
                self._rejected(message)
            case RequestFailed():
                self._request_failed(message)
            case Loading():
                life.progress(message)
            case Ready():
                self._ready(life, message)
            case StartFailed(error=error, may_retry=may_retry):
                life.start_error, life.may_retry = error, may_retry

    def _ready(self, life: WorkerLife, ready: Ready) -> None:
        life.ready_at = time.monotonic()
        took = round(life.ready_at - life.started_at, 3)
        waiting = self._journal.unfinished()
        log.info("worker ready", extra={"seconds": took, "resumed_requests": len(waiting)})
        self._metrics.worker_ready(ready)
        self._board.worker_ready(ready)
        self._send_waiting(life)

    def _send_waiting(self, life: WorkerLife) -> None:
        """Sends what no worker has: the oldest suspect alone, or everything when there is none."""
        waiting = list(self._journal.submissions())
        suspects = [each for each in waiting if self._policy.is_suspect(_stalls(each))]
        self._suspect = suspects[0] if suspects else None
        for submission in suspects[:1] or waiting:
            self._send(life, submission)

    def _send(self, life: WorkerLife, submission: Submission) -> None:
        for entry in submission.entries:
            entry.submitted = True
        life.asked()
        requests = [entry.engine_request() for entry in submission.entries]
        life.link.post(Submit(requests=requests, resumed=submission.resumed))

    def _admitted(self, request_id: str) -> None:
        entry = self._journal.get(request_id)
        if entry is not None:
            entry.admitted = True

    def _rejected(self, rejected: Rejected) -> None:
        """Only new requests are rejected: one that a worker took before waits for memory there."""
        entry = self._journal.get(rejected.request_id)
        if entry is not None:
            entry.fail(rejection_error(rejected))

    def _request_failed(self, failed: RequestFailed) -> None:
        entry = self._journal.get(failed.request_id)
        if entry is not None and failed.field:
            entry.fail(invalid(failed.field, f"{failed.field}: {failed.message}"))
        elif entry is not None:
            self._board.fault(0.9)
            entry.fail(ServiceError(grpc.StatusCode.INTERNAL, "REQUEST_FAILED", failed.message))

    async def _recover(self, life: WorkerLife) -> None:
        """Decides what a worker's end means, and waits as long as the policy says."""
        status = life.exited.result()
        log.warning("worker ended", extra={"pid": life.process.pid, "status": status})
        if self._board.ready is None and (status == 2 or not life.may_retry):
            raise StartError(life.start_error or "the worker could not start; see its log above")
        self._board.worker_lost()
        self._metrics.worker_restarts.inc()
        self._resume_entries()
        self._num_failures = 1 if life.has_served(self._policy) else self._num_failures + 1
        self._board.set_live(not self._policy.is_last_chance(self._num_failures))
        backoff = self._policy.backoff(self._num_failures)
        if backoff is None:
            reason = life.start_error or f"exit status {status}"
            raise GaveUpError(f"{self._num_failures} workers in a row ended early ({reason})")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff):
                await self._stopping.wait()

    def _resume_entries(self) -> None:
        self._suspect = None
        for entry in self._journal.unfinished():
            if not entry.submitted:
                continue
            entry.resume()
            if entry.stalled_resumes > self._policy.max_stalled_resumes:
                entry.fail(_worker_lost(entry.stalled_resumes))


def _stalls(submission: Submission) -> int:
    """Deaths of workers since the last token of what went together, as far as they matter now."""
    return max((e.stalled_resumes for e in submission.entries if not e.is_over), default=0)


def rejection_error(rejected: Rejected) -> ServiceError:
    """What the client of a rejected request is told."""
    facts = {
        "needed_bytes": str(rejected.needed_bytes),
        "available_bytes": str(rejected.available_bytes),
    }
    if rejected.never:
        return ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "KV_NEVER_FITS",
            rejected.message,
            metadata={"field": "input", **facts},
        )
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "KV_HEADROOM",
        rejected.message,
        metadata=facts,
        retry_after_s=rejected.retry_after_s,
    )


def _worker_lost(num_resumes: int) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "WORKER_LOST",
        f"the worker died {num_resumes} times over this request without a new token; "
        "send a shorter one",
    )
