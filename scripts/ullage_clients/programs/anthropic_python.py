"""Anthropic's SDK for Python: messages, tools, token counts and errors."""

import json

import anthropic
from checks import CITY, LONG, MODEL, PAINT, check, expect, is_city, is_paint, raised, run

TOOL = {"name": "weather", "description": "Weather of a city", "input_schema": CITY}
NAMED = {"type": "tool", "name": "weather"}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}

client = anthropic.Anthropic()


@check("models")
def models():
    names = [model.id for model in client.models.list()]
    expect(MODEL in names, names)
    return client.models.retrieve(MODEL).id


@check("create")
def create():
    answer = client.messages.create(model=MODEL, messages=[QUESTION], max_tokens=8)
    expect(answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens"), answer)
    usage = answer.usage
    expect(usage.input_tokens > 0 and 1 <= usage.output_tokens <= 8, usage)
    return f"{answer.stop_reason}, {usage.output_tokens} tokens"


@check("stream")
def stream():
    with client.messages.stream(model=MODEL, messages=[QUESTION], max_tokens=8) as events:
        texts = list(events.text_stream)
        answer = events.get_final_message()
    expect("".join(texts) == answer.content[0].text, answer)
    expect(answer.stop_reason in ("end_turn", "max_tokens"), answer)
    return f"{len(texts)} pieces, {answer.usage.output_tokens} tokens"


@check("forced tool")
def forced_tool():
    answer = client.messages.create(
        model=MODEL, messages=[QUESTION], tools=[TOOL], tool_choice=NAMED, max_tokens=64
    )
    expect(answer.stop_reason == "tool_use", answer)
    [call] = answer.content
    expect(call.type == "tool_use" and call.name == "weather", call)
    expect(is_city(json.dumps(call.input)), call)
    return call.input


@check("tool stream")
def tool_stream():
    with client.messages.stream(
        model=MODEL,
        messages=[QUESTION],
        tools=[TOOL],
        tool_choice={"type": "any"},
        max_tokens=64,
    ) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        answer = events.get_final_message()
    expect(answer.stop_reason == "tool_use", answer)
    expect(is_city("".join(pieces)) and is_city(json.dumps(answer.content[-1].input)), answer)
    return f"{len(pieces)} pieces"


@check("auto tool")
def auto_tool():
    answer = client.messages.create(model=MODEL, messages=[QUESTION], tools=[TOOL], max_tokens=32)
    kinds = [block.type for block in answer.content]
    allowed = ("end_turn", "max_tokens", "tool_use")
    expect(answer.content and answer.stop_reason in allowed, answer)
    expect(answer.stop_reason != "tool_use" or "tool_use" in kinds, answer)
    return f"{', '.join(kinds)}: {answer.stop_reason}"


@check("tool result")
def tool_result():
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
    messages = [
        QUESTION,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(
        model=MODEL,
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "none"},
        max_tokens=8,
    )
    expect(answer.content[0].type == "text", answer)
    return answer.stop_reason


@check("JSON schema")
def json_schema():
    answer = client.messages.create(
        model=MODEL,
        messages=[QUESTION],
        output_config={"format": {"type": "json_schema", "schema": PAINT}},
        max_tokens=64,
    )
    expect(is_paint(answer.content[0].text), answer)
    return answer.content[0].text


@check("token count")
def token_count():
    count = client.messages.count_tokens(model=MODEL, messages=[QUESTION], tools=[TOOL])
    answer = client.messages.create(model=MODEL, messages=[QUESTION], tools=[TOOL], max_tokens=1)
    usage = answer.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    expect(count.input_tokens == total, f"{count}, but {usage}")
    return f"{count.input_tokens} tokens"


@check("wrong model")
def wrong_model():
    error = raised(
        anthropic.NotFoundError,
        lambda: client.messages.create(model="absent", messages=[QUESTION], max_tokens=1),
    )
    expect(error.body["error"]["type"] == "not_found_error", error)
    return f"NotFoundError, {error.body['error']['type']}"


@check("long prompt")
def long_prompt():
    long = {"role": "user", "content": LONG}
    error = raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(model=MODEL, messages=[long], max_tokens=1),
    )
    expect(error.body["error"]["type"] == "invalid_request_error", error)
    return f"BadRequestError, {error.body['error']['type']}"


@check("tool runner")
def tool_runner():
    cities = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather of a city.

        Args:
            city: its name
        """
        cities.append(city)
        return "sunny"

    # The call is forced, so the model would call again after each result.
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        messages=[QUESTION],
        tools=[weather],
        tool_choice=NAMED,
        max_tokens=200,
        max_iterations=2,
    )
    answers = list(runner)
    expect(len(answers) == 2 and cities, answers)
    return f"{len(answers)} answers, {len(cities)} calls"


run()
