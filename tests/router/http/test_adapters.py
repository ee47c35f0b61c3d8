"""LoRA adapters by name: listed, asked for, and sent to engines that have them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from ullage.headroom.v1 import headroom_pb2
from ullage.headroom.v1.headroom_pb2 import AdapterState
from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.process.api_keys import entry
from ullage_common.wire.errors import from_rpc_error
from ullage_router.policy.affinity import prefix_hashes
from ullage_router.policy.facts import Side

StartService = Callable[..., AbstractAsyncContextManager[Any]]


async def learn(service: Any, *adapters: tuple[str, ...]) -> None:
    """Gives each engine its adapters; the router learns them as of a restarted engine."""
    for engine, names in zip(service.engines, adapters, strict=True):
        engine.adapters = names
        engine.push(epoch=engine.headroom.epoch + 1)
    wanted = Counter(frozenset(names) for names in adapters)
    all_engines = service.router.service.engines.all
    await service.until(lambda: Counter(e.adapters for e in all_engines()) == wanted)


def served(service: Any) -> list[list[str]]:
    """The models that each engine was asked for."""
    return [[request.model for request in engine.requests] for engine in service.engines]


def test_a_request_goes_only_to_engines_that_have_its_adapter(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100, 100)) as service:
            await learn(service, (), ("sql",), ("sql", "python"))
            for _ in range(6):
                assert (await service.chat(model="sql")).json()["model"] == "sql"
                assert (await service.complete(model="python")).json()["model"] == "python"
            of_none, of_one, of_both = served(service)
            assert not of_none
            assert set(of_one) <= {"sql"}
            assert of_both.count("python") == 6
            assert of_one.count("sql") + of_both.count("sql") == 6
            latest = (await service.stats())["latest"][0]
            assert latest["model"] == "python"

    asyncio.run(scenario())


def test_adapters_are_listed_under_their_model(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            await learn(service, ("sql",), ("python",))
            models = (await service.openai.models.list()).data
            assert [model.id for model in models] == ["tiny", "python", "sql"]
            described = [model.model_dump() for model in models]
            assert [(each["root"], each["parent"]) for each in described] == [
                ("tiny", None),
                ("tiny", "tiny"),
                ("tiny", "tiny"),
            ]
            assert (await service.openai.models.retrieve("sql")).id == "sql"
            with pytest.raises(openai.NotFoundError, match="'tiny' or its adapter 'python', 'sql'"):
                await service.openai.models.retrieve("java")

    asyncio.run(scenario())


def test_openai_and_grpc_clients_name_an_adapter(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await learn(service, ("sql",))
            messages: Any = [{"role": "user", "content": "Hi"}]
            answer = await service.openai.chat.completions.create(model="sql", messages=messages)
            assert answer.model == "sql"
            stream = await service.openai.chat.completions.create(
                model="sql", messages=messages, stream=True
            )
            assert {chunk.model async for chunk in stream} == {"sql"}
            parts = [part async for part in service.grpc.Generate(ask("sql"))]
            assert parts[0].accepted.model == "sql"
            assert served(service) == [["sql"] * 3]
            described = await service.grpc.GetModel(pb.GetModelRequest(model="sql"))
            assert [adapter.name for adapter in described.adapters] == ["sql"]
            for model in ("java", "SQL"):
                with pytest.raises(openai.NotFoundError) as caught:
                    await service.openai.chat.completions.create(model=model, messages=messages)
                assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    [part async for part in service.grpc.Generate(ask(model))]
                assert from_rpc_error(failed.value).reason == "MODEL_NOT_FOUND"

    asyncio.run(scenario())


def state(name: str, digest: str = "d", **fields: Any) -> AdapterState:
    return AdapterState(name=name, rank=8, **{"served": True, "digest": digest} | fields)


def test_adapters_come_and_go_with_the_reports_of_one_engine(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            engines = service.router.service.engines
            first, second = service.engines
            first.push(adapters=[state("sql"), state("bad", served=False, error="gone")])
            await service.until(lambda: engines.adapters == {"sql"})
            for _ in range(4):
                assert (await service.chat(model="sql")).status_code == 200
            assert served(service) == [["sql"] * 4, []]
            assert (await service.chat(model="bad")).status_code == 404
            described = await service.grpc.GetModel(pb.GetModelRequest(model="sql"))
            assert [(each.name, each.rank) for each in described.adapters] == [("sql", 8)]

            first.push(adapters=[])
            second.push(adapters=[state("sql")])
            moved = {first.headroom.engine: frozenset(), second.headroom.engine: {"sql"}}
            await service.until(lambda: {e.id: e.adapters for e in engines.all()} == moved)
            assert (await service.chat(model="sql")).status_code == 200
            assert served(service)[1] == ["sql"]
            second.push(adapters=[])
            await service.until(lambda: not engines.adapters)
            assert (await service.chat(model="sql")).status_code == 404
            assert (await service.chat()).status_code == 200

    asyncio.run(scenario())


def ask(model: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=model, text="Hi")


def test_an_answer_goes_on_where_its_adapter_is(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100, 100)) as service:
            await learn(service, ("sql",), (), ("sql",))
            pause = asyncio.Event()
            for engine in service.engines:
                engine.script.fail_after = 2
                engine.script.pause = pause
            first, _, other = service.engines
            asking = asyncio.create_task(
                service.openai.completions.create(
                    model="sql", prompt="Hi", stream=True, extra_headers={"x-session-id": "s"}
                )
            )
            await service.until(lambda: bool(first.requests or other.requests))
            broken = first if first.requests else other
            for engine in service.engines:
                if engine is not broken:
                    engine.script.fail_after = None
            pause.set()
            text = ""
            async for chunk in await asking:
                text += chunk.choices[0].text if chunk.choices else ""
            assert text == "Hello big world"
            assert served(service) == [["sql"], [], ["sql"]]

    asyncio.run(scenario())


@pytest.mark.parametrize("weight", [0, 100])
@pytest.mark.parametrize("on_canary", [True, False])
def test_a_canary_gets_what_only_it_has_and_nothing_that_it_lacks(
    start_service: StartService, tmp_path: Path, weight: int, on_canary: bool
) -> None:
    file = tmp_path / "rollout.json"
    file.write_text('{"revision": "old"}')

    async def scenario() -> None:
        async with start_service(rollout_file=str(file)) as service:
            stable = service.engine
            canary = type(stable)("canary-0", "single", 100, 2000)
            await canary.start()
            service.engines.append(canary)
            pools = f'[{{"name": "single", "targets": ["{canary.address}"]}}]'
            section = f'{{"revision": "new", "weight": {weight}, "pools": {pools}}}'
            file.write_text(f'{{"revision": "old", "canary": {section}}}')
            engines = service.router.service.engines
            await service.until(lambda: engines.is_ready_on(Side.CANARY))
            await learn(service, *([(), ("sql",)] if on_canary else [("sql",), ()]))
            await service.until(lambda: len(engines.adapters) == 1)
            for _ in range(4):
                assert (await service.chat(model="sql")).status_code == 200
                assert (await service.chat()).status_code == 200
            asked = served(service)
            assert asked[on_canary].count("sql") == 4
            assert asked[not on_canary].count("sql") == 0
            assert asked[weight == 100].count("tiny") == 4
            outcomes = service.router.service.rollout.outcomes.as_json()
            assert not weight or outcomes["canary"]["declined"] == 0
            await canary.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "behind others"])
def test_what_names_an_adapter_waits_for_the_engines_that_have_it(
    start_service: StartService, is_first: bool
) -> None:
    """It keeps the order, and holds up nobody on an engine that lacks it."""

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            await learn(service, ("sql",), ())
            (having, lacking), router = service.engines, service.router.service
            engines = {e.id: e for e in router.engines.all()}
            names = {engine: engine.headroom.engine for engine in service.engines}
            nothing = {"headroom_bytes": 0, "kv_free_bytes": 0}
            room = {"headroom_bytes": having.headroom.kv_pool_bytes}

            async def waiting(model: str, count: int) -> asyncio.Task[Any]:
                asked = asyncio.create_task(service.chat(model=model))
                await service.until(lambda: len(router.queue) == count or asked.done())
                assert not asked.done(), asked.result().text
                return asked

            having.push(**nothing)
            await service.until(lambda: engines[names[having]].available == 0)
            if is_first:
                with_adapter = await waiting("sql", 1)
                assert (await service.chat()).status_code == 200
                assert served(service) == [[], ["tiny"]]
            lacking.push(**nothing)
            await service.until(lambda: engines[names[lacking]].available == 0)
            without = await waiting("tiny", 1 + is_first)
            if not is_first:
                with_adapter = await waiting("sql", 2)
            having.push(**room)
            assert [(await task).status_code for task in (with_adapter, without)] == [200, 200]
            order = ["sql", "tiny"] if is_first else ["tiny", "sql"]
            assert served(service)[0] == order
            assert (await with_adapter).headers["x-ullage-action"] == "queue"

    asyncio.run(scenario())


def test_small_ones_pass_one_that_waits_for_an_adapter(start_service: StartService) -> None:
    """One of its engines has room for them and not for it."""

    async def scenario() -> None:
        routing = {"queue": {"max_requests": 4, "timeout": 30.0, "backfill": 2}}
        async with start_service(single=(100, 100), routing=routing) as service:
            await learn(service, ("sql",), ())
            having, lacking = service.engines
            queue = service.router.service.queue
            engines = service.router.service.engines.all()
            block = having.headroom.kv_pool_bytes // 100
            releases = [headroom_pb2.Release(after_ms=3000, bytes=90 * block)]
            busy = {"releases": releases, "decode_tokens_per_second": 100.0}
            busy |= {"prefill_tokens_per_second": 1e5, "requests_running": 1}
            busy |= {"expected_output_tokens": 16, "max_sequences": 64}
            lacking.push(headroom_bytes=0, **busy)
            having.push(headroom_bytes=8 * block, **busy)
            await service.until(lambda: {e.available for e in engines} == {0, 8 * block})
            with_adapter = asyncio.create_task(service.complete("x" * 300, model="sql"))
            await service.until(lambda: len(queue) == 1 or with_adapter.done())
            assert len(queue) == 1
            for _ in range(2):
                answer = await service.complete("short", max_tokens=16)
                assert answer.headers["x-ullage-action"] == "accept", answer.text
            assert (queue.passed, served(service)) == (2, [["tiny"] * 2, []])
            # No more than that pass it.
            third = asyncio.create_task(service.complete("short", max_tokens=16))
            await service.until(lambda: len(queue) == 2 or third.done())
            assert len(queue) == 2
            assert not with_adapter.done()
            having.push(headroom_bytes=100 * block)
            assert [(await task).status_code for task in (with_adapter, third)] == [200, 200]
            assert served(service)[0][2] == "sql"

    asyncio.run(scenario())


@pytest.mark.parametrize("others", [(), ((),)], ids=["alone", "beside one without it"])
def test_what_names_an_adapter_waits_while_engines_restart(
    start_service: StartService, others: tuple[tuple[str, ...], ...]
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100,) * (1 + len(others))) as service:
            await learn(service, ("sql",), *others)
            for engine in service.engines:
                engine.push(ready=False)
            router = service.router.service
            await service.until(lambda: not router.engines.is_ready)
            asking = [asyncio.create_task(service.chat(model=m)) for m in ("sql", "tiny")]
            await service.until(lambda: len(router.queue) == 2 or any(t.done() for t in asking))
            assert len(router.queue) == 2
            service.engine.push(ready=True)
            assert [(await task).status_code for task in asking] == [200, 200]
            assert Counter(served(service)[0]) == {"sql": 1, "tiny": 1}

    asyncio.run(scenario())


def test_what_names_an_adapter_does_not_block_an_engine_without_it(
    start_service: StartService,
) -> None:
    """It was the first in line when that engine came back."""

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            await learn(service, ("sql",), ())
            for engine in service.engines:
                engine.push(ready=False)
            router = service.router.service
            _, lacking = service.engines
            await service.until(lambda: not router.engines.is_ready)
            with_adapter = asyncio.create_task(service.chat(model="sql"))
            await service.until(lambda: len(router.queue) == 1)
            without = asyncio.create_task(service.chat())
            await service.until(lambda: len(router.queue) == 2)
            lacking.push(ready=True)
            assert (await without).status_code == 200
            assert len(router.queue) == 1
            assert served(service) == [[], ["tiny"]]
            service.engine.push(ready=True)
            assert (await with_adapter).status_code == 200
            assert served(service) == [["sql"], ["tiny"]]

    asyncio.run(scenario())


def test_an_error_names_the_adapter_of_which_no_engine_is_ready(
    start_service: StartService,
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            await learn(service, ("sql",), ())
            service.engine.push(draining=True)
            name = service.engine.headroom.engine
            await service.until(lambda: service.engine_state(name) == "draining")
            refused = await service.chat(model="sql")
            assert refused.status_code == 503
            assert "no engine with adapter 'sql' is ready" in refused.text

    asyncio.run(scenario())


def test_what_waits_for_an_adapter_that_goes_is_not_found(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await learn(service, ("sql", "python"))
            service.engine.push(headroom_bytes=0, kv_free_bytes=0)
            router = service.router.service
            await service.until(lambda: all(e.available == 0 for e in router.engines.all()))
            waiting = asyncio.create_task(service.chat(model="sql"))
            await service.until(lambda: len(router.queue) == 1)
            await learn(service, ("python",))
            gone = await waiting
            assert gone.status_code == 404, gone.text
            assert "model 'sql' is not served here; use 'tiny' or its adapter 'python'" in gone.text

    asyncio.run(scenario())


def test_a_tenant_may_use_the_adapters_that_its_rules_name(
    start_service: StartService, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "alice").write_text(entry("sk-alice-0123456789"))
    tenants = {"keys_dir": str(keys), "tenants": [{"name": "alice", "models": ["sql"]}]}

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            await learn(service, ("sql", "python"))
            key = {"authorization": "Bearer sk-alice-0123456789"}
            for model, status in (("sql", 200), ("python", 403), ("tiny", 403)):
                body = {"model": model, "prompt": "Hi"}
                answer = await service.http.post("/v1/completions", json=body, headers=key)
                assert answer.status_code == status, answer.text

    asyncio.run(scenario())


def test_a_tenant_learns_only_of_models_that_it_may_use(
    start_service: StartService, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    rules = {"alice": ["sql", "old"], "bob": ["old"], "carol": []}
    for name in rules:
        (keys / name).write_text(entry(f"sk-{name}-0123456789"))
    named = [{"name": name, "models": models} for name, models in rules.items()]
    tenants = {"keys_dir": str(keys), "tenants": named}
    usable = {"alice": ["sql"], "bob": [], "carol": ["tiny", "acme-secret", "sql"]}

    async def scenario() -> None:
        async with start_service(tenants=tenants) as service:
            await learn(service, ("sql", "acme-secret"))
            for engine in service.engines:
                engine.set_facts(weights="w", adapters="acme-secret 3f1a, sql 91bc")
            digest = service.engine.headroom.fingerprint
            numerics = service.router.service.engines.numerics
            await service.until(lambda: {each.digest for each in numerics().values()} == {digest})
            for name, models in usable.items():
                key = {"authorization": f"Bearer sk-{name}-0123456789"}
                listed = await service.http.get("/v1/models", headers=key)
                assert [model["id"] for model in listed.json()["data"]] == models
                for model in usable["carol"]:
                    one = await service.http.get(f"/v1/models/{model}", headers=key)
                    assert one.status_code == (200 if model in models else 404)
                metadata = tuple(key.items())
                described = await service.grpc.GetModel(pb.GetModelRequest(), metadata=metadata)
                assert {adapter.name for adapter in described.adapters} == {*models} - {"tiny"}
                assert described.model == ("tiny" if "tiny" in models else "")
                assert described.tokenizer_json
                assert described.max_model_len
                assert described.fingerprint == digest
                assert ("adapters" in described.fingerprint_facts) == (name == "carol")
                parents = {model["parent"] for model in listed.json()["data"]}
                roots = {model["root"] for model in listed.json()["data"]}
                assert parents | roots <= {None, *models}
                for model in models:
                    asked = pb.GetModelRequest(model=model)
                    one = await service.grpc.GetModel(asked, metadata=metadata)
                    assert one == described
            # Neither the status nor the text says what else there is.
            for name, hint in (("alice", "use 'sql'"), ("bob", "use a key that may")):
                key = {"authorization": f"Bearer sk-{name}-0123456789"}
                for model, status in (
                    ("java", 403),
                    ("acme-secret", 403),
                    ("tiny", 403),
                    ("old", 404),
                ):
                    body = {"model": model, "prompt": "Hi"}
                    answer = await service.http.post("/v1/completions", json=body, headers=key)
                    assert answer.status_code == status
                    for hidden in {"acme-secret", "tiny"} - {model}:
                        assert hidden not in answer.text
                    asked = pb.GetModelRequest(model=model)
                    with pytest.raises(grpc.aio.AioRpcError, match=hint) as failed:
                        await service.grpc.GetModel(asked, metadata=tuple(key.items()))
                    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
                assert hint in answer.text

    asyncio.run(scenario())


def test_the_same_prompt_has_other_kv_with_another_adapter(start_service: StartService) -> None:
    prompt = list(range(64)) * 3
    hashes = [set(prefix_hashes(prompt, adapter)) for adapter in ("", "sql", "python")]
    assert all(len(each) == 3 for each in hashes)
    assert len(set.union(*hashes)) == 9

    async def scenario() -> None:
        async with start_service(single=(1000, 1000)) as service:
            await learn(service, ("sql",), ("sql",))
            text = "x" * 200
            await service.complete(text, model="sql")
            choices = service.router.service.balancer.choices
            assert dict(choices) == {"none": 1}
            await service.complete(text)
            assert dict(choices) == {"none": 2}
            await service.complete(text, model="sql")
            assert dict(choices) == {"none": 2, "kept": 1}

    asyncio.run(scenario())
