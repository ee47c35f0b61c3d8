"""A client that streams directly from engines, with a router's tickets.

    async with Client("router:9000") as client:
        async for event in client.generate(request):
            ...

The RPC `Pick` places a request whose prompt is token ids, and the client sends the request to the
engine that `Pick` returns. Every other request goes through the router's `Generate`: text and
conversations (which the router templates), requests for an adapter (which some engines may lack),
requests that must wait for memory, and all requests if the service issues no tickets. The events
and errors are the same either way.

`PickBatcher` combines the requests to place, and the reports about ended requests, into few `Pick`
RPCs. Only one RPC is in flight at a time. Requests that arrive meanwhile are sent with the next
RPC, so batches grow with the load, and a single request does not wait for others. Requests of equal
size are sent as a single entry with a count, and they share tickets. This is much cheaper for the
router than placing each request separately.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Self

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.tickets.tickets import TICKET_KEY
from ullage_common.wire.channels import open_channel
from ullage_common.wire.continuation import Losses, Progress, check_ending, write_cached
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_common.wire.request_fields import later_fields, set_fields
from ullage_common.wire.validation import is_growing

MAX_BATCH = 256
MAX_REPORTS = 4096
"""Maximum number of reports in one RPC, and of unsent reports that are kept.

A report tells the router that an engine accepted a request, or that the request has ended.
"""
PICK_TIMEOUT_S = 5.0
OFF_S = 30.0
"""How long to use only Generate after the router reports that it issues no tickets, in seconds."""
QUIET_S = 0.05
"""How long reports wait, in seconds, to share an RPC with a request to place."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pick:
    """The engine and the ticket that the router has assigned to a request."""

    id: int
    """Id of the ticket, which several requests may share."""
    engine: str
    """Address of the engine, `host:port`."""
    ticket: str
    max_tokens: int


