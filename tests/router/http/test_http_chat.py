"""OpenAI's chat endpoint, as its official client and a plain one meet it."""

import asyncio
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    StartService = Any


def test_a_whole_answer(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.openai.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=10, seed=5
            )
            assert answer.id.startswith("chatcmpl-")
            assert answer.object == "chat.completion"
            assert answer.choices[0].message.content == "Hello big world"
            assert answer.choices[0].finish_reason == "stop"
            assert answer.usage.completion_tokens == 3
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3
            sent = service.engine.requests[0]
            assert bytes(sent.token_ids.ids) != b""
            assert sent.sampling.seed == 5
            assert sent.stop.max_tokens == 10

    asyncio.run(scenario())


def test_a_streamed_answer_with_usage(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            stream = await service.openai.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "Hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == "Hello big world"
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].choices == []
            assert chunks[-1].usage.completion_tokens == 3
            assert all(chunk.usage is None for chunk in chunks[:-1])

    asyncio.run(scenario())


def test_the_stream_is_events_that_end_with_done(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.chat(stream=True)
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = answer.text.strip().split("\n\n")
            assert all(event.startswith("data: ") for event in events)
            assert events[-1] == "data: [DONE]"
            assert all("usage" not in json.loads(event[6:]) for event in events[:-1])

    asyncio.run(scenario())


def test_parts_and_developer_role(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.openai.chat.completions.create(
                model="tiny",
                messages=[
                    {"role": "developer", "content": "Be brief."},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    },
                ],
                extra_body={"return_token_ids": True},
            )
            prompt = "<system>Be brief.\n<user>a\nb\n<assistant>"
            assert answer.usage.prompt_tokens == len(prompt)
            assert len(answer.model_extra["prompt_token_ids"]) == len(prompt)
            assert answer.choices[0].model_extra["token_ids"] == [0, 1, 2]

    asyncio.run(scenario())


def test_logprobs(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            ask = {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny"}
            answer = await service.openai.chat.completions.create(
                **ask, logprobs=True, top_logprobs=2
            )
            content = answer.choices[0].logprobs.content
            assert [entry.token for entry in content] == ["Hello", " big", " world"]
            assert [top.token for top in content[0].top_logprobs] == ["t0", "t1"]
            assert content[0].bytes == list(b"Hello")
            stream = await service.openai.chat.completions.create(**ask, logprobs=True, stream=True)
            entries = [
                entry
                async for chunk in stream
                if chunk.choices[0].logprobs
                for entry in chunk.choices[0].logprobs.content
            ]
            assert [entry.token for entry in entries] == ["Hello", " big", " world"]

    asyncio.run(scenario())


def test_logprobs_are_of_the_content_alone(start_service: "StartService") -> None:
    """The token that ends the turn is none of it."""

    async def scenario() -> None:
        async with start_service() as service:
            service.engine.script.words = ("Hello", " world", "")
            create = service.openai.chat.completions.create
            ask = {"messages": [{"role": "user", "content": "Hi"}], "model": "tiny"}
            [choice] = (await create(**ask, logprobs=True)).choices
            spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
            assert spelled.decode() == choice.message.content == "Hello world"
            stream = await create(**ask, logprobs=True, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            entries = [e for chunk in chunks if chunk.logprobs for e in chunk.logprobs.content]
            assert [entry.token for entry in entries] == ["Hello", " world"]
            assert all(chunk.logprobs is None or chunk.logprobs.content for chunk in chunks)

    asyncio.run(scenario())


def test_every_parameter_reaches_the_engine(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
            answer = await service.http.post(
                "/v1/chat/completions",
                headers={"traceparent": trace, "x-session-id": "s1", "x-request-id": "mine"},
                json={
                    "messages": [{"role": "user", "content": "Hi"}],
                    "max_completion_tokens": 9,
                    "temperature": 0.5,
                    "top_p": 0.9,
                    "top_k": -1,
                    "min_p": 0.1,
                    "repetition_penalty": 1.1,
                    "presence_penalty": 0.5,
                    "frequency_penalty": -0.5,
                    "seed": -1,
                    "stop": "END",
                    "stop_token_ids": [3],
                    "ignore_eos": True,
                },
            )
            assert answer.headers["x-request-id"] == "mine"
            assert answer.json()["id"] == "chatcmpl-mine"
            sent = service.engine.requests[0]
            assert sent.request_id == "mine"
            assert sent.session_id == "s1"
            assert service.engine.metadata[0]["traceparent"] == trace
            sampling = sent.sampling
            assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 0, 2**64 - 1)
            assert abs(sampling.top_p - 0.9) < 1e-6
            assert abs(sampling.min_p - 0.1) < 1e-6
            assert abs(sampling.repetition_penalty - 1.1) < 1e-6
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
            assert sent.stop.max_tokens == 9
            assert list(sent.stop.stop_strings) == ["END"]
            assert list(sent.stop.stop_token_ids) == [3]
            assert sent.stop.ignore_eos

    asyncio.run(scenario())


def test_long_prompts_are_tokenised_too(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service(single=(1000,), max_model_len=16_000) as service:
            answer = await service.chat("x" * 9000)
            assert answer.json()["usage"]["prompt_tokens"] == 9000 + len("<user>\n<assistant>")

    asyncio.run(scenario())
