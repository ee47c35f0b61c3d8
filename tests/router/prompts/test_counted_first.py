"""Long turns are counted before they are rendered, and none is refused that would have fitted."""

import asyncio
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from ullage_testing.fake_engine import TOKENIZER

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.turns import make_turns
from ullage_common.config.router import CleanseSection
from ullage_common.wire.errors import ServiceError
from ullage_router.intake import IntakeThread
from ullage_router.prompts.cleanse import cleanse_turns
from ullage_router.prompts.prompts import Prompt, PromptBuilder
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.prompts.truncate import truncate
from ullage_router.tokenizer.model import Model, PromptError, load_model
from ullage_router.tokenizer.segments import TooManyTokens

FAMILIES = Path(__file__).parents[2] / "engine/tokenizer/templates"
CONTEXT = 100
LONG_WORD = "x" + "_" * 50
"""A word of one token."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.content.split('</think>')[-1] | trim }}>"
    "{% if m.content | length > 100 * (messages | length) and '</think>' not in m.content "
    "and m.content[0] == 'a' %}{{ raise_exception('rendered') }}{% endif %}{% endfor %}"
)
LLAMA = (
    "{% for m in messages %}{% if m.tool_calls %}<call {{ m.tool_calls[0].function | tojson }}>"
    "{% else %}<{{ m.role }} {{ m.content | trim }}>{% endif %}{% endfor %}"
)
SLIDING = "{% for m in messages[-3:] %}<{{ m.content }}>{% endfor %}"
MAGISTRAL = (
    "{% for m in messages %}{% if m.role == 'assistant' and '[THINK]' in m.content %}"
    "<{{ m.content.split('[/THINK]')[-1] }}>{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "<{{ m.content.split('<|channel|>final<|message|>')[-1] }}>"
    "{% else %}<{{ m.content }}>{% endif %}{% endfor %}"
)
THOUGHTFUL = (
    "{% for m in messages %}{% if m.reasoning_content and loop.last %}"
    "{{ m.reasoning_content.strip('\n') }}{% endif %}"
    "<{% for part in m.content.split('<think>') %}{{ part.split('</think>')[-1].lstrip('\n') }}"
    "{% endfor %}>{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}"
    "{% endfor %}"
)
CUT = "{% for m in messages %}<{{ m.content[:100] }}>{% endfor %}"
SHORTENED = "{% for m in messages %}<{{ m.content | truncate }}>{% endfor %}"
LINES = "{% for m in messages %}<{{ m.content.split('\n')[0] }}>{% endfor %}"
JOINED = "<{% for m in messages %}{{ m.content | replace('\n\n', '') | upper }}{% endfor %}"
TEMPLATES = (
    TEMPLATE,
    LLAMA,
    SLIDING,
    MAGISTRAL,
    HARMONY,
    THOUGHTFUL,
    CUT,
    SHORTENED,
    LINES,
    JOINED,
)


@dataclass
class ShortContext:
    max_model_len: int = CONTEXT


@functools.cache
def loaded(template: str, has_long_words: bool = True) -> Model:
    """Load a model with a token a byte but for long words."""
    tokenizer = Tokenizer.from_buffer(TOKENIZER)
    if has_long_words:
        tokenizer.add_tokens([AddedToken(LONG_WORD, normalized=False)])
    response = inference_pb2.GetModelResponse(
        tokenizer_json=tokenizer.to_str().encode(), chat_template=template
    )
    return load_model(response)


def request_of(messages: Sequence[inference_pb2.Message]) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.messages.messages.extend(messages)
    return request


def alternating(contents: Sequence[str]) -> list[inference_pb2.Message]:
    roles = ("user", "assistant")
    return [
        inference_pb2.Message(role=roles[i % 2], content=content)
        for i, content in enumerate(contents)
    ]


def built(
    model: Model,
    messages: Sequence[inference_pb2.Message],
    drops_turns: bool = False,
    rules: CleanseSection | None = None,
) -> Prompt:
    threads = TokenizerThreads()
    intake = IntakeThread()
    builder = PromptBuilder(
        rules or CleanseSection(),
        None,
        ShortContext(),  # type: ignore[arg-type]
        threads,
        intake,
        drops_turns=drops_turns,
    )
    try:
        return asyncio.run(builder.build(model, request_of(messages), "tenant"))
    finally:
        threads.close()
        intake.close()


def build(*contents: str, drops_turns: bool = False) -> Prompt:
    return built(loaded(TEMPLATE), alternating(contents), drops_turns)


@pytest.mark.parametrize(
    ("contents", "num_tokens"),
    [
        ((LONG_WORD * 60,), 62),
        ((LONG_WORD * 30, LONG_WORD * 30, "y"), 67),
        # Four contexts of thoughts, which this template leaves out.
        (("x", "a" * 1200 + "</think>b", "y"), 9),
        (("a" * 1200 + "</think>b", "x", "y"), 9),
        # Blanks, which it trims.
        (("x", "y", "z" + " \n" * 1000), 9),
    ],
)
def test_what_fits_is_served(contents: tuple[str, ...], num_tokens: int) -> None:
    assert len(build(*contents).token_ids) == num_tokens


@pytest.mark.parametrize(
    ("contents", "drops_turns"),
    [
        # The last turn stays, whatever is dropped.
        (("y", "b", "a" * 1000), True),
        (("y", "a" * 1000, "a" * 90), False),
        (("y", "a" * 1000, "y", "a" * 1000, "y"), True),
    ],
)
def test_what_cannot_fit_is_not_rendered(contents: tuple[str, ...], drops_turns: bool) -> None:
    """The template would raise another error."""
    with pytest.raises(ServiceError, match="messages has more than") as caught:
        build(*contents, drops_turns=drops_turns)
    assert caught.value.reason == "CONTEXT_TOO_LONG"


def test_html_is_cleansed_before_it_is_counted() -> None:
    script = "<html><head><script>" + "a=b;" * 500 + "</script></head><p>Hi</p></html>"
    prompt = built(
        loaded(TEMPLATE, has_long_words=False),
        alternating((script, "ok", script)),
        rules=CleanseSection(html=True),
    )
    assert len(prompt.token_ids) == 12


@pytest.mark.parametrize("padding", [" \u200b", " \t", "\n", "\u200b", " \u2060"])
def test_a_question_that_fits_once_cleansed_is_shrunk(padding: str) -> None:
    question = ("x" + padding * 40 + "\n") * 8
    prompt = built(loaded(SLIDING), alternating(("hello", "hi", question)), drops_turns=True)
    assert len(truncate(prompt.turns, CONTEXT, prompt.render).token_ids) <= CONTEXT


PARTS = st.sampled_from(
    [
        "<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>", "<|channel|>final<|message|>",
        "<p>", "</p>", "<script>", "\n", "\n\n", " ", "\u200b", "\t", '"', "\\", "<",
        "\u00e9", "\U0001f600", "word ", "/no_think", "<tool_response>", "</tool_response>",
        LONG_WORD,
    ]
)  # fmt: skip
TEXTS = st.lists(
    st.tuples(PARTS, st.sampled_from([1, 2, 30, 300, 1500])), max_size=4
).map(lambda parts: "".join(part * number for part, number in parts)[:3000])  # fmt: skip


@st.composite
def messages(draw: st.DrawFn) -> inference_pb2.Message:
    role = draw(st.sampled_from(["user", "assistant", "system"]))
    message = inference_pb2.Message(role=role, content=draw(TEXTS))
    if role == "assistant":
        message.reasoning = draw(TEXTS)
        if draw(st.booleans()):
            message.tool_calls.add(id="c", name="f", arguments=json.dumps({"a": draw(TEXTS)}))
    return message


CLEANSED = CleanseSection(html=True, whitespace=True, zero_width=True)


@settings(max_examples=150, deadline=None)
@given(
    template=st.sampled_from(TEMPLATES),
    has_long_words=st.booleans(),
    said=st.lists(messages(), min_size=1, max_size=5),
    drops=st.booleans(),
    rules=st.sampled_from([CleanseSection(), CLEANSED]),
)
def test_none_is_refused_that_fits_once_rendered(
    template: str,
    has_long_words: bool,
    said: list[inference_pb2.Message],
    drops: bool,
    rules: CleanseSection,
) -> None:
    model = loaded(template, has_long_words)
    turns, _ = cleanse_turns(make_turns(said), rules)
    most = (16 if drops else 4) * CONTEXT
    try:
        prompt = built(model, said, drops, rules)
    except ServiceError as error:
        if "characters" in error.message:
            return  # by the number of characters alone
        if error.reason != "CONTEXT_TOO_LONG":
            with pytest.raises(PromptError):
                model.render(turns)
            return
    else:
        assert list(prompt.token_ids) == list(model.render(turns))
        return
    try:
        model.render(turns, most=most)
    except (PromptError, TooManyTokens):
        return
    assert drops
    assert len(truncate(turns, CONTEXT, model.render).token_ids) > CONTEXT
