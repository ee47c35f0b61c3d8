"""The model's files reach clients and prompts: recommended sampling, templates by name."""

import asyncio
from typing import TYPE_CHECKING

from ullage.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from conftest import StartService

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_recommended_sampling_is_shown_and_left_to_the_engine(
    start_service: "StartService",
) -> None:
    defaults = inference_pb2.SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.05)

    async def scenario() -> None:
        async with start_service(sampling_defaults=defaults) as service:
            [model] = (await service.http.get("/v1/models")).json()["data"]
            assert model["sampling_defaults"] == {
                "temperature": 0.7,
                "top_k": 20,
                "repetition_penalty": 1.05,
            }
            assert (await service.chat(top_p=0.5)).status_code == 200
            [request] = service.engine.requests
            assert not request.sampling.HasField("temperature"), "the engine fills it in"
            assert request.sampling.top_p == 0.5

    asyncio.run(scenario())


def test_a_template_for_tools_renders_conversations_with_tools(
    start_service: "StartService",
) -> None:
    sources = {"template": "plain", "tool_template": "tools {{ tools[0].function.name }}"}

    async def scenario() -> None:
        async with start_service(**sources) as service:
            await service.chat()
            await service.chat(tools=[WEATHER])
            model = service.router.service.engines.model
            prompts = [model.decode(each.token_ids.ids) for each in service.engine.requests]
            assert prompts == ["plain", "tools weather"]

    asyncio.run(scenario())
