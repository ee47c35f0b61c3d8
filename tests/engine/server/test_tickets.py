"""Tickets at an engine: one request each, of its size, in time; none where they are off."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.rpc import status_pb2
from hypothesis import given
from hypothesis import strategies as st

from ullage.admin.v1 import admin_pb2
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.engine import EngineConfig, TicketsSection
from ullage_common.process.config_file import ConfigError
from ullage_common.tickets.tickets import TICKET_KEY, Claims, cache_salt, engine_tag, sign
from ullage_common.wire.errors import ServiceError, from_rpc_error, from_status
from ullage_engine.server.tickets import MAX_REMEMBERED, TicketVerifier

KEY = b"k" * 32
NOW_S = 1_000_000.0
Metadata = tuple[tuple[str, str], ...]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "key").write_bytes(KEY)
    return tmp_path


@pytest.fixture
def make_gate(keys: Path) -> Callable[..., TicketVerifier]:
    def make(now: list[float] | None = None, required: bool = False) -> TicketVerifier:
        section = TicketsSection(keys_dir=str(keys), required=required)
        times = now if now is not None else [NOW_S]
        return TicketVerifier(section, "engine-0", "tiny", lambda: times[0])

    return make


def ticket(number: int = 1, key: bytes = KEY, engine: str = "engine-0", **more: Any) -> Metadata:
    fields = {"expires_ms": int(NOW_S * 1000) + 10_000, "prompt_tokens": 4, "max_tokens": 8}
    claims = Claims(
        id=number, engine=engine_tag(engine), **(fields | {"samples": 1, "priority": 5} | more)
    )
    return ((TICKET_KEY, sign(claims, key)),)


def request(prompt: int = 4, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(prompt)), **more)


def refusal(gate: TicketVerifier, asked: pb.GenerateRequest, metadata: Metadata | None) -> str:
    with pytest.raises(ServiceError) as caught:
        gate.admit(asked, metadata)
    return caught.value.reason


def test_a_ticket_is_taken_once(make_gate: Callable[..., TicketVerifier]) -> None:
    gate = make_gate()
    asked = request(priority=99)
    gate.admit(asked, ticket())
    assert (asked.stop.max_tokens, asked.priority) == (8, 5), "the ticket says what is left open"
    assert refusal(gate, request(), ticket()) == "TICKET_USED"
    gate.admit(request(), ticket(2))


def test_an_older_routers_ticket_is_for_one_request(
    make_gate: Callable[..., TicketVerifier],
) -> None:
    gate = make_gate()
    older = ticket(uses=0)
    gate.admit(request(), older)
    assert refusal(gate, request(), older) == "TICKET_USED"


@pytest.mark.parametrize(("is_sessionless", "session"), [(True, ""), (False, "chat")])
def test_a_ticket_may_leave_out_the_session(
    make_gate: Callable[..., TicketVerifier], is_sessionless: bool, session: str
) -> None:
    gate = make_gate()
    asked = request(session_id="chat")
    gate.admit(asked, ticket(is_sessionless=is_sessionless, uses=2))
    assert asked.session_id == session
    gate.admit(request(), ticket(is_sessionless=is_sessionless, uses=2))
    assert refusal(gate, request(), ticket(is_sessionless=is_sessionless, uses=2)) == "TICKET_USED"


def test_an_embedding_has_no_output_to_bound(make_gate: Callable[..., TicketVerifier]) -> None:
    asked = request(embed=True)
    make_gate().admit(asked, ticket(max_tokens=0))
    assert not asked.HasField("stop")


def test_a_tenants_ticket_is_for_no_adapter(make_gate: Callable[..., TicketVerifier]) -> None:
    """Its router knows which ones a tenant may use, and the ticket does not say."""
    gate = make_gate()
    assert refusal(gate, request(model="sql"), ticket(is_sessionless=True)) == "TICKET_BUDGET"
    gate.admit(request(model="tiny"), ticket(2, is_sessionless=True))
    gate.admit(request(model="sql"), ticket(3))


def test_a_tenants_requests_of_different_salts_stay_apart(
    make_gate: Callable[..., TicketVerifier],
) -> None:
    """With a ticket they have the salt that a router sends for them."""
    gate = make_gate()
    salts = {}
    for tenant in ("alice", "bob"):
        for salt in ("", "mine", "other"):
            asked = request(cache_salt=salt)
            number = len(salts)
            tenant_salt = cache_salt(tenant)
            gate.admit(asked, ticket(number, is_sessionless=True, cache_salt=tenant_salt))
            salts[tenant, salt] = asked.cache_salt
            assert asked.cache_salt == cache_salt(tenant, salt).hex()
    assert len(set(salts.values())) == 6
    asked = request(cache_salt="mine")
    gate.admit(asked, ticket(9))
    assert asked.cache_salt == "mine"


@given(
    counts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    uses=st.lists(st.integers(0, 3), max_size=40),
)
def test_a_ticket_is_taken_as_often_as_it_says(counts: list[int], uses: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "key").write_bytes(KEY)
        gate = TicketVerifier(TicketsSection(keys_dir=folder), "engine-0", "tiny", lambda: NOW_S)
        left = dict(enumerate(counts))
        for use in uses:
            number = use % len(counts)
            mine = ticket(number, uses=counts[number])
            if left[number]:
                left[number] -= 1
                gate.admit(request(), mine)
            else:
                assert refusal(gate, request(), mine) == "TICKET_USED"
        assert gate.num_remembered == len({use % len(counts) for use in uses})


@pytest.mark.parametrize(
    ("asked", "metadata", "reason"),
    [
        (request(5), ticket(), "TICKET_BUDGET"),
        (request(stop=pb.StopConditions(max_tokens=9)), ticket(), "TICKET_BUDGET"),
        (request(samples=pb.Samples(n=2)), ticket(), "TICKET_BUDGET"),
        (request(samples=pb.Samples(best_of=2)), ticket(), "TICKET_BUDGET"),
        (request(samples=pb.Samples(beam=pb.BeamSearch(width=2))), ticket(), "TICKET_BUDGET"),
        (pb.GenerateRequest(text="x"), ticket(), "TICKET_BUDGET"),
        (request(), ticket(key=b"o" * 32), "BAD_TICKET"),
        (request(), ticket(engine="engine-1"), "BAD_TICKET"),
        (request(), ticket(expires_ms=int(NOW_S * 1000) - 6000), "TICKET_EXPIRED"),
        (request(), ((TICKET_KEY, "nonsense"),), "BAD_TICKET"),
    ],
)
def test_what_is_refused(
    make_gate: Callable[..., TicketVerifier],
    asked: pb.GenerateRequest,
    metadata: Metadata,
    reason: str,
) -> None:
    for required in (False, True):
        assert refusal(make_gate(required=required), asked, metadata) == reason


def test_without_a_ticket(make_gate: Callable[..., TicketVerifier]) -> None:
    make_gate().admit(request(), ())
    assert refusal(make_gate(required=True), request(), None) == "TICKET_REQUIRED"
    off = TicketVerifier(None, "engine-0", "tiny")
    off.admit(request(), ticket(key=b"o" * 32))


def test_expired_tickets_are_forgotten_and_stay_refused(
    make_gate: Callable[..., TicketVerifier],
) -> None:
    now = [NOW_S]
    gate = make_gate(now)
    for number in range(1, 50):
        gate.admit(request(), ticket(number))
    now[0] = NOW_S + 16
    assert refusal(gate, request(), ticket(1)) == "TICKET_EXPIRED"
    later = int(now[0] * 1000) + 10_000
    gate.admit(request(), ticket(99, expires_ms=later))
    assert refusal(gate, request(), ticket(99, expires_ms=later)) == "TICKET_USED"
    assert gate.num_remembered == 1


def test_the_memory_of_tickets_is_bounded(
    make_gate: Callable[..., TicketVerifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_engine.server.tickets.MAX_REMEMBERED", 3)
    assert MAX_REMEMBERED > 3
    gate = make_gate()
    for number in range(3):
        gate.admit(request(), ticket(number))
    assert refusal(gate, request(), ticket(7)) == "TOO_MANY_TICKETS"


def test_missing_keys_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no file"):
        TicketVerifier(TicketsSection(keys_dir=str(tmp_path)), "engine-0", "tiny")


class RouterStream:
    """The stream that routers keep open to an engine, with many calls on it."""

    def __init__(self, engine: Any) -> None:
        self._stream = engine.inference.Multiplex()
        self._last_tag = 0

    async def outcomes(self, *calls: tuple[pb.GenerateRequest, Metadata]) -> list[str]:
        """Return what became of calls that were sent in one message: the reasons of their errors,
        or "served"."""
        tags = range(self._last_tag + 1, self._last_tag + 1 + len(calls))
        self._last_tag += len(calls)
        message = pb.MultiplexRequest()
        for tag, (asked, metadata) in zip(tags, calls, strict=True):
            message.calls.add(tag=tag, request=asked, metadata=dict(metadata), window=1000)
        await self._stream.write(message)

        ends: dict[int, str] = {}
        async with asyncio.timeout(60):
            while len(ends) < len(calls):
                answer = await self._stream.read()
                assert answer is not grpc.aio.EOF, await self._stream.details()
                for event in answer.events:
                    if event.HasField("status"):
                        error = from_status(status_pb2.Status.FromString(event.status))
                        ends[event.tag] = error.reason
                    elif event.response.HasField("finished"):
                        ends[event.tag] = "served"
        return [ends[tag] for tag in tags]

    def close(self) -> None:
        self._stream.cancel()


def test_calls_of_routers_streams_are_held_to_their_tickets(
    serve: Any, config: EngineConfig, keys: Path
) -> None:
    async def scenario() -> None:
        section = TicketsSection(keys_dir=str(keys), required=True)
        here = config.server.engine_id
        now = int(time.time() * 1000)

        def of(number: int, engine: str = here, **more: Any) -> Metadata:
            return ticket(number, engine=engine, **({"expires_ms": now + 60_000} | more))

        once = of(100)
        twice = of(200, uses=2)
        async with serve(msgspec.structs.replace(config, tickets=section), step_s=0.001) as engine:
            stream = RouterStream(engine)
            # A good call stands among bad ones: each is judged by itself.
            assert await stream.outcomes(
                (request(), ()),
                (request(), of(1, key=b"o" * 32)),
                (request(), ((TICKET_KEY, "nonsense"),)),
                (request(), of(2, engine="another")),
                (request(), of(3, expires_ms=now - 60_000)),
                (request(), once),
                (request(5), of(4)),
                (request(stop=pb.StopConditions(max_tokens=9)), of(5)),
                (request(samples=pb.Samples(n=2)), of(6)),
            ) == [
                "TICKET_REQUIRED",
                *["BAD_TICKET"] * 3,
                "TICKET_EXPIRED",
                "served",
                *["TICKET_BUDGET"] * 3,
            ]
            # A ticket is used once on all streams and calls together.
            assert await stream.outcomes((request(), once)) == ["TICKET_USED"]
            other = RouterStream(engine)
            assert await other.outcomes((request(), once)) == ["TICKET_USED"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in engine.inference.Generate(request(), metadata=once):
                    pass
            assert from_rpc_error(caught.value).reason == "TICKET_USED"
            # Two uses at one moment, on two streams.
            ends = await asyncio.gather(
                stream.outcomes((request(), twice), (request(), twice)),
                other.outcomes((request(), twice), (request(), twice)),
            )
            assert sorted(ends[0] + ends[1]) == ["TICKET_USED"] * 2 + ["served"] * 2
            stream.close()
            other.close()

    asyncio.run(scenario())


def test_a_stream_ends_behind_many_refused_tickets(
    serve: Any, config: EngineConfig, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_common.wire.multiplex.MAX_REFUSED_TICKETS", 2)

    async def scenario() -> None:
        section = TicketsSection(keys_dir=str(keys), required=True)
        soon = int(time.time() * 1000) + 60_000
        engine_id = config.server.engine_id
        async with serve(msgspec.structs.replace(config, tickets=section), step_s=0.001) as engine:
            stream = RouterStream(engine)
            for number in range(4):
                # One that is served shows that the others were mistakes.
                good = ticket(number, engine=engine_id, expires_ms=soon)
                assert await stream.outcomes((request(), ())) == ["TICKET_REQUIRED"]
                assert await stream.outcomes((request(), good)) == ["served"]
            for _ in range(2):
                assert await stream.outcomes((request(), ())) == ["TICKET_REQUIRED"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream.outcomes((request(), ()))
            error = from_rpc_error(caught.value)
            assert (error.code, error.reason) == (
                grpc.StatusCode.UNAUTHENTICATED,
                "TICKET_REQUIRED",
            )

    asyncio.run(scenario())


def test_a_served_engine_holds_requests_to_their_tickets(
    serve: Any, config: EngineConfig, keys: Path
) -> None:
    async def scenario() -> None:
        section = TicketsSection(keys_dir=str(keys), required=True)
        changed = msgspec.structs.replace(config, tickets=section)
        async with serve(changed, step_s=0.001) as engine:
            soon = int(time.time() * 1000) + 10_000
            mine = ticket(engine=config.server.engine_id, expires_ms=soon)
            answer = [e async for e in engine.inference.Generate(request(), metadata=mine)]
            assert answer[-1].finished.usage.completion_tokens <= 8
            for metadata, reason in ((mine, "TICKET_USED"), ((), "TICKET_REQUIRED")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in engine.inference.Generate(request(), metadata=metadata):
                        pass
                error = from_rpc_error(caught.value)
                assert (error.code, error.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)

    asyncio.run(scenario())


def test_clients_that_reach_an_engine_cannot_drain_it(
    serve: Any, config: EngineConfig, keys: Path
) -> None:
    async def scenario() -> None:
        section = TicketsSection(keys_dir=str(keys), required=True)
        async with serve(msgspec.structs.replace(config, tickets=section)) as engine:
            for call in (
                engine.admin.Drain(admin_pb2.DrainRequest(timeout_ms=1)),
                engine.admin.InjectFault(admin_pb2.InjectFaultRequest()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            state = await engine.state()
            assert state.ready
            assert not state.draining

    asyncio.run(scenario())
