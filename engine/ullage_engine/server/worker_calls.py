"""Tracks commands that get a single reply from the worker: profiling and LoRA adapter loading.

A command fails if the worker exits before it replies.
"""

import asyncio

import grpc

from ullage_common.wire.errors import ServiceError
from ullage_engine.protocol.messages import (
    AdapterAdded,
    AddAdapter,
    ProfileDone,
    StartProfile,
    StopProfile,
)
from ullage_engine.server.adapters import WorkerEndedError
from ullage_engine.server.worker_process import WorkerHandle


class ProfileCall:
    """The running profile of the worker's steps, if there is one."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[ProfileDone] | None = None

    def start(
        self, worker: WorkerHandle | None, message: StartProfile
    ) -> "asyncio.Future[ProfileDone]":
        """Tell the worker to profile its next steps. Return a future for its reply.

        The future fails with a ServiceError if the worker exits before it replies.

        Raises:
            ServiceError: no worker is ready, or a profile is already running.
        """
        if worker is None or worker.ready_at is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "NO_ENGINE",
                "no worker is ready; try again",
                retry_after_s=1.0,
            )
        if self._answer is not None:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "PROFILE_RUNNING",
                "another profile is under way; try again when it has ended",
            )
        self._answer = asyncio.get_running_loop().create_future()
        worker.link.post(message)
        return self._answer

    def stop(self, worker: WorkerHandle | None) -> None:
        """Stop the running profile early. The worker still sends what it has recorded."""
        if worker is not None and self._answer is not None:
            worker.link.post(StopProfile())

    def finish(self, done: ProfileDone) -> None:
        """Pass the worker's reply to the caller that is waiting for the profile."""
        answer = self._pop()
        if answer is not None:
            answer.set_result(done)

    def fail(self) -> None:
        """Fail the running profile, because the worker has exited."""
        answer = self._pop()
        if answer is None:
            return
        answer.set_exception(
            ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "WORKER_LOST",
                "the worker ended during the profile; begin another one",
            )
        )
        answer.exception()  # The caller may be gone, and asyncio would log the error.

    def _pop(self) -> "asyncio.Future[ProfileDone] | None":
        """Remove the running profile. Return its future if a caller is still waiting for it."""
        answer = self._answer
        self._answer = None
        return None if answer is None or answer.done() else answer


class AdapterCalls:
    """Pending commands that load LoRA adapters into the worker."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Future[str]] = {}
        """Futures for the results of pending loads, by the adapter's key in the worker."""

    async def add(self, worker: WorkerHandle | None, message: AddAdapter) -> str:
        """Load a LoRA adapter into the worker. Return the error message, or "" on success.

        Raises:
            WorkerEndedError: the worker exited before it replied.
        """
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[message.name] = answer
        # A worker that is not ready yet gets all adapters once it is.
        if worker is not None and worker.ready_at is not None:
            worker.link.post(message)
        try:
            return await answer
        finally:
            self._answers.pop(message.name, None)

    def finish(self, added: AdapterAdded) -> None:
        """Pass the worker's reply to the caller that is waiting for the adapter."""
        answer = self._answers.get(added.name)
        if answer is not None and not answer.done():
            answer.set_result(added.error)

    def fail_all(self) -> None:
        """Fail all pending loads, because the worker has exited."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(WorkerEndedError())
