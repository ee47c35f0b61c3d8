"""Finding engines, and stopping to use them."""

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import openai
import pytest
from ullage_testing.fake_engine import EXPECTED_OUTPUT

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import PoolSection
from ullage_router.engines import discovery, engines, model_cache
from ullage_router.engines.discovery import resolve
from ullage_router.policy.facts import EngineState, Side

if TYPE_CHECKING:
    StartService = Any

NAMED_POOL = {"single": ["engines.example:9000"]}


def test_resolving() -> None:
    async def scenario() -> None:
        assert await resolve("127.0.0.1:9000") == {"127.0.0.1:9000"}
        assert await resolve("[::1]:9000") == {"[::1]:9000"}
        assert await resolve("localhost:9000") == {"127.0.0.1:9000"}
        assert not await resolve("no-such-host.invalid:9000")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("a..b:9000", "label"),
        (f"{'x' * 64}.example:9000", "label"),
        ("engine:9000", "failed"),
    ],
)
def test_a_target_that_cannot_be_looked_up_is_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    target: str,
    reason: str,
) -> None:
    look_up = socket.getaddrinfo

    def fail_for_engine(host: Any, *args: Any, **more: Any) -> Any:
        if host == "engine":
            raise OSError(5, "failed")  # of EAI_SYSTEM
        return look_up(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", fail_for_engine)
    assert asyncio.run(resolve(target)) is None
    [record] = [each for each in caplog.records if each.message == "cannot resolve"]
    assert vars(record)["target"] == target
    assert reason in vars(record)["reason"]


def test_gone_engines_are_removed_though_another_pool_cannot_be_looked_up(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "RESOLVE_INTERVAL_S", 0.02)

    async def scenario() -> None:
        async with start_service() as service:
            pools = {"single": ["no..label:9000"]}
            async with start_service(single=(), wait=False, pools=pools) as late:
                known = late.router.service.engines
                target = service.engine.address
                known.set_canary((PoolSection(name="single", targets=(target,)),))
                await late.until(lambda: [e.state for e in known.all()] == ["ready"])
                known.set_canary(())
                await late.until(lambda: known.num_engines == 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ({socket.AF_INET6: ["fd00::1", "fd00::2"]}, {"[fd00::1]:9000", "[fd00::2]:9000"}),
        ({socket.AF_INET6: ["fd00::1"], socket.AF_INET: ["10.0.0.1"]}, {"10.0.0.1:9000"}),
    ],
)
def test_resolving_where_addresses_are_of_version_6(
    monkeypatch: pytest.MonkeyPatch, families: dict[int, list[str]], expected: set[str]
) -> None:
    """An engine with both addresses is one engine."""
    records = [
        (family, socket.SOCK_STREAM, 6, "", (ip, 9000, 0, 0) if ":" in ip else (ip, 9000))
        for family, addresses in families.items()
        for ip in addresses
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: records)
    assert asyncio.run(resolve("engines.example:9000")) == expected


