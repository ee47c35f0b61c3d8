"""Templates with the constructs of the most used models render as transformers renders them.

`templates/` has one file a family, written for this test. Each is saved with a tokenizer by
transformers and loaded by the engine, so that special tokens and named templates are compared, too.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ullage_common.chat.template import ChatTemplate, ChatTemplateError
from ullage_common.chat.tool_formats import ToolFormat, with_numbered_ids, with_short_ids
from ullage_engine.tokenizer.tokenizer import TokenizerError, load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if "." not in path.stem)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

NO_TOOLS = {"mistral-v1", "gemma2", "gemma3", "phi3", "phi4-mini", "yi", "olmo2", "corners"}
"""Families whose templates know no tools, which are then told in words: not as in transformers."""
DECIDES_CALLS = {"deepseek"}
"""Families whose templates write calls but not the tools."""


def call(name: str, arguments: Mapping[str, Any], call_id: str = "abcDEF123") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    function = {
        "name": name,
        "description": f'Of "{name}" and caf\u00e9s <b>',
        "parameters": {"type": "object", "properties": parameters, "required": [*parameters][:1]},
    }
    return {"type": "function", "function": function}


TOOLS = [
    tool(
        "get_weather",
        city={"type": "string", "description": "City & land"},
        unit={"type": "string", "enum": ["C", "F"], "default": "C"},
        days={"type": ["integer", "null"]},
    ),
    tool("plot", points={"type": "array", "items": {"type": "number"}}, title={"type": "object"}),
]
SYSTEM = {"role": "system", "content": "Be brief. \u00e9\U0001f600 "}
USER = {"role": "user", "content": "  What is <b>2 + 2</b> & 'so'? \u00e9\U0001f600\n"}
ANSWER = {"role": "assistant", "content": "4"}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFour."}
REASONED = {
    "role": "assistant",
    "content": "4",
    "reasoning_content": "2 and 2.",
    "thinking": "2 and 2.",
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [call("get_weather", {"city": "Troms\u00f8 <&>", "days": 3})],
}
RESULT = {
    "role": "tool",
    "tool_call_id": "abcDEF123",
    "name": "get_weather",
    "content": "-4 \u00b0C",
}
NEXT = {"role": "user", "content": "And now?"}

CONVERSATIONS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, NEXT],
    "answered": [USER, ANSWER],
    "two questions": [USER, NEXT],
    "two systems": [SYSTEM, USER, ANSWER, SYSTEM, NEXT],
    "assistant first": [ANSWER, USER],
    "only system": [SYSTEM],
    "thought": [USER, THOUGHT, NEXT, THOUGHT],
    "reasoned": [USER, REASONED, NEXT],
}
WITH_CALLS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "called": [SYSTEM, USER, CALL],
    "result": [USER, CALL, RESULT],
    "after": [SYSTEM, USER, CALL, RESULT, ANSWER, NEXT],
    "result alone": [USER, RESULT],
}


@dataclass(frozen=True)
class Family:
    theirs: PreTrainedTokenizerFast
    ours: ChatTemplate

    def check(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> None:
        """Compare the text, or the refusal and its words."""
        given = [dict(turn) for turn in conversation]
        # Kimi's ids count the calls.
        numbers = self.ours.tool_format is ToolFormat.KIMI
        theirs = with_numbered_ids(given) if numbers else given
        options = {"tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        try:
            expected = self.theirs.apply_chat_template(
                theirs, tokenize=False, **options, **arguments
            )
        except (jinja2.TemplateError, TypeError) as error:
            with pytest.raises(ChatTemplateError) as refused:
                self.ours.render(given, add_generation_prompt, tools, arguments)
            if type(error) is jinja2.TemplateError:  # the template's own words
                assert " ".join(str(error).split()) in str(refused.value)
        else:
            assert self.ours.render(given, add_generation_prompt, tools, arguments) == expected


def tokenizer(chat_template: object = None, **special: str) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", chat_template=chat_template, **special
    )


def loaded(folder: Path) -> ChatTemplate:
    made = load_tokenizer(folder)
    return ChatTemplate(made.chat_template, made.special_tokens, made.tool_chat_template)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    made = {}
    for name in FAMILIES:
        sources = {"default": (TEMPLATES / f"{name}.jinja").read_text()}
        if (TEMPLATES / f"{name}.tool_use.jinja").exists():
            sources["tool_use"] = (TEMPLATES / f"{name}.tool_use.jinja").read_text()
        source = sources if len(sources) > 1 else sources["default"]
        theirs = tokenizer(source, **SPECIAL)
        folder = tmp_path_factory.mktemp(name)
        theirs.save_pretrained(folder)
        made[name] = Family(theirs, loaded(folder))
    return made


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversations_render_as_in_transformers(
    families: dict[str, Family], name: str, add_generation_prompt: bool
) -> None:
    for conversation in CONVERSATIONS.values():
        families[name].check(conversation, (), add_generation_prompt)
        if name not in NO_TOOLS | DECIDES_CALLS:
            families[name].check(conversation, TOOLS, add_generation_prompt)


@pytest.mark.parametrize("name", sorted({*FAMILIES} - NO_TOOLS))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_calls_render_as_in_transformers(
    families: dict[str, Family], name: str, add_generation_prompt: bool
) -> None:
    for conversation in WITH_CALLS.values():
        if name not in DECIDES_CALLS:
            families[name].check(conversation, TOOLS, add_generation_prompt)
        if name != "command-r":  # without tools it is the template that knows no calls
            families[name].check(conversation, (), add_generation_prompt)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("smollm3", {"enable_thinking": False}),
        ("gpt-oss", {"reasoning_effort": "high", "model_identity": "You are \u00e9."}),
        ("llama3", {"date_string": "1 May 2024", "tools_in_user_message": False}),
        ("granite", {"controls": {"length": "short", "citations": True}}),
        ("lfm2", {"keep_past_thinking": True}),
    ],
)
def test_variables_render_as_in_transformers(
    families: dict[str, Family], name: str, arguments: dict[str, Any]
) -> None:
    assert arguments.keys() <= families[name].ours.variables
    for conversation in CONVERSATIONS.values():
        families[name].check(conversation, **arguments)
        families[name].check(conversation, TOOLS, **arguments)


TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        "<think>\na</think>",
        "</think>",
        "/no_think",
        " \n",
        "{{ 7 }}",
        "<tool_response>x</tool_response>",
    ]
)
TURNS = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["system", "user", "assistant"]),
        TEXTS,
    )
    | st.just(CALL)
    | st.just(RESULT),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FAMILIES), TURNS, st.booleans(), st.booleans())
def test_any_conversation_renders_as_in_transformers(
    families: dict[str, Family],
    name: str,
    turns: list[dict[str, Any]],
    has_tools: bool,
    add_generation_prompt: bool,
) -> None:
    if name in NO_TOOLS or (name == "command-r" and not has_tools):
        turns = [turn for turn in turns if turn not in (CALL, RESULT)]
    if turns:
        tools = TOOLS if has_tools and name not in NO_TOOLS | DECIDES_CALLS else ()
        families[name].check(turns, tools, add_generation_prompt)


@pytest.mark.parametrize("name", ["mistral-v3", "mistral-v7"])
def test_long_ids_of_calls_become_short_ones(families: dict[str, Family], name: str) -> None:
    ours = families[name].ours
    first = "call_0123456789abcdef01234567"
    second = "call_0123456789abcdef01234568"
    turns = [
        USER,
        {**CALL, "tool_calls": [call("plot", {}, first), call("plot", {}, second)]},
        {**RESULT, "tool_call_id": second},
        {**RESULT, "tool_call_id": first},
    ]
    text = ours.render(turns, tools=TOOLS)
    assert first not in text
    assert second not in text
    assert turns[1]["tool_calls"][0]["id"] == first, "the conversation itself stays"

    # transformers takes the same conversation once its ids are the short ones.
    short = with_short_ids(turns)
    assert short[1]["tool_calls"][0]["id"] == short[3]["tool_call_id"]
    assert short[1]["tool_calls"][1]["id"] == short[2]["tool_call_id"]
    assert short[2]["tool_call_id"] != short[3]["tool_call_id"]
    families[name].check(short, TOOLS)
    assert ours.render(short, tools=TOOLS) == text


@pytest.mark.parametrize("call_id", ["abc123XYZ", "", "short", "call_0123456789", "\u00e4" * 9])
def test_ids_are_nine_letters_and_digits(call_id: str) -> None:
    [turn] = with_short_ids([{"role": "tool", "content": "", "tool_call_id": call_id}])
    short = turn["tool_call_id"]
    assert (short == "") == (call_id == "")
    assert not short or (short.isascii() and short.isalnum() and len(short) == 9)
    assert short == call_id or call_id != "abc123XYZ"


def test_templates_that_change_what_they_are_given_are_refused_alike() -> None:
    for source in (
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'content': 'x'}) %}",
        "{{ messages[0].pop('role') }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ dict.__class__ }}{{ dict.mro() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception('no \n\n more') }}",
        "{{ messages | tojson(default=1) }}",
        "{{ missing | tojson }}",
        "{{ missing.deeper }}",
        "{{ bos_token + pad_token }}",
    ):
        Family(
            tokenizer(source, bos_token="<s>"), ChatTemplate(source, {"bos_token": "<s>"})
        ).check([USER])


def test_a_token_that_the_model_lacks_is_undefined() -> None:
    source = "{{ bos_token is defined }}{{ eos_token }}{{ sep_token is defined }}{{ image_token }}"
    theirs = tokenizer(source, eos_token="</s>", image_token="<img>")
    given = {"eos_token": "</s>", "image_token": "<img>"}
    ours = ChatTemplate(source, given)
    Family(theirs, ours).check([USER])
    assert ours.variables == set(), "no client may set a special token"


@pytest.mark.parametrize("layout", ["files", "list", "mapping", "one in the configuration"])
def test_templates_are_found_where_transformers_finds_them(tmp_path: Path, layout: str) -> None:
    sources: object = {"default": "D{{ tools }}", "tool_use": "T{{ tools }}", "rag": "R"}
    theirs = tokenizer("one" if layout.startswith("one") else sources, **SPECIAL)
    theirs.save_pretrained(tmp_path, save_jinja_files=layout == "files")
    if layout == "mapping":
        path = tmp_path / "tokenizer_config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "chat_template": sources}))
    family = Family(PreTrainedTokenizerFast.from_pretrained(tmp_path), loaded(tmp_path))
    family.check([USER])
    family.check(
        [USER], [{"type": "function", "function": {"name": "f"}}] if layout[0] != "o" else []
    )


def test_files_of_templates_replace_those_of_the_configuration(tmp_path: Path) -> None:
    tokenizer({"default": "old", "tool_use": "old too"}).save_pretrained(
        tmp_path, save_jinja_files=False
    )
    (tmp_path / "chat_template.jinja").write_text("new")
    made = load_tokenizer(tmp_path)
    assert (made.chat_template, made.tool_chat_template) == ("new", "")
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == "new"


def test_several_templates_without_a_default_are_no_template(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer({"tool_use": "t", "rag": "r"}).save_pretrained(tmp_path, save_jinja_files=False)
    assert load_tokenizer(tmp_path).chat_template == ""
    assert "['rag', 'tool_use'], but none named default" in caplog.text


@pytest.mark.parametrize("template", [7, ["x"], [{"name": "default"}], {"default": None}])
def test_an_odd_template_is_named(tmp_path: Path, template: object) -> None:
    tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": template}))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template"):
        load_tokenizer(tmp_path)
