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
