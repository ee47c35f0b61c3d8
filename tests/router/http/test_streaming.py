"""How tokens reach clients: bounded, coalesced, paced, kept alive; and who left is counted."""

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.config.router import StreamingSection
from ullage_router.admission.queue import QueueEntry
from ullage_router.engines.flow_control import FlowControl, ReceiveBuffer, flow_of, for_unary

if TYPE_CHECKING:
    StartService = Any

WAIT_S = 20.0


def delta(text: str, tokens: int = 1, sample: int = 0) -> pb.GenerateResponse:
    made = pb.Delta(text=text, num_tokens=tokens, sample=sample, token_ids=[7] * tokens)
    return pb.GenerateResponse(delta=made)


FINISHED = pb.GenerateResponse(finished=pb.Finished())


def put(buffer: ReceiveBuffer, event: pb.GenerateResponse) -> None:
    copy = pb.GenerateResponse()
    copy.CopyFrom(event)
    buffer.put(copy, copy.WhichOneof("event"))


PIECES = st.lists(st.tuples(st.text(max_size=3), st.integers(1, 6), st.integers(0, 1)), max_size=60)


@settings(deadline=None, max_examples=60)
@given(pieces=PIECES, window=st.integers(1, 70), most=st.integers(1, 8), reads=st.integers(1, 5))
def test_a_buffer_loses_nothing_and_holds_no_more_than_its_window(
    pieces: list[tuple[str, int, int]], window: int, most: int, reads: int
) -> None:
    """A source that sends what it may, and a reader that takes a few at a time."""

    async def scenario() -> None:
        room = window

        def grant(responses: int) -> None:
            nonlocal room
            room += responses

        buffer = ReceiveBuffer(
            FlowControl(window=window, coalesce_tokens=most, coalesce_s=0.0), window, grant
        )
        source = [*(delta(*piece) for piece in pieces), FINISHED]
        got: list[pb.Delta] = []
        is_over = False
        while not is_over:
            while source and room:
                room -= 1
                put(buffer, source.pop(0))
            assert buffer.num_events <= window
            for _ in range(reads):
                if not buffer.num_events:
                    break
                event = await buffer.read()
                assert event is not None
                is_over = event.HasField("finished")
                if not is_over:
                    got.append(event.delta)
        sizes = [piece[1] for piece in pieces]
        assert all(d.num_tokens <= max(most, *sizes) for d in got)
        assert all(len(d.token_ids) == d.num_tokens for d in got)
        for sample in (0, 1):
            text = "".join(d.text for d in got if d.sample == sample)
            assert text == "".join(p[0] for p in pieces if p[2] == sample)
        assert sum(d.num_tokens for d in got) == sum(sizes)

    asyncio.run(scenario())


def test_what_is_there_leaves_together_and_at_once() -> None:
    """Its source has waited for it already."""

    async def scenario() -> None:
        buffer = ReceiveBuffer(
            FlowControl(coalesce_tokens=3, coalesce_s=3600.0), 64, lambda _: None
        )
        for texts, expected in (("a", ["a"]), ("bcde", ["bcd", "e"])):
            for text in texts:
                put(buffer, delta(text))
            assert [(await buffer.read()).delta.text for _ in expected] == expected
        reading = asyncio.create_task(buffer.read())
        await asyncio.sleep(0)
        put(buffer, delta("f"))
        assert (await reading).delta.text == "f"
        put(buffer, FINISHED)
        assert (await buffer.read()).HasField("finished")
        assert await buffer.read() is None

    asyncio.run(scenario())


def test_a_whole_answer_comes_in_few_pieces_and_unpaced() -> None:
    flow = for_unary(flow_of(StreamingSection(tokens_per_second=5.0)))
    assert (flow.coalesce_tokens, flow.pace) == (32, 0.0)


async def chunks(service: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await service.chat(stream=True, **body)
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event[6:]) for event in events[:-1]]


