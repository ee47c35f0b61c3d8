"""Identical deterministic requests share one generation; a repeated key replaces the older."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import CoalesceSection
from ullage_common.wire.errors import ServiceError, from_rpc_error
from ullage_router.call import Call, deadline_of
from ullage_router.pipeline import coalesce
from ullage_router.pipeline.coalesce import Coalescer, is_deterministic, key_of
from ullage_router.pipeline.pipeline import RequestPipeline
from ullage_router.policy.decision import Decision
from ullage_router.policy.quota import Quota
from ullage_router.telemetry.record import RequestRecord
from ullage_router.tenants.account import UNLIMITED, Account
from ullage_router.tenants.session import TenantSession

if TYPE_CHECKING:
    Service = Any
    StartService = Any

Request = inference_pb2.GenerateRequest
Event = inference_pb2.GenerateResponse
Sampling = inference_pb2.SamplingParams
GREEDY = {"temperature": 0}


@dataclass
class Source:
    """Generates what the test feeds it; counts what was begun and closed."""

    begun: list[Call] = field(default_factory=list)
    closed: int = 0
    told: int = 0
    feed: "asyncio.Queue[Event | ServiceError]" = field(default_factory=asyncio.Queue)

    async def start(self, call: Call) -> "Told":
        self.begun.append(call)
        call.decisions.adopt(Decision(action="accept"))
        return Told(self)


class Told:
    def __init__(self, source: Source) -> None:
        self.accepted = inference_pb2.Accepted(request_id="first", prompt_tokens=3)
        self.output_tokens = 0
        self._source = source

    async def events(self) -> AsyncGenerator[Event, None]:
        while True:
            event = await self._source.feed.get()
            if isinstance(event, ServiceError):
                raise event
            self._source.told += 1
            yield event
            if event.HasField("finished"):
                return

    def close(self) -> None:
        self._source.closed += 1


def word(text: str) -> Event:
    return Event(delta=inference_pb2.Delta(text=text, num_tokens=1))


def last() -> Event:
    usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=2)
    return Event(finished=inference_pb2.Finished(usage=usage))


def call(
    name: str, text: str = "Hi", tenant: str = "", timeout_s: float = 30.0, is_streamed: bool = True
) -> Call:
    request = Request(request_id=name, text=text, sampling=Sampling(temperature=0))
    session = TenantSession(Account(tenant, UNLIMITED, Quota()))
    record = RequestRecord(name)
    deadline = deadline_of(request, record, timeout_s, timeout_s)
    return Call(request, record, session, deadline, is_streamed=is_streamed)


async def until(condition: Callable[[], bool]) -> None:
    """Lets others run until it holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition belongs to others
            await asyncio.sleep(0)


async def texts(answer: Any) -> str:
    parts = []
    async with contextlib.aclosing(answer.events()) as events:
        async for event in events:
            parts.append(event.delta.text)
    answer.close()
    return "".join(parts)


def coalescer(**more: Any) -> Coalescer:
    return Coalescer(CoalesceSection(**{"window": 60.0, **more}))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(), False),
        (Request(sampling=Sampling(temperature=0.5)), False),
        (Request(sampling=Sampling(temperature=0)), True),
        (Request(sampling=Sampling(temperature=1, seed=0)), True),
        (Request(samples=inference_pb2.Samples(n=2)), False),
        (Request(samples=inference_pb2.Samples(beam=inference_pb2.BeamSearch(width=2))), True),
    ],
)
def test_what_is_deterministic(request_: Request, expected: bool) -> None:
    assert is_deterministic(request_) is expected


def test_every_field_but_the_id_counts() -> None:
    base = Request(request_id="a", text="Hi", sampling=Sampling(seed=1))
    same = Request(request_id="b", text="Hi", sampling=Sampling(seed=1))
    assert key_of(base, "t") == key_of(same, "t") != key_of(same, "u")
    for change in (
        {"text": "Ho"},
        {"sampling": Sampling(seed=2)},
        {"stop": inference_pb2.StopConditions(max_tokens=3)},
        {"output": inference_pb2.OutputOptions(return_token_ids=True)},
        {"session_id": "s"},
    ):
        other = Request()
        other.CopyFrom(same)
        other.MergeFrom(Request(**change))  # type: ignore[arg-type]
        assert key_of(other, "t") != key_of(base, "t"), change


