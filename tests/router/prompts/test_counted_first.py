"""Long turns are counted before they are rendered, and none is refused that would have fitted."""

import asyncio
from dataclasses import dataclass

import pytest
from tokenizers import AddedToken, Tokenizer
from ullage_testing.fake_engine import TOKENIZER

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import CleanseSection
from ullage_common.wire.errors import ServiceError
from ullage_router.intake import IntakeThread
from ullage_router.prompts.prompts import Prompt, PromptBuilder
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.tokenizer import load_model

CONTEXT = 100
LONG_WORD = "x" + "_" * 50
"""A word of one token."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.content.split('</think>')[-1] | trim }}>"
    "{% if m.content == 'no' %}{{ raise_exception('rendered') }}{% endif %}{% endfor %}"
)


@dataclass
class ShortContext:
    max_model_len: int = CONTEXT


def build(*contents: str, drops_turns: bool = False) -> Prompt:
    """Build the prompt of turns, by a tokenizer with a token a byte but for long words."""
    tokenizer = Tokenizer.from_buffer(TOKENIZER)
    tokenizer.add_tokens([AddedToken(LONG_WORD, normalized=False)])
    response = inference_pb2.GetModelResponse(
        tokenizer_json=tokenizer.to_str().encode(), chat_template=TEMPLATE
    )
    model = load_model(response)
    threads, intake = TokenizerThreads(), IntakeThread()
    builder = PromptBuilder(
        CleanseSection(),
        None,
        ShortContext(),  # type: ignore[arg-type]
        threads,
        intake,
        is_cascade=False,
        drops_turns=drops_turns,
    )
    request = inference_pb2.GenerateRequest()
    for i, content in enumerate(contents):
        role = "assistant" if i % 2 else "user"
        request.messages.messages.add(role=role, content=content)
    try:
        return asyncio.run(builder.build(model, request, "tenant"))
    finally:
        threads.close()
        intake.close()


@pytest.mark.parametrize(
    ("contents", "num_tokens"),
    [
        ((LONG_WORD * 60,), 62),
        ((LONG_WORD * 30, LONG_WORD * 30, "y"), 67),
        # Four contexts of thoughts, which this template leaves out.
        (("x", "a" * 1200 + "</think>b", "y"), 9),
    ],
)
def test_what_fits_is_served(contents: tuple[str, ...], num_tokens: int) -> None:
    assert len(build(*contents).token_ids) == num_tokens


@pytest.mark.parametrize(
    ("contents", "drops_turns"),
    [
        # The last turn stays, whatever is dropped.
        (("no", "b", "a" * 1000), True),
        (("no", "a" * 600, "a" * 90), False),
        (("no", "a" * 1000, *["b", "a" * 90] * 10), True),
    ],
)
def test_what_cannot_fit_is_not_rendered(contents: tuple[str, ...], drops_turns: bool) -> None:
    """The template would raise another error."""
    with pytest.raises(ServiceError, match="messages has more than") as caught:
        build(*contents, drops_turns=drops_turns)
    assert caught.value.reason == "CONTEXT_TOO_LONG"
