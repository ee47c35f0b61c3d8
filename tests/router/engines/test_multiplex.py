"""Calls that share one stream to an engine behave as calls of their own."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from ullage_testing import jumping_clock

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc as rpc
from ullage_common.wire.channels import open_channel
from ullage_common.wire.errors import ServiceError, from_status
from ullage_common.wire.multiplex import serve_multiplex
from ullage_common.wire.request_guard import MAX_REQUEST_BYTES
from ullage_common.wire.servers import new_server
from ullage_router.engines.flow_control import FlowControl
from ullage_router.engines.multiplex import ConnectionBroken, Multiplexer, StreamCall

if TYPE_CHECKING:
    StartService = Any

WAIT_S = 20.0


class Engine(rpc.InferenceServiceServicer):
    """Answers with as many words as asked; `wait` in the prompt waits, `crash` is a bug."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.sent: dict[str, int] = {}
        self.ended: set[str] = set()

    async def Multiplex(self, requests: object, context: Any) -> None:
        await serve_multiplex(self.Generate, context)

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncGenerator[pb.GenerateResponse]:
        name = request.request_id
        try:
            yield pb.GenerateResponse(accepted=pb.Accepted(request_id=name))
            if request.text == "wait":
                await self.go_on.wait()
            if request.text == "crash":
                raise RuntimeError("a bug")
            for i in range(request.stop.max_tokens):
                self.sent[name] = i + 1
                for sample in range(max(1, request.samples.n)):
                    delta = pb.Delta(text=f"{name}{i} ", num_tokens=1, sample=sample)
                    yield pb.GenerateResponse(delta=delta)
            if request.text != "no end":
                yield pb.GenerateResponse(finished=pb.Finished())
        finally:
            self.ended.add(name)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Engine, rpc.InferenceServiceStub]]:
    engine = Engine()
    server = new_server()
    rpc.add_InferenceServiceServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(WAIT_S):
            yield engine, rpc.InferenceServiceStub(channel)
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def multiplexed() -> AsyncIterator[tuple[Engine, Multiplexer]]:
    async with served() as (engine, stub):
        multiplexer = Multiplexer(stub, "engine")
        await multiplexer.open()
        assert multiplexer.is_open
        try:
            yield engine, multiplexer
        finally:
            await multiplexer.close()


def ask(name: str, words: int, text: str = "Hi") -> pb.GenerateRequest:
    stop = pb.StopConditions(max_tokens=words)
    return pb.GenerateRequest(request_id=name, text=text, stop=stop)


def begin(
    multiplexer: Multiplexer, request: pb.GenerateRequest, timeout_s: float = 60, **flow: Any
) -> Any:
    return multiplexer.call(request, timeout_s, (), FlowControl(**flow))


async def text_of(call: Any) -> str:
    text = ""
    while event := await call.read():
        text += event.delta.text
        if event.HasField("finished"):
            return text
    raise AssertionError("no last word")


def words(name: str, count: int) -> str:
    return "".join(f"{name}{i} " for i in range(count))


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - the condition belongs to others
        await asyncio.sleep(0.01)


def test_many_calls_get_each_its_own_answer() -> None:
    async def scenario() -> None:
        async with multiplexed() as (_, multiplexer):
            names = [f"n{i}." for i in range(100)]
            calls = [begin(multiplexer, ask(name, 70 + i)) for i, name in enumerate(names)]
            texts = await asyncio.gather(*map(text_of, calls))
            assert texts == [words(name, 70 + i) for i, name in enumerate(names)]

    asyncio.run(scenario())


def test_long_requests_do_not_share_a_message_that_is_too_long() -> None:
    async def scenario() -> None:
        async with multiplexed() as (_, multiplexer):
            names = [f"n{i}." for i in range(6)]
            calls = [begin(multiplexer, ask(name, 1, "x" * (3 << 20))) for name in names]
            assert await asyncio.gather(*map(text_of, calls)) == [words(name, 1) for name in names]

    asyncio.run(scenario())


def test_requests_of_many_fields_do_not_share_a_message_of_too_many() -> None:
    async def scenario() -> None:
        async with multiplexed() as (_, multiplexer):
            biases = pb.SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0))
            requests = [ask(f"n{i}.", 1) for i in range(100)]
            for request in requests:
                request.sampling.CopyFrom(biases)
            calls = [begin(multiplexer, request) for request in requests]
            texts = await asyncio.gather(*map(text_of, calls))
            assert texts == [words(request.request_id, 1) for request in requests]

    asyncio.run(scenario())


