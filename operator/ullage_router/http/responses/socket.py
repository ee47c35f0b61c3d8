"""Serves /v1/responses over WebSockets, where each message of a client is one request."""

import functools
import logging
from collections.abc import Callable, Iterator

from ullage_router.errors import internal, websocket_too_old
from ullage_router.http.messages import Endpoint, Message, Receive, Reply, Request
from ullage_router.http.openai.endpoint import GenerateEndpoint
from ullage_router.http.responses.endpoint import message_dialect
from ullage_router.http.responses.errors import MESSAGE_ERRORS
from ullage_router.http.responses.store import ConnectionResponses, ResponseStore
from ullage_router.http.sessions import open_session
from ullage_router.http.websocket import WebSocket, open_websocket
from ullage_router.server.service import RouterService

INTERNAL_ERROR = 1011
"""The close code after a failure of the server."""

log = logging.getLogger(__name__)


class ResponsesSocket:
    """Opens WebSockets, and answers their messages one after the other until they close.

    A message is answered as a streamed POST request with the same body is. It needs the same key,
    counts against the same quotas and memory, and has the same records and metrics.

    Args:
        service: Serves requests, and provides the tenants.
        store: The stored responses, which messages may continue.
    """

    def __init__(self, service: RouterService, store: ResponseStore) -> None:
        self._service = service
        self._store = store
        self._latest = ResponseStore(service.config.routing.responses)
        """The latest responses of the connections, except for stored ones."""

    async def __call__(self, request: Request, reply: Reply) -> None:
        service = self._service
        open_session(service.tenants, request, request.headers.get("authorization"))
        error = websocket_too_old(request.limits.websocket_max_age_s)
        farewell = MESSAGE_ERRORS.body(error).decode().rstrip()
        serve = functools.partial(self._serve, request.for_messages())
        open_websocket(request, reply, service.config.streaming.keepalive, farewell, serve)

    async def _serve(self, make_request: Callable[[Receive], Request], socket: WebSocket) -> None:
        """Answer the messages of a connection until it closes."""
        responses = ConnectionResponses(self._store, self._latest)
        serve = GenerateEndpoint(self._service, message_dialect(self._service, responses))
        try:
            while await socket.wait():
                await _answer(serve, make_request(socket.receive), socket)
                responses.end_request()
        except Exception:
            log.exception("a WebSocket failed")
            await socket.send([memoryview(MESSAGE_ERRORS.body(internal()).rstrip())])
            socket.close(INTERNAL_ERROR, "internal error; connect again")
        finally:
            responses.drop()


async def _answer(serve: Endpoint, message: Request, socket: WebSocket) -> None:
    """Answer the current message of a connection."""
    lines = _Lines(socket)
    try:
        await serve(message, Reply(message, lines.send))
    finally:
        message.close()
    await socket.skip()


class _Lines:
    """Sends each line of a reply's body as a message.

    Args:
        socket: The connection.
    """

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._rest: list[bytes] = []
        """Pieces of a line whose end has yet to come."""

    async def send(self, message: Message) -> None:
        """Take an ASGI message of the reply. Its status is part of the lines of errors."""
        body = message.get("body", b"")
        view = memoryview(body)
        start = 0
        if self._rest and (end := body.find(b"\n")) >= 0:
            line = b"".join((*self._rest, view[:end]))
            self._rest.clear()
            start = end + 1
            await self._socket.send([memoryview(line)])
        await self._socket.send(_lines(body, start))
        if rest := view[body.rfind(b"\n") + 1 :]:
            self._rest.append(bytes(rest))


def _lines(body: bytes, start: int) -> Iterator[memoryview]:
    """Yield the lines of a body that end in it, without copies.

    Args:
        body: The body.
        start: Where the first line begins.
    """
    view = memoryview(body)
    while (end := body.find(b"\n", start)) >= 0:
        yield view[start:end]
        start = end + 1
