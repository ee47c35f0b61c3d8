"""An answer whose engine is lost after its first token goes on with another engine."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import grpc
import httpx
import pytest
from ullage_testing.fake_engine import BLOCK_BYTES, Script

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_common.wire.limits import MAX_PRIORITY

StartService = Callable[..., AbstractAsyncContextManager[Any]]
WORDS = ("One", " two", " three", " four", " five")
TEXT = "".join(WORDS)
IN_HOST = pb.Usage(
    cached_tokens=16, cached_by_tier=[pb.CachedTokens(tier="host", tokens=16, seconds=0.5)]
)
IN_HOST_DETAILS = {"cached_tokens": 16, "cached_tokens_details": {"host": 16}}


def broken() -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "the connection broke")


def script(service: Any, **fields: Any) -> None:
    for engine in service.engines:
        engine.script = Script(words=WORDS, **fields)


def text_of(answer: httpx.Response, index: int = 0) -> str:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert not [chunk for chunk in chunks if "error" in chunk], answer.text
    assert answer.text.rstrip().endswith("data: [DONE]")
    return "".join(
        choice.get("text") or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return dict(json.loads(lines[-1])["usage"])


async def resumptions(service: Any) -> dict[tuple[str, str], float]:
    """Counts by cause and outcome."""
    lines = (await service.monitoring.get("/metrics")).text.splitlines()
    counts = {}
    for line in lines:
        if line.startswith("ullage_router_resumptions_total{"):
            labels, value = line.partition("{")[2].split("} ")
            found = dict(pair.split("=") for pair in labels.split(","))
            counts[found["cause"].strip('"'), found["outcome"].strip('"')] = float(value)
    return counts


async def is_free(service: Any) -> None:
    """Waits until no engine has credit of the router or a call under way."""
    known = service.router.service.engines.all
    await service.until(lambda: all(not e.inflight and not e.credit_bytes for e in known()))


async def first_word(service: Any) -> Any:
    """Waits until the router has the first word of one answer; the engine that sent it."""
    known = service.router.service.engines.all
    await service.until(lambda: any(e.inflight and not e.backlog_tokens for e in known()))
    return next(engine for engine in service.engines if engine.active)


async def lose(service: Any, task: "asyncio.Task[Any]", **later: Any) -> tuple[Any, Any]:
    """Stops the engine of a paused answer; returns it and the answer."""
    lost = await first_word(service)
    script(service, **later)
    await lost.stop()
    return lost, await task


async def read_text(service: Any, request: pb.GenerateRequest) -> str:
    """Return the text of an answer over gRPC."""
    return "".join([event.delta.text async for event in service.grpc.Generate(request)])


def other(service: Any, lost: Any) -> Any:
    return next(engine for engine in service.engines if engine is not lost)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_engine_that_is_gone_is_replaced(start_service: StartService, is_streamed: bool) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script(service, pause=asyncio.Event())
            more = {"stream_options": {"include_usage": True}} if is_streamed else {}
            task = asyncio.ensure_future(service.complete(stream=is_streamed, **more))
            lost, answer = await lose(service, task)
            assert answer.status_code == 200
            later = other(service, lost)
            assert list(later.requests[-1].continuation.answers[0].token_ids) == [0]
            assert later.requests[-1].sampling.seed == 7
            assert (await resumptions(service)) == {("connection", "resumed"): 1.0}
            if is_streamed:
                assert text_of(answer) == TEXT
                assert usage_of(answer)["completion_tokens"] == len(WORDS)
            else:
                assert answer.json()["choices"][0]["text"] == TEXT
                assert answer.json()["usage"]["completion_tokens"] == len(WORDS)
                assert answer.headers["x-ullage-engine"] == lost.headroom.engine
                assert answer.headers["x-ullage-resumed-on"] == later.headroom.engine
            latest = (await service.stats())["latest"][0]
            assert (latest["status"], latest["output_tokens"]) == (200, len(WORDS))
            await is_free(service)

    asyncio.run(scenario())


def test_an_answer_keeps_its_shortest_length(start_service: StartService) -> None:
    """The tokens received so far count, so the rest may not be that long."""

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script(service, pause=asyncio.Event())
            task = asyncio.ensure_future(service.complete(max_tokens=5, min_tokens=5))
            lost, answer = await lose(service, task)
            assert answer.json()["choices"][0]["text"] == TEXT
            stop = other(service, lost).requests[-1].stop
            assert (stop.min_tokens, stop.max_tokens) == (5, 5)

    asyncio.run(scenario())


def test_the_rest_of_an_answer_is_not_shrunk(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script(service, pause=asyncio.Event())
            task = asyncio.ensure_future(service.complete(max_tokens=len(WORDS)))
            await lose(service, task)
            [latest] = (await service.stats())["latest"]
            decided = [event for event in latest["timeline"] if event["event"] == "decided"]
            assert [event["admission_action"] for event in decided] == ["accept", "accept"]

    asyncio.run(scenario())


@pytest.mark.parametrize("later_blocks", [36, 60])
def test_a_shortened_prompt_stays_as_it_was_shortened(
    start_service: StartService, later_blocks: int
) -> None:
    """Whether the next engine has room for that prompt only, or for the whole one."""

    async def scenario() -> None:
        routing = {"ladder": ["shrinkContext", "queue"]}
        async with start_service(single=(60, 60), routing=routing) as service:
            script(service, pause=asyncio.Event())
            known = service.router.service.engines.all
            for engine in service.engines:
                engine.push(headroom_bytes=36 * BLOCK_BYTES)
            await service.until(lambda: all(e.available == 36 * BLOCK_BYTES for e in known()))
            messages = [{"role": "user", "content": str(turn % 10) * 40} for turn in range(12)]
            body = {"model": "tiny", "messages": messages, "max_tokens": 16}
            task = asyncio.ensure_future(service.http.post("/v1/chat/completions", json=body))
            lost = await first_word(service)
            script(service)
            later = other(service, lost)
            later.push(headroom_bytes=later_blocks * BLOCK_BYTES)
            size = later_blocks * BLOCK_BYTES
            await service.until(lambda: any(e.available == size for e in known()))
            await lost.stop()
            answer = await task
            assert answer.json()["choices"][0]["message"]["content"] == TEXT
            assert "dropped_messages" in answer.headers["x-ullage-degraded"]
            assert later.requests[-1].token_ids == lost.requests[-1].token_ids

    asyncio.run(scenario())


def test_a_request_that_had_no_token_begins_anew(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            hold = asyncio.Event()
            script(service, hold=hold, fail_after=0, failure=broken())
            task = asyncio.ensure_future(service.complete(stream=True))
            await service.until(lambda: any(engine.active for engine in service.engines))
            script(service)
            hold.set()
            assert text_of(await task) == TEXT
            sent = [request for engine in service.engines for request in engine.requests]
            assert not [request for request in sent if request.HasField("continuation")]
            assert await resumptions(service) == {}

    asyncio.run(scenario())


def test_several_answers_go_on_each_by_itself(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script(service, pause=asyncio.Event())
            task = asyncio.ensure_future(service.complete(stream=True, n=2))
            lost, answer = await lose(service, task)
            assert text_of(answer, 0) == TEXT
            assert text_of(answer, 1) == "".join(f"{word}1" for word in WORDS)
            continuation = other(service, lost).requests[-1].continuation
            assert [len(one.token_ids) for one in continuation.answers] == [1, 1]

    asyncio.run(scenario())


def test_the_best_of_several_answers_begins_anew(start_service: StartService) -> None:
    """Nothing of it was sent, so nothing can be repeated."""

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script(service, pause=asyncio.Event())
            task = asyncio.ensure_future(service.complete(best_of=2))
            lost, answer = await lose(service, task)
            assert answer.json()["choices"][0]["text"] == TEXT
            assert not other(service, lost).requests[-1].HasField("continuation")

    asyncio.run(scenario())


def test_an_engine_that_falls_silent_is_left(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script(service, pause=asyncio.Event())
            task = asyncio.ensure_future(service.complete(stream=True))
            lost = await first_word(service)
            script(service)
            lost.is_mute = True
            assert text_of(await task) == TEXT
            assert (await resumptions(service)) == {("silent", "resumed"): 1.0}
            await service.until(lambda: not lost.active)  # its work was cancelled

    asyncio.run(scenario())


def test_a_stream_is_held_until_an_engine_is_there(start_service: StartService) -> None:
    async def scenario() -> None:
        streaming = {"coalesce_tokens": 1, "keepalive": 0.2}
        async with start_service(single=(100,), streaming=streaming) as service:
            script(service, pause=asyncio.Event())
            seen: list[str] = []

            async def read() -> None:
                body = {"model": "tiny", "prompt": "Hi", "stream": True}
                async with service.http.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        seen.append(line)

            task = asyncio.ensure_future(read())
            lost = await first_word(service)
            script(service)
            await lost.stop()
            await service.until(lambda: ": keepalive" in seen)
            await lost.restart()
            await task
            answer = httpx.Response(200, text="\n".join(seen))
            assert text_of(answer) == TEXT
            assert (await resumptions(service)) == {("connection", "resumed"): 1.0}

    asyncio.run(scenario())


BEHIND_A_QUEUE: Any = {
    "single": (100, 100),
    "routing": {"ladder": ["queue", "reject"], "queue": {"max_requests": 2, "timeout": 60.0}},
}


async def fill_queue(service: Any) -> tuple[Any, list["asyncio.Task[httpx.Response]"]]:
    """Fill the queue while an answer runs. Return the answer's engine and the waiting requests."""
    begun = await first_word(service)
    for engine in service.engines:
        engine.push(headroom_bytes=0)
    known = service.router.service.engines.all
    await service.until(lambda: not any(e.headroom.headroom_bytes for e in known()))

    new = [asyncio.ensure_future(service.complete(f"New {i}")) for i in range(2)]
    await service.until(lambda: len(service.router.service.queue) == 2)
    script(service)
    return begun, new


