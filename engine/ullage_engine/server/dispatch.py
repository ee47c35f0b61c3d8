"""Dispatches requests to the worker, and recovers them when the worker dies.

The journal holds every open request. The dispatcher sends requests to the ready worker and receives
the answers. When a worker dies, the dispatcher determines which requests may have killed it (the
suspects). The oldest suspect is retried alone until a worker survives one of its decode steps. All
other requests wait until then.
"""

import logging
import time

import grpc

from ullage_common.wire.errors import ServiceError, invalid
from ullage_engine.kv_tiers.tiers import KvTiers
from ullage_engine.protocol.messages import Cancel, Rejected, RequestFailed, Submit
from ullage_engine.protocol.requests import Embedding, PromptLogprobs, TokenOutput
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
from ullage_engine.server.worker_process import WorkerHandle

log = logging.getLogger("ullage.engine.supervisor")

_SHORT_RETRY_S = 10.0
"""Seconds after which clients should retry if other processes hold memory that the engine needs."""
_SERVER_FAULT = 0.9
"""Factor applied to the health score when a server error fails a single request."""


class Dispatcher:
    """Sends requests to workers, delivers answers, and resumes requests on the next worker."""

    def __init__(
        self,
        journal: Journal,
        engine_status: EngineStatus,
        metrics: EngineMetrics,
        policy: RestartPolicy,
    ) -> None:
        self.kv: KvTiers | None = None
        """KV tiers shared by all workers, or None if there are none."""
        self._journal = journal
        self._engine_status = engine_status
        self._metrics = metrics
        self._policy = policy
        self.has_matched_grammar = False
        """Whether a worker has matched an answer against a grammar, so that it has a vocabulary."""
        self._suspect: Submission | None = None
        """Suspect that is being retried alone, or None. All other requests wait."""

    @property
    def num_open(self) -> int:
        """Number of samples that are not finished yet."""
        return len(self._journal.unfinished())

    # to the worker -------------------------------------------------------------------------------

    def submit(self, worker: WorkerHandle | None, entries: list[JournalEntry]) -> None:
        """Send a request's unfinished samples, now or once the next worker is ready."""
        if worker is None or worker.is_gone:
            return  # a request that a dead worker gets would be suspected of its death
        if worker.ready_at is not None and self._suspect is None:
            for submission in submissions(entries):
                self._send(worker, submission)

    def cancel(self, worker: WorkerHandle | None, entry: JournalEntry) -> None:
        """Make the worker drop a sample whose client has disconnected or needs no more output."""
        if worker is not None and entry.submitted:
            is_answered = entry.finish is not None and entry.finish.reason == "stop"
            worker.link.post(Cancel(request_id=entry.key, is_answered=is_answered))

    def send_waiting(self, worker: WorkerHandle) -> None:
        """Send the oldest suspect alone, or all unsent requests if there is no suspect.

        A worker that is gone gets none of them.
        """
        if worker.is_gone:
            return
        waiting = list(self._journal.submissions())
        suspects = [each for each in waiting if self._runs_alone(worker, each)]
        self._suspect = suspects[0] if suspects else None
        for submission in suspects[:1] or waiting:
            self._send(worker, submission)

    def end_trial(self, worker: WorkerHandle) -> None:
        """Let other requests run again, once the suspect no longer has to be retried alone.

        The suspect is a request that may have killed a worker. Without a suspect, do nothing.
        """
        if self._suspect is not None and not self._runs_alone(worker, self._suspect):
            self.send_waiting(worker)

    def _runs_alone(self, worker: WorkerHandle, submission: Submission) -> bool:
        if worker.ready_at is None:
            return False
        deaths = max((each.deaths for each in submission.entries if not each.is_over), default=0)
        return self._policy.runs_alone(deaths, time.monotonic() - worker.ready_at)

    def _send(self, worker: WorkerHandle, submission: Submission) -> None:
        """Send a submission to the worker. If the message cannot be built, fail its requests."""
        for entry in submission.entries:
            entry.submitted = True

        try:
            requests = [entry.engine_request() for entry in submission.entries]
            if self.kv is not None:
                requests = self.kv.with_stored(requests)
        except Exception:
            log.exception("the server failed to send %s", submission.entries[0].request_key)
            self._engine_status.fault(_SERVER_FAULT)
            for entry in submission.entries:
                entry.fail(_internal())
            return

        worker.on_submit()
        worker.link.post(Submit(requests=requests, resumed=submission.resumed))

    # from the worker -----------------------------------------------------------------------------

    def take_answers(
        self,
        worker: WorkerHandle | None,
        answers: list[TokenOutput | Embedding | PromptLogprobs],
    ) -> None:
        """Deliver a step's outputs to their requests."""
        for answer in answers:
            # One by one, so that an error in one does not cost the others their tokens.
            try:
                self._take_answer(worker, answer)
            except Exception:
                log.exception("the server failed to handle a token of %s", answer.request_id)
                self._engine_status.fault(_SERVER_FAULT)
                self.fail_internally(worker, answer.request_id)

    def _take_answer(
        self, worker: WorkerHandle | None, answer: TokenOutput | Embedding | PromptLogprobs
    ) -> None:
        entry = self._journal.get(answer.request_id)
        if entry is None or entry.is_over:
            return
        if isinstance(answer, Embedding):
            self._metrics.embedding(entry)
            entry.set_embedding(answer)
            return
        if isinstance(answer, PromptLogprobs):
            entry.append_prompt_logprobs(answer)
            return

        self.has_matched_grammar |= bool(entry.job.request.grammar)
        num_before = len(entry.output_ids)
        entry.append_output(answer)
        # Tokens behind a stop string do not count.
        self._metrics.tokens(entry, len(entry.output_ids) - num_before)
        if entry.is_over and not answer.finish:
            self.cancel(worker, entry)

    def admitted(self, request_id: str) -> None:
        """Record that the worker has admitted a request."""
        entry = self._journal.get(request_id)
        if entry is not None:
            entry.take()

    def rejected(self, rejected: Rejected) -> None:
        """Fail a new request that the worker has rejected. Admitted requests are never rejected."""
        entry = self._journal.get(rejected.request_id)
        if entry is not None:
            entry.fail(rejection_error(rejected))

    def request_failed(self, failed: RequestFailed) -> None:
        """Fail a request after a worker error. Invalid requests do not lower the health score."""
        entry = self._journal.get(failed.request_id)
        if entry is not None and failed.field:
            entry.fail(invalid(failed.field, f"{failed.field}: {failed.message}"))
        elif entry is not None:
            self._engine_status.fault(_SERVER_FAULT)
            entry.fail(ServiceError(grpc.StatusCode.INTERNAL, "REQUEST_FAILED", failed.message))

    def fail_internally(self, worker: WorkerHandle | None, request_id: str) -> None:
        """Fail a request because of a server error, and cancel it in the worker."""
        entry = self._journal.get(request_id)
        if entry is not None:
            entry.fail(_internal())
            self.cancel(worker, entry)

    # across workers ------------------------------------------------------------------------------

    def resume(self, worker: WorkerHandle, *, is_short: bool) -> None:
        """Prepare open requests for the next worker.

        Requests that are suspected of having killed too many workers fail instead.

        Args:
            worker: the worker that has exited.
            is_short: whether the worker exited because other processes had taken its memory. Such
                an exit does not count towards any request's `lone_deaths`.
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

    def on_other_fingerprint(self) -> None:
        """Flag partly answered requests as inexact, because their answers may change midway.

        Call this if the next worker's fingerprint differs from the previous worker's.
        """
        for entry in self._journal.unfinished():
            entry.on_other_fingerprint()

    def fail_all(self, reason: str) -> None:
        """Fail all open requests, because this engine has stopped serving."""
        self._journal.end_all(lambda entry: entry.fail(_stays_out(reason)))


def rejection_error(rejected: Rejected) -> ServiceError:
    """Return the error to send to a rejected request's client."""
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
    # Later requests get the same error: the engine is at fault, and no request is suspect.
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE, "NO_ENGINE", message, retry_after_s=_SHORT_RETRY_S
    )


def _worker_lost(num_deaths: int) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "WORKER_LOST",
        f"the worker died {num_deaths} times at the first tokens of this request; "
        "send a shorter one",
    )


def _internal() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "INTERNAL",
        "the engine failed to handle this request; see its log",
    )