def test_a_request_longer_than_a_message_should_be_has_one_of_its_own() -> None:
    async def scenario() -> None:
        async with multiplexed() as (_, multiplexer):
            for name, text in (("a", "x"), ("b", "x" * (5 << 20)), ("c", "x")):
                assert await text_of(begin(multiplexer, ask(name, 1, text))) == words(name, 1)

    asyncio.run(scenario())


def test_a_reader_that_is_slow_holds_up_only_its_own_call() -> None:
    async def scenario() -> None:
        async with multiplexed() as (engine, multiplexer):
            slow = begin(multiplexer, ask("slow", 1000), window=50)
            await until(lambda: engine.sent.get("slow", 0) >= 40)
            for _ in range(3):
                assert await text_of(begin(multiplexer, ask("fast", 200))) == words("fast", 200)
            # 12 responses: Accepted, the first token, ten times four tokens; and four that wait.
            assert engine.sent["slow"] <= 50
            assert await text_of(slow) == words("slow", 1000)

    asyncio.run(scenario())


@pytest.mark.parametrize(("samples", "window"), [(1, 1), (1, 64), (4, 1), (4, 64), (16, 8)])
def test_nothing_waits_for_what_cannot_come(samples: int, window: int) -> None:
    """Where tokens of others, or a shut window, stand behind a token, it leaves."""

    async def scenario() -> None:
        async with multiplexed() as (_, multiplexer):
            request = ask("s", 70)
            request.samples.n = samples
            flow = {"window": window, "coalesce_tokens": 32, "coalesce_s": 3600.0}
            call = begin(multiplexer, request, **flow)
            texts = [""] * samples
            while event := await call.read():
                texts[event.delta.sample] += event.delta.text
                if event.HasField("finished"):
                    break
            assert texts == [words("s", 70)] * samples

    asyncio.run(scenario())


def test_a_cancelled_call_ends_at_the_engine_and_alone() -> None:
    async def scenario() -> None:
        async with multiplexed() as (engine, multiplexer):
            other = begin(multiplexer, ask("other", 5, "wait"))
            for text in ("wait", "Hi"):  # waiting for the engine, and for its reader
                call = begin(multiplexer, ask(text, 1000, text), window=2)
                assert (await call.read()).HasField("accepted")
                call.cancel()
                call.cancel()
                await until(lambda t=text: t in engine.ended)
            engine.go_on.set()
            assert await text_of(other) == words("other", 5)

    asyncio.run(scenario())


def test_the_time_limit_holds_also_when_the_engine_says_nothing() -> None:
    async def scenario() -> None:
        async with multiplexed() as (engine, multiplexer):
            call = begin(multiplexer, ask("late", 1, "wait"), timeout_s=0.05)
            with pytest.raises(ServiceError) as caught:
                await text_of(call)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: "late" in engine.ended)

    asyncio.run(scenario())


def test_a_bug_and_a_missing_end_touch_no_other_call() -> None:
    async def scenario() -> None:
        async with multiplexed() as (engine, multiplexer):
            other = begin(multiplexer, ask("other", 5, "wait"))
            with pytest.raises(ServiceError) as caught:
                await text_of(begin(multiplexer, ask("x", 1, "crash")))
            assert caught.value.code is grpc.StatusCode.UNKNOWN
            with pytest.raises(AssertionError, match="no last word"):
                await text_of(begin(multiplexer, ask("x", 3, "no end")))
            engine.go_on.set()
            assert await text_of(other) == words("other", 5)

    asyncio.run(scenario())


def test_a_lost_stream_breaks_its_calls_and_is_opened_again() -> None:
    async def scenario() -> None:
        async with multiplexed() as (engine, multiplexer), served() as (_, other):
            call = begin(multiplexer, ask("x", 5, "wait"))
            await call.read()
            multiplexer._stub = other  # type: ignore[attr-defined]  # where it reconnects to
            multiplexer._stream._stream.cancel()  # type: ignore[union-attr]
            with pytest.raises(ServiceError) as caught:
                await text_of(call)
            assert caught.value.code is grpc.StatusCode.UNAVAILABLE
            await until(lambda: "x" in engine.ended and multiplexer.is_open)
            assert await text_of(begin(multiplexer, ask("y", 2))) == words("y", 2)

    asyncio.run(scenario())


