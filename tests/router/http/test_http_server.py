"""The HTTP server over raw sockets: framing, bounds, slow clients, order and the end."""

import ast
import asyncio
import contextlib
import email.utils
import gc
import itertools
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvloop
from ullage_testing.loop_watch import watched_loop

from ullage_common.process.addresses import listen
from ullage_common.wire.errors import ServiceError
from ullage_router.http import server as server_module
from ullage_router.http.connection import STARTED_PER_TURN, ConnectionState, HTTPConnection
from ullage_router.http.limits import BodyRoom, HTTPLimits
from ullage_router.http.messages import Reply, Request
from ullage_router.http.server import HTTPServer

WAIT_S = 20.0
SMALL = HTTPLimits(
    max_head_bytes=2000,
    max_body_bytes=1000,
    head_timeout_s=0.2,
    body_timeout_s=0.2,
    idle_timeout_s=0.2,
    linger_s=0.2,
)


class Echo:
    """Says what it was asked; `/wait` waits to be told to go on, `/parts` answers in parts."""

    def __init__(self) -> None:
        self.port = 0
        self.go_on = asyncio.Event()
        self.room = BodyRoom(0)
        self.begun = 0
        self.cancelled = 0

    async def __call__(self, request: Request, reply: Reply) -> None:
        if request.refusal:
            await reply.whole(400, [], request.refusal.reason.encode())
            return
        if request.path == "/forbidden":
            await reply.whole(400, [], b"FORBIDDEN")
            return
        try:
            tenant = request.headers.get("x-tenant", "")
            self.room = request._room
            body = await request.read(tenant) if request.method == "POST" else b""
            self.begun += 1
            await self._serve(request, reply, body)
        except ServiceError as error:
            await reply.whole(400, [], error.reason.encode())
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _serve(self, request: Request, reply: Reply, body: bytes) -> None:
        if request.path == "/wait":
            await self.go_on.wait()
        if request.path in ("/parts", "/flood"):
            reply.start(200, [(b"x-kind", b"parts")])
            for _ in range(3 if request.path == "/parts" else 10_000):
                await reply.piece(b"part" if request.path == "/parts" else b"x" * 10_000)
            await reply.end(b"last")
        elif request.path == "/headers":
            await reply.whole(200, [], repr(dict(request.headers)).encode())
        elif request.path == "/fails":
            reply.start(200, [])
            await reply.piece(b"part")
            raise RuntimeError("a bug")
        else:
            await reply.whole(200, [], f"{request.method} {request.path} ".encode() + body)


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> str:
        async with asyncio.timeout(WAIT_S):
            return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def answer(self) -> tuple[str, bytes]:
        """Head and body of an answer with a length."""
        head = await self.head()
        match = re.search(r"content-length: (\d+)", head)
        assert match, head
        async with asyncio.timeout(WAIT_S):
            return head, await self.reader.readexactly(int(match[1]))

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


