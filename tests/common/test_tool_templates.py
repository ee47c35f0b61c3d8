"""Conversations with tools through templates that know tools, know only some of it, or none."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.template import ChatTemplate
from ullage_common.chat.tool_formats import ToolFormat, tool_format
from ullage_common.chat.turns import make_turns, num_characters

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
MESSAGES = [
    inference_pb2.Message(role="developer", content="Be brief."),
    inference_pb2.Message(role="user", content="Oslo?"),
    inference_pb2.Message(
        role="assistant",
        reasoning="I must look.",
        tool_calls=[
            inference_pb2.ToolCall(id="c1", name="get_weather", arguments='{"city": "Oslo"}')
        ],
    ),
    inference_pb2.Message(role="tool", tool_call_id="c1", content="-4 °C"),
    inference_pb2.Message(role="user", content="And Rome?"),
]

HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' + messages[0].content + '\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools> Answer within <tool_call></tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- set f = call.function %}
        {{- '<tool_call>{"name": "' + f.name + '", "arguments": ' }}
        {{- f.arguments if f.arguments is string else f.arguments | tojson }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""
LFM2 = """{%- set ns = namespace(system='') %}
{%- if tools %}{{- 'List of tools: <|tool_list_start|>' ~ (tools | tojson) ~ '<|tool_list_end|>' }}
{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- endfor %}"""
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
LLAMA = "{{ 'ipython' }}" + HERMES.replace("<tool_call>", "").replace("</tool_call>", "")
HARMONY = "{{ '<|channel|>' }}" + HERMES


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (HERMES, ToolFormat.HERMES),
        (LFM2, ToolFormat.LFM2),
        (LLAMA, ToolFormat.LLAMA),
        (HARMONY, ToolFormat.HARMONY),
        ("<|tool_calls_section_begin|>", ToolFormat.KIMI),
        ("<\uff5ctool▁calls▁begin\uff5c>```json", ToolFormat.DEEPSEEK_V3),
        ("<\uff5ctool▁calls▁begin\uff5c>", ToolFormat.DEEPSEEK_V31),
        ("<tool_call><function=x><parameter=y>", ToolFormat.QWEN_XML),
        ("<tool_call>{name}<arg_key>", ToolFormat.GLM),
        ("<|tool_call|>", ToolFormat.GRANITE),
        ("[TOOL_CALLS][ARGS]", ToolFormat.MISTRAL),
        ("[TOOL_CALLS]", ToolFormat.MISTRAL_LIST),
        (PLAIN, ToolFormat.PLAIN),
    ],
)
def test_the_template_tells_the_format(source: str, expected: ToolFormat) -> None:
    assert tool_format(source) is expected
    assert ChatTemplate(source).tool_format is expected


@pytest.mark.parametrize("tools", [[], [WEATHER]], ids=["none", "one"])
def test_a_template_that_knows_all_renders_as_hugging_face(tools: list[dict[str, Any]]) -> None:
    turns = make_turns(MESSAGES)
    expected, _ = render_jinja_template(
        [turns], tools=tools or None, chat_template=HERMES, add_generation_prompt=True
    )
    rendered = ChatTemplate(HERMES).render(turns, tools=tools)
    assert rendered == expected[0]
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}' in rendered


KIMI = """{%- for m in messages %}<{{ m.role }}>
{%- for c in m.tool_calls or [] %}<|tool_calls_section_begin|>{{ c.id }}{% endfor %}
{%- if m.tool_call_id %}{{ m.tool_call_id }}{% endif %}{%- endfor %}{{ tools and '' }}"""


def test_kimi_gets_ids_that_count_the_calls_of_the_conversation() -> None:
    again = [*MESSAGES[:-1], *MESSAGES[2:4]]
    rendered = ChatTemplate(KIMI).render(make_turns(again), tools=[WEATHER])
    begin = "<assistant><|tool_calls_section_begin|>functions.get_weather"
    assert rendered.endswith(
        f"{begin}:0<tool>functions.get_weather:0{begin}:1<tool>functions.get_weather:1"
    )


def test_a_template_that_adds_arguments_to_text_gets_them_as_text() -> None:
    joins = HERMES.replace(
        "{{- f.arguments if f.arguments is string else f.arguments | tojson }}",
        "{{- '' + f.arguments }}",
    )
    assert joins != HERMES
    turns = make_turns(MESSAGES)
    rendered = ChatTemplate(joins).render(turns, tools=[WEATHER])
    assert rendered == ChatTemplate(HERMES).render(turns, tools=[WEATHER])


def test_calls_become_text_where_the_template_does_not_write_them() -> None:
    rendered = ChatTemplate(LFM2).render(make_turns(MESSAGES), tools=[WEATHER])
    assert rendered.startswith(f"List of tools: <|tool_list_start|>{json.dumps([WEATHER])}")
    assert "<|tool_call_start|>[get_weather(city='Oslo')]<|tool_call_end|>" in rendered


def test_a_template_without_tools_is_told_in_words() -> None:
    rendered = ChatTemplate(PLAIN).render(make_turns(MESSAGES), tools=[WEATHER])
    system, rest = rendered.split("<user>", 1)
    assert system.startswith("<system>Be brief.\n\n")
    assert json.dumps(WEATHER["function"]) in system
    assert rest == (
        'Oslo?\n<assistant>{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        "<user>get_weather returned: -4 °C\n<user>And Rome?\n"
    )


def test_without_a_system_turn_the_words_are_one() -> None:
    question = [inference_pb2.Message(role="user", content="Hi")]
    template = ChatTemplate(PLAIN)
    assert template.render(make_turns(question), tools=[WEATHER]).startswith("<system>These")
    assert template.render(make_turns(question)) == "<user>Hi\n"


def test_results_that_follow_one_another_are_one_turn() -> None:
    results = [inference_pb2.Message(role="tool", name=n, content=n * 2) for n in "ab"]
    rendered = ChatTemplate(PLAIN).render(make_turns(results))
    assert rendered == "<user>a returned: aa\nb returned: bb\n"


@pytest.mark.parametrize("wrong", ["{", "[1]", "7", "[" * 100_000, r'{"a": "\ud800"}'])
def test_arguments_that_are_no_object_stay_text(wrong: str) -> None:
    call = inference_pb2.ToolCall(id="c", name="f", arguments=wrong)
    (turn,) = make_turns([inference_pb2.Message(role="assistant", tool_calls=[call])])
    assert turn["tool_calls"][0]["function"]["arguments"] == wrong
    assert num_characters([turn]) > len(wrong)


ONE_CALL = """
{%- for tool in tools or [] %}{{- '// ' + tool.function.description + '|' }}{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls and message.tool_calls | length != 1 %}
        {{- raise_exception('one call at once') }}
    {%- elif message.tool_calls and message.thinking and message.content %}
        {{- raise_exception('not both') }}
    {%- elif message.tool_calls %}
        {{- '[' + message.content + message.tool_calls[0].id + ']' }}
    {%- else %}
        {{- '(' + message.role + ' ' + message.content + ')' }}
    {%- endif %}
{%- endfor %}{# <|channel|> #}"""


def test_several_calls_of_a_turn_are_told_one_by_one() -> None:
    calls = [inference_pb2.ToolCall(id=i, name="f", arguments="{}") for i in "abc"]
    messages = [
        inference_pb2.Message(role="assistant", content="Look: ", reasoning="Hm", tool_calls=calls),
        *(inference_pb2.Message(role="tool", tool_call_id=i, content=f"of {i}") for i in "cax"),
        inference_pb2.Message(role="user", content="So?"),
    ]
    bare: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
    rendered = ChatTemplate(ONE_CALL).render(make_turns(messages), tools=[bare])
    expected = "// |[Look: a](tool of a)[b][c](tool of c)(tool of x)(user So?)"
    assert rendered == expected
