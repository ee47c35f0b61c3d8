"""Embeddings over HTTP and gRPC: OpenAI's shape, and the way through the router of any request."""

import asyncio
import base64
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from ullage_testing.fake_engine import vector_of

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.process.config_file import entry
from ullage_common.wire.errors import ServiceError, from_rpc_error

StartService = Callable[..., AbstractAsyncContextManager[Any]]
NO_KV = {"kv_pool_bytes": 0, "kv_free_bytes": 0, "headroom_bytes": 0}
BUSY = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM", "full", retry_after_s=3)


async def learn(service: Any, has_kv: bool = False) -> None:
    """Makes all engines' model one for embeddings, as after a restart."""
    for engine in service.engines:
        engine.task, engine.has_kv = pb.TASK_EMBED, has_kv
        engine.push(epoch=engine.headroom.epoch + 1, **({} if has_kv else NO_KV))
    known = service.router.service.engines
    await service.until(
        lambda: all(e.description and e.description.task == pb.TASK_EMBED for e in known.all())
    )
    await service.until(lambda: known.model.description.task == pb.TASK_EMBED)


def ids(text: str) -> Sequence[int]:
    """Tokens of the tiny tokenizer: one a byte of ASCII."""
    letters = "".join(map(chr, range(ord("!"), ord("~") + 1)))
    return [letters.index(letter) for letter in text]


async def post(service: Any, input_: Any, **more: Any) -> Any:
    body = {"model": "tiny", "input": input_, **more}
    return await service.http.post("/v1/embeddings", json=body)


@pytest.mark.parametrize("has_kv", [True, False])
def test_inputs_of_every_shape(start_service: StartService, has_kv: bool) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await learn(service, has_kv)
            create = service.openai.embeddings.create
            shapes: list[tuple[Any, list[Sequence[int]]]] = [
                ("Hi", [ids("Hi")]),
                (["Hi", "there"], [ids("Hi"), ids("there")]),
                ([1, 2, 3], [[1, 2, 3]]),
                ([[1, 2, 3], [4]], [[1, 2, 3], [4]]),
            ]
            for input_, inputs in shapes:
                for form in ("float", "base64", openai.NOT_GIVEN):
                    answer = await create(model="tiny", input=input_, encoding_format=form)
                    vectors = [data.embedding for data in answer.data]
                    if form == "base64":
                        vectors = [struct.unpack("<3f", base64.b64decode(v)) for v in vectors]
                    assert [tuple(v) for v in vectors] == [vector_of(i) for i in inputs]
                    assert [data.index for data in answer.data] == list(range(len(inputs)))
                    assert answer.model == "tiny"
                    assert answer.usage.prompt_tokens == sum(map(len, inputs))
                    assert answer.usage.total_tokens == answer.usage.prompt_tokens
            assert all(r.embed and not r.HasField("stop") for r in service.engine.requests)

    asyncio.run(scenario())


def test_the_prompt_alone_is_priced(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(10,), max_model_len=160) as service:
            await learn(service, has_kv=True)
            for length, blocks in ((16, 1), (17, 2), (160, 10)):
                answer = await post(service, "x" * length)
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-ullage-predicted-kv-bytes"] == str(blocks * 16_000)
            answer = await post(service, ["x", "x" * 161])
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["code"] == "context_length_exceeded"
            assert "the input has 161 tokens, but the context is 160 tokens" in error["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"dimensions": 2}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[1], [256]]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": None}, "input"),
    ],
)
def test_wrong_bodies_name_their_field(
    start_service: StartService, body: dict[str, Any], param: str
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await learn(service)
            answer = await post(service, body.pop("input", "Hi"), **body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == param
            assert error["message"].startswith((param, "body"))

    asyncio.run(scenario())


def test_a_model_is_for_one_task(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await post(service, "Hi")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
            await learn(service)
            for answer in (await service.chat(), await service.complete()):
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
                assert "/v1/embeddings" in answer.json()["error"]["message"]
            answer = await post(service, "Hi", model="other")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert not service.engine.requests

    asyncio.run(scenario())


@pytest.mark.parametrize("fail_after", [0, 1])
def test_a_lost_engine_costs_no_vector(start_service: StartService, fail_after: int) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            await learn(service)
            broken, other = service.engines
            broken.script.fail_after = fail_after
            for _ in range(20):  # each engine is first with a chance of a half
                answer = await post(service, "Hi")
                assert answer.status_code == 200, answer.text
                assert tuple(answer.json()["data"][0]["embedding"]) == vector_of(ids("Hi"))
                if broken.requests:
                    break
            assert other.requests

    asyncio.run(scenario())


def test_engines_without_kv_share_by_what_they_have_to_do(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            await learn(service)
            hold = asyncio.Event()
            for engine in service.engines:
                engine.script.hold = hold
            asking = asyncio.create_task(post(service, ["Hi"] * 20))
            await service.until(lambda: sum(engine.active for engine in service.engines) == 20)
            assert all(engine.active for engine in service.engines)
            hold.set()
            assert len((await asking).json()["data"]) == 20

    asyncio.run(scenario())


def test_a_refusal_of_one_input_is_that_of_all(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(routing={"ladder": ["reject"]}) as service:
            await learn(service)
            service.engine.script.refuse = BUSY
            answer = await post(service, ["Hi", "there"])
            assert answer.status_code == 429, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            await service.until(lambda: service.router.service.pipeline.inflight == 0)

    asyncio.run(scenario())


def test_each_input_counts_against_its_tenants_quota(
    start_service: StartService, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(entry("sk-alice-0123456789"))
    rules = {"name": "alice", "requests_per_minute": 3, "tokens_per_minute": 1000}
    tenants = {"keys_dir": str(keys), "tenants": [rules]}

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            await learn(service)
            client = service.openai.with_options(api_key="sk-alice-0123456789")
            await client.embeddings.create(model="tiny", input=["Hi", "there"])
            usage = (await service.stats())["tenants"]["usage"]
            [alice] = [each for each in usage if each["name"] == "alice"]
            assert (alice["prompt_tokens"], alice["output_tokens"]) == (7, 0)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.embeddings.create(model="tiny", input=["Hi", "there"])
            assert "retry-after" in caught.value.response.headers

    asyncio.run(scenario())


def test_embeddings_over_grpc(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await learn(service)
            request = pb.GenerateRequest(text="Hi", embed=True)
            accepted, delta, finished = [part async for part in service.grpc.Generate(request)]
            assert accepted.accepted.prompt_tokens == 2
            assert struct.unpack("<3f", delta.delta.embedding) == vector_of(ids("Hi"))
            assert finished.finished.usage.prompt_tokens == 2
            request.stop.max_tokens = 3
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [part async for part in service.grpc.Generate(request)]
            assert from_rpc_error(caught.value).metadata["field"] == "stop"

    asyncio.run(scenario())
