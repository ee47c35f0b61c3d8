"""One request and its answer, as every part that serves or relays one sees them."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from ullage.inference.v1 import inference_pb2
from ullage_router.stats import Record
from ullage_router.tenants import Visit, everybody
from ullage_rpc.errors import from_rpc_error

Event = inference_pb2.GenerateResponse
EventStream = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, Event]


@dataclass(frozen=True, slots=True)
class Call:
    """A request with what came along with it."""

    request: inference_pb2.GenerateRequest
    record: Record
    timeout_s: float
    """From arrival to the last token."""
    metadata: tuple[tuple[str, str], ...] = ()
    """Passed on to the engine: the trace."""
    visit: Visit = field(default_factory=everybody)
    """Who asks, and what of their quota this takes."""
    authorization: str | None = None
    """What the client proved itself with, for other services' routers."""
    is_streamed: bool = True
    """The client reads tokens as they come; otherwise only the whole answer counts."""
    path: tuple[str, ...] = ()
    """Names of the cascades that handed it on to here."""
    idempotency_key: str = ""
    """A later call of the tenant with the same key replaces this one; empty: none does."""

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def deadline(self) -> float:
        """When the answer must have ended, on the monotonic clock."""
        return self.record.arrived + self.timeout_s + self.record.patience.held_s


class Answer(Protocol):
    """An answer that has begun."""

    @property
    def accepted(self) -> inference_pb2.Accepted:
        """What was decided, complete."""

    def events(self) -> AsyncIterator[Event]:
        """Delta and, of several samples, SampleFinished any number of times, then Finished.

        Raises:
            ServiceError: the engine fails now that tokens were sent.
        """

    def close(self) -> None:
        """Ends the work on it; harmless when it has ended."""


Begin = Callable[[Call], Awaitable[Answer]]
"""Starts an answer; raises ServiceError when the request is refused or fails before its first
token."""


async def read(stream: EventStream) -> Event | None:
    """The next message; None when there is no more.

    Raises:
        ServiceError: the call failed.
    """
    try:
        event = await stream.read()
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return event if isinstance(event, Event) else None


def timed_out(prompt_tokens: int, output_tokens: int) -> Event:
    """The end of an answer whose time limit passed between two tokens."""
    usage = inference_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=output_tokens)
    reason = inference_pb2.FINISH_REASON_TIMEOUT
    return Event(finished=inference_pb2.Finished(reason=reason, usage=usage))