def test_an_answer_goes_on_before_requests_that_have_not_begun(start_service: StartService) -> None:
    """The queue is full of others, and one of them has to leave."""

    async def scenario() -> None:
        async with start_service(**BEHIND_A_QUEUE) as service:
            script(service, pause=asyncio.Event())
            task = asyncio.ensure_future(service.complete())
            lost, new = await fill_queue(service)
            await lost.stop()
            done, _ = await asyncio.wait(new, return_when=asyncio.FIRST_COMPLETED)
            assert [each.result().status_code for each in done] == [429]

            left = other(service, lost)
            left.push(headroom_bytes=100 * BLOCK_BYTES)
            assert (await task).json()["choices"][0]["text"] == TEXT
            assert left.requests[0].HasField("continuation")
            answers = await asyncio.gather(*new)
            assert sorted(each.status_code for each in answers) == [200, 429]

    asyncio.run(scenario())


def test_a_line_of_a_batch_gives_way_also_without_its_engine(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(**BEHIND_A_QUEUE) as service:
            script(service, pause=asyncio.Event())
            line = pb.GenerateRequest(text="Hi", priority=-MAX_PRIORITY)
            task = asyncio.ensure_future(read_text(service, line))
            lost, new = await fill_queue(service)
            await lost.stop()
            known = service.router.service.engines.all
            await service.until(lambda: sum(e.state == "ready" for e in known()) == 1)

            left = other(service, lost)
            left.push(headroom_bytes=100 * BLOCK_BYTES)
            answers = await asyncio.gather(*new)
            assert [each.status_code for each in answers] == [200, 200]
            assert await task == TEXT
            assert [each.HasField("continuation") for each in left.requests] == [False, False, True]

    asyncio.run(scenario())


def test_a_held_answer_ends_with_its_time_and_keeps_its_text(start_service: StartService) -> None:
    """One that is known only at its end has none yet: that is an error."""

    async def scenario() -> None:
        limits = {"request_timeout": 4.0, "total_timeout": 6.0}
        async with start_service(limits=limits) as service:
            script(service, pause=asyncio.Event(), cached=IN_HOST)
            kinds: tuple[dict[str, Any], ...] = ({"stream": True}, {}, {"best_of": 2})
            tasks = [asyncio.ensure_future(service.complete(**kind)) for kind in kinds]
            engine = service.router.service.engines.all()[0]
            await service.until(lambda: engine.inflight == 3 and not engine.backlog_tokens)
            await service.engine.stop()
            stream, whole, best = await asyncio.gather(*tasks)
            assert (await resumptions(service)) == {("connection", "lost"): 3.0}
            ending = '"finish_reason":"length","stop_reason":"ENGINE_LOST"'
            assert (text_of(stream), ending in stream.text) == (WORDS[0], True)
            assert (whole.status_code, ending in whole.text) == (200, True)
            assert whole.json()["choices"][0]["text"] == WORDS[0]
            usage = whole.json()["usage"]
            assert usage["completion_tokens"] == 1
            assert usage["prompt_tokens_details"] == IN_HOST_DETAILS
            assert (best.status_code, best.json()["error"]["code"]) == (504, "ENGINE_LOST")
            await is_free(service)

    asyncio.run(scenario())


def test_a_request_that_breaks_one_engine_after_the_other_is_stopped(
    start_service: StartService,
) -> None:
    """It gets no further on any: the third loss is the last, and others are still served."""

    async def scenario() -> None:
        async with start_service(single=(100,) * 5) as service:
            script(service, fail_after=1, failure=broken())
            answer = await service.complete(stream=True)
            assert "the connection broke" in answer.text
            assert sum(len(engine.requests) for engine in service.engines) == 3
            assert (await resumptions(service)) == {("connection", "lost"): 1.0}
            script(service)
            assert text_of(await service.complete(stream=True)) == TEXT

    asyncio.run(scenario())


class Gate(asyncio.Event):
    """An event that says whether somebody waits for it or has done so."""

    is_reached = False

    async def wait(self) -> Literal[True]:
        self.is_reached = True
        return await super().wait()


async def suspect(service: Any, hold: asyncio.Event | None) -> "asyncio.Task[httpx.Response]":
    """Sends a stream that has lost two engines, the second without a new token between them.

    Args:
        hold: for which the third engine waits before it goes on; None: it does at once.
    """
    gates = Gate(), Gate()
    script(service, hold=gates[0], fail_after=1, failure=broken())
    task = asyncio.ensure_future(service.complete(stream=True))
    await service.until(lambda: gates[0].is_reached)
    script(service, hold=gates[1], fail_after=1, failure=broken())
    gates[0].set()
    await service.until(lambda: gates[1].is_reached)
    script(service, hold=hold)
    gates[1].set()
    return task


def test_suspects_wait_for_one_another_on_the_same_engine_only(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100,) * 5) as service:
            gate = Gate()
            first = await suspect(service, hold=gate)
            await service.until(lambda: gate.is_reached)
            second = await suspect(service, hold=None)
            assert text_of(await second) == TEXT
            assert not first.done()
            gate.set()
            assert text_of(await first) == TEXT
            await is_free(service)

    asyncio.run(scenario())


