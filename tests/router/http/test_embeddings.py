"""Embeddings over HTTP and gRPC: OpenAI's shape, and the way through the router of any request."""

import asyncio
import base64
import json
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

import grpc
import openai
import pytest
from ullage_testing.fake_engine import Script, vector_of

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.process.api_keys import entry
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_router.http.openai import embeddings
from ullage_router.http.openai.embeddings import PIECE_BYTES

StartService = Callable[..., AbstractAsyncContextManager[Any]]
BUSY = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_HEADROOM", "full", retry_after_s=3)


async def learn(service: Any, has_kv: bool = False) -> None:
    """Makes all engines' model one for embeddings, as after a restart."""
    await service.become_embedding_model(has_kv)


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


def test_usage_has_the_cached_tokens_of_all_inputs(start_service: StartService) -> None:
    """The header has those of the first input, as others have its decision."""
    hits = [
        pb.CachedTokens(tier="device", tokens=16),
        pb.CachedTokens(tier="host", tokens=48, seconds=0.002),
    ]
    in_tiers = pb.Usage(cached_tokens=64, cached_by_tier=hits)
    by_tier = {"device": 32, "host": 96}
    cases: list[tuple[pb.Usage, dict[str, Any] | None, str | None]] = [
        (pb.Usage(), None, None),
        (pb.Usage(cached_tokens=16), {"cached_tokens": 32}, "device=16"),
        (
            in_tiers,
            {"cached_tokens": 128, "cached_tokens_details": by_tier},
            "device=16, host=48;seconds=0.002",
        ),
    ]

    async def scenario() -> None:
        async with start_service() as service:
            await learn(service)
            for cached, details, header in cases:
                service.engine.script = Script(cached=cached)
                answer = await post(service, ["Hi", "there"])
                assert answer.json()["usage"].get("prompt_tokens_details") == details
                assert answer.headers.get("x-ullage-cached") == header

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
            assert "it has 161 tokens" in error["message"]
            assert "this model's maximum context length is 160 tokens" in error["message"]

    asyncio.run(scenario())


def test_long_inputs_are_cut_to_their_first_tokens(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(max_model_len=160) as service:
            await learn(service)
            long = "abcdefghij" * 50
            numbers = list(range(1, 201))
            for most, kept in ((4, 4), (160, 160), (-1, 160), (200, 200)):
                more = {"truncate_prompt_tokens": most, "truncation_side": "right"}
                answer = await post(service, [long, "abc", numbers], **more)
                if kept > 160:  # the context
                    assert answer.json()["error"]["param"] == "input[0]"
                    continue
                inputs = [ids(long)[:kept], ids("abc")[:kept], numbers[:kept]]
                vectors = [tuple(data["embedding"]) for data in answer.json()["data"]]
                assert vectors == [vector_of(each) for each in inputs]
                assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, inputs))
            assert not any(sent.truncate_prompt_tokens for sent in service.engine.requests)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"dimensions": 2}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, "truncation_side"),
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


