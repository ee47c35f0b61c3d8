"""LiteLLM: the providers openai and anthropic, with its own classes of errors."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checks import CITY, LONG, MODEL, PAINT, check, expect, is_city, is_paint, raised, run

NAME = f"openai/{MODEL}"
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]


@check("create")
def create():
    answer = litellm.completion(model=NAME, messages=MESSAGES, max_tokens=8)
    expect(answer.choices[0].message.content and answer.usage.completion_tokens >= 1, answer)
    return f"{answer.choices[0].finish_reason}, {answer.usage.completion_tokens} tokens"


@check("stream")
def stream():
    pieces = list(litellm.completion(model=NAME, messages=MESSAGES, max_tokens=8, stream=True))
    whole = litellm.stream_chunk_builder(pieces, messages=MESSAGES)
    expect(whole.choices[0].message.content, whole)
    return f"{len(pieces)} pieces"


@check("forced tool")
def forced_tool():
    answer = litellm.completion(
        model=NAME, messages=MESSAGES, tools=[TOOL], tool_choice=NAMED, max_tokens=64
    )
    [call] = answer.choices[0].message.tool_calls
    expect(call.function.name == "weather" and is_city(call.function.arguments), call)
    return call.function.arguments


@check("auto tool")
def auto_tool():
    answer = litellm.completion(model=NAME, messages=MESSAGES, tools=[TOOL], max_tokens=32)
    message = answer.choices[0].message
    expect(message.content or message.tool_calls, answer)
    return answer.choices[0].finish_reason


@check("JSON schema")
def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": PAINT}}
    answer = litellm.completion(model=NAME, messages=MESSAGES, response_format=form, max_tokens=64)
    expect(is_paint(answer.choices[0].message.content), answer)
    return answer.choices[0].message.content


@check("choices")
def choices():
    answer = litellm.completion(model=NAME, messages=MESSAGES, n=2, max_tokens=4)
    expect(len(answer.choices) == 2, answer)
    return f"{len(answer.choices)} choices"


@check("responses")
def responses():
    answer = litellm.responses(model=NAME, input="Hello", max_output_tokens=8)
    expect(answer.status in ("completed", "incomplete") and answer.output, answer)
    return answer.status


@check("messages")
def messages():
    answer = litellm.completion(model=f"anthropic/{MODEL}", messages=MESSAGES, max_tokens=8)
    expect(answer.choices[0].message.content, answer)
    return f"{answer.choices[0].finish_reason}, {answer.usage.completion_tokens} tokens"


@check("wrong model")
def wrong_model():
    error = raised(
        litellm.NotFoundError,
        lambda: litellm.completion(model="openai/absent", messages=MESSAGES),
    )
    return type(error).__name__


@check("long prompt")
def long_prompt():
    long = [{"role": "user", "content": LONG}]
    error = raised(
        litellm.ContextWindowExceededError,
        lambda: litellm.completion(model=NAME, messages=long),
    )
    return type(error).__name__


@check("embeddings")
def embeddings():
    error = raised(litellm.BadRequestError, lambda: litellm.embedding(model=NAME, input=["Hello"]))
    expect("WRONG_TASK" in str(error) or "generates" in str(error), error)
    return type(error).__name__


run()
