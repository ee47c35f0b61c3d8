"""Supervises the worker: restarts it when it dies, and keeps accepted requests alive meanwhile.

SupervisorError
    StartError    the worker reports that it cannot serve: a configuration or model error
    GaveUpError   workers keep dying without serving
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

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
    Fault,
    Hang,
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
    ToServer,
)
from ullage_engine.server.dispatch import Dispatcher
from ullage_engine.server.fork_server import ForkServerProcess
from ullage_engine.server.hang_detector import HangDetector
from ullage_engine.server.health import EngineStatus
from ullage_engine.server.journal import Journal, JournalEntry
from ullage_engine.server.metrics import EngineMetrics
from ullage_engine.server.restart_policy import RestartPolicy
from ullage_engine.server.server_link import ServerLink, clear_endpoints, endpoint
from ullage_engine.server.worker_calls import AdapterCalls, ProfileCall
from ullage_engine.server.worker_process import ChildProcess, Standby, WorkerHandle, WorkerProcess
from ullage_kv import FileTierError

log = logging.getLogger("ullage.engine.supervisor")

RANK_MODULE = "ullage_engine.worker.rank_process"
"""Module name that identifies native ranks in process command lines."""

_CHECK_S = 0.25
"""Interval between checks of a worker, in seconds."""
_LAST_WORDS_S = 0.05
"""Seconds of silence after which a dead worker's socket is assumed to be drained."""
_SERVER_FAULT = 0.9
"""Factor applied to the health score when this server fails to handle a message."""
_DOES_NOT_END = "the killed worker does not end"
"""Why an engine is out of service whose worker outlives its SIGKILL, in a GPU driver that hangs."""

WorkerOptions = Callable[[str], list[str]]
"""Function that returns the options of a worker that connects to the given endpoint."""


@dataclass(frozen=True)
class WorkerLaunch:
    """Command line and environment with which an engine's workers are started."""

    program: Sequence[str]
    """Beginning of each worker's command line. The worker's options follow it."""
    options: WorkerOptions
    environment: Mapping[str, str]
    fork_server: Sequence[str] = ()
    """Command line of the process from which workers are forked, or empty to execute each one."""
    model_source: str = ""
    """Source of the model, as configured."""
    uses_tiers: bool = False
    """Whether these workers keep KV in tiers outside the device."""


class SupervisorError(Exception):
    """The engine cannot continue. The message is one line."""


class StartError(SupervisorError):
    """Raised if the first worker reports that it cannot serve, and restarting would not help."""


class GaveUpError(SupervisorError):
    """Raised if the restart limit is reached, because workers keep dying without serving."""


