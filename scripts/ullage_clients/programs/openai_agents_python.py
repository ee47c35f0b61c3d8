"""OpenAI's Agents SDK for Python: tasks by responses and by chats."""

from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import LONG, MODEL, check, expect, raised_async, run
from pydantic import BaseModel

# Traces would go to OpenAI.
set_tracing_disabled(True)

QUESTION = "What is the weather in Paris?"
GREETING = "Hello"
cities = []


class Paint(BaseModel):
    color: Literal["red", "blue"]
    coats: Literal[1, 2]


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    cities.append(city)
    return "sunny"


def agent(**options):
    # The SDK takes an answer for an error that max_tokens cuts, so these tasks have to end: the
    # likeliest answer to a greeting is a greeting.
    settings = ModelSettings(
        max_tokens=200, temperature=0.0, tool_choice=options.pop("tool_choice", None)
    )
    return Agent(name="helper", model_settings=settings, **{"model": MODEL, **options})


@check("task")
async def task():
    result = await Runner.run(agent(instructions="Be brief."), GREETING)
    expect(result.final_output, result)
    return f"{result.context_wrapper.usage.output_tokens} tokens"


@check("task with a tool")
async def task_with_a_tool():
    cities.clear()
    # The SDK takes the choice back after the first call, and the model answers by itself.
    helper = agent(tools=[weather], tool_choice="required", tool_use_behavior="stop_on_first_tool")
    result = await Runner.run(helper, QUESTION)
    expect(cities and result.final_output == "sunny", result)

    first = await Runner.run(
        agent(), [*result.to_input_list(), {"role": "user", "content": GREETING}]
    )
    expect(first.final_output, first)
    return f"{cities[0]}, then {first.context_wrapper.usage.output_tokens} tokens"


@check("stream")
async def stream():
    result = Runner.run_streamed(agent(instructions="Be brief."), GREETING)
    kinds = [event.type async for event in result.stream_events()]
    expect("raw_response_event" in kinds and result.final_output, kinds)
    return f"{len(kinds)} events"


@check("JSON schema")
async def json_schema():
    result = await Runner.run(agent(output_type=Paint), QUESTION)
    expect(isinstance(result.final_output, Paint), result)
    return repr(result.final_output)


@check("chats")
async def chats():
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=openai.AsyncOpenAI())
    cities.clear()
    helper = agent(
        model=model,
        tools=[weather],
        tool_choice="required",
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(helper, QUESTION)
    expect(cities and result.final_output == "sunny", result)
    return cities[0]


@check("wrong model")
async def wrong_model():
    error = await raised_async(openai.NotFoundError, Runner.run(agent(model="absent"), QUESTION))
    return f"NotFoundError, {error.code}"


@check("long prompt")
async def long_prompt():
    error = await raised_async(openai.BadRequestError, Runner.run(agent(), LONG))
    expect(error.code == "context_length_exceeded", f"{error.code}: {error}")
    return f"BadRequestError, {error.code}"


run()
