"""Requests for pools that sleep: held, counted, woken, or refused with a time to come back."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import RoutingSection
from ullage_common.request_cost import CacheGroup, MemoryProfile
from ullage_common.wire.errors import ServiceError
from ullage_router.admission.scale_to_zero import empty_home
from ullage_router.policy.facts import EngineState, EngineView, RequestFacts, RoutingPolicy

BLOCK_BYTES = 16_000
POLICY = RoutingPolicy(("single", "large"), 100, 10**9, RoutingSection().ladder, large_pool="large")


class Asleep:
    """A service of which engines come later, each at the address it will have."""

    def __init__(self, service: Any) -> None:
        self.http: httpx.AsyncClient = service.http
        self.monitoring: httpx.AsyncClient = service.monitoring
        self.grpc = service.grpc
        self.router = service.router
        self.engines = {engine.headroom.pool: engine for engine in service.engines}

    def chat(self, text: str = "Hi", **more: Any) -> "asyncio.Task[httpx.Response]":
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}
        return asyncio.create_task(self.http.post("/v1/chat/completions", json=body))

    async def start(self, pool: str) -> None:
        await self.engines[pool].start(int(self.engines[pool].address.rpartition(":")[2]))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(90):
            while not condition():  # noqa: ASYNC110 - the condition belongs to others
                await asyncio.sleep(0.01)

    async def until_held(self, count: int) -> None:
        await self.until(lambda: len(self.router.service.scale_to_zero.queue) == count)

    async def until_awake(self, pool: str) -> None:
        await self.until(lambda: not self.router.service.scale_to_zero.is_scaled_to_zero(pool))

    async def measures(self, path: str = "/measures") -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.router.metrics_port}{path}"
        (report,) = (await self.http.get(url)).json()
        return dict(report)


@pytest.fixture
def asleep(start_service: Any) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def start(**given: Any) -> AsyncIterator[Asleep]:
        settings = {"sleepy": ("single",), "wait": False} | given
        async with start_service(**settings) as service:
            yield Asleep(service)

    return start


async def test_a_request_wakes_the_pool_and_is_answered(asleep):
    async with asleep() as made:
        assert (await made.http.get("/readyz")).status_code == 200
        asked = [made.chat(), made.chat("Ho")]
        await made.until_held(2)
        report = await made.measures("/measures/wait")
        assert (report["single"]["wanted"], report["single"]["held"]) == (2, 2)
        assert report["single"]["ready"] == 0
        stats = (await made.monitoring.get("/stats")).json()["wake"]
        assert (stats["asleep"], stats["held"]) == (["single"], 2)
        await made.start("single")
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["message"]["content"] == "Hello big world"
        report = await made.measures()
        # How long it took to wake says nothing about the number of engines.
        assert (report["single"]["wanted"], report["single"]["answered"]) == (0, 0)
        assert report["single"]["capacity_bytes"] == 100 * BLOCK_BYTES
        latest = (await made.monitoring.get("/stats")).json()["latest"][0]
        assert latest["held_s"] > 0
        assert "hold=ASLEEP" in latest["trail"]


async def test_a_pool_that_fell_asleep_is_priced_as_it_was(asleep):
    async with asleep() as made:
        await made.start("single")
        await made.until_awake("single")
        await made.engines["single"].stop()
        await made.until(lambda: made.router.service.scale_to_zero.is_scaled_to_zero("single"))
        assert (await made.chat("x" * 5000)).status_code == 400  # fits no engine, awake or not
        asked = made.chat()
        await made.until_held(1)
        await made.start("single")
        assert (await asked).status_code == 200


async def test_a_request_whose_last_engine_goes_is_held_for_the_next(asleep):
    async with asleep() as made:
        await made.start("single")
        await made.until_awake("single")
        engine = made.engines["single"]
        engine.script.hold = asyncio.Event()
        asked = made.chat()
        await made.until(lambda: engine.active == 1)
        await engine.stop()
        await made.until_held(1)
        engine.script.hold = None
        await made.start("single")
        assert (await asked).status_code == 200


async def test_the_time_limit_stands_still_while_a_request_is_held(asleep):
    limits = {"request_timeout": 1.0}
    async with asleep(limits=limits) as made:
        asked = made.chat()
        await made.until_held(1)
        await asyncio.sleep(1.2)
        assert not asked.done()
        await made.start("single")
        assert (await asked).status_code == 200


async def test_the_time_for_which_requests_were_held_makes_none_late(asleep):
    async with asleep(slo={"ttft_p95": 1.0}) as made:
        engine = made.engines["single"]
        engine.script.hold = asyncio.Event()
        asked = [made.chat(text, temperature=0) for text in ("Hi", "Ho")]
        await made.until_held(2)
        await asyncio.sleep(1.2)
        await made.start("single")
        await made.until(lambda: len(engine.requests) == 2 or any(each.done() for each in asked))
        engine.script.hold.set()
        assert [(await each).status_code for each in asked] == [200, 200]


@pytest.mark.parametrize(
    ("wake", "status", "code"),
    [
        ({"max_requests": 0}, 429, "WAKE_QUEUE_FULL"),
        ({"max_bytes": 10}, 429, "WAKE_QUEUE_FULL"),
        ({"timeout": 0.2}, 503, "WAKING"),
    ],
)
async def test_bounds_end_in_an_answer_with_retry_after(asleep, wake, status, code):
    routing = {"wake": wake}
    async with asleep(routing=routing) as made:
        answer = await made.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert int(answer.headers["retry-after"]) >= 1
        # It was refused, but the pool is wanted: who comes back finds it awake.
        assert (await made.measures())["single"]["wanted"] == (1 if status == 429 else 0)
        assert len(made.router.service.scale_to_zero.queue) == 0
        assert made.router.service.scale_to_zero.queue.held_bytes == 0


async def test_who_leaves_is_held_no_more(asleep):
    async with asleep() as made:
        asked = made.chat()
        await made.until_held(1)
        asked.cancel()
        await made.until_held(0)
        assert made.router.service.scale_to_zero.queue.held_bytes == 0


async def test_an_answer_that_is_held_for_two_is_the_seconds_once_the_first_has_left(asleep):
    routing = {"idempotency": {"enabled": True}}
    limits = {"request_timeout": 1.0}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    async with asleep(routing=routing, limits=limits) as made:
        service = made.router.service

        def ask() -> "asyncio.Task[httpx.Response]":
            headers = {"Idempotency-Key": "k"}
            return asyncio.create_task(
                made.http.post("/v1/chat/completions", json=body, headers=headers)
            )

        first = ask()
        await made.until_held(1)
        second = ask()
        await made.until(lambda: service.idempotency.repeated == 1)
        await asyncio.sleep(1.2)
        assert [asked.done() for asked in (first, second)] == [False, False]
        first.cancel()
        await made.until(lambda: service.pipeline.inflight == 1)
        await made.start("single")
        answer = await second
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == "Hello big world"


async def test_a_router_that_stops_holds_on_to_what_it_holds(asleep):
    async with asleep() as made:
        asked = made.chat()
        await made.until_held(1)
        stopping = asyncio.create_task(made.router.stop())
        holding = made.router.service.scale_to_zero.queue
        await made.until(lambda: holding.is_closed)
        with pytest.raises(ServiceError, match="another one will answer"):
            await holding.hold("single", 1, 0.0)
        await made.start("single")
        assert (await asked).status_code == 200
        await stopping


async def test_a_router_that_stops_waits_for_no_pool_for_ever(asleep):
    async with asleep(routing={"wake": {"timeout": 0.5}}) as made:
        asked = made.chat()
        await made.until_held(1)
        stopping = asyncio.create_task(made.router.stop())
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "WAKING")
        await stopping


async def test_another_model_is_not_waited_for(asleep):
    async with asleep() as made:
        assert (await made.chat(model="other")).status_code == 404


def declare(file: Path, *adapters: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"revision": "one", "adapters": adapters}))
    new.replace(file)


async def models(made: Asleep) -> list[str]:
    return [model["id"] for model in (await made.http.get("/v1/models")).json()["data"]]


async def test_an_adapter_wakes_a_pool_of_which_no_engine_was_ever_seen(asleep, tmp_path):
    file = tmp_path / "rollout.yaml"
    declare(file, "sql", "python")
    async with asleep(rollout_file=str(file)) as made:
        assert await models(made) == ["tiny", "python", "sql"]
        unknown = await made.chat(model="java")
        assert (unknown.status_code, "'python', 'sql'" in unknown.text) == (404, True)
        assert (await made.measures())["single"]["wanted"] == 0
        asked = [made.chat(model="sql"), made.chat(model="python")]
        await made.until_held(2)
        assert (await made.measures())["single"]["wanted"] == 2
        made.engines["single"].adapters = ("sql",)
        await made.start("single")
        served, lacking = await asyncio.gather(*asked)
        assert (served.status_code, served.json()["model"]) == (200, "sql")
        # The engine was woken and lacks it after all.
        assert lacking.status_code == 404
        assert "'tiny' or its adapter 'sql'" in lacking.text


async def test_an_adapter_that_came_or_went_while_its_pool_sleeps(asleep, tmp_path):
    file = tmp_path / "rollout.yaml"
    declare(file, "sql")
    async with asleep(rollout_file=str(file)) as made:
        made.engines["single"].adapters = ("sql",)
        await made.start("single")
        await made.until_awake("single")
        await made.engines["single"].stop()
        engines = made.router.service.engines
        wake = made.router.service.scale_to_zero
        await made.until(lambda: wake.is_scaled_to_zero("single"))
        declare(file, "python")
        await made.until(lambda: engines.adapters == {"python"})
        assert (await made.chat(model="sql")).status_code == 404
        assert await models(made) == ["tiny", "python"]
        described = await made.grpc.GetModel(inference_pb2.GetModelRequest(model="python"))
        assert [adapter.name for adapter in described.adapters] == ["python"]
        asked = made.chat(model="python")
        await made.until_held(1)
        made.engines["single"].adapters = ("python",)
        made.engines["single"].headroom.epoch += 1
        await made.start("single")
        assert (await asked).json()["model"] == "python"


async def test_only_engines_say_their_adapters_where_the_file_does_not(asleep, tmp_path):
    file = tmp_path / "rollout.yaml"
    file.write_text('{"revision": "one"}')
    async with asleep(rollout_file=str(file)) as made:
        engine = made.engines["single"]
        service = made.router.service
        engine.adapters = ("sql",)
        await made.start("single")
        await made.until_awake("single")
        await engine.stop()
        await made.until(lambda: service.scale_to_zero.is_scaled_to_zero("single"))
        assert service.engines.adapters == {"sql"}
        asked = made.chat(model="sql")
        await made.until(lambda: len(service.scale_to_zero.queue) == 1 or asked.done())
        engine.headroom.epoch += 1
        await made.start("single")
        assert (await asked).status_code == 200
        await engine.stop()
        await made.until(lambda: service.scale_to_zero.is_scaled_to_zero("single"))
        declare(file)
        await made.until(lambda: not service.engines.adapters)
        assert (await made.chat(model="sql")).status_code == 404


async def test_a_pool_that_may_not_sleep_is_not_waited_for(asleep):
    async with asleep(sleepy=()) as made:
        await made.until(lambda: made.router.service.is_ready)
        await made.engines["single"].stop()
        await made.until(lambda: not made.router.service.engines.is_ready)
        assert (await made.chat()).status_code == 503


async def test_an_awake_pool_serves_while_the_home_is_woken(asleep):
    routing = {"large_request_tokens": 100}
    async with asleep(sleepy=("large",), single=(20,), large=(200,), routing=routing) as made:
        await made.until(lambda: made.router.service.engines.is_ready)
        fits = await made.chat("x" * 150, max_tokens=20)
        assert (fits.status_code, fits.headers["x-ullage-route"]) == (200, "single")
        assert (await made.measures())["large"]["wanted"] == 1
        asked = made.chat("x" * 400, max_tokens=20)  # more than pool single ever holds
        await made.until_held(1)
        await made.start("large")
        answer = await asked
        assert (answer.status_code, answer.headers["x-ullage-route"]) == (200, "tp2pp2")
        small = await made.chat("x", max_tokens=20)
        assert small.headers["x-ullage-route"] == "single"


async def test_waits_are_measured(asleep):
    async with asleep(sleepy=(), single=(10,)) as made:
        await made.until(lambda: made.router.service.engines.is_ready)
        engine = made.engines["single"]
        engine.script.hold = asyncio.Event()
        first = made.chat("a", temperature=1)
        await made.until(lambda: engine.active == 1)
        engine.push(headroom_bytes=0, requests_running=1)
        (followed,) = made.router.service.engines.all()
        await made.until(lambda: followed.headroom.headroom_bytes == 0)
        waits = made.chat("b", temperature=1)
        await made.until(lambda: len(made.router.service.queue) == 1)
        report = (await made.measures())["single"]
        assert report["queued"] == 1
        assert report["queue_bytes"] > 0
        assert report["queue_s"] > 0
        assert (report["ready"], report["engine_requests"], report["idle_s"]) == (1, 1, 0)
        engine.push(headroom_bytes=10 * BLOCK_BYTES, requests_running=0)
        engine.script.hold.set()
        assert [(await task).status_code for task in (first, waits)] == [200, 200]


async def test_late_first_tokens_are_measured(asleep):
    async with asleep(sleepy=(), single=(10,), slo={"ttft_p95": 0.2}) as made:
        await made.until(lambda: made.router.service.engines.is_ready)
        assert (await made.chat()).status_code == 200
        engine = made.engines["single"]
        engine.script.hold = asyncio.Event()
        slow = made.chat("a", temperature=1)
        await made.until(lambda: engine.active == 1)
        await asyncio.sleep(0.3)
        engine.script.hold.set()
        assert (await slow).status_code == 200
        report = (await made.measures())["single"]
        assert report["answered"] == 2
        assert report["late"] >= 1


def view(pool: str, tokens: int, standing: EngineState = EngineState.USABLE) -> EngineView:
    return EngineView(
        id=pool,
        pool=pool,
        standing=standing,
        available=tokens,
        capacity=tokens,
        profile=MemoryProfile(16, (CacheGroup(1),)),
        expected_output=16,
        max_model_len=10_000,
    )


@pytest.mark.parametrize(
    ("prompt", "known", "asleep", "home"),
    [
        (50, {"single": 500, "large": 5000}, {"single"}, "single"),
        (50, {"single": 500, "large": 5000}, {"large"}, ""),
        (150, {"single": 500, "large": 5000}, {"large"}, "large"),
        (150, {"single": 500, "large": 5000}, {"single"}, ""),
        (600, {"single": 500, "large": 5000}, {"large"}, "large"),
        (9000, {"single": 500, "large": 5000}, {"single", "large"}, ""),
        (50, {"large": 5000}, {"single"}, "single"),  # never seen
        (150, {"large": 5000}, {"single"}, ""),
        (50, {"single": 500}, {"large"}, ""),
        (150, {"single": 500}, {"large"}, "large"),
        (600, {"single": 500}, {"large"}, "large"),
        (50, {}, {"single", "large"}, "single"),
    ],
)
def test_which_pool_is_wanted(prompt, known, asleep, home):
    views = [view(pool, tokens) for pool, tokens in known.items()]
    facts = RequestFacts(prompt_tokens=prompt, max_tokens=32, min_tokens=16)
    assert empty_home(facts, views, frozenset(asleep), POLICY) == home