def test_all_who_join_get_everything_in_their_own_name() -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        first = await shared.share(call("a"), source.start)
        source.feed.put_nowait(word("one "))
        reading = asyncio.ensure_future(texts(first))
        await until(lambda: source.told == 1)
        later = call("b")
        second = await shared.share(later, source.start)
        source.feed.put_nowait(word("two"))
        source.feed.put_nowait(last())
        assert await texts(second) == "one two" == await reading
        assert (first.accepted.request_id, second.accepted.request_id) == ("a", "b")
        assert (later.decisions.latest.coalesced_with, second.output_tokens) == ("a", 2)
        assert later.decisions.latest.action == "accept"
        assert (len(source.begun), source.closed, shared.joined, len(shared)) == (1, 1, 1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("change", ["text", "tenant"])
def test_strangers_do_not_share(change: str) -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        other = call("b", text="Ho" if change == "text" else "Hi", tenant=change)
        answers = [await shared.share(c, source.start) for c in (call("a"), other)]
        assert (len(source.begun), shared.joined) == (2, 0)
        for answer in answers:
            answer.close()

    asyncio.run(scenario())


def test_a_stream_and_a_whole_answer_do_not_share() -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        calls = [call(str(n), is_streamed=n < 2) for n in range(4)]
        answers = [await shared.share(c, source.start) for c in calls]
        assert [begun.is_streamed for begun in source.begun] == [True, False]
        assert [c.decisions.latest.coalesced_with for c in calls] == ["", "0", "", "2"]
        for answer in answers:
            answer.close()

    asyncio.run(scenario())


def test_tenants_share_where_that_is_allowed() -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer(across_tenants=True)
        calls = (call("a", tenant="x"), call("b", tenant="y"))
        answers = [await shared.share(c, source.start) for c in calls]
        assert len(source.begun) == 1
        for answer in answers:
            answer.close()

    asyncio.run(scenario())


def test_it_ends_when_the_last_has_left() -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        first = await shared.share(call("a"), source.start)
        second = await shared.share(call("b"), source.start)
        first.close()
        source.feed.put_nowait(word("still here"))
        events = second.events()
        assert (await anext(events)).delta.text == "still here"
        assert source.closed == 0
        await events.aclose()
        second.close()
        await until(lambda: source.closed == 1)
        assert len(shared) == 0

    asyncio.run(scenario())


def test_a_failure_is_told_to_all() -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        answers = [await shared.share(call(name), source.start) for name in "ab"]
        lost = ServiceError(grpc.StatusCode.INTERNAL, "WORKER_LOST", "lost")
        source.feed.put_nowait(lost)
        for answer in answers:
            with pytest.raises(ServiceError) as caught:
                await texts(answer)
            assert caught.value.reason == "WORKER_LOST"
            assert caught.value is not lost

    asyncio.run(scenario())


def test_each_has_its_own_time_limit() -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        patient = await shared.share(call("a"), source.start)
        hasty = await shared.share(call("b", timeout_s=0.05), source.start)
        events = hasty.events()
        end = (await anext(events)).finished
        assert (end.reason, end.usage.prompt_tokens) == (inference_pb2.FINISH_REASON_TIMEOUT, 3)
        hasty.close()
        source.feed.put_nowait(word("in time"))
        source.feed.put_nowait(last())
        assert await texts(patient) == "in time"

    asyncio.run(scenario())


def test_a_slow_reader_is_told_and_holds_nobody_up() -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        fast = await shared.share(call("a"), source.start)
        slow = await shared.share(call("b"), source.start)
        for _ in range(40):
            source.feed.put_nowait(word("w" * 40_000))
        source.feed.put_nowait(last())
        assert len(await texts(fast)) == 40 * 40_000
        with pytest.raises(ServiceError) as caught:
            await texts(slow)
        assert caught.value.reason == "SLOW_READER"
        slow.close()

    asyncio.run(scenario())


class CountedReader(coalesce._Reader):
    """A reader that counts how often the places of all readers are looked at."""

    num_looks = 0

    @property
    def place(self) -> int:
        CountedReader.num_looks += 1
        return self._place

    @place.setter
    def place(self, place: int) -> None:
        self._place = place


def test_a_reader_costs_the_same_however_many_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "JOIN_S", 0.0)
    monkeypatch.setattr(coalesce, "_Reader", CountedReader)
    num_readers = 60
    num_words = 20

    async def scenario() -> None:
        source = Source()
        generation = coalesce.SharedGeneration(call("a"), 0.0)
        readers = [generation.join(call(f"r{n}")) for n in range(num_readers)]
        for _ in range(num_words):
            source.feed.put_nowait(word("w"))
        source.feed.put_nowait(last())
        generation.run(source.start, lambda: None)
        CountedReader.num_looks = 0
        assert await asyncio.gather(*map(texts, readers)) == ["w" * num_words] * num_readers
        assert CountedReader.num_looks <= 10 * num_readers * (num_words + 1)

    asyncio.run(scenario())


