"""Variables of chat templates: those that a template reads are given to it, others are refused."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ullage_common.chat.template import ChatTemplate
from ullage_common.chat.template_arguments import MAX_BYTES, read_arguments, refuse_unread
from ullage_common.wire.errors import ServiceError

TURNS = [{"role": "user", "content": "Hi"}]
SOURCE = """{%- if reasoning_effort is not defined %}
    {%- set reasoning_effort = "medium" %}
{%- endif %}
{{- bos_token + reasoning_effort + strftime_now("") }}
{%- for message in messages %}{%- set text = message.content %}{{- text }}{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{- "<think></think>" }}{%- endif %}
{%- if tools or documents or add_generation_prompt %}{{- "go" }}{%- endif %}"""
TEMPLATE = ChatTemplate(SOURCE, {"bos_token": "<s>", "eos_token": "</s>"})
PLAIN = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")


def test_what_a_client_may_set_is_what_the_template_looks_up() -> None:
    assert TEMPLATE.variables == {"reasoning_effort", "enable_thinking"}
    assert PLAIN.variables == set()


@pytest.mark.parametrize("told", [{}, {"reasoning_effort": "high"}, {"enable_thinking": False}])
def test_renders_as_hugging_face_with_the_same_variables(told: dict[str, object]) -> None:
    arguments, ignored = read_arguments(json.dumps(told), TEMPLATE, "kwargs")
    assert ignored == ()
    expected, _ = render_jinja_template(
        [TURNS], chat_template=SOURCE, add_generation_prompt=True, bos_token="<s>", **told
    )
    assert TEMPLATE.render(TURNS, arguments=arguments) == expected[0]


def test_the_usual_effort_asks_for_nothing() -> None:
    assert read_arguments('{"reasoning_effort": "medium"}', PLAIN, "kwargs") == ({}, ())
    assert read_arguments("", TEMPLATE, "kwargs") == ({}, ())


def test_what_the_template_does_not_read_is_named() -> None:
    told = '{"enable_thinking": false, "other": 1, "a": 2}'
    arguments, ignored = read_arguments(told, TEMPLATE, "kwargs")
    assert arguments == {"enable_thinking": False}
    assert ignored == ("kwargs.a", "kwargs.other")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"reasoning_effort": "low"}', "reasoning_effort"),
        ('{"enable_thinking": true}', "kwargs.enable_thinking"),
        ('{"messages": []}', "kwargs.messages"),
        ('{"bos_token": "x"}', "kwargs.bos_token"),
        ('{"raise_exception": "x"}', "kwargs.raise_exception"),
    ],
)
def test_a_client_sets_nothing_else(text: str, field: str) -> None:
    arguments, ignored = read_arguments(text, PLAIN, "kwargs")
    assert arguments == {}
    assert ignored == (field,)
    with pytest.raises(ServiceError) as caught:
        refuse_unread(ignored, PLAIN)
    assert caught.value.metadata["field"] == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[1]", "kwargs"),
        ("{", "kwargs"),
        ('{"x": "\\ud800"}', "kwargs"),
        ("[" * 5000, "kwargs"),
        (json.dumps({"x": "a" * MAX_BYTES}), "kwargs"),
    ],
)
def test_what_is_no_object_is_refused(text: str, field: str) -> None:
    with pytest.raises(ServiceError) as caught:
        read_arguments(text, PLAIN, "kwargs")
    assert caught.value.metadata["field"] == field
    assert caught.value.message.startswith(field)