@dataclass(eq=False, slots=True)
class _PendingPick:
    """A request that is waiting for the router to place it on an engine."""

    priced: pb.PricedRequest
    placed: "asyncio.Future[Pick | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class PickBatcher:
    """Asks a router to place requests on engines, and batches many requests into one RPC.

    Args:
        router: the router's gRPC stub.
        metadata: metadata to send with every RPC.
    """

    def __init__(
        self,
        router: inference_pb2_grpc.InferenceServiceStub,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._router = router
        self._metadata = metadata
        self._pending: list[_PendingPick] = []
        self._accepted: list[int] = []
        self._ended: list[int] = []
        self._news = asyncio.Event()
        self._off_until = 0.0
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Report ended requests to the router. Unplaced requests fall back to Generate."""
        self._is_closing = True
        self._news.set()
        if self._task:
            await self._task

    async def place(
        self,
        request: pb.GenerateRequest,
        avoid: Sequence[str],
        deadline: float,
        paid_by: str = "",
    ) -> Pick | None:
        """Place a request with token ids, or return None if the router's Generate must serve it.

        Args:
            avoid: addresses of engines that have just refused the request.
            deadline: time on the event loop's clock at which to stop waiting.
            paid_by: if the request continues an answer, the first ticket of that answer, so that
                the tenant is not charged again (empty otherwise).

        Raises:
            ServiceError: INTERNAL, the `Pick` RPC failed unexpectedly or its response is invalid.
        """
        now = asyncio.get_running_loop().time()
        if now < self._off_until or self._is_closing:
            return None
        pending = _PendingPick(_price(request, avoid, paid_by))
        self._pending.append(pending)
        self._wake()
        try:
            async with asyncio.timeout(max(0.0, deadline - now)):
                return await pending.placed
        except TimeoutError:
            self._return(pending)
            return None
        except asyncio.CancelledError:
            self._return(pending)
            raise

    def _return(self, pending: _PendingPick) -> None:
        """Report the end of a request if it was placed at the moment when its caller left."""
        placed = pending.placed
        if not placed.done() or placed.cancelled() or placed.exception():
            return
        if pick := placed.result():
            self.on_ended(pick)

    def on_accepted(self, pick: Pick) -> None:
        """Queue a report to the router that the engine has accepted the request."""
        self._note(self._accepted, pick)

    def on_ended(self, pick: Pick) -> None:
        """Queue a report to the router that the request has ended or will not be sent."""
        self._note(self._ended, pick)

    def _note(self, reports: list[int], pick: Pick) -> None:
        if len(reports) < MAX_REPORTS:  # otherwise its ticket's end tells the router
            reports.append(pick.id)
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="pick")

    async def _run(self) -> None:
        while not self._is_closing:
            await self._news.wait()
            self._news.clear()
            if not self._pending and not self._is_closing:
                await self._quiet()
            while self._pending:
                await self._call()
            if self._accepted or self._ended:
                await self._call()
        _leave(self._pending)
        if self._accepted or self._ended:
            await self._call()

    async def _quiet(self) -> None:
        """Delay pending reports by up to QUIET_S, so that they can share an RPC with a request."""
        try:
            async with asyncio.timeout(QUIET_S):
                await self._news.wait()
        except TimeoutError:
            return

    async def _call(self) -> None:
        pending = [request for request in self._pending[:MAX_BATCH] if not request.placed.done()]
        del self._pending[:MAX_BATCH]
        try:
            await self._ask(pending)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._off_until = asyncio.get_running_loop().time() + OFF_S
            _leave(pending)
        except Exception as error:  # even a bug must not stop later requests
            log.exception("pick failed")
            _fail(pending, error)
        except asyncio.CancelledError:
            _leave(pending)
            raise

    async def _ask(self, pending: list[_PendingPick]) -> None:
        groups = _alike(pending)
        accepted = self._accepted
        self._accepted = []
        ended = self._ended
        self._ended = []
        try:
            request = pb.PickRequest(
                requests=[_merged(group) for group in groups], accepted=accepted, ended=ended
            )
            response = await self._router.Pick(
                request, timeout=PICK_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._keep(accepted, ended)  # after any other error the router may have read them
            raise
        self._deal(groups, response)

    def _keep(self, accepted: list[int], ended: list[int]) -> None:
        """Put reports that could not be sent back into the queue for the next RPC.

        They must not be lost, because they free resources in the router.
        """
        self._accepted = (accepted + self._accepted)[:MAX_REPORTS]
        self._ended = (ended + self._ended)[:MAX_REPORTS]

    def _deal(self, groups: list[list[_PendingPick]], response: pb.PickResponse) -> None:
        answers = iter(response.placed)
        for group in groups:
            places = _places(len(group), answers, response.engines)
            for request in group:
                pick = next(places, None)  # requests without an answer go to the router
                if not request.placed.done():
                    request.placed.set_result(pick)
                elif pick:  # the caller has gone
                    self._ended.append(pick.id)


def _alike(pending: Iterable[_PendingPick]) -> list[list[_PendingPick]]:
    """Group requests of equal size, which may share a ticket.

    A request that has a session, must avoid an engine, or continues an answer forms its own group.
    """
    groups: dict[object, list[_PendingPick]] = {}
    for request in pending:
        priced = request.priced
        is_free = not (priced.session_id or priced.avoid or priced.paid_by)
        size = (
            priced.prompt_tokens,
            priced.max_tokens,
            priced.samples,
            priced.priority,
            priced.comes_at_end,
            tuple(priced.fields),
        )
        groups.setdefault(size if is_free else request, []).append(request)
    return list(groups.values())


def _merged(group: list[_PendingPick]) -> pb.PricedRequest:
    priced = group[0].priced
    if len(group) > 1:
        priced.count = len(group)
    return priced


def _places(
    count: int, answers: Iterator[pb.Placed], engines: Sequence[str]
) -> Iterator[Pick | None]:
    """Yield the engine and ticket of each of `count` equal requests, or None if it was refused.

    One entry in the router's response may place several requests.
    """
    while count > 0 and (placed := next(answers, None)):
        pick = _pick(placed, engines)
        for _ in range(min(count, placed.count or 1)):
            yield pick
        # An older router knows no counts: it answers an entry once, for one request.
        count = count - placed.count if placed.count else 0


def _price(request: pb.GenerateRequest, avoid: Sequence[str], paid_by: str) -> pb.PricedRequest:
    samples = request.samples
    return pb.PricedRequest(
        prompt_tokens=len(request.token_ids.ids),
        max_tokens=request.stop.max_tokens,
        samples=max(samples.n, samples.best_of, samples.beam.width),
        session_id=request.session_id,
        priority=request.priority,
        avoid=avoid,
        paid_by=paid_by,
        comes_at_end=not is_growing(request),
        fields=sorted(set_fields(request, later_fields())),
    )


def _pick(placed: pb.Placed, engines: Sequence[str]) -> Pick | None:
    if placed.HasField("refusal"):
        return None
    return Pick(placed.id, engines[placed.engine], placed.ticket, placed.max_tokens)


def _leave(pending: list[_PendingPick]) -> None:
    """Stop waiting for the placement of requests, which then go through the router's Generate."""
    for request in pending:
        if not request.placed.done():
            request.placed.set_result(None)
    pending.clear()


def _fail(pending: list[_PendingPick], error: Exception) -> None:
    for request in pending:
        if not request.placed.done():
            message = f"asking the router for a place failed: {type(error).__name__}: {error}"
            request.placed.set_exception(
                ServiceError(grpc.StatusCode.INTERNAL, "PICK_FAILED", message)
            )
    pending.clear()


MAX_PICKS = 3
"""Maximum number of engines to try before the router serves the request."""
MAX_ENGINES = 256
"""Number of gRPC channels to engines above which those without running calls are closed."""
ANOTHER_MAY = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
    }
)
"""Status codes of engine errors that justify trying another engine or the router."""

