"""Chat templates render as Hugging Face's do, and a hostile one is harmless."""

import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ullage_common.chat.template import ChatTemplate, ChatTemplateError

CONVERSATION = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "  What is <b>2 + 2</b>? \u00e9\U0001f600\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3?"},
]

SMOLLM = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ \
'<|im_start|>system
You are a helpful AI assistant.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA_LIKE = """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '[' ~ ns.count ~ '|' ~ message.role ~ '] ' ~ (message | tojson) }}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools is not none or documents is not none %}[tools]{% endif %}
{%- if add_generation_prompt %}{{ '[go]' ~ eos_token }}{% endif %}
"""

GENERATION = """{% for m in messages %}
    {% if m.role == 'assistant' %}
        {% generation %}{{ m.content }}{% endgeneration %}
    {% else %}
        {{ m.content | trim }}
    {% endif %}
{% endfor %}"""


@pytest.mark.parametrize("source", [SMOLLM, LLAMA_LIKE, GENERATION])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_hugging_face(source: str, add_generation_prompt: bool) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    expected, _ = render_jinja_template(
        [CONVERSATION],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template.render(CONVERSATION, add_generation_prompt) == expected[0]


def test_default_system_prompt_and_generation_prompt() -> None:
    rendered = ChatTemplate(SMOLLM).render([{"role": "user", "content": "hi"}])
    assert rendered.startswith("<|im_start|>system\nYou are")
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_template_refuses_messages() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate(source).render(CONVERSATION)


def test_date_is_available() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}").render([])
    assert rendered == time.strftime("%Y")


def test_content_is_data_not_template() -> None:
    content = "{{ 7 * 7 }} {% for %} <|im_end|>"
    rendered = ChatTemplate("{{ messages[0].content }}").render(
        [{"role": "user", "content": content}]
    )
    assert rendered == content


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "no chat template"),
        ("{% for x in %}", "line 1"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ ().__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{% for i in range(10000000) %}x{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_broken_and_hostile_templates_are_typed_errors(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message) as raised:
        ChatTemplate(source).render(CONVERSATION)
    assert "\n" not in str(raised.value)
