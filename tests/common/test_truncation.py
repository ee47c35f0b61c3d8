"""Prompts cut to their last tokens, and inputs of embeddings to their first."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ullage.inference.v1 import inference_pb2
from ullage_common.chat.affixes import Affixes, affixes_of
from ullage_common.chat.truncation import truncated
from ullage_common.wire.errors import ServiceError

NONE = Affixes()
WORDS = "abcdefghij"


def encoder() -> Tokenizer:
    """Return a tokenizer whose words are tokens, between [CLS] and [SEP] [SEP]."""
    vocab = {word: i for i, word in enumerate(("[UNK]", "[CLS]", "[SEP]", *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP] [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


@given(length=st.integers(1, 50), most=st.integers(-1, 60), context=st.integers(2, 40))
def test_the_last_tokens_are_kept(length: int, most: int, context: int) -> None:
    prompt = array("I", range(length))
    request = inference_pb2.GenerateRequest(truncate_prompt_tokens=most)
    kept = truncated(prompt, request, context, Affixes((0,), (0,)))
    expected = {0: length, -1: context - 1}.get(most, most)
    assert kept == prompt[-min(expected, length) :]


@pytest.mark.parametrize(("max_tokens", "kept"), [(1, 9), (4, 6), (10, 1), (99, 1)])
def test_room_is_left_for_the_answer(max_tokens: int, kept: int) -> None:
    request = inference_pb2.GenerateRequest(
        truncate_prompt_tokens=-1,
        stop=inference_pb2.StopConditions(max_tokens=max_tokens),
    )
    assert len(truncated([7] * 50, request, 10, NONE)) == kept


@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=20),
    most=st.integers(4, 30) | st.just(-1),
    is_bare=st.booleans(),
)
def test_embeddings_keep_the_first_tokens_as_tokenizers_do(
    words: list[str], most: int, is_bare: bool
) -> None:
    """vLLM leaves it to the tokenizer, whose special tokens stay around the text."""
    context = 9
    text = " ".join(words)
    tokenizer = encoder()
    whole = tokenizer.encode(text, add_special_tokens=not is_bare).ids
    request = inference_pb2.GenerateRequest(
        text=text, embed=True, truncate_prompt_tokens=most, omit_special_tokens=is_bare
    )
    kept = truncated(array("I", whole), request, context, affixes_of(tokenizer))

    tokenizer.enable_truncation(context if most < 0 else most)
    assert kept.tolist() == tokenizer.encode(text, add_special_tokens=not is_bare).ids


def test_token_ids_of_embeddings_have_no_special_tokens() -> None:
    request = inference_pb2.GenerateRequest(embed=True, truncate_prompt_tokens=2)
    request.token_ids.ids[:] = [4, 5, 6]
    assert truncated([4, 5, 6], request, 9, affixes_of(encoder())) == [4, 5]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_limit_that_leaves_no_text_is_refused(most: int) -> None:
    request = inference_pb2.GenerateRequest(text="a b", embed=True, truncate_prompt_tokens=most)
    with pytest.raises(ServiceError, match=f"is {most}; possible: -1, or at least 4") as caught:
        truncated([1, 3, 4, 2, 2], request, 9, affixes_of(encoder()))
    assert caught.value.metadata["field"] == "truncate_prompt_tokens"
