"""Sends requests to the router of a service, as many at a time as the service can use.

A request that the service refuses waits for the time that the refusal names, and keeps its place
among those in flight. A request is sent again if its router or engine is lost or if its answer is
cut off, up to MAX_FAULTS times in a row.
"""

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import grpc

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_common.wire.channels import open_blocking_channel
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_offline.outputs import IncompleteAnswer, RequestOutput, read_answer

PAUSE_S = 1.0
"""Seconds before a request is sent again, if no answer says how long to wait."""
MAX_FAULTS = 5
"""Number of internal errors and incomplete answers in a row after which a request is given up."""

log = logging.getLogger(__name__)

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
"""Statuses of requests whose router or engine is lost. `ullage up` restarts both."""
_FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)

Asked = tuple[inference_pb2.GenerateRequest, str | None]
"""A request, and the text of its prompt (None if it has none)."""


class RequestError(Exception):
    """Raised if a request can never be answered.

    index
        place of the request in the list of requests
    is_invalid
        whether the request itself is the reason
    """

    def __init__(self, index: int, message: str, *, is_invalid: bool = False) -> None:
        super().__init__(message)
        self.index = index
        self.is_invalid = is_invalid


class ServiceLost(Exception):
    """Raised if the service has ended."""


def ask_all(
    target: str, asked: Sequence[Asked], concurrency: int, failure: Callable[[], str]
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Yield the place and the answer of each request, in the order in which they are answered.

    Close the generator to cancel all other requests.

    Args:
        target: gRPC address of the router.
        asked: the requests.
        concurrency: most requests to send at a time.
        failure: returns why the service has ended (empty while it runs).

    Raises:
        RequestError: a request can never be answered. All others are cancelled.
        ServiceLost: the service has ended.
    """
    if not asked:
        return
    with open_blocking_channel(target) as channel:
        asker = _Asker(inference_pb2_grpc.InferenceServiceStub(channel), failure)
        threads = ThreadPoolExecutor(min(concurrency, len(asked)), "ullage-ask")
        try:
            futures = [threads.submit(asker.ask, i, *each) for i, each in enumerate(asked)]
            for future in as_completed(futures):
                yield future.result()
        finally:
            # After an error, a Ctrl-C, or the last answer.
            asker.cancel()
            threads.shutdown(cancel_futures=True)


def faults_after(faults: int, error: ServiceError) -> int:
    """Return the number of consecutive faults of a request after an error.

    A lost router or engine neither adds to it nor ends the row.
    """
    if error.code in _FAULTS:
        return faults + 1
    return faults if error.code in _LOST else 0


class _Asker:
    """Sends requests from several threads until it is cancelled."""

    def __init__(self, stub: Any, failure: Callable[[], str]) -> None:
        self._stub = stub
        self._failure = failure
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._calls: set[grpc.Call] = set()

    def cancel(self) -> None:
        """Cancel all running requests, and let no others begin."""
        self._cancelled.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def ask(
        self, index: int, request: inference_pb2.GenerateRequest, prompt: str | None
    ) -> tuple[int, RequestOutput]:
        """Send a request until it is answered."""
        faults = 0
        while not self._cancelled.is_set():
            try:
                return index, read_answer(request, self._responses(request), prompt)
            except IncompleteAnswer as cut:
                faults += 1
                if faults >= MAX_FAULTS:
                    raise RequestError(
                        index, f"its answer was cut off {faults} times in a row: {cut}"
                    ) from None
                log.warning("request %d is sent again, as its answer was cut off: %s", index, cut)
                pause_s = PAUSE_S
            except grpc.RpcError as failed:
                assert isinstance(failed, grpc.Call)
                error = from_rpc_error(failed)
                is_invalid = error.code is grpc.StatusCode.INVALID_ARGUMENT
                faults = faults_after(faults, error)
                if error.retry_after_s is None and not self._is_passing(error, faults):
                    raise RequestError(index, error.message, is_invalid=is_invalid) from None
                pause_s = error.retry_after_s or PAUSE_S

            if not self._cancelled.is_set() and (reason := self._failure()):
                raise ServiceLost(reason)
            self._cancelled.wait(pause_s)
        raise ServiceLost("the call was cancelled")

    def _is_passing(self, error: ServiceError, faults: int) -> bool:
        return error.code in _LOST or (error.code in _FAULTS and faults < MAX_FAULTS)

    def _responses(
        self, request: inference_pb2.GenerateRequest
    ) -> list[inference_pb2.GenerateResponse]:
        call = self._stub.Generate(request)
        with self._lock:
            self._calls.add(call)
        if self._cancelled.is_set():  # `cancel` did not see this call
            call.cancel()
        try:
            return list(call)
        finally:
            with self._lock:
                self._calls.discard(call)
