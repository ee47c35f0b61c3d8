"""The server's end of a worker's socket: what is queued arrives whole, however slowly it is read,
and is dropped when the worker has gone."""

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ullage_engine.protocol.frames import SEND_BUFFER_BYTES, Frames, framed
from ullage_engine.protocol.messages import Admitted, Cancel, Submit, ToWorker
from ullage_engine.protocol.requests import EngineRequest, SamplingParams
from ullage_engine.server.server_link import ServerLink


class Client:
    """A worker that reads in small pieces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._frames = Frames()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    async def connect(self) -> None:
        await asyncio.get_running_loop().sock_connect(self._socket, str(self._path))

    async def read(self) -> list[ToWorker]:
        """The messages that a piece completes."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, 50_000)
        return [self._decoder.decode(each) for each in self._frames.feed(data)]

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def close(self) -> None:
        self._socket.close()


def submit(num_bytes: int) -> Submit:
    """A request of about so many bytes."""
    request = EngineRequest(
        request_id="x" * num_bytes,
        token_ids=[1],
        num_prompt_tokens=1,
        max_tokens=1,
        sampling=SamplingParams(),
    )
    return Submit(requests=[request])


Scenario = Callable[[ServerLink, Client], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with a link, and a client that is not connected."""

    async def with_link(scenario: Scenario) -> None:
        path = tmp_path / "w.ipc"
        link = ServerLink(str(path))
        client = Client(path)
        try:
            await scenario(link, client)
        finally:
            client.close()
            link.close()
        assert not path.exists()

    return lambda scenario: asyncio.run(with_link(scenario))


LONG = 3 * SEND_BUFFER_BYTES
"""Bytes that no buffer takes at once: the kernel doubles what it is asked for."""


def test_all_that_was_posted_arrives_in_order(run: Callable[[Scenario], None]) -> None:
    async def scenario(link: ServerLink, client: Client) -> None:
        posted: list[ToWorker] = [submit(1 << 20), submit(LONG), Cancel(request_id="before")]
        for message in posted:
            link.post(message)
        await client.connect()
        found: list[ToWorker] = []
        while not found:
            found += await client.read()
        posted.append(Cancel(request_id="behind what waits"))
        link.post(posted[-1])
        while len(found) < len(posted):
            found += await client.read()
        assert found == posted
        link.post(Cancel(request_id="alone"))
        assert await client.read() == [Cancel(request_id="alone")]
        said = framed(msgspec.msgpack.encode(Admitted(request_id="a")))
        for piece in (said[:3], said[3:]):
            await client.send(piece)
            await asyncio.sleep(0)
        assert await link.receive() == Admitted(request_id="a")

    run(scenario)


def test_what_a_worker_does_not_take_before_it_goes_is_dropped(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(link: ServerLink, client: Client) -> None:
        await client.connect()
        link.post(submit(LONG))
        await client.read()
        assert link._unsent
        client.close()
        for _ in range(5):
            await asyncio.sleep(0)
        link.post(Cancel(request_id="to nobody"))
        assert not link._unsent
        assert not link.failure.done()

    run(scenario)


class FullSocket:
    """A socket of a machine that has no memory for it."""

    def __init__(self, connected: socket.socket) -> None:
        self.fileno = connected.fileno

    def send(self, data: bytearray) -> int:
        raise OSError(errno.ENOBUFS, "No buffer space available")


def test_a_worker_that_cannot_be_reached_for_another_reason_is_a_failure(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(link: ServerLink, client: Client) -> None:
        link.post(Cancel(request_id="a"))
        link._write(cast(socket.socket, FullSocket(client._socket)))
        assert link.failure.done()
        with pytest.raises(OSError, match="No buffer space"):
            link.failure.result()

    run(scenario)
