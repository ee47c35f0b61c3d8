"""Pydantic AI: agents with tools and typed outputs."""

from typing import Literal

from checks import LONG, MODEL, check, expect, raised, run
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

QUESTION = "What is the weather in Paris?"
SETTINGS = {"max_tokens": 64}


class Paint(BaseModel):
    color: Literal["red", "blue"]
    coats: Literal[1, 2]


class City(BaseModel):
    city: Literal["Paris", "Rome"]


model = OpenAIChatModel(MODEL)


@check("task")
def task():
    result = Agent(model, model_settings=SETTINGS).run_sync(QUESTION)
    expect(result.output and result.usage.output_tokens >= 1, result)
    return f"{result.usage.output_tokens} tokens"


@check("task with a tool")
def task_with_a_tool():
    cities = []

    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Weather of a city."""
        cities.append(city)
        return "sunny"

    # The model has to call an output function, which ends the task.
    agent = Agent(model, output_type=[weather], model_settings=SETTINGS)
    result = agent.run_sync(QUESTION)
    expect(cities and result.output == "sunny", result)
    return cities[0]


@check("stream")
async def stream():
    async with Agent(model, model_settings={"max_tokens": 8}).run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    expect(pieces, result)
    return f"{len(pieces)} pieces"


@check("typed output")
def typed_output():
    agent = Agent(model, output_type=ToolOutput(City), model_settings=SETTINGS)
    return repr(agent.run_sync(QUESTION).output)


@check("JSON schema")
def json_schema():
    agent = Agent(model, output_type=NativeOutput(Paint), model_settings=SETTINGS)
    return repr(agent.run_sync(QUESTION).output)


@check("responses")
def responses():
    result = Agent(OpenAIResponsesModel(MODEL), model_settings=SETTINGS).run_sync(QUESTION)
    expect(result.output, result)
    return f"{result.usage.output_tokens} tokens"


@check("wrong model")
def wrong_model():
    agent = Agent(OpenAIChatModel("absent"))
    error = raised(ModelHTTPError, lambda: agent.run_sync(QUESTION))
    expect(error.status_code == 404, error)
    return f"ModelHTTPError, {error.status_code}"


@check("long prompt")
def long_prompt():
    error = raised(ModelHTTPError, lambda: Agent(model).run_sync(LONG))
    expect(error.status_code == 400, error)
    return f"ModelHTTPError, {error.status_code}"


run()
