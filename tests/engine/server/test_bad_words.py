"""Bad words become the tokens that the worker knows them by."""

import pytest
from ullage_testing.small_models import smollm2_path

from ullage_common.wire.errors import ServiceError
from ullage_engine.server.prompts import bad_word_ids
from ullage_engine.tokenizer.tokenizer import ModelTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return load_tokenizer(smollm2_path())


def test_a_word_counts_at_the_beginning_and_within_text(tokenizer: ModelTokenizer) -> None:
    [alone, within] = bad_word_ids(["dog"], tokenizer)
    assert tokenizer.decode(list(alone)) == "dog"
    assert tokenizer.decode(list(within)) == " dog"
    assert bad_word_ids([" dog", "dog"], tokenizer) == (alone, within)


def test_a_blank_that_is_a_token_of_its_own_is_no_other_word(tokenizer: ModelTokenizer) -> None:
    """As in vLLM: the word behind the blank is the same tokens."""
    for word in ("!", "dog house", "\u00e9l\u00e8ve"):
        for ids in bad_word_ids([word], tokenizer):
            assert tokenizer.decode(list(ids)).lstrip() == word


def test_a_word_without_tokens_is_refused(tokenizer: ModelTokenizer) -> None:
    with pytest.raises(ServiceError, match="bad_words"):
        bad_word_ids(["  "], tokenizer)
