"""Several choices, as OpenAI's official client meets them."""

import asyncio
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid

if TYPE_CHECKING:
    StartService = Any

TEXTS = ["Hello big world", "Hello1 big1 world1", "Hello2 big2 world2"]
HI: list[Any] = [{"role": "user", "content": "Hi"}]


async def collect(stream: AsyncIterable[Any]) -> tuple[dict[int, str], list[int], Any]:
    """Texts by choice, the choices in the order of their ends, and the usage."""
    texts: dict[int, str] = {}
    ends: list[int] = []
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends, "text after the end"
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                ends.append(choice.index)
    return texts, ends, usage


def test_whole_chat_choices(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.openai.chat.completions.create(model="tiny", messages=HI, n=3)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            assert [choice.message.content for choice in answer.choices] == TEXTS
            assert {choice.finish_reason for choice in answer.choices} == {"stop"}
            assert answer.usage.completion_tokens == 9
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9
            assert service.engine.requests[0].samples == inference_pb2.Samples(n=3)

    asyncio.run(scenario())


def test_streamed_chat_choices(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            stream = await service.openai.chat.completions.create(
                model="tiny",
                messages=HI,
                n=3,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            roles = [c.choices[0].index for c in chunks if c.choices and c.choices[0].delta.role]
            assert roles == [0, 1, 2]
            assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])

            async def again() -> AsyncIterable[Any]:
                for chunk in chunks:
                    yield chunk

            texts, ends, usage = await collect(again())
            assert [texts[i] for i in range(3)] == TEXTS
            assert ends == [0, 1, 2]
            assert usage.completion_tokens == 9

    asyncio.run(scenario())


def test_completions_whole_and_streamed(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            ask: dict[str, Any] = {"model": "tiny", "prompt": "Say: ", "n": 2, "echo": True}
            answer = await service.openai.completions.create(
                **ask, extra_body={"return_token_ids": True}
            )
            assert [choice.text for choice in answer.choices] == [f"Say: {t}" for t in TEXTS[:2]]
            assert [choice.model_extra["token_ids"] for choice in answer.choices] == [[0, 1, 2]] * 2
            stream = await service.openai.completions.create(**ask, stream=True)
            texts, ends, usage = await collect(stream)
            assert texts == {i: f"Say: {TEXTS[i]}" for i in range(2)}
            assert (ends, usage) == ([0, 1], None)
            stream = await service.openai.completions.create(
                model="tiny", prompt="x", n=2, logprobs=0, stream=True
            )
            offsets: dict[int, list[int]] = {0: [], 1: []}
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.logprobs:
                        offsets[choice.index] += choice.logprobs.text_offset
            assert offsets == {0: [0, 5, 9], 1: [0, 6, 11]}

    asyncio.run(scenario())


def test_best_of_and_beam_search_reach_the_engine(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.openai.completions.create(
                model="tiny", prompt="x", n=2, best_of=5
            )
            assert len(answer.choices) == 2
            search = {"use_beam_search": True, "length_penalty": 0.5}
            answer = await service.openai.completions.create(
                model="tiny", prompt="x", n=2, best_of=4, extra_body=search
            )
            assert [choice.text for choice in answer.choices] == TEXTS[:2]
            await service.chat(use_beam_search=True, n=3)
            wanted = [
                inference_pb2.Samples(n=2, best_of=5),
                inference_pb2.Samples(
                    n=2, beam=inference_pb2.BeamSearch(width=4, length_penalty=0.5)
                ),
                inference_pb2.Samples(n=3, beam=inference_pb2.BeamSearch(width=3)),
            ]
            assert [request.samples for request in service.engine.requests] == wanted

    asyncio.run(scenario())


def test_a_time_limit_ends_every_choice(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(limits={"request_timeout": 1.0}) as service:
            service.engine.script.pause = asyncio.Event()
            stream = await service.openai.chat.completions.create(
                model="tiny", messages=HI, n=2, stream=True
            )
            reasons = {}
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.finish_reason:
                        reasons[choice.index] = choice.model_extra["stop_reason"]
            assert reasons == {0: "timeout", 1: "timeout"}

    asyncio.run(scenario())


def test_a_session_from_the_header_or_the_body(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            body = {"messages": HI, "session_id": "of the body"}
            header = {"x-session-id": "of the header"}
            path = "/v1/chat/completions"
            await service.http.post(path, json=body)
            await service.http.post(path, json=body, headers=header)
            await service.http.post(path, json={"messages": HI})
            sessions = [request.session_id for request in service.engine.requests]
            assert sessions == ["of the body", "of the header", ""]

    asyncio.run(scenario())


def test_what_is_known_only_at_its_end_may_take_longer_than_a_token(
    start_service: "StartService",
) -> None:
    async def scenario() -> None:
        async with start_service(limits={"request_timeout": 1.0}) as service:
            hold = service.engine.script.hold = asyncio.Event()
            slow = [
                asyncio.ensure_future(service.complete("x", best_of=2)),
                asyncio.ensure_future(service.complete("x", n=2, use_beam_search=True)),
            ]
            await service.until(lambda: service.engine.active == len(slow))
            # One that came later is out of time.
            assert (await service.complete("x")).status_code in (429, 504)
            hold.set()
            assert [(await answer).status_code for answer in slow] == [200, 200]

    asyncio.run(scenario())


def test_an_engine_that_searches_no_beams_names_the_field(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            message = "samples.beam: this engine searches no beams; ask for samples"
            service.engine.script.refuse = invalid("samples.beam", message)
            answer = await service.complete(use_beam_search=True, n=2)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "use_beam_search")
            assert error["message"] == message.replace("samples.beam", "use_beam_search")

    asyncio.run(scenario())
