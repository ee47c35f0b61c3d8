"""Bounds of tokens are never above what a text has, and cuts never change tokens."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from ullage_testing.small_models import smollm2_path

from ullage_engine.tokenizer.gguf import build_tokenizer
from ullage_engine.tokenizer.tokenizer import load_tokenizer
from ullage_router.text_bounds import TextCutter, TokenBound, UncutText, token_bound

PLAIN = [chr(byte) for byte in range(0x21, 0x7F)]


def byte_level(pre: str = "gpt-2") -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["\u0120 \u0120", "\u0120\u0120 \u0120\u0120", "a b", "ab ab", "- -", "\u010a \u010a"]
    words = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    return build_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*words, "<|end|>"],
            "tokenizer.ggml.token_type": [1] * len(words) + [3],
            "tokenizer.ggml.merges": list(merges),
        }
    )


def normalized(*steps: normalizers.Normalizer) -> Tokenizer:
    made = byte_level()
    made.normalizer = normalizers.Sequence(list(steps))
    return made


def stripping() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<x>", lstrip=True, rstrip=True, normalized=False)])
    return made


def sentencepiece(byte_fallback: bool = True, letters: str = "".join(PLAIN)) -> Tokenizer:
    merges = [("\u2581", "\u2581"), ("a", "b"), ("\u2581", "a")]
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += [*letters, "\u2581", "\n", *("".join(pair) for pair in merges)]
    made = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(dict.fromkeys(["<unk>", *words]))},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made


def metaspace() -> Tokenizer:
    made = sentencepiece()
    made.normalizer = None
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return made


def gemma() -> Tokenizer:
    made = sentencepiece()
    made.normalizer = normalizers.Replace(" ", "\u2581")
    return made


def unigram(*steps: normalizers.Normalizer) -> Tokenizer:
    words = ["<unk>", *PLAIN, "\u2581", "ab", "\u2581a", "\u2581\u2581"]
    made = Tokenizer(models.Unigram([(word, -float(i % 5 + 1)) for i, word in enumerate(words)], 0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    if steps:
        made.normalizer = normalizers.Sequence(list(steps))
    return made


def wordpiece(**options: bool) -> Tokenizer:
    words = ["[UNK]", *PLAIN, "ab", *(f"##{letter}" for letter in PLAIN)]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(**options)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


def removing() -> Tokenizer:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("a", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "gpt-2": byte_level,
    "smollm": lambda: byte_level("smollm"),
    "llama": lambda: byte_level("llama-bpe"),
    "qwen": lambda: byte_level("qwen2"),
    "lower NFKC": lambda: normalized(normalizers.NFKC(), normalizers.Lowercase()),
    "NFD without accents": lambda: normalized(normalizers.NFD(), normalizers.StripAccents()),
    "shrinking": lambda: normalized(normalizers.Replace("abab", "x"), normalizers.Strip()),
    "one blank": lambda: normalized(normalizers.Replace(Regex(" {2,}"), " ")),
    "unknown pattern": lambda: normalized(normalizers.Replace(Regex("a+"), "a")),
    "strip": stripping,
    "removing": removing,
    "legacy": sentencepiece,
    "unknown characters": lambda: sentencepiece(False),
    "unknown letters": lambda: sentencepiece(False, "abc"),
    "metaspace": metaspace,
    "gemma": gemma,
    "unigram": unigram,
    "unigram NFC": lambda: unigram(normalizers.NFC()),
    "wordpiece": wordpiece,
    "wordpiece cased": lambda: wordpiece(lowercase=False, strip_accents=True),
}

LETTERS = [
    "a",
    "ab",
    "abab" * 9,
    "1",
    "12ab3",
    "x_y",
    "'s",
    "\u00e9",
    "e\u0301",
    "\u212a",
    "\u0301",
]
OTHERS = [
    "----",
    ",",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\x00\x01",
    "\u4f60\u597d\u3002",
    "\uff0c",
    '"',
    '{"',
    "| ",
    ";",
    "\r\n",
    "\U0001f600",
]
TOKENS = ["<|end|>", " <x> "]
WORDS = st.sampled_from([*LETTERS, *OTHERS, *TOKENS])
TEXTS = st.lists(WORDS | st.text(max_size=5), max_size=30).map("".join)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_fewer_tokens_than_its_bound(kind: str) -> None:
    tokenizer = KINDS[kind]()
    bound = token_bound(tokenizer)

    @settings(max_examples=100, deadline=None)
    @given(TEXTS, st.sampled_from([1, 7, 40]))
    def check(text: str, times: int) -> None:
        assert bound.fewest(text * times) <= len(encode(tokenizer, text * times))

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole(kind: str) -> None:
    tokenizer = KINDS[kind]()
    cutter = TextCutter(tokenizer, usual=6, longest=1000)

    @settings(max_examples=100, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        pieces = [encode(tokenizer, piece) for piece in cutter.pieces(text)]
        assert [token for piece in pieces for token in piece] == encode(tokenizer, text)

    check()


@pytest.mark.parametrize(
    ("kind", "least"),
    [("gpt-2", 4), ("llama", 4), ("qwen", 4), ("legacy", 2), ("metaspace", 2), ("gemma", 3)],
)
def test_usual_texts_are_cut(kind: str, least: int) -> None:
    cutter = TextCutter(KINDS[kind](), usual=10, longest=100)
    assert len(list(cutter.pieces("the quick brown fox\njumps over 12abc the lazy dog"))) >= least


CHINESE = (
    "\u4ed6\u5728\u90a3\u91cc\u7ad9\u4e86\u5f88\u4e45\uff0c\u770b\u7740\u5c71\u548c\u6cb3\u3002"
)
DATA = {
    "Chinese": f"{CHINESE * 3}\n\n\u3000\u3000",
    "numbers": "1.25,2.5,",
    "JSON": '{"a":1,"b":[-2,"c"]},',
    "table": "| - | - |\n",
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen"])
def test_long_data_and_texts_without_blanks_are_cut(kind: str, name: str) -> None:
    tokenizer = KINDS[kind]()
    text = DATA[name] * 4000
    pieces = list(TextCutter(tokenizer, usual=1000, longest=2000).pieces(text))
    assert len(pieces) > len(text) / 1300
    assert [token for piece in pieces for token in encode(tokenizer, piece)] == encode(
        tokenizer, text
    )


@pytest.mark.parametrize("kind", ["gpt-2", "llama", "legacy", "gemma", "metaspace", "lower NFKC"])
def test_a_bound_is_of_use(kind: str) -> None:
    """Letters are counted by the longest token with one, not by the longest run of blanks."""
    bound = token_bound(KINDS[kind]())
    text = "lorem ipsum dolor sit amet " * 1000
    assert bound.fewest(text) >= len(text) // 9


@pytest.mark.parametrize("kind", ["unknown pattern", "removing"])
def test_where_nothing_is_known_nothing_is_counted(kind: str) -> None:
    assert token_bound(KINDS[kind]()) == TokenBound()


def test_the_real_tokenizer_keeps_its_tokens_and_its_bound() -> None:
    tokenizer = load_tokenizer(smollm2_path()).tokenizer
    cutter = TextCutter(tokenizer, usual=50)
    bound = token_bound(tokenizer)
    text = Path(__file__).read_text() + (Path(__file__).parent / "test_cleanse.py").read_text()
    pieces = list(cutter.pieces(text))
    assert len(pieces) > len(text) / 200
    ids = encode(tokenizer, text)
    assert [token for piece in pieces for token in encode(tokenizer, piece)] == ids
    assert len(ids) / 40 < bound.fewest(text) <= len(ids)


def test_a_text_without_a_place_to_cut_at_is_refused() -> None:
    cutter = TextCutter(byte_level(), usual=10, longest=100)
    assert list(cutter.pieces("-" * 100)) == ["-" * 100]
    with pytest.raises(UncutText, match="no word ends within 100 characters"):
        list(cutter.pieces("-" * 101 + " a b"))
    with pytest.raises(UncutText, match="101 characters, and this tokenizer takes at most 100"):
        list(TextCutter(wordpiece(), usual=10, longest=100).pieces("a" * 101))
