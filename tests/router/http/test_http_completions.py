"""OpenAI's completions, with what vLLM adds to them."""

import asyncio
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    StartService = Any


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [72, 105], [[72, 105]]], ids=str)
def test_prompts(start_service: "StartService", prompt: Any) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = (await service.complete(prompt, return_token_ids=True)).json()
            assert answer["object"] == "text_completion"
            choice = answer["choices"][0]
            assert choice["text"] == "Hello big world"
            assert choice["token_ids"] == [0, 1, 2]
            assert len(choice["prompt_token_ids"]) == 2
            assert answer["usage"]["prompt_tokens"] == 2

    asyncio.run(scenario())


def test_echo(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            answer = await service.complete("Say: ", echo=True)
            assert answer.json()["choices"][0]["text"] == "Say: Hello big world"
            first = list(service.router.service.engines.model.encode("Hi"))
            answer = await service.complete(first, echo=True)
            assert answer.json()["choices"][0]["text"] == "HiHello big world"
            assert not service.engine.requests[0].output.echo

    asyncio.run(scenario())


def test_streams_with_logprobs_and_token_ids(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            stream = await service.openai.completions.create(
                model="tiny",
                prompt="Hi",
                logprobs=2,
                stream=True,
                extra_body={"return_token_ids": True},
            )
            choices = [chunk.choices[0] async for chunk in stream]
            assert "".join(choice.text for choice in choices) == "Hello big world"
            assert choices[-1].finish_reason == "stop"
            assert choices[0].model_extra["prompt_token_ids"]
            assert choices[1].model_extra["prompt_token_ids"] is None
            assert [c.logprobs.text_offset[0] for c in choices[:3]] == [0, 5, 9]
            assert choices[0].logprobs.top_logprobs[0] == {"Hello": -0.5, "t0": -1.0, "t1": -2.0}

    asyncio.run(scenario())


def test_whole_logprobs(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            logprobs = (await service.complete(logprobs=0)).json()["choices"][0]["logprobs"]
            assert logprobs["tokens"] == ["Hello", " big", " world"]
            assert logprobs["token_logprobs"] == [-0.5, -0.5, -0.5]

    asyncio.run(scenario())


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_places_in_the_text(start_service: "StartService", echo: bool) -> None:
    """The text of a token may come later: as a part of a character, or of a stop string."""
    smile = "\N{GRINNING FACE}".encode()

    async def scenario() -> None:
        async with start_service() as service:
            script = service.engine.script
            script.words = ("a", "", "", "\N{GRINNING FACE}", "", "\n.", "b", "")
            script.spellings = (b"a", smile[:2], smile[2:3], smile[3:], b"\n", b".", b"b", b"")
            ask: Any = {"logprobs": 1, "echo": echo}
            whole = (await service.complete("Hi", **ask)).json()["choices"][0]
            num_scored = 2 if echo else 0
            begin = sum(map(len, whole["logprobs"]["tokens"][:num_scored]))
            offsets = whole["logprobs"]["text_offset"][num_scored:]
            assert [each - begin for each in offsets] == [0, 1, 1, 1, 2, 3, 4, 5]

            lines = (await service.complete("Hi", stream=True, **ask)).text.splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            parts = [chunk["choices"][0] for chunk in chunks]
            assert "".join(part["text"] for part in parts) == whole["text"]
            for name, expected in whole["logprobs"].items():
                streamed = [part["logprobs"][name] for part in parts if part["logprobs"]]
                assert list(chain(*streamed)) == expected, name

    asyncio.run(scenario())