class WorkerSupervisor:
    """Owns the worker process, its connection and its restarts."""

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
        """Create a supervisor. No worker is started before `run` is called.

        Args:
            run_dir: directory for the workers' sockets.
            unservable: returns why a worker's model cannot be served, or "" if it can.
            adapters: returns the LoRA adapters that every worker loads before it receives requests.
            has_standby: whether to keep a standby worker ready while another worker serves, if
                workers are executed.
        """
        self._run_dir = run_dir
        self._engine_status = engine_status
        self._metrics = metrics
        self._unservable = unservable
        self._adapters = adapters
        self._policy = policy

        self._dispatcher = Dispatcher(journal, engine_status, metrics, policy)
        self._profile = ProfileCall()
        self._adapter_calls = AdapterCalls()
        self._standby = Standby(policy) if has_standby else None
        self._fork_server: ForkServerProcess | None = None

        self._kv: KvTiers | None = None
        self._worker: WorkerHandle | None = None
        self._batch_limit = 1.0
        self._num_starts = 0
        self._num_failures = 0
        """Number of consecutive workers that exited without having served."""
        self._num_unproven = 0
        """Number of consecutive startups whose results differ from those of a verified startup."""
        self._stopping = asyncio.Event()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the current worker, or None if there is none."""
        return self._worker.process.pid if self._worker else None

    def serving_pids(self) -> list[int]:
        """Return the process ids of the ready worker and its other ranks."""
        worker = self._worker
        if worker is None or worker.ready_at is None:
            return []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(worker.process.pid).children(recursive=True)
            ranks = [each.pid for each in children if RANK_MODULE in each.cmdline()]
            return [worker.process.pid, *ranks]
        return [worker.process.pid]

    def submit(self, entries: list[JournalEntry]) -> None:
        """Send a request's unfinished samples, now or once the next worker is ready."""
        self._dispatcher.submit(self._worker, entries)

    def cancel(self, entry: JournalEntry) -> None:
        """Make the worker drop a sample whose client has disconnected or needs no more output."""
        self._dispatcher.cancel(self._worker, entry)

    def limit_batch(self, share: float) -> None:
        """Limit the batch of this and later workers to a fraction of the maximum batch size."""
        self._batch_limit = share
        if self._worker and self._worker.ready_at is not None:
            self._worker.link.post(LimitBatch(share=share))

    def inject_oom(self, after_steps: int) -> int | None:
        """Inject an out-of-memory error into an upcoming step. Return the worker's process id."""
        if self._worker is None or self._worker.ready_at is None:
            return None
        self._worker.link.post(Fault(after_steps=after_steps))
        return self._worker.process.pid

    def inject_hang(self) -> int | None:
        """Make the worker compute without end. Return the worker's process id."""
        if self._worker is None or self._worker.ready_at is None:
            return None
        self._worker.link.post(Hang())
        return self._worker.process.pid

    def start_profile(self, start: StartProfile) -> "asyncio.Future[ProfileDone]":
        """Tell the worker to profile its next steps. Return a future for its reply.

        The future fails with a ServiceError if the worker exits before it replies.

        Raises:
            ServiceError: no worker is ready, or a profile is already running.
        """
        return self._profile.start(self._worker, start)

    def stop_profile(self) -> None:
        """Stop the running profile early. The worker still sends what it has recorded."""
        self._profile.stop(self._worker)

    async def add_adapter(self, message: AddAdapter) -> str:
        """Load a LoRA adapter into the worker. Return the error message, or "" on success.

        Raises:
            WorkerEndedError: the worker exited before it replied.
        """
        return await self._adapter_calls.add(self._worker, message)

    def remove_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from the worker. Later workers do not load the adapter."""
        if self._worker is not None and self._worker.ready_at is not None:
            self._worker.link.post(RemoveAdapter(name=name))

    def kill_worker(self) -> int | None:
        """Send SIGKILL to the worker. Return its process id, or None if there is no worker."""
        if self._worker is None:
            return None
        self._kill(self._worker)
        return self._worker.process.pid

    async def run(self, launch: WorkerLaunch, kv: KvTiers | None = None) -> None:
        """Run workers, one after another, until `stop` is called.

        Args:
            launch: how to start each worker.
            kv: KV tiers shared by all workers, or None.

        Raises:
            SupervisorError: no worker can serve.
        """
        self._kv = self._dispatcher.kv = kv
        if launch.fork_server:
            self._fork_server = ForkServerProcess(launch.fork_server, launch.environment)
            self._standby = None
        try:
            while not self._stopping.is_set():
                worker = await self._run_worker(launch)
                if not self._stopping.is_set():
                    await self._recover(worker)
        finally:
            if self._standby is not None:
                await self._standby.close()
            if self._fork_server is not None:
                await self._fork_server.close()

    async def stop(self) -> None:
        """Ask the worker to exit, kill it if necessary, and wait until its process has exited."""
        self._stopping.set()
        worker = self._worker
        if worker is None:
            return

        if worker.ready_at is not None:
            worker.link.post(Shutdown())
        else:  # a worker that is loading does not read messages yet
            worker.process.terminate()
        await asyncio.wait({worker.exited}, timeout=self._policy.stop_grace_s)
        self._kill(worker)
        await asyncio.wait({worker.exited})

    async def _run_worker(self, launch: WorkerLaunch) -> WorkerHandle:
        """Run one worker from startup to its last message."""
        self._num_starts += 1
        worker = await self._start(launch)
        receiving = asyncio.create_task(self._receive(worker))
        try:
            while not worker.exited.done():
                ends: set[asyncio.Future[Any]] = {worker.exited, receiving, worker.link.failure}
                await asyncio.wait(ends, timeout=_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                self._kill_if_broken(worker, receiving)
                if worker.is_killed:
                    await self._outlast(worker)
                    continue
                self._dispatcher.end_trial(worker)
                self._share_vocabulary(launch)
                if self._standby is not None and worker.ready_at is not None:
                    address = endpoint(self._run_dir, self._num_starts + 1)
                    command = partial(self._command, launch, address)
                    await self._standby.keep(command, launch.environment)
            await self._drain_messages(worker, receiving)
        finally:
            self._worker = None
            self._profile.fail()
            self._kill(worker)
            receiving.cancel()
            await self._outlast(worker)
            await asyncio.gather(receiving, worker.exited, return_exceptions=True)
            if self._kv is not None:
                self._kv.worker_lost()
            worker.link.close()
        return worker

    def _share_vocabulary(self, launch: WorkerLaunch) -> None:
        """Let later workers inherit the vocabulary for grammars, once a worker has built it.

        A vocabulary that ends the process which builds it would otherwise end all workers.
        """
        if self._fork_server is None or not self._dispatcher.has_matched_grammar:
            return
        if (ready := self._engine_status.ready) is not None:
            self._fork_server.load_vocabulary(launch.model_source, ready.vocab_size)

    async def _start(self, launch: WorkerLaunch) -> WorkerHandle:
        clear_endpoints(self._run_dir)
        address = endpoint(self._run_dir, self._num_starts)
        # The link must listen before the process connects.
        link = ServerLink(address)
        try:
            process = await self._start_process(launch, address)
        except OSError:
            link.close()
            raise
        log.info("worker started", extra={"pid": process.pid, "start": self._num_starts})
        self._worker = WorkerHandle(process, link, HangDetector(self._policy))
        return self._worker

    async def _start_process(self, launch: WorkerLaunch, address: str) -> WorkerProcess:
        if self._standby is not None and (standby := await self._standby.take()):
            return standby
        if self._fork_server is not None:
            return self._fork_server.start_worker(launch.program, self._options(launch, address))
        return ChildProcess(self._command(launch, address), launch.environment)

    def _command(self, launch: WorkerLaunch, address: str) -> list[str]:
        """Return a worker's command line."""
        return [*launch.program, *self._options(launch, address)]

    def _options(self, launch: WorkerLaunch, address: str) -> list[str]:
        options = launch.options(address)
        return options if self._kv is None else [*options, *self._kv.worker_options]

    async def _receive(self, worker: WorkerHandle) -> None:
        """Handle a worker's messages until the task is cancelled.

        Raises:
            msgspec.MsgspecError: the worker sent an invalid message.
        """
        while True:
            message = await worker.link.receive()
            # An error here is the server's own, and no reason to kill a healthy worker.
            try:
                worker.on_message(message)
                if isinstance(message, Ready) and not await self._open_tiers(worker, message):
                    continue
                self._handle(worker, message)
                self._dispatcher.end_trial(worker)
            except Exception as error:
                log.exception("the server failed to handle a %s", type(message).__name__)
                self._on_own_failure(worker, message, error)

    def _on_own_failure(self, worker: WorkerHandle, message: ToServer, error: Exception) -> None:
        """Contain a server error that occurred while handling a worker's message.

        If the message concerns one request or profile, fail only that one. If the error may have
        left the worker waiting for an answer or out of sync, kill the worker.
        """
        self._engine_status.fault(_SERVER_FAULT)
        match message:
            case Admitted() | Rejected() | RequestFailed():
                self._dispatcher.fail_internally(worker, message.request_id)
            case ProfileDone():
                self._profile.fail()
            case Ready() | KvOffer() | KvWritten() | KvWanted() | KvRead() | KvDamaged():
                # The worker waits for an answer that does not come. It would mistake the next
                # answer for this one, put KV in the wrong place and generate wrong tokens. No
                # request is to blame.
                worker.start_error = f"the server failed: {one_line(error)}"
                worker.is_blameless = True
                self._kill(worker)

    async def _drain_messages(self, worker: WorkerHandle, receiving: asyncio.Task[None]) -> None:
        last_message_at = None
        while last_message_at != worker.last_message_at and not receiving.done():
            last_message_at = worker.last_message_at
            await asyncio.wait({receiving}, timeout=_LAST_WORDS_S)

    def _kill(self, worker: WorkerHandle) -> None:
        """Send SIGKILL to a worker, and report at once that this engine has no worker."""
        worker.is_killed = True
        worker.process.kill()
        self._engine_status.worker_killed()

    async def _outlast(self, worker: WorkerHandle) -> None:
        """Wait until the process of a killed worker has ended, however long that takes.

        After `RestartPolicy.kill_grace_s` the engine is out of service until the process ends.
        """
        await asyncio.wait({worker.exited}, timeout=self._policy.kill_grace_s)
        if worker.exited.done():
            return

        log.error("%s; this engine stays out", _DOES_NOT_END, extra={"pid": worker.process.pid})
        self._engine_status.stay_out(_DOES_NOT_END)
        self._engine_status.set_live(False)
        self._dispatcher.fail_all(_DOES_NOT_END)
        self._profile.fail()

        await asyncio.wait({worker.exited})
        log.warning("the killed worker has ended", extra={"pid": worker.process.pid})
        self._engine_status.return_to_service()

    def _kill_if_broken(self, worker: WorkerHandle, receiving: asyncio.Task[None]) -> None:
        """Kill a worker that hangs, sends invalid messages or cannot be reached."""
        if worker.exited.done() or worker.is_killed:
            return
        pid = worker.process.pid
        if receiving.done():
            log.error("worker sent an invalid message", exc_info=receiving.exception())
        elif worker.link.failure.done():
            error = worker.link.failure.exception()
            log.error("worker cannot be reached; killing it", exc_info=error)
        elif reason := worker.check_health(has_work=self._dispatcher.num_open > 0):
            log.error("worker hangs; killing it", extra={"pid": pid, "reason": reason})
            worker.is_blameless = worker.is_stopped
        else:
            return
        worker.is_broken = True
        self._kill(worker)

    def _handle(self, worker: WorkerHandle, message: ToServer) -> None:
        match message:
            case StepDone(outputs=outputs, embeddings=embeddings, prompts=prompts):
                self._metrics.step_done()
                # Prompts first, because no token of a request precedes its prompt's scores.
                self._dispatcher.take_answers(worker, [*prompts, *outputs, *embeddings])
            case KvOffer() | KvWritten() | KvWanted() | KvRead() | KvDamaged():
                if self._kv is not None:
                    self._kv.on_message(message)
            case StateReport(state=state):
                self._metrics.worker_state(state)
                self._engine_status.worker_state(state)
            case ProfileDone():
                self._profile.finish(message)
            case AdapterAdded():
                self._adapter_calls.finish(message)
            case Admitted(request_id=request_id):
                self._dispatcher.admitted(request_id)
            case Rejected():
                self._dispatcher.rejected(message)
            case RequestFailed():
                self._dispatcher.request_failed(message)
            case Loading():
                worker.on_progress(message)
            case Ready():
                self._ready(worker, message)
            case StartFailed():
                worker.start_error = message.error
                worker.may_retry = message.may_retry
                worker.is_unproven = message.is_unproven

    def _ready(self, worker: WorkerHandle, ready: Ready) -> None:
        if worker.is_killed:
            return
        if problem := self._unservable(ready):
            worker.start_error = problem
            worker.may_retry = False
            self._kill(worker)
            return

        worker.ready_at = time.monotonic()
        self._num_unproven = 0
        start_s = worker.ready_at - worker.started_at
        self._expect_start(start_s)
        extra = {
            "stage": "ready",
            "seconds": round(start_s, 3),
            "resumed_requests": self._dispatcher.num_open,
        }
        log.info("worker ready", extra=extra)
        self._metrics.worker_ready(ready)
        if before := self._engine_status.ready:
            self._compare_fingerprints(before.fingerprint, ready.fingerprint)
        self._engine_status.worker_ready(ready)

        # The worker must have its batch limit and adapters before the first request.
        if self._batch_limit < 1.0:
            worker.link.post(LimitBatch(share=self._batch_limit))
        for addition in self._adapters():
            worker.link.post(addition)
        self._dispatcher.send_waiting(worker)

    def _expect_start(self, start_s: float) -> None:
        """Record how long the next worker's start is expected to take.

        The first worker of a fork server waits for imports that later workers inherit. So with a
        fork server, the shortest start after the first one counts.
        """
        if self._fork_server is None:
            self._engine_status.worker_start_s = start_s
        elif self._engine_status.ready is not None:
            shortest_s = self._engine_status.worker_start_s or start_s
            self._engine_status.worker_start_s = min(shortest_s, start_s)

    def _compare_fingerprints(self, before: Fingerprint, now: Fingerprint) -> None:
        """Compare the new worker's fingerprint with the previous worker's.

        If they differ, log why, and flag open requests that already have output as inexact.
        """
        differing = differences({"before": before, "now": now})
        if not differing:
            return
        extra = {"fingerprint": now.digest, "reason": describe(differing)}
        log.warning("the new worker's fingerprint differs from the last one's", extra=extra)
        self._dispatcher.on_other_fingerprint()

    async def _open_tiers(self, worker: WorkerHandle, ready: Ready) -> bool:
        """Open the KV tiers for a worker. If that fails, kill the worker and return False."""
        if self._kv is None:
            return True
        try:
            await self._kv.worker_ready(ready, worker.link.post)
        except FileTierError as error:
            worker.start_error = f"memory.tiers.file.path: {error}"
            worker.may_retry = False
            self._kill(worker)
            return False
        return True

    async def _recover(self, worker: WorkerHandle) -> None:
        """Classify why a worker exited, and apply the restart policy's delay before the next start.

        Raises:
            StartError: the first worker cannot serve.
            GaveUpError: too many consecutive workers exited early.
        """
        status = worker.exited.result()
        extra = {"stage": f"worker ended with status {status}", "pid": worker.process.pid}
        log.warning("worker ended", extra={**extra, "status": status})
        if self._engine_status.ready is None and (status == 2 or not worker.may_retry):
            raise StartError(worker.start_error or "the worker could not start; see its log above")

        self._engine_status.worker_lost()
        self._adapter_calls.fail_all()
        self._metrics.worker_restarts.inc()
        self._metrics.collective_errors.inc(_is_group_lost(status, self._engine_status.ready))

        is_killed_for_memory = self._count_oom(worker, status)
        is_short = status in (MEMORY_SHORT, HOST_SHORT) or is_killed_for_memory
        if worker.is_killed_by_others(status):
            worker.is_blameless = True
        self._dispatcher.resume(worker, is_short=is_short)
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
        """Count a worker that ran out of memory and died before it could report the error.

        Return whether the kernel's OOM killer killed the worker.
        """
        is_killed = status in (-signal.SIGKILL, GROUP_LOST) and worker.oom_kills.recent() > 0
        if is_killed:
            log.error("the kernel killed the worker, since the container has no memory left")
        if is_killed or status in (OUT_OF_MEMORY, HOST_SHORT):
            self._metrics.workers_ran_out_of_memory(1)
        return is_killed

    async def _take_unproven(self, reason: str) -> bool:
        """Count a worker whose startup check failed, and stop serving after too many in a row.

        The check compares the worker's results with those of a verified startup.

        Returns:
            False if another worker may start. True if the engine has stopped serving, in which case
            this method returns only once `stop` is called.

        Raises:
            GaveUpError: too many startups failed before any worker served.
        """
        self._num_unproven += 1
        self._metrics.start_proof_failures.inc()
        extra = {"reason": reason, "in_a_row": self._num_unproven}
        log.error("a worker failed the proof of its start", extra=extra)
        if self._num_unproven < self._policy.max_unproven:
            return False

        message = f"{self._num_unproven} starts in a row failed their proof, the last one: {reason}"
        if self._engine_status.ready is None:
            # The operator's healing does not touch a pod that is still starting. If the container
            # ends instead, its last log line goes to the service's condition.
            raise GaveUpError(message)
        log.error("this engine stays out: %s", message)
        self._engine_status.stay_out(message)
        self._dispatcher.fail_all(message)
        await self._stopping.wait()
        return True


def _is_group_lost(status: int, ready: Ready | None) -> bool:
    """Return whether a worker's exit status means that its engine has lost one of its ranks."""
    has_ranks = ready is not None and len(ready.ranks) > 1
    # NCCL's watchdog aborts the process whose collective failed.
    lost_by = (OUT_OF_MEMORY, HOST_SHORT, -signal.SIGABRT)
    return status == GROUP_LOST or (has_ranks and status in lost_by)
