"""Forced calls: every format's grammar compiles, takes valid arguments and nothing else."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.tool_formats import ToolFormat
from ullage_engine.server.grammar import grammar_text
from ullage_router.prompts.tools.forced_calls import Forced, force
from ullage_router.prompts.tools.pieces import Arguments, CallStart
from ullage_router.prompts.tools.tool_use import ToolUse
from ullage_router.prompts.tools.toolbox import open_toolbox

WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
    "required": ["city"],
    "$defs": {"City": {"enum": ["Oslo", 'Quo"te']}},
}
FORMATS = list(ToolFormat)
TRIP: Any = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "stops": {"type": "array", "items": WEATHER}},
    "required": ["days"],
    "$defs": WEATHER["$defs"],
}
COMPACT = ('{"days":3}', '{"days": 3, "stops": [{"city": "Oslo"}, {"city":"Oslo","days":1}]}')
SPACED = (
    '{ "days": 3}',
    '{"days" : 3}',
    '{"days": 3 }',
    '{"days":  3}',
    '{"days":\n3}',
    '{"days": 3,\n"stops": []}',
    '{"days": 3, "stops": [ ]}',
    '{"days": 3, "stops": [{"city": "Oslo"} ]}',
)


def forced(form: ToolFormat, **functions: Any) -> Forced:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in functions.items()
    ]
    mode = inference_pb2.TOOL_MODE_REQUIRED
    toolbox = open_toolbox(inference_pb2.Tools(functions=json.dumps(tools), mode=mode))
    assert toolbox
    return force(toolbox, form)


def matches(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    consumed = matcher.try_consume_tokens(list(text.encode()))
    return bool(consumed == len(text.encode()) and matcher.is_accepting())


@pytest.mark.parametrize("form", FORMATS)
def test_one_function_is_named_in_the_prompt(form: ToolFormat) -> None:
    made = forced(form, weather=WEATHER)
    assert "weather" in made.opening
    assert made.opening == made.opening.rstrip()
    grammar = LLMatcher.grammar_from_json_schema(made.json_schema)
    assert matches(grammar, '{"city": "Oslo", "days": 3}')
    assert matches(grammar, '{"city": "Quo\\"te"}')
    assert not matches(grammar, '{"city": "Rome"}')
    assert not matches(grammar, '{"city": "Oslo", "other": 1}')
    assert not matches(grammar, '{"days": 3}')
    reader = made.reader()
    assert reader.push('{"city"') == [CallStart("weather"), Arguments('{"city"')]


@pytest.mark.parametrize("form", [f for f in FORMATS if f is not ToolFormat.HARMONY])
def test_of_several_functions_the_answer_names_one(form: ToolFormat) -> None:
    made = forced(form, weather=WEATHER, weather_now=None, clock={"type": "object"})
    assert "weather" not in made.opening
    grammar = LLMatcher.grammar_from_lark(made.lark)
    arguments = {"weather": '{"city": "Oslo"}', "weather_now": "{}", "clock": '{"a": 1}'}
    for name, text in arguments.items():
        answer = made.openings[name] + text
        assert matches(grammar, answer)
        assert made.reader().push(answer) == [CallStart(name), Arguments(text)]
    assert not matches(grammar, made.openings["weather"] + "{}")
    assert not matches(grammar, made.openings["weather_now"] + '{"city": "Oslo"}')
    assert not matches(grammar, "other" + made.openings["clock"].removeprefix("clock") + "{}")


@pytest.mark.parametrize("form", [f for f in FORMATS if f is not ToolFormat.HARMONY])
@pytest.mark.parametrize("others", [{}, {"clock": None}], ids=["schema", "lark"])
def test_a_forced_call_has_no_needless_white_space(form: ToolFormat, others: Any) -> None:
    """Where it is free, a model at a high temperature writes nothing else."""
    made = forced(form, trip=TRIP, **others)
    request = inference_pb2.GenerateRequest()
    ToolUse(forced=made).ask(request)
    _, grammar = grammar_text(request.grammar)  # as engines take it
    begin = made.openings.get("trip", "")
    assert all(matches(grammar, begin + text) for text in COMPACT)
    assert not any(matches(grammar, begin + text) for text in SPACED)


def test_the_harmony_formats_marks_are_special_tokens() -> None:
    made = forced(ToolFormat.HARMONY, weather=WEATHER, clock=None)
    assert '" <|constrain|> "json" <|message|> %json' in made.lark
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(made.lark))
    pieces = made.reader().push("clock <|constrain|>json<|message|>{}")
    assert pieces == [CallStart("clock"), Arguments("{}")]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "object", "properties": {}, "patternProperties": {"^x": {}}},
        {"type": "object", "properties": {}, "anyOf": [{"properties": {"x": {}}}]},
    ],
    ids=str,
)
def test_what_a_schema_leaves_open_stays_open(schema: Any) -> None:
    assert json.loads(forced(ToolFormat.PLAIN, f=schema).json_schema) == schema
