"""A session is its tenant's: in engines, in placement, and whatever others say that theirs is."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ullage.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    Service = Any
    StartService = Any

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}


@pytest.fixture
def tenants(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "api-keys"
    folder.mkdir()
    for name, key in KEYS.items():
        (folder / name).write_text(key)
    return {"keys_dir": str(folder), "tenants": [{"name": name} for name in KEYS]}


@pytest.fixture
def tickets(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "ticket-keys"
    folder.mkdir()
    (folder / "key").write_bytes(b"k" * 32)
    return {"keys_dir": str(folder)}


def proof(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),)


async def over_http(service: "Service", name: str, session: str) -> None:
    headers = dict(proof(name)) | {"x-session-id": session}
    answer = await service.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert answer.status_code == 200, answer.text


async def over_grpc(service: "Service", name: str, session: str) -> None:
    request = pb.GenerateRequest(text="Hi", session_id=session)
    assert [event async for event in service.grpc.Generate(request, metadata=proof(name))]


def test_engines_get_a_name_of_the_tenants_own(
    start_service: "StartService", tenants: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            for ask in (over_http, over_grpc):
                await ask(service, "alice", "s")
                await ask(service, "bob", "s")
            alice, bob, *again = (request.session_id for request in service.engine.requests)
            assert again == [alice, bob]
            assert len({alice, bob, "s"}) == 3
            await over_grpc(service, "bob", alice)  # a name that was found out is no key
            await over_http(service, "alice", "")
            last = [request.session_id for request in service.engine.requests[-2:]]
            assert last[0] not in (alice, bob)
            assert last[1] == ""

    asyncio.run(scenario())


def test_engines_get_a_cache_salt_of_the_tenants_own(
    start_service: "StartService", tenants: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            for name in ("alice", "bob", "alice"):
                await over_grpc(service, name, "")
            alice, bob, again = (request.cache_salt for request in service.engine.requests)
            assert alice == again != bob
            body = {"prompt": "Hi", "cache_salt": "mine"}
            for name in ("alice", "bob"):
                await service.http.post("/v1/completions", json=body, headers=dict(proof(name)))
            named = [request.cache_salt for request in service.engine.requests[-2:]]
            assert len({alice, bob, "", "mine", *named}) == 6
        async with start_service() as service:
            await service.http.post("/v1/completions", json=body)
            assert [request.cache_salt for request in service.engine.requests] == ["mine"]

    asyncio.run(scenario())


def test_without_tenants_names_stay(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.http.post(
                "/v1/completions", json={"prompt": "Hi"}, headers={"x-session-id": "s"}
            )
            assert [request.session_id for request in service.engine.requests] == ["s"]

    asyncio.run(scenario())


def test_placement_is_the_tenants_own(
    start_service: "StartService", tenants: dict[str, Any], tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with start_service(tenants=tenants, tickets=tickets) as service:
            asked = pb.PickRequest(
                requests=[pb.PricedRequest(prompt_tokens=9, session_id="s", prefixes=[11, 12])]
            )
            choices = service.router.service.balancer.choices
            for name in KEYS:
                await service.grpc.Pick(asked, metadata=proof(name))
                await over_http(service, name, "t")
            assert dict(choices) == {"none": 4}
            for name in KEYS:
                await service.grpc.Pick(asked, metadata=proof(name))
                await over_http(service, name, "t")
            assert dict(choices) == {"none": 4, "kept": 4}
            placement = (await service.stats())["placement"]
            assert (placement["sessions"], placement["prefixes"]) == (4, 4)

    asyncio.run(scenario())


def test_made_up_prefixes_cost_others_nothing(
    start_service: "StartService", tenants: dict[str, Any], tickets: dict[str, Any]
) -> None:
    async def scenario() -> None:
        placement = {"affinity": {"max_sessions": 4, "max_prefixes": 4}}
        more = {"tenants": tenants, "tickets": tickets, "routing": {"placement": placement}}
        async with start_service(**more) as service:
            mine = pb.PickRequest(requests=[pb.PricedRequest(prompt_tokens=9, prefixes=[11, 12])])
            await service.grpc.Pick(mine, metadata=proof("alice"))
            flood = [
                pb.PricedRequest(prompt_tokens=1, session_id=str(i), prefixes=range(20, 84))
                for i in range(9)
            ]
            await service.grpc.Pick(pb.PickRequest(requests=flood), metadata=proof("bob"))
            choices = service.router.service.balancer.choices
            before = choices["kept"]
            await service.grpc.Pick(mine, metadata=proof("alice"))
            assert choices["kept"] == before + 1

    asyncio.run(scenario())
