"""WebSockets over raw sockets: handshakes, frames, bounds, slow clients, time limits, the end."""

import asyncio
import contextlib
import gc
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from ullage_testing.certificates import Authority
from ullage_testing.raw_websocket import KEY, RawWebSocket, handshake
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Event, Ping, Pong, TextMessage

from ullage_common.process.addresses import listen
from ullage_common.wire.errors import ServiceError
from ullage_router.errors import http_status
from ullage_router.http import server as server_module
from ullage_router.http import websocket as websocket_module
from ullage_router.http.connection import FRAMES_PER_TURN, HTTPConnection
from ullage_router.http.limits import HTTPLimits
from ullage_router.http.messages import (
    MAX_OF_MESSAGES_BYTES,
    PIECE_BYTES,
    Message,
    Receive,
    Reply,
    Request,
)
from ullage_router.http.server import HTTPServer
from ullage_router.http.websocket import (
    BYTES_PER_FRAME,
    FRAMES_PER_STEP,
    HELD_BYTES,
    MAX_SMALL_FRAMES,
    TOO_MANY_FRAMES,
    WebSocket,
    open_websocket,
)

WAIT_S = 20.0
HANDSHAKE = handshake()
SMALL = HTTPLimits(
    max_body_bytes=1000,
    body_timeout_s=1.0,
    stall_timeout_s=1.0,
    linger_s=0.3,
)


class Echo:
    """Repeats each message in pieces; `wait` waits for the test, `flood` sends without end."""

    def __init__(self, ping_s: float = 0.0) -> None:
        self.ping_s = ping_s
        self.go_on = asyncio.Event()
        self.read_on = asyncio.Event()
        """Clear for a reader that takes no further parts."""
        self.read_on.set()
        self.num_parts = 0
        self.begun: list[str] = []
        self.cancelled = 0

    async def __call__(self, request: Request, reply: Reply) -> None:
        try:
            serve = partial(self._serve, request.for_messages())
            open_websocket(request, reply, self.ping_s, "farewell", serve)
        except ServiceError as error:
            await reply.whole(http_status(error), [], error.reason.encode())

    async def _serve(self, make_request: Callable[[Receive], Request], socket: WebSocket) -> None:
        async def receive() -> Message:
            await self.read_on.wait()
            self.num_parts += 1
            return await socket.receive()

        try:
            while await socket.wait():
                message = make_request(receive)
                try:
                    text = (await message.read()).decode()
                    self.begun.append(text)
                    if text == "wait":
                        await self.go_on.wait()
                    while text == "flood":
                        await socket.send([memoryview(b"x" * 10_000)])
                    answer = (text, f"{len(text)}")
                    await socket.send(memoryview(each.encode()) for each in answer)
                except ServiceError as error:
                    await socket.send([memoryview(error.reason.encode())])
                finally:
                    message.close()
                await socket.skip()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def rest(client: RawWebSocket) -> bytes:
    """Everything until the server closes."""
    async with asyncio.timeout(WAIT_S):
        return await client.reader.read()


OpenSocket = Callable[..., Awaitable[ClientConnection]]
OpenRaw = Callable[[], Awaitable[RawWebSocket]]
Scenario = Callable[[HTTPServer, Echo, OpenSocket, OpenRaw], Awaitable[None]]
Run = Callable[..., None]


