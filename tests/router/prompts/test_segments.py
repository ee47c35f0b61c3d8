"""Prompts tokenised in segments have the ids that the tokenizer gives them whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ullage_router.tokenizer.segments import SegmentEncoder

SPECIAL = ("<|end|>", "<|start|>", "<|start|>x", "\n\n\n", "<|")
TEXTS = st.lists(
    st.one_of(
        st.sampled_from((*SPECIAL, "<|en", "d|>", " ", "a", "é", "e\u0301", "12", "\n")), st.text()
    ),
    max_size=20,
).map("".join)


def byte_level(*special: AddedToken, normalizer: object = None) -> Tokenizer:
    """Bytes, with a few merges, so that what is beside a byte matters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "a"), ("a", "b"), ("Ġ", "a"), ("Ã", "©"), ("e", "Ì"), ("<", "|"), ("x", "x")]
    words = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(list(special) or [plain(text) for text in SPECIAL])
    return tokenizer


def plain(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@settings(max_examples=300)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), composes=st.booleans())
def test_segments_are_what_the_tokenizer_makes_of_the_whole(
    texts: list[str], composes: bool
) -> None:
    tokenizer = byte_level(normalizer=normalizers.NFC() if composes else None)
    encoder = SegmentEncoder(tokenizer, max_bytes=1000)
    for text in [*texts, *texts]:
        assert list(encoder.encode(text)) == whole(tokenizer, text)
        assert encoder.size <= 1000


@pytest.mark.parametrize("name", ["lstrip", "rstrip", "single_word", "normalized"])
def test_tokens_that_look_around_are_no_boundaries(name: str) -> None:
    tokenizer = byte_level(AddedToken("<|end|>", special=True, **{"normalized": False, name: True}))
    encoder = SegmentEncoder(tokenizer)
    for text in ("a <|end|> b", "x<|end|>x", "aa <|end|>"):
        assert list(encoder.encode(text)) == whole(tokenizer, text)
    assert encoder.size == 0


def test_many_special_tokens_are_found_as_fast_as_few() -> None:
    """No branch of the search begins like another."""
    names = [f"<special_{number}>" for number in range(1000)] + ["<s>", "[INST]", "<spe"]
    tokenizer = byte_level(*map(plain, names))
    encoder = SegmentEncoder(tokenizer)
    text = "<" * 2000 + "<special_17<special_999><special_9990>[INST][INS<spex<s>"
    assert list(encoder.encode(text)) == whole(tokenizer, text)
    assert encoder.pattern.count("<") == 1


def test_a_tokenizer_that_knows_the_beginning_gets_the_whole() -> None:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    encoder = SegmentEncoder(tokenizer)
    assert list(encoder.encode("a<|end|>a")) == whole(tokenizer, "a<|end|>a")
    assert encoder.size == 0


def test_a_conversation_that_comes_back_costs_what_is_new() -> None:
    tokenizer = byte_level()
    encoder = SegmentEncoder(tokenizer)
    first = "<|start|>" + "a b " * 500 + "<|end|>"
    encoder.encode(first)
    before = encoder.size
    encoder.encode(first + "<|start|>new<|end|>")
    assert 0 < encoder.size - before < 1000 < before


def test_what_was_used_last_is_kept() -> None:
    encoder = SegmentEncoder(byte_level(), max_bytes=3600)  # of about eight
    for number in range(20):
        if number % 5 == 0:
            encoder.encode("instructions")
        encoder.encode(f"{number:02}" * 25)
    kept = encoder.size
    encoder.encode("instructions")
    assert encoder.size == kept
