"""A gRPC server that does not crash on method names that are not UTF-8.

gRPC's asyncio server decodes the names of unregistered methods outside of its error handling. Any
client may send a name that is not UTF-8. Such a name terminates the loop that accepts calls, which
breaks the server and all its streams (seen with grpcio 1.85.1 and 1.85.3). The server in this
module has all its methods registered, so calls to other methods are refused before their names are
decoded.
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
    """gRPC's internal server class, changed to refuse calls to methods that are not registered."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._refusals = set[asyncio.Task[None]]()

    async def _request_call(self) -> Any:
        """Refuse every call to an unregistered method, in an endless loop."""
        while True:
            call = await super()._request_call()
            refusal = asyncio.create_task(_refuse(call), name="unknown method")
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


async def _refuse(call: Any) -> None:
    context = cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    with contextlib.suppress(grpc.aio.BaseError, cygrpc.ExecuteBatchError):
        try:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, UNKNOWN_METHOD)
        except cygrpc.AbortError as aborted:
            aborted.__traceback__ = None  # it refers to the call, which keeps the exception


class Server(_server.Server):
    """A gRPC server that serves only registered methods, such as those of generated gRPC code.

    Args:
        interceptors: interceptors for every call.
        options: gRPC channel options.
        max_calls: maximum number of concurrent calls.
    """

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        options: Sequence[tuple[str, int]],
        max_calls: int,
    ) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), tuple(interceptors), tuple(options), max_calls)