@contextlib.asynccontextmanager
async def serving(
    limits: HTTPLimits, ping_s: float, context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[HTTPServer, Echo, OpenSocket, OpenRaw]]:
    echo = Echo(ping_s)
    server = HTTPServer(echo, limits)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    scheme = "wss" if context else "ws"
    await server.start(listener, context)

    async with contextlib.AsyncExitStack() as stack:

        async def open_socket(**more: Any) -> ClientConnection:
            return await stack.enter_async_context(
                connect(f"{scheme}://127.0.0.1:{port}", ping_interval=None, **more)
            )

        async def open_raw() -> RawWebSocket:
            async with asyncio.timeout(WAIT_S):
                client = await RawWebSocket.open(port)
            stack.callback(client.writer.close)
            return client

        yield server, echo, open_socket, open_raw
        echo.go_on.set()
    await server.stop(WAIT_S)
    assert server.num_connections == 0


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a scenario on both event loops, with a fast clock of time limits."""
    monkeypatch.setattr(server_module, "TICK_S", 0.02)
    start: Any = asyncio.run if request.param == "asyncio" else uvloop.run

    def run_it(scenario: Scenario, limits: HTTPLimits | None = None, ping_s: float = 0.0) -> None:
        async def main() -> None:
            async with serving(limits or HTTPLimits(), ping_s) as parts:
                await scenario(*parts)

        start(main())

    return run_it


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the condition belongs to others
            await asyncio.sleep(0.01)


async def received(socket: ClientConnection) -> str:
    async with asyncio.timeout(WAIT_S):
        text = await socket.recv()
    assert isinstance(text, str)
    return text


async def closed(socket: ClientConnection) -> tuple[int | None, str | None]:
    """Code and reason with which the server closes."""
    async with asyncio.timeout(WAIT_S):
        await socket.wait_closed()
    return socket.close_code, socket.close_reason


def test_messages_are_answered_one_after_the_other(run: Run) -> None:
    async def scenario(_: HTTPServer, echo: Echo, open_socket: OpenSocket, __: OpenRaw) -> None:
        socket = await open_socket()
        for text in ("", "abc", "wait", "ümlaut 語", "x" * 200_000):
            await socket.send(text)
        for text in ("", "abc"):
            assert await received(socket) == text
            assert await received(socket) == f"{len(text)}"
        await until(lambda: echo.begun == ["", "abc", "wait"])
        echo.go_on.set()
        for text in ("wait", "ümlaut 語", "x" * 200_000):
            assert await received(socket) == text
            assert await received(socket) == f"{len(text)}"
        await socket.close()
        assert socket.close_code == 1000

    run(scenario)


def test_fragments_are_one_message_and_pings_may_come_between(run: Run) -> None:
    async def scenario(_: HTTPServer, echo: Echo, open_socket: OpenSocket, __: OpenRaw) -> None:
        socket = await open_socket()
        await socket.send(["a", "", "b" * 3000, "c"])
        assert await received(socket) == "a" + "b" * 3000 + "c"
        assert await received(socket) == "3002"
        await socket.send("wait")
        await until(lambda: "wait" in echo.begun)
        async with asyncio.timeout(WAIT_S):
            await (await socket.ping())  # while a message is answered
        echo.go_on.set()
        assert await received(socket) == "wait"

    run(scenario)


@pytest.mark.parametrize("start", [asyncio.run, uvloop.run])
def test_messages_pass_through_tls(start: Any, tmp_path: Path) -> None:
    folder = Authority().issue(tmp_path / "tls", "localhost")
    serves = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serves.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    trusts = ssl.create_default_context(cafile=folder / "ca.crt")

    async def main() -> None:
        async with serving(HTTPLimits(), 0.0, serves) as (server, echo, open_socket, _):
            socket = await open_socket(ssl=trusts)
            await socket.send("wait")
            await until(lambda: echo.begun == ["wait"])
            await socket.send("x" * 1_000_000)
            echo.go_on.set()
            for text in ("wait", "4", "x" * 1_000_000, "1000000"):
                assert await received(socket) == text
            await server.stop(WAIT_S)
            assert (await closed(socket))[0] == 1001

    start(main())


HANDSHAKES = {
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n": (426, "UPGRADE_REQUIRED"),
    HANDSHAKE.replace(b"13", b"8"): (426, "UPGRADE_REQUIRED"),
    HANDSHAKE.replace(b"Connection: Upgrade", b"Connection: close"): (426, "UPGRADE_REQUIRED"),
    HANDSHAKE.replace(b"websocket", b"h2c", 1): (426, "UPGRADE_REQUIRED"),
    HANDSHAKE.replace(b"GET", b"POST"): (426, "UPGRADE_REQUIRED"),
    HANDSHAKE.replace(b"HTTP/1.1", b"HTTP/1.0"): (426, "UPGRADE_REQUIRED"),
    HANDSHAKE.replace(KEY, b"short"): (400, "MALFORMED_REQUEST"),
    HANDSHAKE.replace(KEY, b""): (400, "MALFORMED_REQUEST"),
    HANDSHAKE.replace(b"Host: 127.0.0.1\r\n", b""): (None, ""),
}


def test_invalid_handshakes_are_refused(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, _: OpenSocket, __: OpenRaw) -> None:
        assert server._server
        port = server._server.sockets[0].getsockname()[1]
        wrong = {}
        for sent, (status, reason) in HANDSHAKES.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(WAIT_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                body = (await reader.readexactly(length)).decode()
            if status is None:
                if head.startswith("HTTP/1.1 101"):
                    wrong[sent] = head
            elif not head.startswith(f"HTTP/1.1 {status} ") or body != reason:
                wrong[sent] = (head, body)
            writer.close()
        assert wrong == {}

    run(scenario)


def test_an_open_socket_keeps_no_handshake(run: Run) -> None:
    head = HANDSHAKE.removesuffix(b"\r\n") + b"X-Long: " + b"x" * 60_000 + b"\r\n\r\n"
    long = HANDSHAKE.removesuffix(b"\r\n") + b"Authorization: "
    long += b"x" * MAX_OF_MESSAGES_BYTES + b"\r\n\r\n"

    async def scenario(server: HTTPServer, _: Echo, __: OpenSocket, ___: OpenRaw) -> None:
        assert server._server
        port = server._server.sockets[0].getsockname()[1]
        writers = []

        async def open_one(sent: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(sent)
            async with asyncio.timeout(WAIT_S):
                return await reader.readuntil(b"\r\n\r\n")

        assert (await open_one(long)).startswith(b"HTTP/1.1 431 ")
        writers.pop().close()
        assert b" 101 " in await open_one(head)
        await until(lambda: len(server._state.tasks) == server.num_connections == 1)
        gc.collect()
        kept = [each for each in gc.get_objects() if isinstance(each, HTTPConnection | Request)]
        assert kept == []
        for writer in writers:
            writer.close()

    run(scenario)


def test_a_client_that_does_not_wait_for_the_answer_is_refused(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, _: OpenSocket, __: OpenRaw) -> None:
        assert server._server
        port = server._server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        early = Connection(ConnectionType.CLIENT).send(TextMessage("early"))
        writer.write(HANDSHAKE + early)
        async with asyncio.timeout(WAIT_S):
            answer = await reader.read()
        assert b" 101 " not in answer
        assert answer.startswith(b"HTTP/1.1 400 ")
        writer.close()

    run(scenario)


def test_a_message_that_is_too_long_ends_the_connection(run: Run) -> None:
    async def scenario(_: HTTPServer, echo: Echo, open_socket: OpenSocket, __: OpenRaw) -> None:
        socket = await open_socket()
        await socket.send("x" * 1000)
        assert await received(socket) == "x" * 1000
        assert await received(socket) == "1000"
        await socket.send(["x" * 999, "yz"])
        assert await received(socket) == "BODY_TOO_LARGE"
        assert await closed(socket) == (1009, "a message has at most 1000 bytes")

    run(scenario, SMALL)


def test_binary_messages_and_broken_frames_close_the_connection(run: Run) -> None:
    async def scenario(_: HTTPServer, echo: Echo, open_socket: OpenSocket, raw: OpenRaw) -> None:
        socket = await open_socket()
        await socket.send(b"bytes")
        assert (await closed(socket))[0] == 1003

        for frame, code in (
            (b"\x81\x01x", 1002),
            (b"\xf1\x81abcdx", 1002),
            (b"\x81\x81\0\0\0\0\xff", 1007),
        ):
            client = await raw()
            client.writer.write(frame + b"\x81" * 1000)
            answer = await rest(client)
            assert (answer[0], int.from_bytes(answer[2:4])) == (0x88, code), frame
        assert echo.begun == []

    run(scenario, SMALL)


async def end_of(client: RawWebSocket) -> tuple[list[str], int, str | None]:
    """The messages until the server's close frame, and its code and reason."""
    texts: list[str] = []
    async with asyncio.timeout(WAIT_S):
        while True:
            for event in await client.events():
                if isinstance(event, CloseConnection):
                    return texts, event.code, event.reason
                if isinstance(event, TextMessage):
                    texts.append(event.data)