ANOTHER_MAY_GO_ON = ANOTHER_MAY | {grpc.StatusCode.UNIMPLEMENTED}
"""Status codes of errors that interrupt an answer but let another engine continue it."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
_NOT_NOW = frozenset({"DRAINING", "NO_ENGINE"})

Events = AsyncGenerator[pb.GenerateResponse, None]
Stream = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class Client:
    """A client for one Ullage service.

    Args:
        router: `host:port` of the gRPC API of the service's router.
        metadata: sent with every RPC to the router, for example ("authorization", "Bearer KEY").
        is_direct: whether to send requests directly to engines if possible, instead of sending
            all of them through the router.
        credentials: credentials for connections to router and engines, or None for plaintext.
    """

    def __init__(
        self,
        router: str,
        *,
        metadata: Sequence[tuple[str, str]] = (),
        is_direct: bool = True,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._metadata = tuple(metadata)
        self._credentials = credentials
        self._channel = open_channel(router, credentials)
        self._router = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._batcher = PickBatcher(self._router, self._metadata) if is_direct else None
        self._base_model: str | None = None
        """Name of the served model, or None before it is fetched.

        The name is empty if the tenant may not use the model.
        """
        self._engines: dict[str, grpc.aio.Channel] = {}
        """Channels to engines by address, the least recently used first."""
        self._num_calls: Counter[str] = Counter()
        """Number of running calls on each channel, by address."""
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Report ended requests, and close all connections. Answers in progress are cut off."""
        if self._batcher:
            await self._batcher.close()
        await asyncio.gather(*(channel.close() for channel in self._engines.values()))
        await asyncio.gather(*self._closing)
        await self._channel.close()

    async def generate(self, request: pb.GenerateRequest, timeout_s: float = 30.0) -> Events:
        """Yield an Accepted event, then any number of Delta events, then a Finished event.

        If the prompt consists of token ids, the answer survives the loss of its engine, because
        another engine or the router continues it.

        Raises:
            ServiceError: the request was refused, or it failed and could not be continued.
        """
        answer = _Answer(request, asyncio.get_running_loop().time() + timeout_s)
        while not answer.is_over:
            try:
                async with aclosing(self._attempt(answer)) as events:
                    async for event in events:
                        for visible in answer.take(event):
                            yield visible
            except ServiceError as error:
                await answer.on_loss(error)

    async def _attempt(self, answer: "_Answer") -> Events:
        """Yield the answer, or its remainder, from an engine or through the router."""
        async with aclosing(self._direct(answer)) as direct:
            async for event in direct:
                yield event
                if event.HasField("finished"):
                    return
        paid = ((TICKET_KEY, answer.paid_by),) if answer.paid_by else ()
        stream = self._router.Generate(
            answer.request, timeout=_left(answer.deadline), metadata=self._metadata + paid
        )
        try:
            async for event in _events(stream):
                yield event
        finally:
            stream.cancel()

    async def _direct(self, answer: "_Answer") -> Events:
        """Yield the answer from an engine, or nothing if the router must serve it."""
        request = answer.request
        is_priced = request.WhichOneof("input") == "token_ids" and not request.embed
        if self._batcher is None or not (is_priced and await self._names_base(request.model)):
            return
        for _ in range(MAX_PICKS):
            avoid = answer.avoid[-MAX_PICKS:]
            pick = await self._batcher.place(request, avoid, answer.deadline, answer.paid_by)
            if pick is None:
                return
            if request.HasField("continuation") and pick.max_tokens < request.stop.max_tokens:
                self._batcher.on_ended(pick)
                return  # the router finds a place for all that was granted
            try:
                async with aclosing(self._from_engine(answer, pick)) as events:
                    async for event in events:
                        yield event
                return
            except _NotBegun:
                answer.avoid.append(pick.engine)
            except ServiceError:
                answer.avoid.append(pick.engine)
                raise

    async def _names_base(self, name: str) -> bool:
        """Return whether a request's model is the base model, which every engine serves.

        The result is False for an adapter, or if the router does not answer.
        """
        if not name:
            return True
        if self._base_model is None:
            request = pb.GetModelRequest()
            try:
                described = await self._router.GetModel(
                    request, timeout=PICK_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.aio.AioRpcError:
                return False
            self._base_model = described.model
        return name == self._base_model

    async def _from_engine(self, answer: "_Answer", pick: Pick) -> Events:
        assert self._batcher
        request = answer.request
        stub = inference_pb2_grpc.InferenceServiceStub(self._engine(pick.engine))
        sent = pb.GenerateRequest()
        sent.CopyFrom(request)
        sent.stop.max_tokens = pick.max_tokens
        sent.stop.min_tokens = min(sent.stop.min_tokens, pick.max_tokens)
        metadata = ((TICKET_KEY, pick.ticket),)
        stream = stub.Generate(sent, timeout=_left(answer.deadline), metadata=metadata)
        self._num_calls[pick.engine] += 1
        has_begun = False
        try:
            async for event in _events(stream):
                if not has_begun:
                    has_begun = True
                    answer.paid_by = answer.paid_by or pick.ticket
                    self._batcher.on_accepted(pick)
                    event.accepted.action = "accept"
                    event.accepted.route = "direct"
                    granted = event.accepted.max_tokens or pick.max_tokens
                    event.accepted.max_tokens = min(granted, pick.max_tokens)
                yield event
        except ServiceError as error:
            is_lost = has_begun or (request.HasField("continuation") and not _is_refusal(error))
            if is_lost or error.code not in ANOTHER_MAY:
                raise
            raise _NotBegun from error
        finally:
            stream.cancel()
            self._num_calls[pick.engine] -= 1
            if not self._num_calls[pick.engine]:
                del self._num_calls[pick.engine]
            self._batcher.on_ended(pick)

    def _engine(self, address: str) -> grpc.aio.Channel:
        """Return the channel to an engine, opening it if necessary."""
        channel = self._engines.pop(address, None) or open_channel(address, self._credentials)
        self._engines[address] = channel
        if len(self._engines) > MAX_ENGINES:
            self._close_idle(address)
        return channel

    def _close_idle(self, address: str) -> None:
        """Close the least recently used channels without calls, except the one to an address.

        A channel that closes would cancel its calls, whose answers would be lost.
        """
        surplus = len(self._engines) - MAX_ENGINES
        idle = [each for each in self._engines if each != address and each not in self._num_calls]
        for each in idle[:surplus]:
            closing = asyncio.create_task(self._engines.pop(each).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class _Answer:
    """An answer in progress, which another server may continue if the current one fails.

    Args:
        request: the caller's request.
        deadline: time on the event loop's clock at which the answer is abandoned.

    Attributes:
        avoid: addresses of engines that refused or lost the answer, oldest first.
        paid_by: the first ticket with which an engine accepted the request. It proves that the
            tenant need not be charged again when another server continues the answer.
    """

    def __init__(self, request: pb.GenerateRequest, deadline: float) -> None:
        self.request = pb.GenerateRequest()
        self.request.CopyFrom(request)
        self.request.output.delta_token_ids = True
        self.deadline = deadline
        self.avoid: list[str] = []
        self.paid_by = ""
        self.is_over = False
        self._hides_ids = not (request.output.return_token_ids or request.output.delta_token_ids)
        self._progress = Progress(request)
        self._losses = Losses()
        self._pause_s = FIRST_PAUSE_S
        self._accepted: pb.Accepted | None = None
        """The Accepted event that the caller has received, or None before that event."""
        self._is_resumed = False
        """Whether another engine has continued the answer."""
        self._held: list[pb.GenerateResponse] | None = None if is_growing(request) else []
        """Events held back until the answer is complete, or None if the answer is streamed."""

    def take(self, event: pb.GenerateResponse) -> Iterator[pb.GenerateResponse]:
        """Record an event of the answer, and yield the events that the caller may receive now.

        Only the first server's Accepted event is yielded. If the answer is not streamed, all later
        events are held back until the answer is complete.
        """
        match event.WhichOneof("event"):
            case "accepted":
                self._progress.on_accepted(event.accepted, event.accepted.max_tokens)
                self._pause_s = FIRST_PAUSE_S
                self._is_resumed = self._accepted is not None
                if self._accepted is None:
                    self._accepted = event.accepted
                    yield event
                return
            case "delta":
                if not self._progress.is_new(event.delta):
                    return
                self._progress.on_delta(event.delta)
                if self._hides_ids:
                    event.delta.ClearField("token_ids")
            case "sample_finished":
                self._progress.on_sample_finished(event.sample_finished)
            case "finished":
                event.finished.resumes += self._losses.total
                event.finished.resumed_inexact |= self._progress.is_inexact
                if self._is_resumed and self._accepted is not None:
                    write_cached(event.finished.usage, self._accepted)
                self.is_over = True
        if self._held is None:
            yield event
            return
        self._held.append(event)
        if self.is_over:
            yield from self._held

    async def on_loss(self, error: ServiceError) -> None:
        """Prepare to continue the answer on another server.

        Raises:
            ServiceError: the answer cannot be continued, or the deadline has passed.
        """
        progress = self._progress
        is_known = self.request.WhichOneof("input") == "token_ids" and progress.is_whole
        if not (progress.has_begun and is_known) or error.code not in ANOTHER_MAY_GO_ON:
            raise error
        if not _is_refusal(error):
            self._losses.add(error, progress)
        if self._losses.are_too_many or asyncio.get_running_loop().time() >= self.deadline:
            raise error
        if _is_refusal(error):
            await asyncio.sleep(min(self._pause_s, _left(self.deadline)))
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        if self._held:
            self._held.clear()
        progress.on_loss()
        progress.write(self.request)


class _NotBegun(Exception):
    """Raised if an engine did not accept the request, so that another server may be tried."""


async def _events(stream: Stream) -> Events:
    """Yield a server's events.

    Raises:
        ServiceError: the call failed, or the engine cut the answer short.
    """
    try:
        async for event in stream:
            if event.HasField("sample_finished"):
                check_ending(event.sample_finished)
            elif event.HasField("finished"):
                check_ending(event.finished)
            yield event
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def _left(deadline: float) -> float:
    return max(0.001, deadline - asyncio.get_running_loop().time())


def _is_refusal(error: ServiceError) -> bool:
    """Return whether the error is a temporary refusal by the server, rather than a failure."""
    return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED or error.reason in _NOT_NOW
