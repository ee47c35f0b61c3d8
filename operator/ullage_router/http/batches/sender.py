"""Sends the requests of batches through the application, as if they had arrived over HTTP."""

import asyncio
import logging
from http import HTTPStatus

from ullage_router.batches.lines import BatchReply
from ullage_router.errors import internal
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import BATCH_TENANT, JSON, Endpoint, Message, asgi
from ullage_router.http.openai.errors import envelope

log = logging.getLogger(__name__)


class BatchSender:
    """Sends requests.

    Args:
        app: Answers the requests.
    """

    def __init__(self, app: Endpoint) -> None:
        self._serve = asgi(app, HTTPLimits())

    async def send(self, endpoint: str, tenant: str, body: bytes, request_id: str) -> BatchReply:
        """Send a request, and return the response.

        Args:
            endpoint: The path of the endpoint.
            tenant: The tenant that owns the batch.
            body: The body.
            request_id: The request id.
        """
        headers = {
            "content-type": JSON,
            "content-length": f"{len(body)}",
            "x-request-id": request_id,
        }
        scope = {
            "method": "POST",
            "path": endpoint,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            BATCH_TENANT: tenant,
        }
        response = _Response()

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._serve(scope, receive, response.add)
        if not response.is_complete:  # `asgi` has swallowed the cancellation of this task
            raise asyncio.CancelledError
        if not response.is_json:  # it would make the line of the output file no JSON
            log.error("a batch's request got no JSON", extra={"request_id": request_id})
            body = envelope(internal(request_id))
            return BatchReply(HTTPStatus.INTERNAL_SERVER_ERROR, body, request_id)
        return BatchReply(
            response.status, b"".join(response.pieces), request_id, response.retry_after_s
        )


class _Response:
    """Collects the messages of a response."""

    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[bytes] = []
        self.retry_after_s: float | None = None
        self.is_json = False
        self.is_complete = False

    async def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = dict(message["headers"])
            self.is_json = headers.get(b"content-type") == JSON.encode()
            retry_after = headers.get(b"retry-after")
            self.retry_after_s = float(retry_after) if retry_after else None
            return
        self.pieces.append(message["body"])
        self.is_complete = not message.get("more_body", False)