def test_words_that_are_there_leave_together(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(streaming={"coalesce_tokens": 5}) as service:
            words = tuple(f'"{i}" é\n' for i in range(40))
            service.engine.script.words = words
            told = await chunks(service, max_tokens=40)
            texts = [c["choices"][0]["delta"].get("content") for c in told]
            assert "".join(text or "" for text in texts) == "".join(words)
            assert len(told) < 40
            assert max((text or "").count("\n") for text in texts) <= 5
            assert told[-1]["choices"][0]["finish_reason"] == "stop"
            both = await chunks(service, n=2)
            for i, expected in enumerate(("".join(words), "".join(w + "1" for w in words))):
                mine = [c["choices"][0] for c in both if c["choices"][0]["index"] == i]
                text = "".join(choice["delta"].get("content") or "" for choice in mine)
                assert text == expected

    asyncio.run(scenario())


def test_a_paced_answer_takes_its_time(start_service: "StartService") -> None:
    async def scenario() -> None:
        streaming = {"coalesce_tokens": 1, "tokens_per_second": 20.0}
        async with start_service(streaming=streaming) as service:
            started = time.monotonic()
            told = await chunks(service)
            assert time.monotonic() - started >= 2 / 20  # three words, the first at once
            texts = [c["choices"][0]["delta"].get("content") for c in told]
            assert "".join(text or "" for text in texts) == "Hello big world"

    asyncio.run(scenario())


def test_a_silent_stream_is_kept_alive(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(streaming={"keepalive": 0.05}) as service:
            service.engine.script.pause = asyncio.Event()
            body = {"prompt": "x", "stream": True}
            async with service.http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                comments = 0
                while comments < 2:
                    comments += (await anext(lines)) == ": keepalive"
                service.engine.script.pause.set()
                rest = [line async for line in lines if line]
                assert rest[-1] == "data: [DONE]"
            # The official client takes comments for what they are.
            service.engine.script.pause = asyncio.Event()
            stream = await service.openai.completions.create(
                model="tiny", prompt="x", stream=True, max_tokens=3
            )
            first = await anext(aiter(stream))
            await asyncio.sleep(0.2)
            service.engine.script.pause.set()
            text = first.choices[0].text + "".join([c.choices[0].text async for c in stream])
            assert text == "Hello big world"

    asyncio.run(scenario())


@pytest.mark.parametrize("is_served", [True, False])
def test_a_stream_that_waits_is_kept_alive(
    start_service: "StartService", is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        routing = {"ladder": ["queue", "reject"], "queue": {"timeout": 60.0 if is_served else 1.0}}
        is_time_over = asyncio.Event()

        async def wait_turn(entry: QueueEntry, timeout_s: float) -> bool:
            await is_time_over.wait()
            return False

        if not is_served:
            monkeypatch.setattr(QueueEntry, "wait_turn", wait_turn)
        streaming = {"keepalive": 0.05}
        async with start_service(single=(10,), routing=routing, streaming=streaming) as service:
            full = service.engine.headroom.headroom_bytes
            service.engine.push(headroom_bytes=0)
            known = service.router.service.engines.all()[0]
            await service.until(lambda: known.available == 0)
            body = {"prompt": "x", "stream": True}
            async with service.http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                lines = answer.aiter_lines()
                assert [await anext(lines) for _ in range(4)] == [": keepalive", ""] * 2
                if is_served:
                    service.engine.push(headroom_bytes=full)
                is_time_over.set()
                rest = [line async for line in lines if line and line != ": keepalive"]
            assert rest[-1] == "data: [DONE]"
            assert ("QUEUE_TIMEOUT" in rest[-2]) is not is_served
            if not is_served:  # the header has left, so the event says it
                assert 1 <= json.loads(rest[-2][6:])["error"]["retry_after"] <= 30
            texts = [json.loads(line[6:]).get("choices") for line in rest[:-1]]
            words = "".join(choices[0]["text"] for choices in texts if choices)
            assert words == ("Hello big world" if is_served else "")

    asyncio.run(scenario())


def test_clients_that_leave_are_counted(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.pause = asyncio.Event()
            body = {"prompt": "x", "stream": True}
            async with service.http.stream("POST", "/v1/completions", json=body) as answer:
                await anext(answer.aiter_lines())
            await service.until(lambda: len(service.engine.cancelled) == 1, WAIT_S)
            await service.until(lambda: service.router.service.pipeline.inflight == 0, WAIT_S)
            text = (await service.monitoring.get("/metrics")).text
            assert 'ullage_router_early_stops_total{had_tokens="yes"} 1.0' in text
            assert 'ullage_router_early_stop_tokens_bucket{le="1.0"} 1.0' in text

    asyncio.run(scenario())
