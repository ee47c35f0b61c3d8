"""LangChain's ChatOpenAI: messages, tools, structured output and errors."""

import json

import openai
from checks import CITY, LONG, MODEL, PAINT, check, expect, is_city, is_paint, raised, run
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

TOOL = {"name": "weather", "description": "Weather of a city", "parameters": CITY}
QUESTION = "What is the weather in Paris?"
SCHEMA = {"title": "paint", "description": "Paint of a wall", **PAINT}

chat = ChatOpenAI(model=MODEL, max_tokens=16, stream_usage=True)


@check("create")
def create():
    answer = chat.invoke(QUESTION)
    expect(answer.content and answer.usage_metadata["output_tokens"] >= 1, answer)
    return f"{answer.usage_metadata['output_tokens']} tokens"


@check("stream")
def stream():
    pieces = list(chat.stream(QUESTION))
    whole = sum(pieces[1:], pieces[0])
    expect(len(pieces) > 1 and whole.content and whole.usage_metadata, whole)
    return f"{len(pieces)} pieces, {whole.usage_metadata['output_tokens']} tokens"


@check("forced tool")
def forced_tool():
    answer = chat.bind_tools([TOOL], tool_choice="weather").invoke(QUESTION, max_tokens=64)
    [call] = answer.tool_calls
    expect(call["name"] == "weather" and is_city(json.dumps(call["args"])), call)
    return call["args"]


@check("auto tool")
def auto_tool():
    answer = chat.bind_tools([TOOL]).invoke(QUESTION)
    expect(answer.content or answer.tool_calls or answer.invalid_tool_calls, answer)
    return answer.response_metadata["finish_reason"]


@check("JSON schema")
def json_schema():
    answer = chat.with_structured_output(SCHEMA, method="json_schema").invoke(
        QUESTION, max_tokens=64
    )
    expect(is_paint(json.dumps(answer)), answer)
    return answer


@check("batch")
def batch():
    answers = chat.batch(["One", "Two", "Three"])
    expect(len(answers) == 3 and all(answer.content for answer in answers), answers)
    return f"{len(answers)} answers"


@check("responses")
def responses():
    answer = ChatOpenAI(model=MODEL, max_tokens=16, use_responses_api=True).invoke(QUESTION)
    expect(answer.text and answer.usage_metadata["output_tokens"] >= 1, answer)
    return f"{answer.usage_metadata['output_tokens']} tokens"


@check("wrong model")
def wrong_model():
    error = raised(openai.NotFoundError, lambda: ChatOpenAI(model="absent").invoke(QUESTION))
    expect(error.code == "model_not_found", error)
    return type(error).__name__


@check("long prompt")
def long_prompt():
    error = raised(openai.BadRequestError, lambda: chat.invoke(LONG))
    # The class that LangChain has for a prompt beyond the context.
    expect(type(error).__name__ == "OpenAIContextOverflowError", repr(error))
    return type(error).__name__


@check("embeddings")
def embeddings():
    model = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False)
    error = raised(openai.BadRequestError, lambda: model.embed_query("Hello"))
    expect(error.code == "WRONG_TASK", error)
    return f"BadRequestError, {error.code}"


run()