async def raw(stub: rpc.InferenceServiceStub, *calls: pb.MultiplexCall) -> list[pb.MultiplexEvent]:
    """The events until each call has ended."""
    stream = stub.Multiplex()
    await stream.write(pb.MultiplexRequest(calls=calls))
    events: list[pb.MultiplexEvent] = []
    while sum(e.HasField("status") or e.response.HasField("finished") for e in events) < len(calls):
        events += (await stream.read()).events
    stream.cancel()
    return events


def test_what_a_stream_refuses() -> None:
    async def scenario() -> None:
        async with served() as (_, stub):
            good = ask("a", 1)
            huge = ask("b", 1, "x" * MAX_REQUEST_BYTES)
            calls = [
                pb.MultiplexCall(tag=1, request=good, window=9),
                pb.MultiplexCall(tag=1, request=good, window=9),
                pb.MultiplexCall(tag=2, request=huge, window=9),
            ]
            events = await raw(stub, *calls)
            errors = {}
            for event in events:
                if event.HasField("status"):
                    status = pb_status(event.status)
                    errors[event.tag] = from_status(status).reason
            assert errors == {1: "INVALID_FIELD", 2: "BODY_TOO_LARGE"}
            assert "a0 " in [event.response.delta.text for event in events if event.tag == 1]

    asyncio.run(scenario())


def pb_status(data: bytes) -> Any:
    from google.rpc import status_pb2

    return status_pb2.Status.FromString(data)


def test_an_engine_without_the_stream_gets_no_requests_and_says_why(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            engine = service.engine
            engine.has_multiplex = False
            await engine.restart()
            known = service.router.service.engines.all()[0]
            await service.until(lambda: "Multiplex" in known.trouble, WAIT_S)
            assert known.state != "ready"
            engine.has_multiplex = True
            await engine.restart()
            await service.until(lambda: known.state == "ready", WAIT_S)
            assert (await service.complete()).status_code == 200

    asyncio.run(scenario())


def test_an_engine_that_stays_out_says_why(start_service: "StartService") -> None:
    reason = "3 starts in a row failed their proof"

    async def scenario() -> None:
        async with start_service() as service:
            known = service.router.service.engines.all()[0]
            service.engine.push(ready=False, not_ready_reason=reason)
            await service.until(lambda: known.trouble == reason, WAIT_S)
            assert known.state != "ready"
            service.engine.push(ready=True, not_ready_reason="")
            await service.until(lambda: known.state == "ready", WAIT_S)
            assert known.trouble == ""

    asyncio.run(scenario())


def test_the_router_passes_requests_and_errors_over_the_stream(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            engine = service.engine
            headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
            body = {"prompt": "Hi", "stream": True, "n": 2}
            answer = await service.http.post("/v1/completions", json=body, headers=headers)
            assert engine.metadata[0]["traceparent"] == headers["traceparent"]
            assert engine.streams == 1
            texts = {0: "", 1: ""}
            for line in answer.text.split("\n\n"):
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        texts[choice["index"]] += choice["text"]
            assert texts == {0: "Hello big world", 1: "Hello1 big1 world1"}
            engine.script.refuse = ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "KV_HEADROOM",
                "full",
                metadata={"needed_bytes": "5", "available_bytes": "3"},
                retry_after_s=7,
            )
            with pytest.raises(grpc.aio.AioRpcError):
                async for _ in service.grpc.Generate(pb.GenerateRequest(text="Hi"), timeout=0.5):
                    pass
            engine.script.refuse = ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT, "BAD", "no", metadata={"field": "seed"}
            )
            refused = await service.complete()
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "seed"
            assert refused.json()["error"]["code"] == "BAD"

    asyncio.run(scenario())


def test_an_engine_that_stops_in_a_stream_ends_the_answer(start_service: "StartService") -> None:
    async def scenario() -> None:
        limits = {"request_timeout": 4.0, "total_timeout": 6.0}
        async with start_service(limits=limits) as service:
            engine = service.engine
            engine.script.pause = asyncio.Event()
            async with service.http.stream(
                "POST", "/v1/completions", json={"prompt": "x", "stream": True}
            ) as answer:
                lines = answer.aiter_lines()
                assert "Hello" in await anext(lines)
                await engine.stop()
                rest = [line async for line in lines if line]
            assert '"stop_reason":"ENGINE_LOST"' in rest[-2]
            assert rest[-1] == "data: [DONE]"
            engine.script = type(engine.script)()
            await engine.start(int(engine.address.rpartition(":")[2]))
            await service.until(lambda: service.engine_state("single-0") == "ready", WAIT_S)
            assert (await service.complete()).status_code == 200

    asyncio.run(scenario())


