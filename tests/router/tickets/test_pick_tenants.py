"""Tenants that pick, and tenants whose requests a cascade answers."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.router import RouterTickets
from ullage_common.tickets.tickets import CLOCK_SKEW_S, engine_tag, read, verify
from ullage_common.wire.errors import from_rpc_error
from ullage_router.tenants.session import TenantSession
from ullage_router.tickets.paid import RESUMES_A_USE
from ullage_router.tickets.signing import TicketSigner

if TYPE_CHECKING:
    Service = Any
    StartService = Any

ALICE = "sk-alice-0123456789"
PROOF = (("authorization", f"Bearer {ALICE}"),)


@pytest.fixture
def tenants(tmp_path: Path) -> Any:
    """The section, with alice's rules."""
    folder = tmp_path / "api-keys"
    folder.mkdir()
    (folder / "alice").write_text(ALICE)

    def make(**rules: Any) -> dict[str, Any]:
        return {"keys_dir": str(folder), "tenants": [{"name": "alice", **rules}]}

    return make


@pytest.fixture
def tickets(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "ticket-keys"
    folder.mkdir()
    (folder / "key").write_bytes(b"k" * 32)
    return {"keys_dir": str(folder)}


async def usage(service: "Service") -> dict[str, Any]:
    (alice,) = (await service.stats())["tenants"]["usage"]
    found: dict[str, Any] = alice
    return found


async def refusals(service: "Service") -> float:
    """Of the tenant's requests, as the metrics tell."""
    text = (await service.monitoring.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["ullage_router_tenant_requests"].samples
    return sum(each.value for each in samples if each.labels["code"] in ("429", "503"))


def test_picks_are_charged_to_their_tenant(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rules = tenants(requests_per_minute=3, max_tokens=20, priority=7)
        async with start_service(tenants=rules, tickets=tickets) as service:
            asked = pb.PickRequest(requests=[pb.PricedRequest(prompt_tokens=10)] * 4)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.grpc.Pick(asked)
            assert from_rpc_error(caught.value).code is grpc.StatusCode.UNAUTHENTICATED
            answer = await service.grpc.Pick(asked, metadata=PROOF)
            *placed, over = answer.placed
            assert [each.max_tokens for each in placed] == [20, 20, 20]
            assert over.refusal.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert over.refusal.retry_after_s >= 1
            assert (await usage(service))["active"] == 3
            told = pb.PickRequest(ended=[each.id for each in placed])
            await service.grpc.Pick(told, metadata=PROOF)
            alice = await usage(service)
            paid = (alice["active"], alice["prompt_tokens"], alice["output_tokens"])
            assert paid == (0, 30, 60), "an unused ticket may still be used: it is paid for"

    asyncio.run(scenario())


def test_like_picks_are_charged_one_by_one(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rules = tenants(concurrency=5, tokens_per_minute=100, max_tokens=20)
        async with start_service(tenants=rules, tickets=tickets) as service:
            priced = pb.PricedRequest(prompt_tokens=10, count=8)
            answer = await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
            *placed, over = answer.placed
            assert sum(each.count for each in placed) == 3, "of 30 expected tokens each"
            assert (over.count, over.refusal.reason) == (5, "RATE_LIMIT_EXCEEDED")
            alice = await usage(service)
            assert (alice["active"], alice["requests"]) == (3, 4), "the refused are one"
            ids = [each.id for each in placed for _ in range(each.count)]
            await service.grpc.Pick(pb.PickRequest(ended=ids[:2]), metadata=PROOF)
            alice = await usage(service)
            assert (alice["active"], alice["prompt_tokens"], alice["output_tokens"]) == (1, 20, 40)
            await service.grpc.Pick(pb.PickRequest(ended=ids), metadata=PROOF)
            assert (await usage(service))["active"] == 0
            assert service.router.service.issuer.open == 0

    asyncio.run(scenario())


def test_picks_that_another_process_left_no_tokens_for_are_over(
    start_service: "StartService",
    tenants: Any,
    tickets: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        rules = tenants(concurrency=5, tokens_per_minute=100, max_tokens=20)
        async with start_service(tenants=rules, tickets=tickets) as service:
            priced = pb.PricedRequest(prompt_tokens=10)
            await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
            # As where the other one takes them after this one has looked.
            monkeypatch.setattr(TenantSession, "num_allowed", lambda *_: 4)
            priced.count = 4
            answer = await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
            [refused] = answer.placed
            assert (refused.count, refused.refusal.reason) == (4, "RATE_LIMIT_EXCEEDED")
            assert (await usage(service))["active"] == 1
            assert await refusals(service) == 4

    asyncio.run(scenario())


def test_a_ticket_pays_for_another_only_where_its_engine_was_lost(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rules = tenants(requests_per_minute=60, tokens_per_minute=1000, max_tokens=20)
        async with start_service(tenants=rules, tickets=tickets) as service:

            async def served(paid_by: str = "") -> str:
                priced = pb.PricedRequest(prompt_tokens=10, max_tokens=20, paid_by=paid_by)
                answer = await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
                (placed,) = answer.placed
                told = pb.PickRequest(ended=[placed.id])
                await service.grpc.Pick(told, metadata=PROOF)
                return str(placed.ticket)

            async def paid() -> list[float]:
                alice = await usage(service)
                return [alice[name] for name in ("active", "requests", "prompt_tokens")]

            (engine,) = service.router.service.engines.all()
            engine.lost_unix -= 60.0
            first = await served()
            assert await paid() == [0, 1, 10]
            await served(paid_by=first)
            assert await paid() == [0, 2, 20], "the engine is as it was"
            service.engine.push(worker_restarts=1)
            await service.until(lambda: engine.order.workers_lost == 1)
            for _ in range(RESUMES_A_USE - 1):
                await served(paid_by=first)
            assert await paid() == [0, 2, 20]
            await served(paid_by=first)
            assert await paid() == [0, 3, 30], "so often no answer goes on elsewhere"

    asyncio.run(scenario())


def test_a_ticket_pays_for_one_answer_of_its_size(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rules = tenants(requests_per_minute=60, tokens_per_minute=1000, max_tokens=20)
        async with start_service(tenants=rules, tickets=tickets) as service:

            async def pick(**more: Any) -> pb.Placed:
                priced = pb.PricedRequest(prompt_tokens=10, **more)
                (placed,) = (
                    await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
                ).placed
                told = pb.PickRequest(ended=[placed.id])
                await service.grpc.Pick(told, metadata=PROOF)
                return placed

            ticket = (await pick(max_tokens=1)).ticket
            (engine,) = service.router.service.engines.all()
            engine.lost_unix += 60.0
            await pick(paid_by=ticket)
            alice = await usage(service)
            assert (alice["requests"], alice["output_tokens"]) == (2, 1 + 20)
            with pytest.raises(grpc.aio.AioRpcError, match=r"requests\[0\].count is 2"):
                await pick(max_tokens=1, paid_by=ticket, count=2)

    asyncio.run(scenario())


def test_a_loss_is_seen_though_the_clocks_of_routers_differ(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rules = tenants(requests_per_minute=60, tokens_per_minute=1000, max_tokens=20)
        async with start_service(tenants=rules, tickets=tickets) as service:
            issuer = service.router.service.issuer
            (engine,) = service.router.service.engines.all()
            signer = TicketSigner(RouterTickets(**tickets))
            ticket = signer.sign(1, engine.id, 10, 20, tenant="alice")
            signed = read(ticket, signer.keys.all).expires_ms / 1000 - signer.ttl_s
            for behind_s, is_lost in ((CLOCK_SKEW_S - 1, True), (CLOCK_SKEW_S + 1, False)):
                engine.lost_unix = signed - behind_s
                assert issuer.paid.was_lost(read(ticket, signer.keys.all)) == is_lost

    asyncio.run(scenario())


def test_sessions_of_tenants_are_left_out_by_engines(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        asked = pb.PickRequest(requests=[pb.PricedRequest(prompt_tokens=10, session_id="s")])
        for section, is_sessionless in ((tenants(), True), (None, False)):
            async with start_service(tenants=section, tickets=tickets) as service:
                (placed,) = (await service.grpc.Pick(asked, metadata=PROOF)).placed
                tag = engine_tag(service.engine.headroom.engine)
                claims = verify(placed.ticket, (b"k" * 32,), tag, time.time())
                assert claims.is_sessionless == is_sessionless
                assert any(claims.cache_salt) == is_sessionless

    asyncio.run(scenario())


def test_what_no_engine_takes_is_not_paid(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rules = tenants(concurrency=8, tokens_per_minute=1000, max_tokens=20)
        async with start_service(single=(5,), tenants=rules, tickets=tickets) as service:
            priced = pb.PricedRequest(prompt_tokens=12, count=8)
            answer = await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
            assert [each.count for each in answer.placed] == [2, 6], "two blocks each"
            assert answer.placed[1].refusal.reason
            alice = await usage(service)
            assert alice["active"] == 2
            assert alice["tokens_left"] in range(1000 - 2 * 32, 1001)

    asyncio.run(scenario())


def test_a_refused_pick_is_no_request_of_the_minute(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    """Its client goes on with Generate, which is one."""

    async def scenario() -> None:
        rules = tenants(requests_per_minute=2)
        async with start_service(single=(10,), tenants=rules, tickets=tickets) as service:
            priced = pb.PricedRequest(prompt_tokens=90, max_tokens=64, count=2)
            service.engine.push(headroom_bytes=0)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.headroom.headroom_bytes == 0)
            for _ in range(5):
                answer = await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
                assert [each.refusal.reason for each in answer.placed] == ["KV_HEADROOM"]
            alice = await usage(service)
            assert (alice["active"], alice["requests_left"]) == (0, 2)
            known.lost_unix -= 60.0  # not seen to be lost since the ticket was signed
            signer = TicketSigner(RouterTickets(**tickets))
            priced.count, priced.paid_by = 1, signer.sign(1, known.id, 90, 64, tenant="alice")
            await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
            assert (await usage(service))["requests_left"] == 2

    asyncio.run(scenario())


def test_every_refused_pick_is_counted(
    start_service: "StartService", tenants: Any, tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        rules = tenants(concurrency=3, max_tokens=20)
        async with start_service(single=(5,), tenants=rules, tickets=tickets) as service:
            priced = pb.PricedRequest(prompt_tokens=12, count=8)
            for refused in (6, 14):
                await service.grpc.Pick(pb.PickRequest(requests=[priced]), metadata=PROOF)
                picks = (await service.stats())["picks"]
                assert (picks["placed"], picks["refused"]) == (2, refused)
                assert await refusals(service) == refused, "of which few ever began"
            assert (await usage(service))["active"] == 2, "what was placed is not over"

    asyncio.run(scenario())


def test_a_cascade_hands_the_key_on_and_charges_what_is_read(
    start_service: "StartService", tenants: Any
) -> None:
    async def scenario() -> None:
        rules = tenants(tokens_per_minute=100_000)
        async with start_service(model="small-model", tenants=rules) as small:
            small.engine.script.logprob = -0.1
            steps = [
                {"name": "small", "target": f"127.0.0.1:{small.router.grpc_port}"},
                {"name": "big"},
            ]
            section = {"name": "default/big", "steps": steps}
            async with start_service(model="big-model", cascade=section, tenants=rules) as big:
                headers = dict(PROOF)
                body = {"model": "big-model", "prompt": "Hi"}
                answer = await big.http.post("/v1/completions", json=body, headers=headers)
                assert answer.headers["x-ullage-model"] == "small-model"
                for service in (small, big):
                    alice = await usage(service)
                    assert (alice["prompt_tokens"], alice["output_tokens"], alice["active"]) == (
                        2,
                        3,
                        0,
                    )
                    assert (await service.stats())["latest"][0]["status"] == 200
                assert "authorization" not in small.engine.metadata[0], "engines see no key"

    asyncio.run(scenario())
