"""Resumes answers on another engine when the engine that generates them is lost.

The other engine continues from the tokens received so far, so the client notices only a pause. If
no engine is available, the answer waits for one until the time limit between two tokens expires.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import grpc
from msgspec.structs import replace

from ullage_common.wire.continuation import BREAKAGES, Losses, Progress
from ullage_common.wire.errors import ServiceError
from ullage_router import errors
from ullage_router.admission.admission import Admission, AdmissionRequest
from ullage_router.admission.prefill_window import Reservation
from ullage_router.call import Call, DecisionLog, EngineStream, PausableDeadline
from ullage_router.policy.facts import Side
from ullage_router.rollout.stages import Send

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
ANOTHER_ENGINE_MAY = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        *errors.OF_THE_ROUTER,
    }
)
"""Statuses of failures after which a retry on another engine may succeed."""
_ANOTHER_MAY_GO_ON = ANOTHER_ENGINE_MAY | {grpc.StatusCode.UNIMPLEMENTED}
"""Statuses of failures after which another engine may still resume an answer.

They include UNIMPLEMENTED, because some engines may not support continuations.
"""

log = logging.getLogger(__name__)

OnResumption = Callable[[str, str], None]
"""A callback for the loss of an engine after an answer's first token.

Its arguments are the cause of the loss, and whether the answer was `resumed` or `lost`.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Resumer:
    """The components and the state that all attempts to resume answers share.

    The state is the set of engines that are running a suspect, which is a request that may have
    crashed engines.
    """

    admission: Admission
    send: Send
    on_resumption: OnResumption
    _suspected: set[str] = field(default_factory=set)
    """Keys of the engines that are currently running a suspect.

    A suspect is a request that may have crashed the engines it ran on. It is cleared as soon as its
    next token arrives. An engine runs at most one suspect at a time, so that a crash can be
    attributed to the right one.
    """

    @contextlib.contextmanager
    def alone(self, reservation: Reservation) -> Iterator[None]:
        """Keep other suspects off the reserved engine while the `with` block runs.

        A suspect is a request that may have crashed engines. If an engine runs only one of them, a
        crash can be attributed to it.

        Raises:
            _SuspectThere: the engine is already running a suspect. The reservation was released.
        """
        engine = reservation.engine
        if engine.key in self._suspected:
            engine.release(reservation.credit)
            raise _SuspectThere
        self._suspected.add(engine.key)
        try:
            yield
        finally:
            self._suspected.discard(engine.key)


