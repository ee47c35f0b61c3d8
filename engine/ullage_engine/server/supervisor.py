"""Keeps a worker running and every accepted request alive across the worker's deaths.

SupervisorError
    StartError    the worker says that it cannot serve: a configuration or model error
    GaveUpError   workers keep dying without serving
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.fingerprint import Fingerprint, describe, differences
from ullage_engine.kv_tiers.tiers import KvTiers
from ullage_engine.protocol.errors import (
    GROUP_LOST,
    HOST_SHORT,
    MEMORY_SHORT,
    OUT_OF_MEMORY,
    one_line,
)
from ullage_engine.protocol.messages import (
    AdapterAdded,
    AddAdapter,
    Admitted,
    Cancel,
    Embedding,
    Fault,
    KvDamaged,
    KvOffer,
    KvRead,
    KvWanted,
    KvWritten,
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
    TokenOutput,
    ToServer,
)
from ullage_engine.server.adapters import WorkerEndedError
from ullage_engine.server.hang_detector import HangDetector
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import (
    Journal,
    JournalEntry,
    Submission,
    in_question,
    submissions,
)
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.server_link import ServerLink, clear_endpoints, endpoint
from ullage_engine.server.worker_process import ChildProcess, StandbyWorker, WorkerHandle
from ullage_kv import FileTierError

log = logging.getLogger("ullage.engine.supervisor")

WorkerCommand = Callable[[str], Sequence[str]]
"""The command line of a worker that connects to the given endpoint."""


@dataclass(frozen=True)
class WorkerLaunch:
    """The command line and the environment of an engine's workers."""

    command: WorkerCommand
    environment: Mapping[str, str]
    uses_tiers: bool = False
    """Whether these workers keep KV outside the device."""


RANK_MODULE = "ullage_engine.worker.rank_process"
"""In the command lines of native ranks."""
# How often a worker is looked at.
_CHECK_S = 0.25
# What a dead worker sent last is still in the socket; more than this it cannot be.
_LAST_WORDS_S = 0.05
_SHORT_RETRY_S = 10.0
"""Seconds after which others may have given back memory that they took."""


class SupervisorError(Exception):
    """The engine cannot go on; the message is one line."""


class StartError(SupervisorError):
    """The first worker cannot serve and starting it again would not help."""


class GaveUpError(SupervisorError):
    """The restart budget is spent: workers keep dying without serving."""


