"""The sender of batches' requests: bodies that cannot stand in a line, and bodies that are long."""

import asyncio
import json

import pytest

from ullage_router.http.batches.sender import BatchSender
from ullage_router.http.messages import Reply, Request

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("status", [200, 400])
def test_a_response_that_is_no_json_is_an_error(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(request: Request, reply: Reply) -> None:
        reply.start(status, [(b"content-type", b"text/event-stream")])
        await reply.piece(b"data: {}\n\n")
        await reply.end(b"data: [DONE]\n\n")

    reply = asyncio.run(BatchSender(app).send(CHAT, "", b"{}", "batch_1_0"))
    assert reply.status == 500
    assert "batch_1_0" in json.loads(reply.body)["error"]["message"]
    assert "a batch's request got no JSON" in caplog.messages
