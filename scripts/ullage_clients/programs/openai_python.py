"""OpenAI's SDK for Python: chats, completions, responses and errors."""

import openai
from checks import CITY, LONG, MODEL, PAINT, check, expect, is_city, is_paint, raised, run

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}

client = openai.OpenAI()


@check("models")
def models():
    names = [model.id for model in client.models.list()]
    expect(MODEL in names, names)
    return client.models.retrieve(MODEL).id


@check("create")
def create():
    answer = client.chat.completions.create(model=MODEL, messages=[QUESTION], max_tokens=8)
    choice = answer.choices[0]
    expect(choice.message.content and choice.finish_reason in ("stop", "length"), answer)
    usage = answer.usage
    expect(1 <= usage.completion_tokens <= 8 and usage.prompt_tokens > 0, usage)
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)
    return f"{choice.finish_reason}, {usage.prompt_tokens} and {usage.completion_tokens} tokens"


@check("stream")
def stream():
    pieces = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[QUESTION],
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [p.choices[0].delta.content for p in pieces if p.choices and p.choices[0].delta.content]
    reasons = [p.choices[0].finish_reason for p in pieces if p.choices]
    expect(texts and reasons[-1] in ("stop", "length"), pieces)
    expect(not any(reasons[:-1]), reasons)
    expect(pieces[-1].usage and not pieces[-1].choices, pieces[-1])
    return f"{len(texts)} pieces, {pieces[-1].usage.completion_tokens} tokens"


@check("forced tool")
def forced_tool():
    answer = client.chat.completions.create(
        model=MODEL, messages=[QUESTION], tools=[TOOL], tool_choice=NAMED, max_tokens=64
    )
    [call] = answer.choices[0].message.tool_calls
    expect(call.id and call.function.name == "weather", call)
    expect(is_city(call.function.arguments), call)
    return call.function.arguments


@check("auto tool")
def auto_tool():
    answer = client.chat.completions.create(
        model=MODEL, messages=[QUESTION], tools=[TOOL], max_tokens=32
    )
    [choice] = answer.choices
    if choice.message.tool_calls:
        expect(choice.finish_reason in ("tool_calls", "length"), choice)
        expect(choice.message.tool_calls[0].function.name == "weather", choice)
        return "a call"
    expect(choice.message.content and choice.finish_reason in ("stop", "length"), choice)
    return "text"


@check("tool result")
def tool_result():
    call = {"name": "weather", "arguments": '{"city": "Paris"}'}
    messages = [
        QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8
    )
    expect(answer.choices[0].message.content, answer)
    expect(not answer.choices[0].message.tool_calls, answer)
    return answer.choices[0].finish_reason


@check("JSON schema")
def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": PAINT}}
    answer = client.chat.completions.create(
        model=MODEL, messages=[QUESTION], response_format=form, max_tokens=64
    )
    expect(is_paint(answer.choices[0].message.content), answer)
    return answer.choices[0].message.content


@check("choices")
def choices():
    answer = client.chat.completions.create(
        model=MODEL, messages=[QUESTION], n=2, temperature=1.0, max_tokens=4
    )
    expect([choice.index for choice in answer.choices] == [0, 1], answer)
    expect(all(choice.message.content for choice in answer.choices), answer)
    return f"{len(answer.choices)} choices, {answer.usage.completion_tokens} tokens"


@check("logprobs")
def logprobs():
    answer = client.chat.completions.create(
        model=MODEL, messages=[QUESTION], logprobs=True, top_logprobs=2, max_tokens=3
    )
    tokens = answer.choices[0].logprobs.content
    expect(len(tokens) == answer.usage.completion_tokens, tokens)
    expect(all(t.logprob <= 0 and len(t.top_logprobs) == 2 for t in tokens), tokens)
    return f"{len(tokens)} tokens"


@check("completions")
def completions():
    answer = client.completions.create(model=MODEL, prompt="The sky is", max_tokens=4)
    expect(answer.choices[0].text, answer)
    return answer.choices[0].finish_reason


@check("responses")
def responses():
    answer = client.responses.create(
        model=MODEL, instructions="Be brief.", input="Hello", max_output_tokens=8, store=False
    )
    expect(answer.status in ("completed", "incomplete") and answer.output_text, answer)
    expect(1 <= answer.usage.output_tokens <= 8, answer.usage)
    return f"{answer.status}, {answer.usage.output_tokens} tokens"


@check("responses stream")
def responses_stream():
    with client.responses.stream(model=MODEL, input="Hello", max_output_tokens=8) as events:
        kinds = [event.type for event in events]
    expect(kinds[0] == "response.created", kinds)
    expect(kinds[-1] in ("response.completed", "response.incomplete"), kinds)
    expect("response.output_text.delta" in kinds, kinds)
    return f"{len(kinds)} events, {kinds[-1]}"


@check("responses tool")
def responses_tool():
    tool = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    answer = client.responses.create(
        model=MODEL, input="Hello", tools=[tool], tool_choice="required", max_output_tokens=64
    )
    [call] = [item for item in answer.output if item.type == "function_call"]
    expect(call.name == "weather" and is_city(call.arguments), call)
    return call.arguments


@check("wrong model")
def wrong_model():
    error = raised(
        openai.NotFoundError,
        lambda: client.chat.completions.create(model="absent", messages=[QUESTION]),
    )
    expect(error.code == "model_not_found" and "absent" in str(error), error)
    return f"NotFoundError, {error.code}"


@check("long prompt")
def long_prompt():
    long = {"role": "user", "content": LONG}
    error = raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=[long]),
    )
    expect(error.code == "context_length_exceeded", f"{error.code}: {error}")
    return f"BadRequestError, {error.code}"


@check("embeddings")
def embeddings():
    error = raised(
        openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input="Hello")
    )
    expect(error.code == "WRONG_TASK", error)
    return f"BadRequestError, {error.code}"


@check("async client")
async def async_client():
    async with openai.AsyncOpenAI() as own:
        answer = await own.chat.completions.create(
            model=MODEL, messages=[QUESTION], max_completion_tokens=4
        )
    expect(answer.choices[0].message.content, answer)
    return answer.choices[0].finish_reason


run()
