"""A client that streams straight from engines, with a router's tickets.

    async with Client("router:9000") as client:
        async for event in client.generate(request):
            ...

What is in token ids is placed by `Pick` and sent to the engine that was named; calls that are made
at the same time share one `Pick`, and those of the same sizes share tickets. Everything else (text
and conversations, which the router templates), what has to wait for memory, and all of it where the
service gives no tickets, goes through the router's `Generate`. Either way the events and the errors
are the same.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Self

import grpc

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_rpc.channels import open_channel
from ullage_rpc.errors import ServiceError, from_rpc_error
from ullage_rpc.picks import Pick, Picks
from ullage_rpc.tickets import TICKET_KEY

MAX_PICKS = 3
"""Engines that are tried before the router is asked to do it all."""
MAX_ENGINES = 256
"""Channels kept open."""
CLOSING_S = 60.0
"""What an answer has that runs on a channel which is closed."""
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
"""What an engine says that another engine, or the router, may not."""

Events = AsyncGenerator[pb.GenerateResponse, None]
Stream = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


class Client:
    """Speaks with one service.

    Args:
        router: `host:port` of its router, gRPC.
        metadata: sent with every call to the router, such as ("authorization", "Bearer KEY").
        is_direct: False sends everything through the router.
        credentials: of the connections to router and engines; None for plaintext.
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
        self._picks = Picks(self._router, self._metadata) if is_direct else None
        self._engines: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Reports what ended and closes every connection; answers under way break off."""
        if self._picks:
            await self._picks.close()
        await asyncio.gather(*(channel.close() for channel in self._engines.values()))
        await asyncio.gather(*self._closing)
        await self._channel.close()

    async def generate(self, request: pb.GenerateRequest, timeout_s: float = 30.0) -> Events:
        """Accepted, then Delta any number of times, then Finished.

        Raises:
            ServiceError: the request was refused or failed, as the router would say it.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        async with aclosing(self._direct(request, deadline)) as direct:
            async for event in direct:
                yield event
                if event.HasField("finished"):
                    return
        stream = self._router.Generate(request, timeout=_left(deadline), metadata=self._metadata)
        try:
            async for event in _events(stream):
                yield event
        finally:
            stream.cancel()

    async def _direct(self, request: pb.GenerateRequest, deadline: float) -> Events:
        """The answer from an engine; nothing at all when the router shall do it."""
        if self._picks is None or request.WhichOneof("input") != "token_ids":
            return
        avoid: list[str] = []
        while len(avoid) < MAX_PICKS:
            pick = await self._picks.place(request, avoid, deadline)
            if pick is None:
                return
            try:
                async with aclosing(self._from_engine(request, pick, deadline)) as events:
                    async for event in events:
                        yield event
                return
            except _NotBegun:
                avoid.append(pick.engine)

    async def _from_engine(
        self, request: pb.GenerateRequest, pick: Pick, deadline: float
    ) -> Events:
        assert self._picks
        stub = inference_pb2_grpc.InferenceServiceStub(self._engine(pick.engine))
        sent = pb.GenerateRequest()
        sent.CopyFrom(request)
        sent.stop.max_tokens = pick.max_tokens
        stream = stub.Generate(sent, timeout=_left(deadline), metadata=((TICKET_KEY, pick.ticket),))
        has_begun = False
        try:
            async for event in _events(stream):
                if not has_begun:
                    has_begun = True
                    self._picks.accepted(pick)
                    event.accepted.action, event.accepted.route = "accept", "direct"
                yield event
        except ServiceError as error:
            if has_begun or error.code not in ANOTHER_MAY:
                raise
            raise _NotBegun from error
        finally:
            stream.cancel()
            self._picks.ended(pick)

    def _engine(self, address: str) -> grpc.aio.Channel:
        """Its channel; the one used longest ago is closed when there are too many."""
        channel = self._engines.pop(address, None) or open_channel(address, self._credentials)
        self._engines[address] = channel
        if len(self._engines) > MAX_ENGINES:
            oldest = next(iter(self._engines))
            closing = asyncio.create_task(self._engines.pop(oldest).close(grace=CLOSING_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return channel


class _NotBegun(Exception):
    """The engine took nothing: the request may go elsewhere."""


async def _events(stream: Stream) -> Events:
    try:
        async for event in stream:
            yield event
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def _left(deadline: float) -> float:
    return max(0.001, deadline - asyncio.get_running_loop().time())