Connect = Callable[[], Awaitable[Client]]
Scenario = Callable[[HTTPServer, Echo, Connect], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(limits: HTTPLimits) -> AsyncIterator[tuple[HTTPServer, Echo, Connect]]:
    echo = Echo()
    server = HTTPServer(echo, limits)
    listener = listen("127.0.0.1", 0)
    port = echo.port = listener.getsockname()[1]
    await server.start(listener)
    writers = []

    async def connect() -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return Client(reader, writer)

    try:
        yield server, echo, connect
    finally:
        echo.go_on.set()
        for writer in writers:
            writer.close()
        await server.stop(WAIT_S)
        assert server.num_connections == 0


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a scenario on both event loops."""
    start: Any = asyncio.run if request.param == "asyncio" else uvloop.run

    def run_it(scenario: Scenario, limits: HTTPLimits | None = None) -> None:
        async def main() -> None:
            async with serving(limits or HTTPLimits()) as parts:
                await scenario(*parts)

        start(main())

    return run_it


Run = Callable[..., None]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - the condition belongs to others
            await asyncio.sleep(0.01)


def test_a_connection_is_used_again(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        for body in (b"", b"abc"):
            await client.send(b"POST /a%20b?q=1 HTTP/1.1\r\nHost: x\r\nContent-Length: ")
            await client.send(b"%d\r\n\r\n%b" % (len(body), body))
            head, told = await client.answer()
            assert head.startswith("HTTP/1.1 200 OK\r\n")
            assert "\r\ndate: " in head
            assert "connection: close" not in head
            assert told == b"POST /a b " + body

    run(scenario)


def test_requests_in_one_packet_are_answered_in_order(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        paths = ["wait", *map(str, range(40)), "parts"]
        await client.send(
            b"".join(b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % p.encode() for p in paths)
        )
        await until(lambda: echo.begun == 1)
        echo.go_on.set()
        for path in paths[:-1]:
            assert (await client.answer())[1] == f"GET /{path} ".encode()
        assert "transfer-encoding: chunked" in await client.head()
        body = b"4\r\npart\r\n" * 3 + b"4\r\nlast\r\n0\r\n\r\n"
        assert await client.reader.readexactly(len(body)) == body

    run(scenario)


def test_a_body_in_chunks_and_byte_by_byte(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        for byte in head + b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nTrailer: x\r\n\r\n":
            await client.send(bytes([byte]))
        assert (await client.answer())[1] == b"POST / abcde"

    run(scenario)


CHUNKED = b"POST /headers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"


def test_what_follows_the_last_chunk_is_no_header(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        trailers = b"Authorization: Bearer k\r\nX-Session-Id: s\r\nHost: y\r\n"
        plain = b"GET /headers HTTP/1.1\r\nHost: z\r\n\r\n"
        await client.send(CHUNKED + b"0\r\n" + trailers + b"\r\n" + plain)
        told = (await client.answer())[1].decode()
        assert ast.literal_eval(told) == {"host": "x", "transfer-encoding": "chunked"}
        assert ast.literal_eval((await client.answer())[1].decode()) == {"host": "z"}

    run(scenario)


def test_headers_of_one_name_are_one(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(
            b"GET /headers HTTP/1.1\r\nHost: x\r\nA: 1\r\nB: 2\r\na: 3\r\nA: 4\r\n\r\n"
        )
        told = ast.literal_eval((await client.answer())[1].decode())
        assert told == {"host": "x", "a": "1, 3, 4", "b": "2"}

    run(scenario)


def numbered(count: int) -> bytes:
    return b"".join(b"%x:\r\n" % i for i in range(count))


TINY_CHUNKS = b"".join(b"1;e\r\n%b\r\n" % bytes([65 + i % 26]) for i in range(50_000))
LONG_MESSAGES = {
    "trailers": CHUNKED + b"0\r\n" + numbered(200_000) + b"\r\n",
    "a few trailers": CHUNKED + b"0\r\n" + numbered(8_000) + b"\r\n",
    "trailers behind a body": CHUNKED
    + b"400000\r\n"
    + bytes(4 << 20)
    + b"\r\n0\r\n"
    + numbered(500_000),
    "a long trailer": CHUNKED + b"400000\r\n" + bytes(4 << 20) + b"\r\n0\r\na: " + b"x" * (8 << 20),
    "headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + numbered(200_000) + b"\r\n",
    "a head full of headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + numbered(9_000) + b"\r\n",
    "tiny chunks": CHUNKED + TINY_CHUNKS + b"0\r\n\r\n",
    "a pipeline": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4_000,
}


@pytest.mark.parametrize("data", LONG_MESSAGES.values(), ids=LONG_MESSAGES)
def test_no_message_holds_up_others(data: bytes) -> None:
    """Another client is answered meanwhile; the time is the loop's own, whatever else runs."""

    async def scenario() -> None:
        async with serving(HTTPLimits()) as (_, echo, connect), watched_loop() as watch:
            sending = asyncio.create_task(asyncio.to_thread(send_all, echo.port, data))
            other = await connect()
            num_answers = 0
            while not sending.done() or num_answers < 3:
                await other.send(b"GET /other HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await other.answer())[1] == b"GET /other "
                num_answers += 1
        watch.check()

    uvloop.run(scenario())


def send_all(port: int, data: bytes) -> None:
    """Sends as much as the server takes, and reads what it says to that."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        reading = threading.Thread(target=read_all, args=(client,))
        reading.start()
        with contextlib.suppress(OSError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        reading.join(WAIT_S)


def read_all(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while client.recv(1 << 16):
            pass


def test_leave_to_send_a_body(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        await client.send(head % 3)
        assert (await client.head()).startswith("HTTP/1.1 100 ")
        await client.send(b"abc")
        assert (await client.answer())[1] == b"POST / abc"
        await client.send(head.replace(b"/", b"/forbidden", 1) % 3)
        assert (await client.answer())[1] == b"FORBIDDEN"
        client = await connect()
        await client.send(head % 1001)
        assert (await client.answer())[1] == b"BODY_TOO_LARGE"

    run(scenario, HTTPLimits(max_body_bytes=1000))


def test_an_offer_to_upgrade_is_not_taken_and_loses_no_body(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(
            b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAMAAABkAAQAAP__\r\nContent-Length: 3\r\n\r\nabc"
        )
        assert (await client.answer())[1] == b"POST / abc"

    run(scenario)


def test_the_old_protocol_gets_no_chunks(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /parts HTTP/1.0\r\n\r\n")
        told = await client.rest()
        assert b"connection: close" in told
        assert told.endswith(b"\r\n\r\npartpartpartlast")

    run(scenario)


def test_parts_of_one_moment_leave_in_one_write(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    write = HTTPConnection.write

    def counted(connection: HTTPConnection, data: bytes) -> None:
        writes.append(data)
        write(connection, data)

    monkeypatch.setattr(HTTPConnection, "write", counted)

    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /parts HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert (await client.rest()).endswith(b"4\r\nlast\r\n0\r\n\r\n")
        assert len(writes) == 1

    run(scenario)


def test_head_has_no_body(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        told = await client.rest()
        assert b"content-length: 7" in told
        assert told.endswith(b"\r\n\r\n")

    run(scenario)


BAD = {
    "no HTTP": b"\x16\x03\x01 gibberish\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a tunnel": b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and chunks": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Length: 4\r\n\r\n",
    "no number": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "a bad chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "a folded header": b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n",
    "no ASCII": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    "chunks of the old protocol": b"POST / HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "chunks twice": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n",
    "a scheme alone": b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n",
}
OTHERS = {
    "HTTP/2's first words": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a compressed body": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\n"
    b"Content-Length: 1\r\n\r\na",
    "no version": b"POST /x\r\nHost: a\r\nConnection: keep-alive\r\nContent-Length: 5\r\n\r\nhello",
    "version 2": b"GET /x HTTP/2.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
    "version 2 and an upgrade": b"GET /x HTTP/2.0\r\nHost: a\r\nConnection: upgrade\r\n"
    b"Upgrade: h2c\r\n\r\n",
    "two codings": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "another expectation": b"POST / HTTP/1.1\r\nHost: a\r\nExpect: x\r\nContent-Length: 1\r\n\r\na",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_malformed_requests_are_refused_after_those_before(run: Run, data: bytes) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n" + data)
        assert (await client.answer())[1] == b"GET /1 "
        head, told = await client.answer()
        assert told == b"MALFORMED_REQUEST"
        assert "connection: close" in head
        assert await client.rest() == b""
        assert echo.begun == 1

    run(scenario, HTTPLimits(linger_s=0.1))


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS.keys())
def test_what_others_would_read_otherwise_is_refused_and_closed(run: Run, data: bytes) -> None:
    """A proxy that reads such a request in another way takes its rest for another request."""

    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(data + b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
        head, reason = await client.answer()
        assert reason in (
            b"HTTP_VERSION_NOT_SUPPORTED",
            b"CONTENT_ENCODING_NOT_SUPPORTED",
            b"TRANSFER_ENCODING_NOT_SUPPORTED",
            b"EXPECTATION_FAILED",
        )
        assert "connection: close" in head
        assert await client.rest() == b""
        assert echo.begun == 0

    run(scenario, HTTPLimits(linger_s=0.1))


def test_many_offers_to_upgrade_hold_up_nobody(run: Run) -> None:
    """Each is parsed twice; 4000 of them come in one read."""
    offer = b"GET /%d HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"

    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        loop = asyncio.get_running_loop()
        client = await connect()
        stalls = [0.0]
        failures: list[Any] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))

        async def measure() -> None:
            while True:
                began = time.process_time()  # what other programs do must not count
                await asyncio.sleep(0)
                stalls.append(time.process_time() - began)

        gc.collect()
        gc.disable()
        try:
            sending = asyncio.create_task(client.send(b"".join(offer % i for i in range(4000))))
            measuring = asyncio.create_task(measure())
            for i in range(4000):
                assert (await client.answer())[1] == b"GET /%d " % i
            measuring.cancel()
            await sending
        finally:
            gc.enable()
        assert failures == []
        assert max(stalls) < sum(stalls) / 30

    run(scenario)


def test_an_offer_to_upgrade_keeps_the_version_and_the_wish_to_close(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        for line, connection in ((b"1.1", b"close, upgrade"), (b"1.0", b"upgrade")):
            client = await connect()
            await client.send(
                b"GET /parts HTTP/%b\r\nHost: x\r\nConnection: %b\r\nUpgrade: h2c\r\n\r\n"
                % (line, connection)
            )
            told = await client.rest()
            assert b"connection: close" in told
            assert (b"chunked" in told) == (line == b"1.1")

    run(scenario)


def test_a_client_that_reads_nothing_is_parsed_no_further(run: Run) -> None:
    """However much it sends; what it sends does not keep it alive either."""

    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        request = b"GET /parts HTTP/1.1\r\nHost: x\r\n\r\n" * 2000
        sent = 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1.0):
                while True:
                    await client.send(request)
                    sent += 2000
        begun = echo.begun
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(2.0):
                while server.num_connections:
                    await client.send(request)
                    await asyncio.sleep(0.01)
        assert begun < sent
        assert echo.begun - begun < 100
        await until(lambda: server.num_connections == 0)

    run(scenario, HTTPLimits(stall_timeout_s=1.5))


def test_a_long_pipeline_is_answered_in_order_and_whole(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        data = b"".join(
            b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\n\r\n%b" % (i, b"x" * 300)
            for i in range(3000)
        )
        sending = asyncio.create_task(client.send(data))
        for i in range(3000):
            assert (await client.answer())[1] == b"POST /%d " % i + b"x" * 300
        await sending

    run(scenario)


def test_a_short_body_that_nobody_reads_costs_no_connection(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        head = b"POST /forbidden HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\n\r\n"
        await client.send(head + b"x" * 100)
        answer, reason = await client.answer()
        assert reason == b"FORBIDDEN"
        assert "connection: close" not in answer
        await client.send(b"x" * 200 + b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer())[1] == b"GET /next "
        for length in (b"Content-Length: 70000", b"Transfer-Encoding: chunked"):
            client = await connect()
            await client.send(b"POST /forbidden HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % length)
            answer, reason = await client.answer()
            assert reason == b"FORBIDDEN"
            assert "connection: close" in answer
            assert await client.rest() == b""

    run(scenario, HTTPLimits(linger_s=0.1))


def test_a_body_that_nobody_reads_must_come_in_time(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"POST /forbidden HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        assert (await client.answer())[1] == b"FORBIDDEN"
        assert await client.rest() == b""

    run(scenario, SMALL)


def test_one_tenant_gets_half_the_room_for_bodies(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        async def begin(tenant: bytes) -> Client:
            client = await connect()
            await client.send(
                b"POST / HTTP/1.1\r\nHost: x\r\nX-Tenant: %b\r\nContent-Length: 1000\r\n\r\n"
                % tenant
                + b"x" * 900
            )
            return client

        first = [await begin(b"a"), await begin(b"a")]
        await until(lambda: echo.room.taken == 1800)
        assert (await (await begin(b"a")).answer())[1] == b"BODIES_FULL"
        other = await begin(b"b")
        for client in (*first, other):
            await client.send(b"x" * 100)
            assert (await client.answer())[1] == b"POST / " + b"x" * 1000

    run(scenario, HTTPLimits(max_body_bytes=1000, max_held_bytes=4000, linger_s=0.1))


def test_old_connections_end_with_a_reply(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert "connection: close" not in (await client.answer())[0]
        await asyncio.sleep(1.1)
        await client.send(b"GET /2 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert "connection: close" in (await client.answer())[0]
        assert await client.rest() == b""

    run(scenario, HTTPLimits(max_age_s=1.0))


HUGE = {
    "one header": b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 3000 + b"\r\n\r\n",
    "an endless header": b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 3000,
    "a long line": b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 101 + b"\r\n",
}


@pytest.mark.parametrize("data", HUGE.values(), ids=HUGE.keys())
def test_heads_have_bounds(run: Run, data: bytes) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(data)
        assert (await client.answer())[1] == b"HEADERS_TOO_LARGE"
        assert await client.rest() == b""

    run(scenario, HTTPLimits(max_head_bytes=2000, linger_s=0.1))


def test_bodies_have_bounds(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        head = b"POST / HTTP/1.1\r\nHost: x\r\n"
        cases = {
            b"BODY_TOO_LARGE": b"Transfer-Encoding: chunked\r\n\r\n"
            + b"64\r\n%b\r\n" % (b"x" * 100) * 11,
            b"MALFORMED_REQUEST": b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 9000,
        }
        for reason, rest in cases.items():
            client = await connect()
            await client.send(head)
            for start in range(0, len(rest), 1000):
                await client.send(rest[start : start + 1000])
                await asyncio.sleep(0.01)
            assert (await client.answer())[1] == reason
            assert await client.rest() == b""

    run(scenario, HTTPLimits(max_body_bytes=1000, max_head_bytes=2000, linger_s=1.0))


def test_bodies_that_arrive_have_a_bound_together(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        clients = [await connect() for _ in range(40)]
        answers = {asyncio.create_task(client.answer()): client for client in clients}
        for client in clients:
            await client.send(head + b"x" * 900)
        await until(lambda: sum(task.done() for task in answers) == 35)
        assert {task.result()[1] for task in answers if task.done()} == {b"BODIES_FULL"}
        other = await connect()
        await other.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await other.answer())[1] == b"GET /healthz "
        taken = [task for task in answers if not task.done()]
        for task in taken[:2]:
            await answers[task].send(b"x" * 100)
            assert (await task)[1] == b"POST / " + b"x" * 1000
        for task in taken[2:]:
            answers[task].writer.close()
        await asyncio.wait(taken)
        await until(lambda: server.num_connections == 3)
        # All the room is free again, for requests that wait for another, too.
        await other.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + (head + b"y" * 1000) * 4)
        await until(lambda: echo.begun == 4)
        echo.go_on.set()
        assert (await other.answer())[1] == b"GET /wait "
        for _ in range(4):
            assert (await other.answer())[1] == b"POST / " + b"y" * 1000

    run(scenario, HTTPLimits(max_body_bytes=1000, max_held_bytes=4950, linger_s=0.1))


def test_clients_that_take_their_time_are_ended(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        silent = await connect()
        head = await connect()
        body = await connect()
        await head.send(b"GET / HTTP/1.1\r\nHost: x\r\n")
        await body.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert await silent.rest() == b""
        for client in (head, body):
            assert (await client.answer())[1] == b"REQUEST_TIMEOUT"
            assert await client.rest() == b""
        idle = await connect()
        await idle.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await idle.answer())[1] == b"GET / "
        assert await idle.rest() == b""

    run(scenario, SMALL)


@pytest.mark.parametrize(
    "header", [b"Content-Length: 9", b"Transfer-Encoding: chunked", b"Expect: 100-continue"]
)
def test_a_body_that_never_begins_is_late(run: Run, header: bytes) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        length = b"\r\nContent-Length: 9" if header.startswith(b"Expect") else b""
        await client.send(b"POST / HTTP/1.1\r\nHost: x\r\n" + header + length + b"\r\n\r\n")
        assert b"REQUEST_TIMEOUT" in await client.rest()

    run(scenario, SMALL)


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"
LATER = {
    "head in two packets": (HEAD[:20], HEAD[20:] + b"abc", b"POST / abc"),
    "body in two packets": (HEAD + b"a", b"bc", b"POST / abc"),
    "not to its end": (HEAD + b"a", b"b", b"REQUEST_TIMEOUT"),
    "malformed": (HEAD[:20], b"no header\r\n\r\n", b"MALFORMED_REQUEST"),
}


@pytest.mark.parametrize(("first", "rest", "told"), LATER.values(), ids=LATER.keys())
def test_what_comes_during_an_answer_does_not_end_it(
    run: Run, first: bytes, rest: bytes, told: bytes
) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: echo.begun == 1)
        for data in (first, rest):
            await client.send(data)
            assert await (await connect()).rest() == b""  # all that was due is over
        assert echo.cancelled == 0
        echo.go_on.set()
        assert (await client.answer())[1] == b"GET /wait "
        assert (await client.answer())[1] == told

    run(scenario, SMALL)


def test_bytes_that_trickle_in_win_no_time(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        with contextlib.suppress(ConnectionError):
            await client.send(b"GET / HTTP/1.1\r\n")
            while server.num_connections:
                await client.send(b"a: b\r\n")
                await asyncio.sleep(0.02)
        await until(lambda: server.num_connections == 0)
        assert echo.begun == 0

    run(scenario, SMALL)


def test_a_client_that_goes_cancels_its_request(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: echo.begun == 1)
        client.writer.close()
        await until(lambda: server.num_connections == 0 and echo.cancelled > 0)
        assert (echo.begun, echo.cancelled) == (1, 1)

    run(scenario)


def test_a_client_that_takes_nothing_is_cut_off(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: server.num_connections == 0)
        await until(lambda: echo.cancelled > 0)
        assert echo.cancelled == 1

    run(scenario, HTTPLimits(stall_timeout_s=0.2))


def test_a_failing_handler_ends_the_connection(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /fails HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert not (await client.rest()).endswith(b"0\r\n\r\n")
        await until(lambda: server.num_connections == 0)

    run(scenario)


def test_connections_have_a_bound(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        kept = [await connect() for _ in range(2)]
        await until(lambda: server.num_connections == 2)
        one_too_many = await connect()
        with contextlib.suppress(ConnectionError):
            assert await one_too_many.rest() == b""
        for client in kept:
            await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await client.answer())[1] == b"GET / "

    run(scenario, HTTPLimits(max_connections=2))


def test_a_stop_waits_for_answers_and_not_for_idle_clients(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        idle = await connect()
        busy = await connect()
        await busy.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: echo.begun == 1)
        stopping = asyncio.create_task(server.stop(WAIT_S))
        assert await idle.rest() == b""
        with pytest.raises(ConnectionError):
            await (await connect()).rest()
        echo.go_on.set()
        head, told = await busy.answer()
        assert "connection: close" in head
        assert told == b"GET /wait "
        assert await busy.rest() == b""
        await stopping

    run(scenario)


def test_a_stop_ends_what_does_not_end(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: echo.begun == 1)
        await server.stop(0.05)
        assert echo.cancelled == 1

    run(scenario)


def test_a_burst_is_begun_in_order_and_over_several_turns() -> None:
    async def scenario() -> None:
        state = ConnectionState(HTTPLimits())
        begun: list[int] = []

        def begin(number: int) -> int:
            begun.append(number)
            return 1

        for number in range(3 * STARTED_PER_TURN):
            state.starts.add(partial(begin, number))
        sizes = [0]
        while len(begun) < 3 * STARTED_PER_TURN:
            await asyncio.sleep(0)
            sizes.append(len(begun))
        assert begun == sorted(begun)
        assert max(b - a for a, b in itertools.pairwise(sizes)) <= STARTED_PER_TURN

    asyncio.run(scenario())


def test_connections_are_checked_in_several_turns(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty thousand idle ones would take 70 ms in one turn of the event loop, twice a second."""
    monkeypatch.setattr(server_module, "TICK_S", 0.02)
    monkeypatch.setattr(server_module, "TICKED_PER_TURN", 2)
    tick = HTTPConnection.tick
    turn = 0
    checked = Counter[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def noted(self: HTTPConnection, now: float) -> None:
        checked[turn] += 1
        tick(self, now)

    async def scenario(_: HTTPServer, echo: Echo, connect: Connect) -> None:
        counting = asyncio.create_task(count_turns())
        clients = [await connect() for _ in range(5)]
        monkeypatch.setattr(HTTPConnection, "tick", noted)
        await until(lambda: checked.total() >= 10)
        counting.cancel()
        assert max(checked.values()) == 2
        assert len(clients) == 5

    run(scenario)


def test_time_limits_hold_after_a_failure(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One failing connection does not keep others open, nor does the clock stop."""
    monkeypatch.setattr(server_module, "TICK_S", 0.02)
    tick = HTTPConnection.tick
    broken: list[HTTPConnection] = []
    format_date = email.utils.formatdate
    failures = iter(range(3))

    def fail_for_first(self: HTTPConnection, now: float) -> None:
        if not broken:
            broken.append(self)
        if self is broken[0]:
            raise RuntimeError("a bug")
        tick(self, now)

    def fail_first(*args: Any, **more: Any) -> str:
        if next(failures, None) is not None:
            raise RuntimeError("a bug")
        return format_date(*args, **more)

    async def scenario(_: HTTPServer, echo: Echo, connect: Connect) -> None:
        monkeypatch.setattr(HTTPConnection, "tick", fail_for_first)
        monkeypatch.setattr(email.utils, "formatdate", fail_first)
        await connect()
        async with asyncio.timeout(WAIT_S):
            while not broken:  # noqa: ASYNC110 - the clock belongs to the server
                await asyncio.sleep(0.01)
        others = [await connect() for _ in range(3)]
        ends = await asyncio.gather(*[other.rest() for other in others])
        assert ends == [b""] * 3  # closed for their silence, without a reply

    run(scenario, SMALL)