FLOODS: dict[str, tuple[Event, Event]] = {
    "pings": (Ping(), Ping()),
    "pongs": (Pong(), Pong()),
    "fragments": (
        TextMessage("x", message_finished=False),
        TextMessage("x", message_finished=False),
    ),
    "empty fragments": (
        TextMessage("", message_finished=False),
        TextMessage("", message_finished=False),
    ),
    "pings in a message": (TextMessage("x", message_finished=False), Ping()),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_small_frames_ends_the_connection(run: Run, kind: str) -> None:
    async def scenario(server: HTTPServer, echo: Echo, __: OpenSocket, raw: OpenRaw) -> None:
        client = await raw()
        first, other = FLOODS[kind]
        frames = client.frames.send(first)
        frames += b"".join(client.frames.send(other) for _ in range(3 * MAX_SMALL_FRAMES))
        client.writer.write(frames)
        assert await end_of(client) == ([], 1008, TOO_MANY_FRAMES)
        await until(lambda: server.num_connections == 0)
        assert echo.begun == []

    run(scenario, HTTPLimits(linger_s=0.3))


def test_fragments_of_enough_bytes_are_not_limited(run: Run) -> None:
    async def scenario(_: HTTPServer, __: Echo, open_socket: OpenSocket, ___: OpenRaw) -> None:
        socket = await open_socket()
        count = 4 * MAX_SMALL_FRAMES
        await socket.send(["x" * BYTES_PER_FRAME] * count)
        assert await received(socket) == "x" * BYTES_PER_FRAME * count
        assert await received(socket) == f"{BYTES_PER_FRAME * count}"
        await socket.send(["x"] * (MAX_SMALL_FRAMES - 1))
        assert await received(socket) == "x" * (MAX_SMALL_FRAMES - 1)

    run(scenario)


def test_frames_of_all_connections_share_the_turns_of_the_loop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = 0
    parsed = Counter[int]()
    take = WebSocket._take

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def count_frame(socket: WebSocket, event: Event) -> None:
        parsed[turn] += 1
        take(socket, event)

    async def scenario(_: HTTPServer, echo: Echo, __: OpenSocket, raw: OpenRaw) -> None:
        clients = [await raw() for _ in range(8)]
        counting = asyncio.create_task(count_turns())
        for client in clients:
            frames = b"".join(
                client.frames.send(TextMessage("x")) + client.frames.send(Ping())
                for _ in range(MAX_SMALL_FRAMES // 2)
            )
            client.writer.write(frames)
        await until(lambda: len(echo.begun) == len(clients) * MAX_SMALL_FRAMES // 2)
        counting.cancel()
        assert parsed.total() == len(clients) * MAX_SMALL_FRAMES
        assert max(parsed.values()) <= FRAMES_PER_TURN + FRAMES_PER_STEP

    monkeypatch.setattr(WebSocket, "_take", count_frame)
    run(scenario)


def test_a_message_that_does_not_end_is_refused(run: Run) -> None:
    async def scenario(_: HTTPServer, __: Echo, ___: OpenSocket, raw: OpenRaw) -> None:
        client = await raw()
        await client.send("begun", message_finished=False)
        texts, code, reason = await end_of(client)
        assert (texts, code) == (["REQUEST_TIMEOUT"], 1008), reason

    run(scenario, SMALL)


def test_small_frames_do_not_stop_the_clock_of_a_message(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on small frames is far away here, and there are always some to parse."""
    monkeypatch.setattr(websocket_module, "MAX_SMALL_FRAMES", 1 << 30)

    async def scenario(server: HTTPServer, _: Echo, __: OpenSocket, raw: OpenRaw) -> None:
        client = await raw()
        await client.send("x", message_finished=False)
        client.writer.write(client.frames.send(TextMessage("", message_finished=False)) * 120_000)
        async with asyncio.timeout(WAIT_S):
            assert await client.messages(1) == ["REQUEST_TIMEOUT"]
        assert _only(server)._is_reading_paused  # frames are still to be parsed
        client.writer.transport.abort()

    run(scenario, SMALL)


def test_a_slow_reader_is_no_slow_message(run: Run) -> None:
    """The clock of messages stops while the server does not read."""
    limits = HTTPLimits(body_timeout_s=0.3)

    async def scenario(server: HTTPServer, echo: Echo, open_socket: OpenSocket, _: OpenRaw) -> None:
        socket = await open_socket()
        echo.read_on.clear()
        sending = asyncio.create_task(socket.send(["x" * 10_000] * 50))
        await until(lambda: _only(server)._is_full)
        await asyncio.sleep(2 * limits.body_timeout_s)
        echo.read_on.set()
        assert await received(socket) == "x" * 500_000
        await sending

    run(scenario, limits)


def test_a_message_that_was_late_for_the_reader_leaves_nothing(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, _: OpenSocket, raw: OpenRaw) -> None:
        client = await raw()
        await client.send("a", message_finished=False)
        await until(lambda: echo.num_parts == 2)  # the reader awaits the second
        echo.read_on.clear()
        await client.send("b", message_finished=False)
        await until(lambda: _only(server)._taken_bytes == 2)
        await until(lambda: _only(server)._refusal is not None)
        await client.send("c")
        await until(lambda: bool(_only(server)._parts))
        echo.read_on.set()
        async with asyncio.timeout(WAIT_S):
            assert await client.messages(2) == ["abc", "3"]
            await client.send("d", message_finished=False)
            await until(lambda: _only(server)._taken_bytes == 1)
            await client.send("e")
            assert await client.messages(2) == ["de", "2"]

    run(scenario, SMALL)


def _only(server: HTTPServer) -> Any:
    """The server's only connection."""
    (connection,) = server._state.connections
    return connection


def test_a_client_that_does_not_read_is_ended(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, _: OpenSocket, raw: OpenRaw) -> None:
        client = await raw()
        await client.send("flood")
        await until(lambda: server.num_connections == 0)
        assert echo.cancelled == 1

    run(scenario, SMALL)


def test_a_long_answer_waits_for_its_client(run: Run) -> None:
    """Most of it stays where it is, and a pong may come between its pieces."""
    text = "語" * 2_000_000

    async def scenario(server: HTTPServer, echo: Echo, open_socket: OpenSocket, _: OpenRaw) -> None:
        socket = await open_socket(max_size=None, max_queue=1)
        await socket.send(text)
        await until(lambda: bool(echo.begun))
        await until(lambda: not _only(server)._writable.is_set())
        transport = _only(server)._transport
        assert transport.get_write_buffer_size() <= 2 * PIECE_BYTES
        pong = await socket.ping()
        assert await received(socket) == text
        assert await received(socket) == f"{len(text)}"
        async with asyncio.timeout(WAIT_S):
            await pong

    run(scenario)


def test_a_client_that_floods_is_not_read_further(run: Run) -> None:
    """What it sends while it is answered stays in the kernel, but for HELD_BYTES."""

    async def scenario(server: HTTPServer, echo: Echo, _: OpenSocket, raw: OpenRaw) -> None:
        client = await raw()
        await client.send("wait")
        await until(lambda: echo.begun == ["wait"])
        frame = client.frames.send(TextMessage("x" * 10_000))
        client.writer.transport.set_write_buffer_limits(0)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 100 << 20:
                client.writer.write(frame)
                async with asyncio.timeout(0.5):
                    await client.writer.drain()
                sent += len(frame)
        assert sent < 100 << 20
        held = _only(server)
        assert held._held_bytes <= HELD_BYTES + 10_000
        assert len(held._unparsed) <= 1 << 20
        client.writer.transport.abort()

    run(scenario)


def test_a_client_that_disconnects_takes_its_request_with_it(run: Run) -> None:
    async def scenario(
        server: HTTPServer, echo: Echo, open_socket: OpenSocket, raw: OpenRaw
    ) -> None:
        client = await raw()
        await client.send("wait")
        await until(lambda: echo.begun == ["wait"])
        client.writer.transport.abort()
        await until(lambda: echo.cancelled == 1)

        socket = await open_socket()
        await socket.send("wait")
        await until(lambda: len(echo.begun) == 2)
        await socket.close()
        assert socket.close_code == 1000
        await until(lambda: echo.cancelled == 2)
        await until(lambda: server.num_connections == 0)

    run(scenario)


def test_a_silent_connection_gets_pings(run: Run) -> None:
    async def scenario(_: HTTPServer, echo: Echo, __: OpenSocket, raw: OpenRaw) -> None:
        client = await raw()
        async with asyncio.timeout(WAIT_S):
            await client.pings(3)  # which it does not answer
            await client.send("abc")
            assert "abc" in await client.messages(2)

    run(scenario, ping_s=0.1)


def test_idle_and_old_connections_are_closed(run: Run) -> None:
    async def scenario(_: HTTPServer, echo: Echo, open_socket: OpenSocket, __: OpenRaw) -> None:
        socket = await open_socket()
        await socket.send("wait")
        await until(lambda: echo.begun == ["wait"])
        await asyncio.sleep(1.5)
        echo.go_on.set()
        assert await received(socket) == "wait"
        assert await received(socket) == "4"
        assert await closed(socket) == (1001, "no message came for 1 s; connect again")

    run(scenario, HTTPLimits(websocket_idle_timeout_s=1.0))

    async def old(_: HTTPServer, echo: Echo, open_socket: OpenSocket, __: OpenRaw) -> None:
        socket = await open_socket()
        assert await received(socket) == "farewell"
        assert (await closed(socket))[0] == 1001

    run(old, HTTPLimits(websocket_max_age_s=0.1))


def test_a_leaving_server_still_gives_each_connection_one_answer(run: Run) -> None:
    async def scenario(server: HTTPServer, _: Echo, open_socket: OpenSocket, __: OpenRaw) -> None:
        earlier = await open_socket()
        leaving = asyncio.create_task(server.leave(WAIT_S))
        await until(lambda: server._state.is_leaving)
        later = await open_socket()
        for socket in (earlier, later):
            await socket.send("abc")
            assert await received(socket) == "abc"
            assert await received(socket) == "3"
            assert (await closed(socket))[0] == 1001
        await leaving

    run(scenario)


def test_a_stop_lets_the_current_answer_end(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, open_socket: OpenSocket, _: OpenRaw) -> None:
        idle = await open_socket()
        busy = await open_socket()
        await busy.send("wait")
        await until(lambda: echo.begun == ["wait"])
        stopping = asyncio.create_task(server.stop(WAIT_S))
        assert (await closed(idle))[0] == 1001
        with pytest.raises(OSError):
            await open_socket()
        echo.go_on.set()
        assert await received(busy) == "wait"
        assert await received(busy) == "4"
        assert (await closed(busy))[0] == 1001
        await stopping

    run(scenario)


def test_a_stop_ends_what_does_not_end(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, open_socket: OpenSocket, _: OpenRaw) -> None:
        socket = await open_socket()
        await socket.send("wait")
        await until(lambda: echo.begun == ["wait"])
        await server.stop(0.05)
        assert echo.cancelled == 1
        with pytest.raises(ConnectionClosed):
            await socket.recv()

    run(scenario)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.text(max_size=300), min_size=1, max_size=6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 400), min_size=1, max_size=20),
)
def test_messages_survive_every_cut(texts: list[list[str]], cuts: list[int]) -> None:
    """Frames and packets may end anywhere, even within a character."""

    async def scenario() -> None:
        async with serving(HTTPLimits(), 0.0) as (_, echo, __, open_raw):
            client = await open_raw()
            texts_whole = [
                "".join(parts).replace("wait", "w").replace("flood", "f") for parts in texts
            ]
            data = b"".join(
                client.frames.send(TextMessage(whole[: len(whole) // 2], message_finished=False))
                + client.frames.send(TextMessage(whole[len(whole) // 2 :]))
                for whole in texts_whole
            )
            start = 0
            for size in cuts:
                client.writer.write(data[start : start + size])
                await asyncio.sleep(0)
                start += size
            client.writer.write(data[start:])
            await until(lambda: len(echo.begun) == len(texts_whole))
            assert echo.begun == texts_whole

    asyncio.run(scenario())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_end_in_a_close_and_never_in_a_failure(data: bytes) -> None:
    failures: list[dict[str, Any]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        async with serving(SMALL, 0.0) as (server, _, __, open_raw):
            client = await open_raw()
            client.writer.write(data)
            client.writer.write_eof()
            await rest(client)
            await until(lambda: server.num_connections == 0)

    asyncio.run(scenario())
    assert failures == []