def test_the_engine_waits_for_the_fastest_reader() -> None:
    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        only = await shared.share(call("a"), source.start)
        for _ in range(40):
            source.feed.put_nowait(word("w" * 40_000))
        for _ in range(200):
            await asyncio.sleep(0)
        assert source.told == 2  # 64 KiB ahead, and no more
        source.feed.put_nowait(last())
        assert len(await texts(only)) == 40 * 40_000

    asyncio.run(scenario())


steps = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "say", "read"]), st.integers(0, 5)), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_state(actions: list[tuple[str, int]]) -> None:
    """Whatever the order: each reader gets all from the start, and nothing outlives its readers."""

    async def scenario() -> None:
        source = Source()
        shared = coalescer()
        said: list[str] = []
        readers: list[tuple[Any, Any, list[str]]] = []
        for action, n in actions:
            if action == "join":
                answer = await shared.share(call(f"r{n}"), source.start)
                if len(readers) == 0:
                    said = []
                readers.append((answer, answer.events(), []))
            elif action == "say" and readers:
                said.append(str(n))
                source.feed.put_nowait(word(str(n)))
            elif readers:
                answer, events, got = readers[n % len(readers)]
                if action == "leave":
                    readers.remove((answer, events, got))
                    await events.aclose()
                    answer.close()
                    if not readers:
                        await until(lambda: source.closed == len(source.begun))
                        source.feed = asyncio.Queue()
                elif len(got) < len(said):
                    got.append((await anext(events)).delta.text)
        for answer, events, got in readers:
            while len(got) < len(said):
                got.append((await anext(events)).delta.text)
            assert got == said
            await events.aclose()
            answer.close()
        await until(lambda: source.closed == len(source.begun))
        assert len(shared) == 0

    asyncio.run(scenario())