class WorkerSupervisor:
    """Owns the worker process, its link and its restarts."""

    def __init__(
        self,
        *,
        run_dir: Path,
        engine_status: EngineStatus,
        journal: Journal,
        metrics: EngineMetrics,
        unservable: Callable[[Ready], str] = lambda _: "",
        adapters: Callable[[], list[AddAdapter]] = list,
        has_standby: bool = False,
        policy: RestartPolicy = RestartPolicy(),  # noqa: B008 - immutable
    ) -> None:
        self._run_dir = run_dir
        self._engine_status = engine_status
        self._journal = journal
        self._metrics = metrics
        self._unservable = unservable
        """Why the server cannot serve a worker's model; empty if it can."""
        self._adapters = adapters
        """LoRA adapters that every worker has to know before it gets requests."""
        self._adding: dict[str, asyncio.Future[str]] = {}
        """Adapters that the worker loads, by what it calls them."""
        self._has_standby = has_standby
        """Whether the next worker is started beside a ready one, and waits."""
        self._standby: StandbyWorker | None = None
        self._standby_at = 0.0
        """When the next one may be started."""
        self._policy = policy
        self._worker: WorkerHandle | None = None
        self._num_starts = 0
        self._num_failures = 0
        self._num_unproven = 0
        """Starts in a row that computed otherwise than a verified one."""
        self._kv: KvTiers | None = None
        self._suspect: Submission | None = None
        """The request that runs alone until a worker has decoded it; everything else waits."""
        self._batch_limit = 1.0
        self._profile: asyncio.Future[ProfileDone] | None = None
        self._stopping = asyncio.Event()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the present worker; None between two."""
        return self._worker.process.pid if self._worker else None

    def serving_pids(self) -> list[int]:
        """Return the process ids of a worker that is ready, and of its other ranks."""
        worker = self._worker
        if worker is None or worker.ready_at is None:
            return []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(worker.process.pid).children(recursive=True)
            ranks = [each.pid for each in children if RANK_MODULE in each.cmdline()]
            return [worker.process.pid, *ranks]
        return [worker.process.pid]

    def submit(self, entries: list[JournalEntry]) -> None:
        """Send a request's open entries to the worker, now or when the next one is ready."""
        if self._worker and self._worker.ready_at is not None and self._suspect is None:
            for submission in submissions(entries):
                self._send(self._worker, submission)

    def cancel(self, entry: JournalEntry) -> None:
        """Cancel an entry in the worker, since its client has gone or has its answer."""
        if self._worker and entry.submitted:
            is_answered = entry.finish is not None and entry.finish.reason == "stop"
            self._worker.link.post(Cancel(request_id=entry.key, is_answered=is_answered))

    def limit_batch(self, share: float) -> None:
        """Bounds the batch of this worker and of those after it to a share of the largest."""
        self._batch_limit = share
        if self._worker and self._worker.ready_at is not None:
            self._worker.link.post(LimitBatch(share=share))

    def inject_oom(self, after_steps: int) -> int | None:
        """Make a coming step of the worker run out of memory; return its process id, if any."""
        if self._worker is None or self._worker.ready_at is None:
            return None
        self._worker.link.post(Fault(after_steps=after_steps))
        return self._worker.process.pid

    def start_profile(self, start: StartProfile) -> "asyncio.Future[ProfileDone]":
        """Has the worker look at its coming steps; returns what it answers with.

        The future's error is a ServiceError when the worker ends before.

        Raises:
            ServiceError: no worker is ready, or it is at one already.
        """
        if self._worker is None or self._worker.ready_at is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "NO_ENGINE",
                "no worker is ready; try again",
                retry_after_s=1.0,
            )
        if self._profile is not None:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "PROFILE_RUNNING",
                "another profile is under way; come back when it has ended",
            )
        self._profile = asyncio.get_running_loop().create_future()
        self._worker.link.post(start)
        return self._profile

    def stop_profile(self) -> None:
        """End a look at steps before its time; its answer comes even so."""
        if self._worker is not None and self._profile is not None:
            self._worker.link.post(StopProfile())

    def _profile_done(self, done: ProfileDone | None) -> None:
        profile = self._profile
        self._profile = None
        if profile is None or profile.done():
            return
        if done is None:
            profile.set_exception(
                ServiceError(
                    grpc.StatusCode.UNAVAILABLE,
                    "WORKER_LOST",
                    "the worker ended during the profile; begin another one",
                )
            )
            profile.exception()  # whoever asked may have gone
        else:
            profile.set_result(done)

    async def add_adapter(self, message: AddAdapter) -> str:
        """Have the serving worker load a LoRA adapter; return the reason if it cannot, else an
        empty string.

        Raises:
            WorkerEndedError: it ended before it answered.
        """
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._adding[message.name] = answer
        if self._worker is not None and self._worker.ready_at is not None:
            self._worker.link.post(message)
        try:
            return await answer
        finally:
            self._adding.pop(message.name, None)

    def remove_adapter(self, name: str) -> None:
        """Have the worker remove a LoRA adapter; later workers do not load it."""
        if self._worker is not None and self._worker.ready_at is not None:
            self._worker.link.post(RemoveAdapter(name=name))

    def _adapter_added(self, added: AdapterAdded) -> None:
        answer = self._adding.get(added.name)
        if answer is not None and not answer.done():
            answer.set_result(added.error)

    def _lose_additions(self) -> None:
        for answer in self._adding.values():
            if not answer.done():
                answer.set_exception(WorkerEndedError())

    def kill_worker(self) -> int | None:
        """Send SIGKILL to the worker; return its process id, None without a worker."""
        if self._worker is None:
            return None
        self._worker.process.kill()
        return self._worker.process.pid

    async def run(self, launch: WorkerLaunch, kv: KvTiers | None = None) -> None:
        """Run workers, one after the other, until `stop`.

        `kv`: tiers of KV that all of them use; None: there are none.

        Raises:
            SupervisorError: no worker can be had.
        """
        self._kv = kv
        try:
            while not self._stopping.is_set():
                worker = await self._run_worker(launch)
                if not self._stopping.is_set():
                    await self._recover(worker)
        finally:
            if self._standby is not None:
                await self._standby.close()

    async def stop(self) -> None:
        """Ask the worker to end, then kills it. Returns when its process is gone."""
        self._stopping.set()
        worker = self._worker
        if worker is None:
            return
        if worker.ready_at is not None:
            worker.link.post(Shutdown())
        else:  # one that is loading does not listen yet
            worker.process.terminate()
        await asyncio.wait({worker.exited}, timeout=self._policy.stop_grace_s)
        worker.process.kill()
        await asyncio.wait({worker.exited})

    async def _run_worker(self, launch: WorkerLaunch) -> WorkerHandle:
        """Run one worker from start to end, its last messages included."""
        self._num_starts += 1
        worker = await self._start(launch)
        receiving = asyncio.create_task(self._receive(worker))
        try:
            while not worker.exited.done():
                ends: set[asyncio.Future[Any]] = {worker.exited, receiving, worker.link.failure}
                await asyncio.wait(ends, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                if self._kill_if_broken(worker, receiving):
                    await asyncio.wait({worker.exited})
                    continue
                self._go_on_from_trial(worker)
                if self._has_standby and worker.ready_at is not None:
                    await self._keep_standby(launch)
            await self._drain_messages(worker, receiving)
        finally:
            self._worker = None
            self._profile_done(None)
            worker.process.kill()
            receiving.cancel()
            await asyncio.gather(receiving, worker.exited, return_exceptions=True)
            if self._kv is not None:
                self._kv.worker_lost()
            worker.link.close()
        return worker

    async def _start(self, launch: WorkerLaunch) -> WorkerHandle:
        clear_endpoints(self._run_dir)
        address = endpoint(self._run_dir, self._num_starts)
        link = ServerLink(address)
        standby = self._standby
        self._standby = None
        if standby is not None and standby.failure():
            await standby.close()
            standby = None
        try:
            if standby is not None:
                process = standby.begin()
            else:
                process = ChildProcess(self._command(launch, address), launch.environment)
        except OSError:
            link.close()
            raise
        log.info("worker started", extra={"pid": process.pid, "start": self._num_starts})
        self._worker = WorkerHandle(process, link, HangDetector(self._policy))
        return self._worker

    def _command(self, launch: WorkerLaunch, address: str) -> list[str]:
        """Return a worker's command line."""
        command = list(launch.command(address))
        return command if self._kv is None else [*command, *self._kv.worker_options]

    async def _keep_standby(self, launch: WorkerLaunch) -> None:
        """Start the worker that is to be the next one, and replace it when it is lost."""
        now = time.monotonic()
        if self._standby is None and now >= self._standby_at:
            self._standby_at = now + self._policy.max_backoff_s
            command = self._command(launch, endpoint(self._run_dir, self._num_starts + 1))
            try:
                self._standby = StandbyWorker(
                    command, launch.environment, self._policy.standby_import_s
                )
            except OSError as error:
                log.warning("no worker can be started to stand by: %s", error)
        elif self._standby is not None and (reason := self._standby.failure()):
            log.warning("the worker that stood by is lost", extra={"reason": reason})
            standby = self._standby
            self._standby = None
            await standby.close()

    async def _receive(self, worker: WorkerHandle) -> None:
        """Handle a worker's messages for ever.

        Raises:
            msgspec.MsgspecError: the worker sent something that is not a message.
        """
        while True:
            message = await worker.link.receive()
            # An error in here is the server's own, and no reason to end a worker that is well.
            try:
                worker.on_message(message)
                if isinstance(message, Ready) and not await self._open_tiers(worker, message):
                    continue
                self._handle(worker, message)
                self._go_on_from_trial(worker)
            except Exception as error:
                log.exception("the server failed over a worker's %s", type(message).__name__)
                self._on_own_failure(worker, message, error)

    def _on_own_failure(self, worker: WorkerHandle, message: ToServer, error: Exception) -> None:
        """Limit the damage of an error of this server to the request that a message is about."""
        self._engine_status.fault(0.9)
        match message:
            case Admitted() | Rejected() | RequestFailed():
                self._fail_internally(message.request_id)
            case ProfileDone():
                self._profile_done(None)
            case Ready() | KvOffer() | KvWritten() | KvWanted() | KvRead() | KvDamaged():
                # It waits for an answer that does not come, and would take the next one for it:
                # KV in the wrong place, and wrong tokens. No request is to blame.
                worker.start_error = f"the server failed: {one_line(error)}"
                worker.is_blameless = True
                worker.process.kill()

    def _fail_internally(self, request_id: str) -> None:
        """End a request over which this server failed, here and in the worker."""
        entry = self._journal.get(request_id)
        if entry is not None:
            entry.fail(_internal())
            self.cancel(entry)

    async def _drain_messages(self, worker: WorkerHandle, receiving: asyncio.Task[None]) -> None:
        last_message_at = None
        while last_message_at != worker.last_message_at and not receiving.done():
            last_message_at = worker.last_message_at
            await asyncio.wait({receiving}, timeout=_LAST_WORDS_S)

    def _kill_if_broken(self, worker: WorkerHandle, receiving: asyncio.Task[None]) -> bool:
        """Kills a worker that hangs, sends no valid messages or cannot be reached."""
        if worker.exited.done():
            return False
        pid = worker.process.pid
        if receiving.done():
            log.error("worker sent what is not a message", exc_info=receiving.exception())
        elif worker.link.failure.done():
            error = worker.link.failure.exception()
            log.error("nothing can be sent to the worker; killing it", exc_info=error)
        elif reason := worker.check_health(has_work=bool(self._journal.unfinished())):
            log.error("worker hangs; killing it", extra={"pid": pid, "reason": reason})
        else:
            return False
        worker.process.kill()
        return True

    def _handle(self, worker: WorkerHandle, message: ToServer) -> None:
        match message:
            case StepDone(outputs=outputs, embeddings=embeddings):
                self._metrics.step_done()
                answers: list[TokenOutput | Embedding] = [*outputs, *embeddings]
                for answer in answers:
                    # One by one: a failure over one must not cost the others their tokens.
                    try:
                        self._take_answer(answer)
                    except Exception:
                        log.exception("the server failed over a token of %s", answer.request_id)
                        self._engine_status.fault(0.9)
                        self._fail_internally(answer.request_id)
            case KvOffer() | KvWritten() | KvWanted() | KvRead() | KvDamaged():
                if self._kv is not None:
                    self._kv.on_message(message)
            case StateReport(state=state):
                self._metrics.worker_state(state)
                self._engine_status.worker_state(state)
            case ProfileDone():
                self._profile_done(message)
            case AdapterAdded():
                self._adapter_added(message)
            case Admitted(request_id=request_id):
                self._admitted(request_id)
            case Rejected():
                self._rejected(message)
            case RequestFailed():
                self._request_failed(message)
            case Loading():
                worker.on_progress(message)
            case Ready():
                self._ready(worker, message)
            case StartFailed():
                worker.start_error = message.error
                worker.may_retry = message.may_retry
                worker.is_unproven = message.is_unproven

    def _take_answer(self, answer: TokenOutput | Embedding) -> None:
        entry = self._journal.get(answer.request_id)
        if entry is None or entry.is_over:
            return
        if isinstance(answer, Embedding):
            self._metrics.embedding(entry)
            entry.set_embedding(answer)
            return

        num_before = len(entry.output_ids)
        entry.append_output(answer)
        # Not those behind a stop string.
        self._metrics.tokens(entry, len(entry.output_ids) - num_before)
        if entry.is_over and not answer.finish:
            self.cancel(entry)

    def _ready(self, worker: WorkerHandle, ready: Ready) -> None:
        if problem := self._unservable(ready):
            worker.start_error = problem
            worker.may_retry = False
            worker.process.kill()
            return
        worker.ready_at = time.monotonic()
        self._num_unproven = 0
        took = round(worker.ready_at - worker.started_at, 3)
        waiting = self._journal.unfinished()
        extra = {"stage": "ready", "seconds": took, "resumed_requests": len(waiting)}
        log.info("worker ready", extra=extra)
        self._metrics.worker_ready(ready)
        if before := self._engine_status.ready:
            self._compare_fingerprints(before.fingerprint, ready.fingerprint)
        self._engine_status.worker_ready(ready)
        if self._batch_limit < 1.0:  # before it starts any request
            worker.link.post(LimitBatch(share=self._batch_limit))
        for addition in self._adapters():
            worker.link.post(addition)
        self._send_waiting(worker)

    def _compare_fingerprints(self, before: Fingerprint, now: Fingerprint) -> None:
        """Mark the answers that a worker with another fingerprint than the last one's goes on
        with."""
        differing = differences({"before": before, "now": now})
        if not differing:
            return
        extra = {"fingerprint": now.digest, "reason": describe(differing)}
        log.warning("the new worker computes otherwise than the last one", extra=extra)
        for entry in self._journal.unfinished():
            entry.on_other_fingerprint()

    async def _open_tiers(self, worker: WorkerHandle, ready: Ready) -> bool:
        """Let a worker use the tiers of KV; False: they cannot be had, and it is killed."""
        if self._kv is None:
            return True
        try:
            await self._kv.worker_ready(ready, worker.link.post)
        except FileTierError as error:
            worker.start_error = f"memory.tiers.file.path: {error}"
            worker.may_retry = False
            worker.process.kill()
            return False
        return True

    def _send_waiting(self, worker: WorkerHandle) -> None:
        """Send what the worker does not have: the oldest suspect alone, or everything when there is
        none."""
        waiting = list(self._journal.submissions())
        suspects = [each for each in waiting if self._runs_alone(worker, each)]
        self._suspect = suspects[0] if suspects else None
        for submission in suspects[:1] or waiting:
            self._send(worker, submission)

    def _go_on_from_trial(self, worker: WorkerHandle) -> None:
        """Send what waits for a suspect, once the worker has survived it for long enough."""
        if self._suspect is not None and not self._runs_alone(worker, self._suspect):
            self._send_waiting(worker)

    def _runs_alone(self, worker: WorkerHandle, submission: Submission) -> bool:
        if worker.ready_at is None:
            return False
        deaths = max((each.deaths for each in submission.entries if not each.is_over), default=0)
        return self._policy.runs_alone(deaths, time.monotonic() - worker.ready_at)

    def _send(self, worker: WorkerHandle, submission: Submission) -> None:
        """Send requests to the worker; requests over which this server fails end."""
        for entry in submission.entries:
            entry.submitted = True

        try:
            requests = [entry.engine_request() for entry in submission.entries]
            if self._kv is not None:
                requests = self._kv.with_stored(requests)
        except Exception:
            log.exception("the server failed over %s", submission.entries[0].request_key)
            self._engine_status.fault(0.9)
            for entry in submission.entries:
                entry.fail(_internal())
            return

        worker.on_submit()
        worker.link.post(Submit(requests=requests, resumed=submission.resumed))

    def _admitted(self, request_id: str) -> None:
        entry = self._journal.get(request_id)
        if entry is not None:
            entry.take()

    def _rejected(self, rejected: Rejected) -> None:
        """Fails a new request; one that a worker had admitted waits for memory there instead."""
        entry = self._journal.get(rejected.request_id)
        if entry is not None:
            entry.fail(rejection_error(rejected))

    def _request_failed(self, failed: RequestFailed) -> None:
        entry = self._journal.get(failed.request_id)
        if entry is not None and failed.field:
            entry.fail(invalid(failed.field, f"{failed.field}: {failed.message}"))
        elif entry is not None:
            self._engine_status.fault(0.9)
            entry.fail(ServiceError(grpc.StatusCode.INTERNAL, "REQUEST_FAILED", failed.message))

    async def _recover(self, worker: WorkerHandle) -> None:
        """Classify a worker's end, and wait as long as the policy says."""
        status = worker.exited.result()
        extra = {"stage": f"worker ended with status {status}", "pid": worker.process.pid}
        log.warning("worker ended", extra={**extra, "status": status})
        if self._engine_status.ready is None and (status == 2 or not worker.may_retry):
            raise StartError(worker.start_error or "the worker could not start; see its log above")
        self._engine_status.worker_lost()
        self._lose_additions()
        self._metrics.worker_restarts.inc()
        self._metrics.collective_errors.inc(_is_group_lost(status, self._engine_status.ready))
        is_killed_for_memory = self._count_oom(worker, status)
        is_short = status in (MEMORY_SHORT, HOST_SHORT) or is_killed_for_memory
        self._resume_entries(worker, is_short=is_short)
        if worker.is_unproven and await self._take_unproven(worker.start_error):
            return
        self._num_failures = 1 if worker.has_served(self._policy) else self._num_failures + 1
        self._engine_status.set_live(not self._policy.is_last_chance(self._num_failures))
        backoff = self._policy.backoff(self._num_failures)
        if backoff is None:
            reason = worker.start_error or f"exit status {status}"
            raise GaveUpError(f"{self._num_failures} workers in a row ended early ({reason})")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff):
                await self._stopping.wait()

    def _count_oom(self, worker: WorkerHandle, status: int) -> bool:
        """Count a worker's end by lack of memory that it could not report; return whether the
        kernel killed it for that."""
        is_killed = status in (-signal.SIGKILL, GROUP_LOST) and worker.oom_kills.recent() > 0
        if is_killed:
            log.error("the kernel killed the worker, since the container has no memory left")
        if is_killed or status in (OUT_OF_MEMORY, HOST_SHORT):
            self._metrics.workers_ran_out_of_memory(1)
        return is_killed

    async def _take_unproven(self, reason: str) -> bool:
        """Count a start that computed otherwise than a verified one; after too many in a row serve
        nothing until `stop`, and return True.

        Raises:
            GaveUpError: there were too many before any worker served.
        """
        self._num_unproven += 1
        self._metrics.start_proof_failures.inc()
        extra = {"reason": reason, "in_a_row": self._num_unproven}
        log.error("a worker failed the proof of its start", extra=extra)
        if self._num_unproven < self._policy.max_unproven:
            return False

        message = f"{self._num_unproven} starts in a row failed their proof, the last one: {reason}"
        if self._engine_status.ready is None:
            # Healing leaves a pod alone that still starts. The last words of a container that ends
            # go to the service's condition.
            raise GaveUpError(message)
        log.error("this engine stays out: %s", message)
        self._engine_status.stay_out(message)
        self._journal.end_all(lambda entry: entry.fail(_stays_out(message)))
        await self._stopping.wait()
        return True

    def _resume_entries(self, worker: WorkerHandle, *, is_short: bool) -> None:
        """Make requests ready for the next worker; give up those over which too many died.

        `is_short`: others had taken memory that the worker needed, for which no request is to
        blame.
        """
        self._suspect = None
        sent = [entry for entry in self._journal.unfinished() if entry.submitted]
        suspects = [] if worker.is_blameless else in_question(sent)
        is_alone = len({entry.request_key for entry in suspects}) == 1
        for entry in suspects:
            entry.blame(was_alone=is_alone and not is_short)

        for entry in sent:
            entry.resume()
            if served := entry.job.served:
                served.happened("resumed", reason="worker", output_tokens=len(entry.output_ids))

        for entry in suspects:
            if self._policy.is_given_up(entry.deaths, entry.lone_deaths, is_short=is_short):
                entry.fail(_memory_short() if is_short else _worker_lost(entry.deaths))


def _is_group_lost(status: int, ready: Ready | None) -> bool:
    """Whether ranks that compute together were lost, by their worker's status."""
    has_ranks = ready is not None and len(ready.ranks) > 1
    # NCCL's watchdog aborts the process whose collective failed.
    lost_by = (OUT_OF_MEMORY, HOST_SHORT, -signal.SIGABRT)
    return status == GROUP_LOST or (has_ranks and status in lost_by)


def rejection_error(rejected: Rejected) -> ServiceError:
    """Return the error that the client of a rejected request gets."""
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


def _memory_short() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "MEMORY_SHORT",
        "other processes hold memory of the device that this engine needs, or its container is at "
        "resources.limits.memory; try again",
        retry_after_s=_SHORT_RETRY_S,
    )


def _stays_out(message: str) -> ServiceError:
    # As requests that come later: it is the engine's fault, and speaks against no request.
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE, "NO_ENGINE", message, retry_after_s=_SHORT_RETRY_S
    )


def _worker_lost(num_deaths: int) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "WORKER_LOST",
        f"the worker died {num_deaths} times over this request at its first tokens; "
        "send a shorter one",
    )


def _internal() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "INTERNAL",
        "the engine's server failed over this request; its log says why",
    )
