"""Request fields that some engines do not know, as those of an earlier version."""

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.request_fields import known_fields, later_fields

if TYPE_CHECKING:
    StartService = Any

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    "{# content.split('</think>') #}"
)
ASKED: list[tuple[dict[str, Any], str]] = [
    ({"bad_words": ["dog"]}, "bad_words"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
]
OF_THE_ROUTER = [{"truncate_prompt_tokens": 2}, {"add_generation_prompt": False}, {"stop": "x"}]


async def restart(service: Any, index: int, fields: tuple[str, ...]) -> None:
    """Let an engine describe its model again, as after an upgrade or a downgrade."""
    engine = service.engines[index]
    engine.request_fields = fields
    engine.push(epoch=engine.headroom.epoch + 1)
    engines = service.router.service.engines.all()
    known = next(each for each in engines if each.address == engine.address)
    await service.until(lambda: tuple(known.description.request_fields) == fields)
    await service.until(lambda: known.headroom.epoch == engine.headroom.epoch)


def test_fields_that_no_engine_knows_are_refused_by_name(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await restart(service, 0, ())
            for more, name in ASKED:
                answer = await service.chat(**more)
                error = answer.json()["error"]
                assert answer.status_code == 400, answer.text
                assert (error["param"], error["code"]) == (name, "FIELD_NOT_SUPPORTED")
                assert f"do not know {name}; leave it out, or upgrade" in error["message"]
            assert not service.engine.requests

            for more in OF_THE_ROUTER:
                assert (await service.chat(**more)).status_code == 200, more

            await restart(service, 0, tuple(sorted(known_fields())))
            for more, _ in ASKED[:1]:
                assert (await service.chat(**more)).status_code == 200
            assert list(service.engine.requests[-1].sampling.bad_words) == ["dog"]

    asyncio.run(scenario())


def test_requests_go_to_engines_that_know_their_fields(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            await restart(service, 0, ())
            for _ in range(8):
                assert (await service.chat(bad_words=["dog"])).status_code == 200
            old, new = service.engines
            assert (len(old.requests), len(new.requests)) == (0, 8)

            for _ in range(30):
                assert (await service.chat()).status_code == 200
            assert old.requests, "other requests go to either"

            new.push(ready=False)
            await service.until(lambda: service.engine_state("single-1") != "ready")
            answer = await service.chat(bad_words=["dog"])
            assert answer.status_code == 503
            assert "no engine that knows bad_words is ready" in answer.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_router_announces_the_fields_that_all_of_its_engines_know(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            described = await service.grpc.GetModel(pb.GetModelRequest())
            assert set(described.request_fields) == known_fields()
            await restart(service, 1, ())
            described = await service.grpc.GetModel(pb.GetModelRequest())
            lacking = known_fields() - set(described.request_fields)
            assert {"sampling.bad_words", "output.prompt_logprobs"} <= lacking < later_fields()
            assert "truncate_prompt_tokens" not in lacking

    asyncio.run(scenario())


@pytest.mark.parametrize("more", [{"stop": ["x"]}, {"response_format": {"type": "json_object"}}])
def test_what_reasoning_adds_counts_too(
    start_service: "StartService", more: dict[str, Any]
) -> None:
    """Without the marks, a grammar or a stop would hold within the reasoning."""

    async def scenario() -> None:
        async with start_service(template=THINKS) as service:
            await restart(service, 0, ())
            answer = await service.chat(**more)
            assert answer.status_code == 400, answer.text
            assert "response_format or stop after reasoning" in answer.json()["error"]["message"]
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())