def test_a_suspect_waits_where_another_one_is(start_service: StartService) -> None:
    """Its time without a token stands still meanwhile."""

    async def scenario() -> None:
        async with start_service(single=(200,)) as service:
            gate = Gate()
            first = await suspect(service, hold=gate)
            await service.until(lambda: gate.is_reached)
            second = await suspect(service, hold=None)
            engine = service.router.service.engines.all()[0]
            await service.until(lambda: len(service.engine.requests) == 5 and engine.inflight == 1)
            later = await service.complete()  # those beside them go on
            assert later.json()["choices"][0]["text"] == TEXT
            assert len(service.engine.requests) == 6
            assert not (first.done())
            assert not (second.done())
            gate.set()
            answers = await asyncio.gather(first, second)
            assert [text_of(answer) for answer in answers] == [TEXT] * 2
            await is_free(service)

    asyncio.run(scenario())


def test_an_engines_own_verdict_counts_more(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100,) * 5) as service:
            failure = ServiceError(grpc.StatusCode.INTERNAL, "REQUEST_FAILED", "no memory for it")
            script(service, fail_after=1, failure=failure)
            answer = await service.complete(stream=True)
            assert "no memory for it" in answer.text
            assert sum(len(engine.requests) for engine in service.engines) == 2

    asyncio.run(scenario())