class NoStream:
    """Takes what a call sends back."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def grant(self, tag: int, responses: int) -> None:
        pass

    def cancel(self, tag: int) -> None:
        self.cancelled.append(tag)


def token(text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, num_tokens=1))


async def told(call: StreamCall) -> str:
    event = await call.read()
    return event.delta.text if event else ""


def test_only_silence_and_the_whole_time_end_a_call() -> None:
    """30 s may pass without a token and 600 s in all."""

    async def scenario() -> None:
        stream = NoStream()
        loop = jumping_clock.clock()
        flow = FlowControl(coalesce_tokens=1, stall_s=30.0)
        call = StreamCall(stream, 1, 600.0, flow, 64)  # type: ignore[arg-type]
        for number in range(10):  # nearly 30 s before each token
            reading = asyncio.create_task(told(call))
            await loop.jump(29.0)
            call.put(token(str(number)), "delta")
            assert await reading == str(number)
        await loop.jump(200.0)  # the client reads nothing, for which the engine is not to blame
        call.put(token("late"), "delta")
        assert await told(call) == "late"
        reading = asyncio.create_task(told(call))
        await loop.jump(29.0)
        assert not reading.done()
        await loop.jump(2.0)
        with pytest.raises(ServiceError) as ended:
            await reading
        assert ended.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert stream.cancelled == [1]
        whole = StreamCall(stream, 2, 600.0, flow, 64)  # type: ignore[arg-type]
        for _ in range(21):
            reading = asyncio.create_task(told(whole))
            await loop.jump(29.0)
            if not reading.done():
                whole.put(token("x"), "delta")
        with pytest.raises(ServiceError):
            await reading
        assert stream.cancelled == [1, 2]

    jumping_clock.run(scenario())


def test_a_sender_that_died_ends_the_stream_and_another_one_is_opened() -> None:
    """Nothing that is sent would arrive: calls must not wait for their time limits."""

    async def scenario() -> None:
        async with multiplexed() as (_, multiplexer):
            waiting = begin(multiplexer, ask("a", 2, "wait"))
            await waiting.read()
            stream = multiplexer._stream
            assert stream

            async def fail(_: Any) -> None:
                raise RuntimeError("a bug in sending")

            stream._stream.write = fail  # type: ignore[method-assign]
            late = begin(multiplexer, ask("b", 2))
            for call in (waiting, late):
                with pytest.raises(ConnectionBroken):
                    await call.read()
            await until(lambda: multiplexer.is_open and multiplexer._stream is not stream)
            assert await text_of(begin(multiplexer, ask("c", 2))) == words("c", 2)

    asyncio.run(scenario())


def test_the_loss_of_a_stream_is_one_loss_for_all_its_calls() -> None:
    async def scenario() -> None:
        async with multiplexed() as (_, multiplexer):
            calls = [begin(multiplexer, ask(f"n{i}.", 2, "wait")) for i in range(8)]
            await asyncio.gather(*(call.read() for call in calls))
            assert multiplexer._stream
            multiplexer._stream._stream.cancel()
            losses = set()
            for call in calls:
                with pytest.raises(ConnectionBroken) as caught:
                    await call.read()
                losses.add(caught.value.loss)
            (loss,) = losses
            assert [loss.is_first("breaker") for _ in calls] == [True] + 7 * [False]
            assert loss.is_first("retries")

    asyncio.run(scenario())


def test_one_lost_stream_opens_no_breaker_and_costs_one_retry(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            engine, other = service.engines
            other.push(draining=True)
            await service.until(lambda: service.engine_state("single-1") == "draining")
            engine.script.hold = asyncio.Event()
            asked = [asyncio.ensure_future(service.complete(f"{i:03}")) for i in range(8)]
            await service.until(lambda: engine.active == 8)
            other.push(draining=False)
            await service.until(lambda: service.engine_state("single-1") == "ready")
            await engine.stop()
            answers = await asyncio.gather(*asked)
            assert [answer.status_code for answer in answers] == 8 * [200]
            known = next(
                e for e in service.router.service.engines.all() if e.address == engine.address
            )
            assert (known.breaker.openings, known.breaker.failures) == (0, 1)
            assert service.router.service.balancer.budget.spent == 1

    asyncio.run(scenario())
