"""The HTTP server over raw sockets: framing, bounds, slow clients, order and the end."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from ullage_router.http.connection import BEGUN_PER_TURN, Hub
from ullage_router.http.messages import Reply, Request
from ullage_router.http.reader import Limits
from ullage_router.http.server import HTTPServer
from ullage_router.listening import listen
from ullage_rpc.errors import ServiceError, invalid

WAIT_S = 20.0
SMALL = Limits(
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
        self.go_on = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    async def serve(self, request: Request, reply: Reply) -> None:
        self.begun += 1
        try:
            await self._serve(request, reply)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _serve(self, request: Request, reply: Reply) -> None:
        if request.path == "/wait":
            await self.go_on.wait()
        if request.path in ("/parts", "/flood"):
            reply.start(200, [(b"x-kind", b"parts")])
            for _ in range(3 if request.path == "/parts" else 10_000):
                await reply.piece(b"part" if request.path == "/parts" else b"x" * 10_000)
            reply.end(b"last")
        elif request.path == "/fails":
            raise RuntimeError("a bug")
        else:
            reply.whole(200, [], f"{request.method} {request.path} ".encode() + request.body)

    def check(self, request: Request) -> None:
        if request.path == "/forbidden":
            raise invalid("path", "not this one", "FORBIDDEN")

    def refuse(self, request: Request, reply: Reply, error: ServiceError) -> None:
        reply.whole(400, [], error.reason.encode())


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

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
async def serving(limits: Limits) -> AsyncIterator[tuple[HTTPServer, Echo, Connect]]:
    echo = Echo()
    server = HTTPServer(echo, limits)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
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

    def run_it(scenario: Scenario, limits: Limits | None = None) -> None:
        async def main() -> None:
            async with serving(limits or Limits()) as parts:
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

    run(scenario, Limits(max_body_bytes=1000))


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

    run(scenario, Limits(linger_s=0.1))


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

    run(scenario, Limits(max_head_bytes=2000, linger_s=0.1))


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

    run(scenario, Limits(max_body_bytes=1000, max_head_bytes=2000, linger_s=0.1))


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

    run(scenario, Limits(max_body_bytes=1000, max_held_bytes=4950, linger_s=0.1))


def test_clients_that_take_their_time_are_ended(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        silent, head, body = await connect(), await connect(), await connect()
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
        await until(lambda: server.num_connections == 0)
        assert (echo.begun, echo.cancelled) == (1, 1)

    run(scenario)


def test_a_client_that_takes_nothing_is_cut_off(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: server.num_connections == 0)
        await until(lambda: echo.cancelled > 0)
        assert echo.cancelled == 1

    run(scenario, Limits(stall_timeout_s=0.2))


def test_a_failing_handler_ends_the_connection(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        client = await connect()
        await client.send(b"GET /fails HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await client.rest() == b""
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

    run(scenario, Limits(max_connections=2))


def test_a_stop_waits_for_answers_and_not_for_idle_clients(run: Run) -> None:
    async def scenario(server: HTTPServer, echo: Echo, connect: Connect) -> None:
        idle, busy = await connect(), await connect()
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
        hub, begun = Hub(Echo(), Limits()), []
        for number in range(3 * BEGUN_PER_TURN):
            hub.begin(lambda n=number: begun.append(n))
        sizes = [0]
        while len(begun) < 3 * BEGUN_PER_TURN:
            await asyncio.sleep(0)
            sizes.append(len(begun))
        assert begun == sorted(begun)
        assert max(b - a for a, b in itertools.pairwise(sizes)) <= BEGUN_PER_TURN

    asyncio.run(scenario())
