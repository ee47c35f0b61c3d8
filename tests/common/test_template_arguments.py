"""Variables of chat templates: those that a template reads are given to it, others are refused."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ullage_common.chat.template import ChatTemplate, ChatTemplateError
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


TURNED = (
    "{% for m in messages %}<{{ m.role }}>{{ TEXT }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDED: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    for content in ("It is", "It is ", " It is\n\n", "end", "assistant", "<end>", "e")
]


@pytest.mark.parametrize("text", ["m.content", "m.content | trim", "(m.content ~ '!') | trim"])
def test_continues_the_last_message_as_hugging_face(text: str) -> None:
    source = TURNED.replace("TEXT", text)
    template = ChatTemplate(source)
    for turns in ENDED:
        expected, _ = render_jinja_template(
            [turns], chat_template=source, continue_final_message=True
        )
        ours = template.render(turns, add_generation_prompt=False, continue_final_message=True)
        assert ours == expected[0], turns


@pytest.mark.parametrize(
    "last",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "x", "tool_calls": [{}]},
        {"role": "critic", "content": "x"},
    ],
)
def test_what_cannot_be_continued(last: dict[str, object]) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role != 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatTemplateError, match="continue_final_message"):
        template.render([*TURNS, last], add_generation_prompt=False, continue_final_message=True)
