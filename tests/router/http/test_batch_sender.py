"""The sender of batches' requests: bodies that cannot stand in a line, and bodies that are long."""

import asyncio
import json

import pytest

from ullage_router.http.batches.sender import BatchSender
from ullage_router.http.long_bodies import MAX_HANDLED_BYTES
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


def test_long_bodies_take_turns() -> None:
    """Two bodies that together exceed the memory for parsing are parsed one after the other."""
    body = b" " * (MAX_HANDLED_BYTES // 2 + 1)
    active = 0
    most = 0

    async def app(request: Request, reply: Reply) -> None:
        nonlocal active, most
        await request.read_json("alice")
        active += 1
        most = max(most, active)
        for _ in range(10):
            await asyncio.sleep(0)
        active -= 1
        request.release()
        await reply.whole(200, [(b"content-type", b"application/json")], b"{}")

    async def scenario() -> None:
        sender = BatchSender(app)
        replies = await asyncio.gather(
            *[sender.send(CHAT, "alice", body, f"batch_1_{i}") for i in range(3)]
        )
        assert [reply.status for reply in replies] == [200, 200, 200]

    asyncio.run(scenario())
    assert most == 1
