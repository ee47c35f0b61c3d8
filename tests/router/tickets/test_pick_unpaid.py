"""A caller that picks for nothing and uses no ticket leaves room for everybody else."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_common.tickets.client import Client
from ullage_common.wire.errors import from_rpc_error
from ullage_router.policy.credit import CreditBook
from ullage_router.policy.facts import EngineState, EngineView
from ullage_router.tickets import issuer
from ullage_router.tickets.unpaid import ALL_SHARE, CALLER_SHARE, Unpaid, caller_of

if TYPE_CHECKING:
    Service = Any
    StartService = Any

BLOCK = 16_000
ALICE = "sk-alice-0123456789"


@pytest.fixture
def tickets(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "ticket-keys"
    folder.mkdir()
    (folder / "key").write_bytes(b"k" * 32)
    return {"keys_dir": str(folder)}


async def grab(service: "Service", **more: Any) -> list[pb.Placed]:
    """Picks as much as there is and uses none of it."""
    priced = pb.PricedRequest(prompt_tokens=16, max_tokens=16, count=1024, **more)
    answer = await service.grpc.Pick(pb.PickRequest(requests=[priced]))
    return [placed for placed in answer.placed if placed.ticket]


@pytest.mark.parametrize("has_tenant", [False, True])
def test_others_are_served_beside_a_caller_that_picks_all(
    start_service: "StartService", tickets: dict[str, Any], tmp_path: Path, has_tenant: bool
) -> None:
    """Also where callers have keys and no limits."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "alice").write_text(ALICE)
    tenants = {"keys_dir": str(tmp_path / "keys"), "anonymous": "allow"}
    more = {"tenants": tenants} if has_tenant else {}

    async def scenario() -> None:
        routing = {"ladder": ["reject"]}
        async with start_service(
            single=(100, 100), tickets=tickets, routing=routing, **more
        ) as service:
            for _ in range(3):
                await grab(service)
            for engine in service.router.service.engines.all():
                assert engine.credit_bytes <= CALLER_SHARE * 100 * BLOCK
            error = (
                (
                    await service.grpc.Pick(
                        pb.PickRequest(requests=[pb.PricedRequest(prompt_tokens=16, max_tokens=16)])
                    )
                )
                .placed[0]
                .refusal
            )
            assert error.reason == "TICKETS_HELD"
            assert error.retry_after_s == 1
            answers = await asyncio.gather(*(service.complete("x" * 160) for _ in range(6)))
            assert [answer.status_code for answer in answers] == [200] * 6
            # The client of this package goes to the router with what is not placed.
            async with Client(f"127.0.0.1:{service.router.grpc_port}") as client:
                request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[72, 105]))
                events = [event async for event in client.generate(request)]
                assert events[0].accepted.route == "single"
                assert "".join(event.delta.text for event in events) == "Hello big world"

    asyncio.run(scenario())


def test_nor_is_the_time_of_engines_taken(
    start_service: "StartService", tickets: dict[str, Any]
) -> None:
    """Prompts that are not sent are no backlog, and places in the batch are left."""

    async def scenario() -> None:
        routing = {"ladder": ["reject"]}
        async with start_service(single=(2000,), tickets=tickets, routing=routing) as service:
            service.engine.push(
                prefill_tokens_per_second=1000.0, max_sequences=8, step_seconds=[0.02] * 4
            )
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.headroom.max_sequences == 8)
            placed = await grab(service)
            assert sum(each.count for each in placed) == 4
            assert (await service.complete("x" * 160, max_tokens=16)).status_code == 200
            ended = [each.id for each in placed for _ in range(each.count)]
            await service.grpc.Pick(pb.PickRequest(ended=ended))
            long = pb.PricedRequest(prompt_tokens=1500, max_tokens=16, count=8)
            answer = await service.grpc.Pick(pb.PickRequest(requests=[long]))
            assert sum(each.count for each in answer.placed if each.ticket) == 1  # of 2.8 s
            assert (await service.complete("x" * 160, max_tokens=16)).status_code == 200

    asyncio.run(scenario())