@pytest.fixture
def alice(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """alice(concurrency=2) returns the section of a tenant with this limit."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(entry("sk-alice-0123456789"))
    return lambda **rules: {"keys_dir": str(keys), "tenants": [{"name": "alice", **rules}]}


KEY = {"authorization": "Bearer sk-alice-0123456789"}


async def embed_as_alice(service: Any, input_: Any) -> Any:
    body = {"model": "tiny", "input": input_}
    return await service.http.post("/v1/embeddings", json=body, headers=KEY)


def test_each_input_counts_against_its_tenants_quota(
    start_service: StartService, alice: Callable[..., dict[str, Any]]
) -> None:
    async def scenario() -> None:
        tenants = alice(requests_per_minute=3, tokens_per_minute=1000)
        async with start_service(tenants=tenants) as service:
            await learn(service)
            client = service.openai.with_options(api_key="sk-alice-0123456789")
            await client.embeddings.create(model="tiny", input=["Hi", "there"])
            usage = (await service.stats())["tenants"]["usage"]
            [of_alice] = [each for each in usage if each["name"] == "alice"]
            assert (of_alice["prompt_tokens"], of_alice["output_tokens"]) == (7, 0)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.embeddings.create(model="tiny", input=["Hi", "there"])
            assert "retry-after" in caught.value.response.headers
            assert len(service.engine.requests) == 2, "nothing of it was begun"

    asyncio.run(scenario())


def test_a_body_that_never_fits_a_quota_takes_nothing_of_it(
    start_service: StartService, alice: Callable[..., dict[str, Any]]
) -> None:
    async def scenario() -> None:
        tenants = alice(requests_per_minute=3, tokens_per_minute=20)
        async with start_service(tenants=tenants) as service:
            await learn(service)
            for inputs, limit in ((["a"] * 4, "requests"), ([[1] * 7] * 3, "tokens")):
                answer = await embed_as_alice(service, inputs)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, "input"), answer.text
                assert f"{limit} per minute of this key are" in error["message"]
            answer = await embed_as_alice(service, [[1] * 7, [1] * 7, [1] * 6])
            assert answer.status_code == 200, answer.text

    asyncio.run(scenario())


def test_a_body_waits_for_tokens_that_its_own_inputs_took(
    start_service: StartService, alice: Callable[..., dict[str, Any]]
) -> None:
    async def scenario() -> None:
        tenants = alice(tokens_per_minute=60_000)
        async with start_service(tenants=tenants, max_model_len=60_000) as service:
            await learn(service)
            assert (await embed_as_alice(service, [[1] * 59_900])).status_code == 200
            answer = await embed_as_alice(service, [[1] * 100] * 6)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["data"]) == 6

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("rules", "routing"),
    [
        ({"concurrency": 2}, {}),
        ({}, {"queue": {"max_requests": 1}}),
        ({}, {"queue": {"max_bytes": 16_000}}),
        ({}, {"ladder": ["reject"]}),
    ],
    ids=["concurrency", "queue's requests", "queue's bytes", "no queue"],
)
def test_inputs_of_one_body_do_not_refuse_one_another(
    start_service: StartService,
    alice: Callable[..., dict[str, Any]],
    rules: dict[str, Any],
    routing: dict[str, Any],
) -> None:
    """The engine has memory for two of them at a time."""

    async def scenario() -> None:
        tenants = alice(**rules)
        async with start_service(single=(2,), tenants=tenants, routing=routing) as service:
            await learn(service, has_kv=True)
            answer = await embed_as_alice(service, [[n] for n in range(1, 41)])
            assert answer.status_code == 200, answer.text
            vectors = [tuple(each["embedding"]) for each in answer.json()["data"]]
            assert vectors == [vector_of([n]) for n in range(1, 41)]

    asyncio.run(scenario())


def test_inputs_beside_a_wrong_one_are_not_clients_that_left(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(max_model_len=160) as service:
            await learn(service)
            service.engine.script.hold = asyncio.Event()
            answer = await post(service, ["a", "b", "x" * 161])
            assert answer.status_code == 400
            await service.until(lambda: service.router.service.pipeline.inflight == 0)
            latest = (await service.stats())["latest"]
            assert [each["status"] for each in latest] == [400] * 3
            assert len({each["error"] for each in latest}) == 1

    asyncio.run(scenario())


async def chunks_of(service: Any, body: Any) -> list[bytes]:
    """The chunks of an answer, as the router sends them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.router.http_port)
    data = json.dumps(body).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in answer.splitlines()[0]
    assert b"transfer-encoding: chunked" in answer.lower()
    chunks = []
    while size := int(await reader.readline(), 16):
        chunks.append(await reader.readexactly(size))
        await reader.readline()
    writer.close()
    return chunks


@pytest.mark.parametrize("form", ["float", "base64"])
def test_many_long_vectors_are_encoded_piece_by_piece(
    start_service: StartService, form: str
) -> None:
    inputs = [[n] for n in range(1, 65)]
    dims = 4096

    async def scenario() -> None:
        async with start_service() as service:
            await learn(service)
            service.engine.script.dims = dims
            body = {"model": "tiny", "input": inputs, "encoding_format": form}
            chunks = await chunks_of(service, body)
            assert max(map(len, chunks)) < 2 * PIECE_BYTES
            answer = json.loads(b"".join(chunks))
            assert answer["usage"] == {"prompt_tokens": 64, "total_tokens": 64}
            assert [each["index"] for each in answer["data"]] == list(range(64))
            for item, ids in zip(answer["data"], inputs, strict=True):
                vector = item["embedding"]
                if form == "base64":
                    vector = struct.unpack(f"<{dims}f", base64.b64decode(vector))
                assert len(vector) == dims
                assert tuple(vector[:3]) == vector_of(ids)

    asyncio.run(scenario())


def test_vectors_of_one_body_are_bounded(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_VECTOR_BYTES", 3 * 12)

    async def scenario() -> None:
        async with start_service() as service:
            await learn(service)
            answer = await post(service, ["a"] * 4)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "input"), answer.text
            assert "send at most 3 at a time" in error["message"]
            assert (await post(service, ["a"] * 3)).status_code == 200

    asyncio.run(scenario())


class AllButTheSecond(asyncio.Event):
    """What waits for it second waits until it is set; others do not wait."""

    num_waited = 0

    async def wait(self) -> Literal[True]:
        self.num_waited += 1
        return await super().wait() if self.num_waited == 2 else True


def test_vectors_of_all_bodies_are_bounded(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_ALL_VECTOR_BYTES", 3 * 12)

    async def scenario() -> None:
        # One input of a body at a time.
        async with start_service(routing={"queue": {"max_requests": 0}}) as service:
            await learn(service)
            hold = service.engine.script.hold = AllButTheSecond()
            first = asyncio.create_task(post(service, ["a"] * 2))
            await service.until(lambda: hold.num_waited == 2)
            answer = await post(service, ["a"] * 2)
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "VECTORS_FULL"
            assert "retry-after" in answer.headers
            hold.set()
            assert (await first).status_code == 200
            assert (await post(service, ["a"] * 3)).status_code == 200

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


def test_the_models_own_dimensions(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await learn(service)
            answer = await post(service, ["a", "b"], dimensions="3", user="me")
            assert answer.status_code == 200, answer.text
            assert [len(item["embedding"]) for item in answer.json()["data"]] == [3, 3]
            assert answer.headers["x-ullage-ignored"] == "user"

    asyncio.run(scenario())
