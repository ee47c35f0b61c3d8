"""A real model that knows no tools makes a call all the same when one is forced."""

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import openai
import pytest

if TYPE_CHECKING:
    Service = Any

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/City"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit", "days"],
            "$defs": {"City": {"type": "string", "maxLength": 20}},
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}
ASK: Any = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "What is the weather in Oslo for the next 3 days?"}],
    "temperature": 0,
    "max_tokens": 64,
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("tools", "choice"), [([WEATHER], NAMED), ([WEATHER, CLOCK], "required")], ids=str
)
def test_a_forced_call_has_valid_arguments(
    service: "Service", tools: list[Any], choice: Any
) -> None:
    with openai.OpenAI(
        base_url=f"{service.http_url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        answer = client.chat.completions.create(**ASK, tools=tools, tool_choice=choice)
        stream = client.chat.completions.create(**ASK, tools=tools, tool_choice=choice, stream=True)
        pieces = [p for chunk in stream for p in chunk.choices[0].delta.tool_calls or ()]
    told = answer.choices[0]
    assert (told.finish_reason, told.message.content) == ("tool_calls", None)
    (call,) = told.message.tool_calls
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    assert pieces[0].function.name == call.function.name
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