def test_a_slow_name_server_holds_up_no_other_pool(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = asyncio.Event()

    async def scenario() -> None:
        async with start_service(large=(100,)) as both:
            single, large = both.engines

            async def resolve_slowly(target: str) -> set[str]:
                if target.startswith("quick"):
                    return {large.address}
                await answers.wait()
                return {single.address}

            monkeypatch.setattr(discovery, "resolve", resolve_slowly)
            monkeypatch.setattr(engines, "RESOLVE_INTERVAL_S", 0.02)
            monkeypatch.setattr(discovery, "SLOW_RESOLVE_S", 0.02)
            pools = {"single": ["hangs.example:9000"], "large": ["quick.example:9000"]}
            async with start_service(single=(), wait=False, pools=pools) as named:
                await named.until(lambda: named.router.service.is_ready)
                assert [e.pool for e in named.router.service.engines.all()] == ["large"]
                answers.set()
                await named.until(lambda: len(named.router.service.engines.all()) == 2)

    asyncio.run(scenario())


def test_a_canarys_pool_that_is_not_configured_is_ignored(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            known = service.router.service.engines
            unknown = PoolSection(name="huge", targets=("127.0.0.1:1",))
            same = PoolSection(name="single", targets=(service.engine.address,))
            known.set_canary((unknown, same))
            await service.until(
                lambda: [e.state for e in known.all()].count("ready") == 2 == len(known.all())
            )
            assert (await service.complete()).status_code == 200

    asyncio.run(scenario())


def test_engines_at_one_address_are_told_apart(start_service: "StartService") -> None:
    """A canary's address may become a stable engine's before the canary's is forgotten."""

    async def scenario() -> None:
        async with start_service() as service:
            known = service.router.service.engines
            known.set_canary((PoolSection(name="single", targets=(service.engine.address,)),))
            await service.until(lambda: [e.state for e in known.all()] == 2 * ["ready"])
            for side in Side:
                views = known.views(known.served_model("", side), side)
                usable = [view for view in views if view.standing is EngineState.USABLE]
                (engine,) = [known.at(view.id) for view in usable]
                assert engine.side is side
                credit = engine.reserve(5, 1)
                others = [other for other in known.all() if other is not engine]
                assert [engine.credit_bytes] + [o.credit_bytes for o in others] == [5, 0]
                engine.release(credit)

    asyncio.run(scenario())


def test_the_output_that_a_canary_expected_is_forgotten_with_it(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "RESOLVE_INTERVAL_S", 0.02)

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as both:
            stable, canary = both.engines
            canary.push(expected_output_tokens=500)
            pools = {"single": [stable.address]}
            async with start_service(single=(), wait=False, pools=pools) as service:
                known = service.router.service.engines
                known.set_canary((PoolSection(name="single", targets=(canary.address,)),))
                await service.until(lambda: known.expected_output == 500)
                known.set_canary(())
                await service.until(lambda: known.num_engines == 1)
                await both.until(lambda: canary.streams == 1)  # that of the other router
                assert known.expected_output == EXPECTED_OUTPUT

    asyncio.run(scenario())


def test_a_named_target(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            port = service.engine.address.rpartition(":")[2]
            pools = {"single": [f"localhost:{port}"]}
            async with start_service(wait=False, pools=pools) as named:
                router = named.router.service
                await named.until(lambda: router.is_ready)
                assert (await named.complete()).status_code == 200
                assert len(service.engine.requests) == 1

    asyncio.run(scenario())


def test_a_failed_search_is_repeated(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[str]] = [set()]
    failures = 0

    async def resolve_badly(_: str) -> set[str]:
        nonlocal failures
        if found[-1] and failures < 3:
            failures += 1
            raise UnicodeError("label too long")
        return found[-1]

    monkeypatch.setattr(engines, "RESOLVE_INTERVAL_S", 0.02)

    async def scenario() -> None:
        async with start_service() as service:
            monkeypatch.setattr(discovery, "resolve", resolve_badly)
            async with start_service(single=(), wait=False, pools=NAMED_POOL) as late:
                found.append({service.engine.address})
                await late.until(lambda: late.router.service.is_ready)
                assert failures == 3
                assert (await late.complete()).status_code == 200

    asyncio.run(scenario())


def test_an_engine_that_loads_is_followed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.engine.stop()
            service.engine.headroom.ready = False
            await service.engine.restart()
            await service.until(lambda: service.engine_state("single-0") == "loading")
            service.engine.push(ready=True)
            await service.until(lambda: service.engine_state("single-0") == "ready")
            assert (await service.complete()).status_code == 200

    asyncio.run(scenario())


def test_new_certificates_reach_an_engine_whose_stream_had_broken(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            engine = service.engine
            port = int(service.engine.address.rpartition(":")[2])
            await engine.stop()
            await service.until(lambda: service.engine_state("single-0") != "ready")
            service.router.service.engines.reconnect(5.0)
            await engine.start(port)  # the same engine, so that it is not described anew
            await service.until(lambda: service.engine_state("single-0") == "ready")
            assert (await service.complete()).status_code == 200

    asyncio.run(scenario())


def test_an_unreachable_engine_with_an_old_channel_holds_up_nothing(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old channels have a grace period of minutes, which is for running answers alone."""
    monkeypatch.setattr(engines, "RESOLVE_INTERVAL_S", 0.02)

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as both:
            stable, canary = both.engines
            others = asyncio.all_tasks()
            pools = {"single": [stable.address]}
            async with start_service(single=(), wait=False, pools=pools) as service:
                known = service.router.service.engines
                known.set_canary((PoolSection(name="single", targets=(canary.address,)),))
                await service.until(lambda: [e.state for e in known.all()] == 2 * ["ready"])
                await canary.stop()
                lost = next(e for e in known.all() if e.side is Side.CANARY)
                await service.until(lambda: lost.state != "ready")
                known.reconnect(600.0)

                known.set_canary(())
                await service.until(lambda: known.num_engines == 1)
                known.set_canary((PoolSection(name="single", targets=(canary.address,)),))
                await service.until(lambda: known.num_engines == 2)
                known.reconnect(600.0)
                known.reconnect(600.0)
                async with asyncio.timeout(20):
                    await known.close()
                names = {task.get_name() for task in asyncio.all_tasks() - others}
                assert not [name for name in names if name.endswith(canary.address)]

    asyncio.run(scenario())


def test_an_answer_on_an_old_channel_finishes(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            engine = service.engine
            engine.script.hold = asyncio.Event()
            asked = asyncio.create_task(service.complete())
            await service.until(lambda: engine.active == 1)
            service.router.service.engines.reconnect(600.0)
            await service.until(lambda: engine.streams == 2)
            engine.script.hold.set()
            assert (await asked).json()["choices"][0]["text"] == "Hello big world"
            await service.until(lambda: engine.streams == 1)

    asyncio.run(scenario())


def test_tokenizers_of_models_that_went_are_dropped(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            known = service.router.service.engines
            told = await service.engine.GetModel(inference_pb2.GetModelRequest(), None)

            async def load(template: str) -> Any:
                other = inference_pb2.GetModelResponse()
                other.CopyFrom(told)
                other.chat_template = template
                return await known.load(other)

            first = await load("first")
            second = await load("second")
            assert await load("first") is first  # one may come back
            for i in range(model_cache.MAX_IDLE_MODELS):
                await load(f"{i}")
            assert await load("second") is not second
            assert await load("first") is not first
            assert await known.load(told) is known.model  # which an engine announces

    asyncio.run(scenario())


def test_a_draining_router_refuses(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.router.service.pipeline.drain()
            answer = await service.complete()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "DRAINING"
            assert answer.headers["retry-after"] == "1"
            assert (await service.http.get("/readyz")).json() == {"status": "draining"}

    asyncio.run(scenario())


def test_the_official_client_raises_errors_of_a_stream(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.fail_after = 2
            stream = await service.openai.completions.create(model="tiny", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="lost"):
                async for _ in stream:
                    pass

    asyncio.run(scenario())


def test_the_route_says_how_the_engines_ranks_are_arranged(start_service: "StartService") -> None:
    words = {(1, 1): "large", (4, 1): "large", (1, 4): "large", (2, 2): "tp2pp2", (4, 2): "tp4pp2"}

    async def scenario() -> None:
        routing = {"large_request_tokens": 10}
        async with start_service(large=(200,), routing=routing) as service:
            engine = service.engines[1]
            for engine.grid, word in words.items():
                await engine.restart()
                epoch = engine.headroom.epoch
                engines = service.router.service.engines
                known = next(e for e in engines.all() if e.address == engine.address)
                await service.until(lambda known=known, epoch=epoch: known.order.epoch == epoch)
                await service.until(lambda: service.engine_state("large-0") == "ready")
                answer = await service.complete("x" * 40)
                assert (answer.status_code, answer.headers["x-ullage-route"]) == (200, word)
                assert (await service.stats())["engines"][1]["route"] == word
                assert (engines.route("large"), engines.route("other")) == (word, "other")

    asyncio.run(scenario())


def test_stats_describe_engines(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(large=(200,)) as service:
            first, second = (await service.stats())["engines"]
            assert (first["id"], first["state"], first["route"]) == ("single-0", "ready", "single")
            assert second["route"] == "tp2pp2"
            assert second["headroom_bytes"] == 200 * 16_000
            assert first["ledger"][0]["name"] == "kv_pool"
            [tier] = first["kv_tiers"]
            assert (tier["name"], tier["backend"], tier["hits"]) == ("host", "shared memory", 3)
            assert first["headroom_age_s"] < 3

    asyncio.run(scenario())


def test_preemptions_are_counted_though_their_engine_is_gone(
    start_service: "StartService", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "RESOLVE_INTERVAL_S", 0.02)
    name = "ullage_router_preemptions_total"

    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.preemptions = 2
            pools = {"single": ["no..label:9000"]}
            async with start_service(single=(), wait=False, pools=pools) as late:
                known = late.router.service.engines
                target = service.engine.address
                known.set_canary((PoolSection(name="single", targets=(target,)),))
                await late.until(lambda: [e.state for e in known.all()] == ["ready"])
                for _ in range(3):
                    assert (await late.complete()).status_code == 200
                (shown,) = (await late.stats())["engines"]
                assert shown["preemptions"] == 6
                assert await late.metrics(name) == {name: 6.0}

                known.set_canary(())
                await late.until(lambda: known.num_engines == 0)
                assert await late.metrics(name) == {name: 6.0}

    asyncio.run(scenario())


def test_a_router_keeps_to_the_steps_that_requests_of_others_bear(
    start_service: "StartService",
) -> None:
    """Of another router, or of another process of the same: the engine says how long they are."""

    async def scenario() -> None:
        sections = {"slo": {"e2e_p95": 10.0}, "routing": {"ladder": ["reject"]}}
        async with start_service(**sections) as service:
            fast = {"prefill_tokens_per_second": 1e4, "step_seconds": [0.1, 0.3]}
            service.engine.push(max_sequences=8, requests_running=1, step_limit_s=0.25, **fast)
            (engine,) = service.router.service.engines.all()
            await service.until(lambda: engine.headroom.max_sequences == 8)
            assert engine.view(time.monotonic()).step_limit_s == 0.25
            refused = await service.complete(max_tokens=8)
            assert refused.status_code == 429, "its steps would be of 0.3 s"
            service.engine.push(step_limit_s=0.35)
            await service.until(lambda: engine.headroom.step_limit_s > 0.3)
            assert (await service.complete(max_tokens=8)).status_code == 200
            assert 0.3 <= service.engine.requests[-1].step_limit_s < 10.0

    asyncio.run(scenario())
