"""A gRPC server that no name of a method can end.

gRPC's asyncio server decodes the name of a method that nobody has registered, outside of all that
handles calls: one that is not UTF-8, which anybody may send, ends the loop that accepts calls, and
with it the server and all its streams (seen with grpcio 1.85.1 and 1.85.3). Here such calls end
before: every method is registered, so what no method has asked for is unknown, whatever its name.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

UNKNOWN_METHOD = "there is no such method; see reflection for those that there are"


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Accepts the calls of methods that are registered, and refuses all others."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._refusals = set[asyncio.Task[None]]()

    async def _request_call(self) -> Any:
        """Refuse call after call that is for no registered method."""
        while True:
            call = await super()._request_call()
            refusal = asyncio.create_task(_refuse(call), name="unknown method")
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(cygrpc.AbortError, grpc.aio.BaseError, cygrpc.ExecuteBatchError):
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, UNKNOWN_METHOD)


class Server(_server.Server):
    """A server all of whose methods are registered, as those of generated code are.

    Args:
        interceptors: asked before each call.
        options: of gRPC.
        max_calls: number of calls that it has at one time.
    """

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, int]],
        max_calls: int,
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), tuple(interceptors), tuple(options), max_calls)