class Takeover:
    """Moves one answer to another engine whenever its current engine is lost.

    Args:
        resumer: the components and state shared by all attempts to resume answers.
        call: the request, with the prompt that its first engine got.
        progress: the part of the answer that has been received.
    """

    def __init__(self, resumer: Resumer, call: Call, progress: Progress) -> None:
        self._resumer = resumer
        self._admission = resumer.admission
        # The request keeps the decision of its first engine.
        self._call = replace(call, decisions=DecisionLog(call.decisions.latest))
        self._progress = progress
        self._losses = Losses()
        self._refused_by: dict[str, int] = {}
        """Engines that refused or lost the answer, as in `AdmissionRequest.refused_by`."""

    async def resume(
        self, lost: Reservation, error: ServiceError
    ) -> tuple[Reservation, EngineStream]:
        """Resume the answer as soon as another engine can take over.

        Args:
            lost: the reservation on the lost engine, whose memory has already been released.
            error: the error that interrupted the answer.

        Raises:
            ServiceError: the answer cannot be resumed.
        """
        if error.code not in _ANOTHER_MAY_GO_ON and error.reason != errors.ENGINE_SILENT:
            raise error  # the request is at fault

        cause = _cause_of(error)
        began = time.monotonic()
        before = self._call.deadline
        next_token_at = began + before.token_timeout_s
        deadline = PausableDeadline(before.at, next_token_at, before.token_timeout_s)
        self._call = replace(self._call, deadline=deadline)
        try:
            async with (
                asyncio.timeout(max(0.0, deadline.remaining_s)),
                asyncio.timeout(max(0.0, deadline.first_token_remaining_s)) as timeout,
            ):
                with deadline.pauses(timeout):
                    taken = await self._take_over(lost, error)
        except (ServiceError, TimeoutError) as failure:
            self._resumer.on_resumption(cause, "lost")
            self._log(logging.WARNING, "answer lost", cause, lost.engine.id)
            if isinstance(failure, TimeoutError):
                raise errors.not_resumed(lost.engine.id, deadline.token_timeout_s, error) from error
            raise

        self._resumer.on_resumption(cause, "resumed")
        engines = f"{lost.engine.id} -> {taken[0].engine.id}"
        paused_s = time.monotonic() - began
        inexact = {"inexact": True} if self._progress.goes_on_inexactly else {}
        self._call.record.note("resumed", paused_s, engines=engines, reason=cause, **inexact)
        self._log(logging.INFO, "answer resumed", cause, engines, paused_s)
        return taken

    async def _take_over(
        self, lost: Reservation, error: ServiceError
    ) -> tuple[Reservation, EngineStream]:
        """Try one engine after another until one of them resumes the answer.

        Give up after too many losses.
        """
        progress = self._progress
        while True:
            self._losses.add(error, progress)
            is_given_up = self._losses.are_too_many or not progress.is_whole
            if is_given_up or error.code not in _ANOTHER_MAY_GO_ON:
                raise error

            progress.on_loss()
            progress.has_left_worker |= errors.is_left_worker(error)
            if self._admission.has_stable_engine(self._call):
                # A canary that has lost the answer does not get it again.
                self._call = replace(self._call, side=Side.STABLE)
            self._refused_by[lost.engine.key] = lost.engine.reports
            try:
                return await self._on_next_engine()
            except _EngineLost as another:
                lost = another.reservation
                error = another.error

    async def _on_next_engine(self) -> tuple[Reservation, EngineStream]:
        """Wait until an engine continues the answer, and return its reservation and its stream.

        A request that may have crashed engines (a suspect) is sent only to an engine that runs no
        other suspect. The time spent waiting for such an engine does not count towards the time
        limit between two tokens.

        Raises:
            _EngineLost: an engine failed before it sent another token.
        """
        pause_s = FIRST_PAUSE_S
        while True:
            is_occupied = False
            try:
                if taken := await self._try_once():
                    return taken
            except _SuspectThere:
                is_occupied = True

            with self._call.deadline.paused() if is_occupied else nullcontext():
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _try_once(self) -> tuple[Reservation, EngineStream] | None:
        """Resume the answer on one engine, or return None if no engine can take it now.

        Raises:
            _SuspectThere: the engine is already running another request that may have crashed
                engines.
            _EngineLost: the engine failed before it sent another token.
        """
        if not self._admission.has_engine:
            return None
        call = self._call
        progress = self._progress
        try:
            request = AdmissionRequest(call, progress, self._refused_by)
            reservation = await self._admission.admit(request)
        except ServiceError:
            # No refusal is final, since the request was admitted before.
            return None

        engine = reservation.engine
        resumer = self._resumer
        try:
            with resumer.alone(reservation) if self._losses.is_suspect else nullcontext():
                return reservation, await resumer.send(call, reservation, progress)
        except _SuspectThere:
            self._refused_by[engine.key] = engine.reports
            raise
        except ServiceError as error:
            if not _is_refusal(error):
                raise _EngineLost(reservation, error) from error
            self._refused_by[engine.key] = engine.reports
            return None

    def _log(
        self, level: int, message: str, cause: str, engine: str, paused_s: float | None = None
    ) -> None:
        extra: dict[str, object] = {
            "request_id": self._call.record.request_id,
            "event": "resumed" if paused_s is not None else "lost",
            "reason": cause,
            "engine": engine,
            "output_tokens": self._progress.num_tokens,
        }
        if paused_s is not None:
            extra["seconds"] = round(paused_s, 3)
            extra["inexact"] = self._progress.goes_on_inexactly
        log.log(level, message, extra=extra)


class _SuspectThere(Exception):
    """Raised if the chosen engine is already running another suspect.

    A suspect is a request that may have crashed engines.
    """


class _EngineLost(Exception):
    """Raised if the engine chosen to resume an answer fails before it sends a token."""

    def __init__(self, reservation: Reservation, error: ServiceError) -> None:
        super().__init__(error.message)
        self.reservation = reservation
        self.error = error


def _is_refusal(error: ServiceError) -> bool:
    """Return whether an error means that the engine refused the request rather than failed."""
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED or error.reason in errors.LEAVING


def _cause_of(error: ServiceError) -> str:
    """Return why an engine was lost, as the value of a metric label."""
    if error.reason in BREAKAGES:
        return "worker"
    if error.reason in errors.LEAVING:
        return "leaving"
    if error.reason == errors.ENGINE_SILENT:
        return "silent"
    if errors.is_left_worker(error):
        return "recovering"
    return "connection" if error.code is grpc.StatusCode.UNAVAILABLE else "error"