def test_a_stream_lives_through_many_losses_as_long_as_it_grows(
    start_service: StartService,
) -> None:
    async def scenario() -> None:
        async with start_service(single=(100,) * 5) as service:
            script(service)
            for number, engine in enumerate(service.engines[:-1], start=1):
                engine.script = Script(words=WORDS, fail_after=number, failure=broken())
            answers = [await service.complete(stream=True) for _ in range(8)]
            assert {text_of(answer) for answer in answers} == {TEXT}

    asyncio.run(scenario())


def test_an_engine_that_knows_no_continuations_repeats_nothing(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            for engine in service.engines:
                engine.knows_continuations = False
            script(service, pause=asyncio.Event())
            task = asyncio.ensure_future(service.complete(stream=True))
            _, answer = await lose(service, task)
            assert answer.text.count(WORDS[0]) == 1
            assert "CONTINUATION_UNKNOWN" in answer.text

    asyncio.run(scenario())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_usage_has_what_the_first_engine_had_of_the_prompt(
    start_service: StartService, is_streamed: bool
) -> None:
    later = pb.Usage(cached_tokens=20, cached_by_tier=[pb.CachedTokens(tier="file", tokens=20)])

    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script(service, pause=asyncio.Event(), cached=IN_HOST)
            more = {"stream_options": {"include_usage": True}} if is_streamed else {}
            task = asyncio.ensure_future(service.complete("prompt", stream=is_streamed, **more))
            _, answer = await lose(service, task, cached=later)
            usage = usage_of(answer) if is_streamed else answer.json()["usage"]
            assert usage["prompt_tokens"] == len("prompt")
            assert usage["prompt_tokens_details"] == IN_HOST_DETAILS
            assert answer.headers["x-ullage-cached"] == "host=16;seconds=0.500"
            latest = (await service.stats())["latest"][0]
            assert latest["cached_tokens"] == {"host": 16}

    asyncio.run(scenario())


def test_over_grpc_only_what_was_asked_for_arrives(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(single=(100, 100)) as service:
            script(service, pause=asyncio.Event())
            events: list[pb.GenerateResponse] = []

            async def read() -> None:
                async for event in service.grpc.Generate(pb.GenerateRequest(text="Hi")):
                    events.append(event)

            task = asyncio.ensure_future(read())
            lost, _ = await lose(service, task)
            assert [e.WhichOneof("event") for e in events].count("accepted") == 1
            assert "".join(e.delta.text for e in events) == TEXT
            assert not [e for e in events if e.delta.token_ids]
            finished = events[-1].finished
            assert finished.resumes == 1
            assert list(finished.resumed_on) == [other(service, lost).headroom.engine]
            assert finished.usage.completion_tokens == len(WORDS)

    asyncio.run(scenario())


def test_a_shared_generation_goes_on_for_all(start_service: StartService) -> None:
    async def scenario() -> None:
        async with start_service(
            single=(100, 100), routing={"coalesce": {"enabled": True}}
        ) as service:
            script(service, pause=asyncio.Event())
            ask = {"stream": True, "temperature": 0}
            tasks = [asyncio.ensure_future(service.complete(**ask)) for _ in range(2)]
            both = asyncio.gather(*tasks)
            _, answers = await lose(service, both)
            assert [text_of(answer) for answer in answers] == [TEXT, TEXT]
            assert (await resumptions(service)) == {("connection", "resumed"): 1.0}

    asyncio.run(scenario())


def test_an_answer_that_a_client_brings_waits_no_longer_than_a_new_one(
    start_service: StartService,
) -> None:
    async def scenario() -> None:
        routing = {"ladder": ["queue", "reject"], "queue": {"timeout": 0.2}}
        async with start_service(single=(10,), routing=routing) as service:
            service.engine.push(headroom_bytes=0)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.available == 0)
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[1, 2, 3]),
                stop=pb.StopConditions(max_tokens=9),
                continuation=pb.Continuation(answers=[pb.PartialAnswer(token_ids=[0])]),
            )
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await service.grpc.Generate(request).read()
            assert from_rpc_error(raised.value).reason == "QUEUE_TIMEOUT"

    asyncio.run(scenario())