def test_over_http(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.hold = asyncio.Event()
            streamed = asyncio.ensure_future(collect(service))
            await service.until(lambda: len(service.engine.requests) == 1)
            others = [asyncio.ensure_future(collect(service)) for _ in range(3)]
            joined = service.router.service.coalescer
            await service.until(lambda: joined.joined == 3, 20)
            service.engine.script.hold.set()
            answers = await asyncio.gather(streamed, *others)
            assert {text for _, text in answers} == {"Hello big world"}
            assert len({name for name, _ in answers}) == 4  # each under its own id
            assert len(service.engine.requests) == 1
            seen = await service.stats()
            assert seen["coalescing"] == {"joined": 3, "replaced": 0, "repeated": 0}
            shared = [r for r in seen["latest"] if r["coalesced_with"]]
            assert len(shared) == 3
            assert all(r["engine"] and r["output_tokens"] == 3 for r in shared)
            metrics = (await service.monitoring.get("/metrics")).text
            assert "ullage_router_coalesced_requests_total 3.0" in metrics

    asyncio.run(scenario())


async def collect(service: "Service") -> tuple[str, str]:
    stream = await service.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True, seed=4
    )
    parts = []
    name = ""
    async for chunk in stream:
        name = chunk.id
        parts.append(chunk.choices[0].delta.content or "")
    return name, "".join(parts)


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0}], ids=["unset", "sampled"])
def test_sampled_requests_never_share(start_service: "StartService", more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.hold = asyncio.Event()
            asked = [asyncio.ensure_future(service.chat(**more)) for _ in range(2)]
            await service.until(lambda: len(service.engine.requests) == 2, 20)
            service.engine.script.hold.set()
            answers = await asyncio.gather(*asked)
            assert [answer.status_code for answer in answers] == [200, 200]

    asyncio.run(scenario())


REPLACING = {"replace": {"enabled": True}}


def test_a_later_request_with_the_same_key_replaces_the_older(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(routing=REPLACING) as service:
            service.engine.script.hold = asyncio.Event()
            older = asyncio.ensure_future(asked_with_key(service, "k"))
            await service.until(lambda: len(service.engine.requests) == 1)
            newer = asyncio.ensure_future(asked_with_key(service, "k"))
            other = asyncio.ensure_future(asked_with_key(service, "other"))
            with pytest.raises(openai.ConflictError) as caught:
                await older
            assert caught.value.body == {
                "message": "a later request with the x-ullage-replace 'k' replaced this one",
                "type": "conflict_error",
                "param": None,
                "code": "REPLACED",
            }
            await service.until(lambda: len(service.engine.cancelled) == 1, 20)
            service.engine.script.hold.set()
            assert await newer == await other == "Hello big world"
            assert (await service.stats())["coalescing"]["replaced"] == 1
            metrics = (await service.monitoring.get("/metrics")).text
            assert "ullage_router_replaced_requests_total 1.0" in metrics

    asyncio.run(scenario())


def test_a_client_that_retries_conflicts_sends_no_replaced_request_again(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(routing=REPLACING) as service:
            service.engine.script.hold = asyncio.Event()
            retries = openai.DEFAULT_MAX_RETRIES
            older = asyncio.ensure_future(asked_with_key(service, "k", retries))
            await service.until(lambda: len(service.engine.requests) == 1)
            newer = asyncio.ensure_future(asked_with_key(service, "k", retries))
            with pytest.raises(openai.ConflictError):
                await older
            service.engine.script.hold.set()
            assert await newer == "Hello big world"
            assert len(service.engine.requests) == 2

    asyncio.run(scenario())


async def asked_with_key(
    service: "Service", key: str, max_retries: int = 0, header: str = "x-ullage-replace"
) -> str | None:
    client = service.openai.with_options(max_retries=max_retries)
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        extra_headers={header: key},
    )
    content: str | None = answer.choices[0].message.content
    return content


def test_a_stream_that_is_replaced_says_so(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing=REPLACING) as service:
            service.engine.script.pause = asyncio.Event()
            headers = {"x-ullage-replace": "k"}
            body = {"prompt": "x", "stream": True}
            async with service.http.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                newer = asyncio.ensure_future(
                    service.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
                )
                rest = [line async for line in lines if line]
            assert "REPLACED" in rest[-2]
            assert rest[-1] == "data: [DONE]"
            service.engine.script.pause.set()
            assert (await newer).status_code == 200

    asyncio.run(scenario())


def test_over_grpc(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(routing=REPLACING) as service:
            service.engine.script.hold = asyncio.Event()

            async def ask(metadata: tuple[tuple[str, str], ...] = (), **more: Any) -> list[Event]:
                request = Request(text="Hi", **more)
                return [e async for e in service.grpc.Generate(request, metadata=metadata)]

            key = (("x-ullage-replace", "k"),)
            older = asyncio.ensure_future(ask(key))
            await service.until(lambda: len(service.engine.requests) == 1)
            newer = asyncio.ensure_future(ask(key))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await older
            assert from_rpc_error(caught.value).reason == "REPLACED"
            assert caught.value.code() is grpc.StatusCode.ABORTED
            greedy = [asyncio.ensure_future(ask(sampling=Sampling(temperature=0))) for _ in "abc"]
            shared = service.router.service.coalescer
            await service.until(lambda: shared.joined == 2, 20)
            service.engine.script.hold.set()
            await asyncio.gather(newer, *greedy)
            assert len(service.engine.requests) == 3
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask((("x-ullage-replace", "k" * 257),))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


@pytest.mark.parametrize("header", ["x-ullage-replace", "Idempotency-Key"])
def test_nothing_is_replaced_unless_asked_for(start_service: "StartService", header: str) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            asked = [asked_with_key(service, "k", header=header) for _ in range(3)]
            assert await asyncio.gather(*asked) == ["Hello big world"] * 3

    asyncio.run(scenario())


def test_an_idempotency_key_replaces_nothing(start_service: "StartService") -> None:
    """It asks for the same answer again, not for the end of the one under way."""

    async def scenario() -> None:
        async with start_service(routing=REPLACING) as service:
            asked = [asked_with_key(service, "k", header="Idempotency-Key") for _ in range(3)]
            assert await asyncio.gather(*asked) == ["Hello big world"] * 3

    asyncio.run(scenario())


def test_a_request_is_counted_out_though_its_answer_cannot_be_closed() -> None:
    class Unclosable(Told):
        def close(self) -> None:
            raise OSError("closing failed")

    async def scenario() -> None:
        async def start(_: Call) -> Told:
            return Unclosable(Source())

        served = call("a")
        records = list[RequestRecord]()
        pipeline = RequestPipeline(start, records.append)
        with pytest.raises(OSError, match="closing failed"):
            async with pipeline.serve(served):
                assert pipeline.inflight == 1
        await until(lambda: records == [served.record])
        assert pipeline.inflight == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_generation_that_is_cancelled_ends_its_readers(has_begun: bool) -> None:
    """As by gRPC, whose calls are cancelled by the other side with the same exception."""

    class Cancelled(Told):
        async def events(self) -> AsyncGenerator[Event, None]:
            yield word("one ")
            raise asyncio.CancelledError

    async def start(call: Call) -> Told:
        if not has_begun:
            raise asyncio.CancelledError
        return Cancelled(Source())

    async def scenario() -> None:
        shared = coalescer()
        async with asyncio.timeout(20):
            with pytest.raises(RuntimeError, match="the shared generation failed"):
                await texts(await shared.share(call("a"), start))
        assert len(shared) == 0

    asyncio.run(scenario())