def test_a_false_word_of_acceptance_frees_nothing_at_once(
    start_service: "StartService", tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service(tickets=tickets) as service:
            service.engine.heartbeat_s = 60.0  # reports would have the requests
            known = service.router.service.engines.all()[0]
            service.engine.push()
            for _ in range(4):
                placed = await grab(service)
                accepted = [each.id for each in placed for _ in range(each.count)]
                await service.grpc.Pick(pb.PickRequest(accepted=accepted))
            assert known.credit_bytes <= CALLER_SHARE * 100 * BLOCK

    asyncio.run(scenario())


def test_what_is_held_comes_back(start_service: "StartService", tickets: dict[str, Any]) -> None:
    """With the report of the end, or with the end of the tickets."""

    async def scenario() -> None:
        async with start_service(tickets=tickets | {"ttl": 0.1}) as service:
            first = await grab(service)
            assert not await grab(service)
            ended = [each.id for each in first for _ in range(each.count)]
            await service.grpc.Pick(pb.PickRequest(ended=ended))
            assert await grab(service)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.credit_bytes == 0, 30)
            assert await grab(service)

    asyncio.run(scenario())


def test_no_caller_opens_all_picks(
    start_service: "StartService", tickets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted ones hold no memory and are open until their tickets end."""
    monkeypatch.setattr(issuer, "MAX_OPEN", 20)

    async def scenario() -> None:
        async with start_service(single=(1000,), tickets=tickets) as service:
            asked = pb.PickRequest(requests=[pb.PricedRequest(prompt_tokens=16, count=10)])
            assert sum(each.count for each in (await service.grpc.Pick(asked)).placed) == 10
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.grpc.Pick(asked)
            error = from_rpc_error(caught.value)
            assert (error.reason, error.retry_after_s) == ("TICKETS_HELD", 1)
            issuer = service.router.service.issuer
            assert issuer.pick(asked, None, "ipv4:10.0.0.9:4000").placed[0].ticket

    asyncio.run(scenario())


def test_another_caller_gets_what_the_first_may_not(
    start_service: "StartService", tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service(tickets=tickets) as service:
            await grab(service)
            known = service.router.service.engines.all()[0]
            held = known.credit_bytes
            issuer = service.router.service.issuer
            priced = pb.PricedRequest(prompt_tokens=16, max_tokens=16, count=1024)
            for other in range(50):
                peer = f"ipv4:10.0.0.{other}:4000"
                response = issuer.pick(pb.PickRequest(requests=[priced]), None, peer)
                assert bool(response.placed[0].ticket) is (other == 0)
            assert held < known.credit_bytes <= ALL_SHARE * 100 * BLOCK

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("ipv4:10.0.0.1:5000", "10.0.0.1"),
        ("ipv6:%5B2001:db8:0:1::7%5D:5000", "2001:db8:0:1::/64"),
        ("ipv6:[2001:db8:0:1:ffff::7]:5000", "2001:db8:0:1::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", "fe80::/64"),
        ("unix:/tmp/socket", "unix:/tmp/socket"),
        ("", ""),
    ],
)
def test_callers_without_a_key_are_known_by_their_address(peer: str, caller: str) -> None:
    assert caller_of(peer) == caller


sizes = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.integers(1, 3000)), max_size=40
)


@given(sizes, st.integers(0, 20), st.sampled_from([0.0, 500.0]))
def test_whatever_is_asked_for_a_quarter_is_left(
    asked: list[tuple[str, int, int]], max_sequences: int, speed: float
) -> None:
    view = EngineView(
        id="a",
        pool="single",
        standing=EngineState.USABLE,
        available=100 * BLOCK,
        capacity=100 * BLOCK,
        profile=MemoryProfile(16, (CacheGroup(1000),)),
        expected_output=32,
        max_model_len=4096,
        max_sequences=max_sequences,
        prefill_speed=speed,
    )
    book = CreditBook()
    for caller, blocks, tokens in asked:
        held = book.held(caller), book.held_by_all
        if Unpaid(caller, 7.0).room(view, held, blocks * BLOCK, tokens):
            book.reserve(blocks * BLOCK, tokens, holder=caller)
        book.check_integrity()
        assert book.held(caller).size <= CALLER_SHARE * 100 * BLOCK
    everybody = book.held_by_all
    assert everybody.size <= ALL_SHARE * 100 * BLOCK
    if max_sequences > 1:
        assert everybody.requests <= ALL_SHARE * max_sequences
    if speed:
        assert everybody.tokens / speed <= ALL_SHARE * 0.8 * 7.0
