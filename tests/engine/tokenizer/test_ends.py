"""Beginnings and ends: in directories as transformers has them, in GGUF files as llama.cpp does.

The vocabulary is one of bytes, so every text has tokens.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ullage.inference.v1 import inference_pb2 as pb
from ullage_engine.tokenizer.gguf import UnsupportedTokenizer, build_tokenizer
from ullage_engine.tokenizer.gguf_special_tokens import END_TOKENS
from ullage_engine.tokenizer.tokenizer import ModelTokenizer, TokenizerError, load_tokenizer
from ullage_router.tokenizer.model import load_model

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
TEXTS = ("a", "", "Hello <s>there</s>", "<s>once", "twice<s><s></s></s>", "caf\u00e9 </s>")


def byte_level(*special: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return tokenizer


def directory(
    path: Path, processor: processors.PostProcessor | None = None, **files: Mapping[str, Any]
) -> Path:
    """A model's directory with the special tokens <s> (256) and </s> (257), and <e> (258)."""
    tokenizer = byte_level("<s>", "</s>", "<e>")
    if processor:
        tokenizer.post_processor = processor
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    files["tokenizer_config"] = {**config, **files.get("tokenizer_config", {})}
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def around(single: str) -> processors.PostProcessor:
    tokens = [("<s>", 256), ("</s>", 257), ("<e>", 258)]
    return processors.TemplateProcessing(
        single=single, special_tokens=[pair for pair in tokens if pair[0] in single]
    )


def routed(tokenizer: ModelTokenizer, **more: Any) -> Any:
    """The router's model of what the engine describes."""
    return load_model(
        pb.GetModelResponse(
            model="m",
            tokenizer_json=tokenizer.json_bytes,
            chat_template=tokenizer.chat_template,
            special_tokens=tokenizer.special_tokens,
            bos_token=tokenizer.bos_token,
            add_bos=tokenizer.add_bos,
            chat_adds_bos=tokenizer.chat_adds_bos,
            **more,
        )
    )


PROCESSORS = {
    "none": None,
    "byte level": processors.ByteLevel(trim_offsets=False),
    "bos": around("<s> $A"),
    "bos and eos": around("<s> $A </s>"),
    "eos": around("$A </s>"),
    "two before": around("<e> <s> $A"),
    "sequence": processors.Sequence([processors.ByteLevel(), around("<s> $A </s>")]),
    "bert": processors.BertProcessing(("</s>", 257), ("<s>", 256)),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(
    "flags",
    [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}],
    ids=["silent", "bos", "eos"],
)
def test_raw_text_begins_and_ends_as_in_transformers(
    tmp_path: Path, name: str, flags: Mapping[str, bool]
) -> None:
    folder = directory(tmp_path, PROCESSORS[name], tokenizer_config=flags)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    router = routed(ours)
    for text in TEXTS:
        expected = theirs(text)["input_ids"]
        begins = text.startswith("<s>") and name != "two before"
        if begins and expected[:2] == [256, 256]:
            expected = expected[1:]  # which the text has already
        if text.endswith("</s>") and expected[-2:] == [257, 257] and name != "none":
            expected = expected[: len(expected) - (text.count("</s>") < expected.count(257))]
        assert ours.encode_text(text) == list(router.encode(text)) == expected, text
        assert ours.encode_rendered(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.add_bos == (ours.encode_text("a")[0] == 256)


def test_text_that_has_its_beginning_gets_no_second_one(tmp_path: Path) -> None:
    ours = load_tokenizer(directory(tmp_path, around("<s> $A </s>")))
    assert ours.encode_text("<s>a</s>") == ours.encode_text("a") == [256, *ours._encode("a"), 257]


@pytest.mark.parametrize(
    ("config", "generation", "own", "expected"),
    [
        (None, None, "</s>", (257,)),
        (258, None, "</s>", (258, 257)),
        (258, [3, 257], "</s>", (3, 257, 258)),
        (None, 4, "", (4,)),
        ([5, 5], None, None, (5,)),
        (None, None, "", ()),
        (None, None, "<none>", ()),
    ],
)
def test_ends_are_those_of_all_files(
    tmp_path: Path, config: object, generation: object, own: object, expected: tuple[int, ...]
) -> None:
    folder = directory(
        tmp_path,
        tokenizer_config={"eos_token": own},
        config={"eos_token_id": config},
        generation_config={"eos_token_id": generation},
    )
    assert load_tokenizer(folder).eos_token_ids == expected


def test_ends_of_the_text_part_count(tmp_path: Path) -> None:
    config = {"eos_token_id": 1, "text_config": {"eos_token_id": [2, 3]}}
    assert load_tokenizer(directory(tmp_path, config=config)).eos_token_ids == (1, 2, 3, 257)


@pytest.mark.parametrize("value", ["</s>", True, [1, "x"], -1, 1.5, {}])
def test_an_odd_end_is_named(tmp_path: Path, value: object) -> None:
    folder = directory(tmp_path, config={"eos_token_id": value})
    with pytest.raises(TokenizerError, match=r"/config\.json: eos_token_id is .*fetch it again"):
        load_tokenizer(folder)


def test_special_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    for number, (tokens, more) in enumerate(
        [
            ({"pad_token": {"content": "<e>", "__type": "AddedToken"}, "unk_token": None}, {}),
            ({"image_token": "<e>", "extra_special_tokens": {"audio_token": "<s>"}}, {}),
            ({"sep_token": "<e>"}, {"eos_token": {"content": "<e>"}, "cls_token": "<s>"}),
            ({"added_tokens_decoder": {}, "mask_token": "<e>"}, {"eos_token": "<e>"}),
        ]
    ):
        folder = directory(tmp_path / str(number), tokenizer_config=tokens, special_tokens_map=more)
        theirs = AutoTokenizer.from_pretrained(folder)
        assert load_tokenizer(folder).special_tokens == theirs.special_tokens_map


def metadata(*special: str, types: int = CONTROL, **values: Any) -> dict[str, Any]:
    """Metadata of a GGUF file whose special tokens follow the bytes, from 256 on."""
    more = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*BYTES, *special],
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [types] * len(special),
        "tokenizer.ggml.merges": ["h e"],
        **more,
    }


def gguf(path: Path, pairs: Mapping[str, Any]) -> Path:
    """Writes a GGUF file's header."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def value(item: object) -> bytes:
        match item:
            case bool():
                return struct.pack("<I?", 7, item)
            case int():
                return struct.pack("<II", 4, item)
            case float():
                return struct.pack("<If", 6, item)
            case str():
                return struct.pack("<I", 8) + text(item)
            case [str(), *_]:
                return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(text, item))
            case list():
                return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
        raise TypeError(item)

    body = b"".join(text(key) + value(item) for key, item in pairs.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + body)
    return path


def of_file(tmp_path: Path, *special: str, **values: Any) -> ModelTokenizer:
    pairs = metadata(*special, **values)
    pairs["tokenizer.ggml.tokens"].append("he")
    pairs["tokenizer.ggml.token_type"].append(NORMAL)
    return load_tokenizer(gguf(tmp_path / "model.gguf", pairs))


@pytest.mark.parametrize(
    ("special", "stated", "expected"),
    [
        (("<|eot_id|>", "<x>"), {}, [256]),
        (("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"), {"eos": 256}, [256, 257, 258]),
        (("<x>", "<y>", "<z>"), {"eos": 256, "eot": 257, "eom": 258}, [256, 257, 258]),
        (("<|im_end|>", "<|endoftext|>"), {"eos": 257}, [257, 256]),
        (("<|return|>", "<|call|>", "<|end|>"), {"eos": 256}, [256, 257]),
        (("<|return|>", "<|call|>", "<|end|>"), {"eos": 256, "eot": 258}, [256, 257]),
        (("<|calls|>", "<|flush|>", "<|end|>"), {}, [256, 257]),
        (("<|end|>", "<|call|>"), {}, [256, 257]),
        (("<eos>", "</s>", "<|tool_response>"), {"eos": 256}, [256, 258]),
        (("<x>",), {"eos": 4_000_000_000}, []),
        (("<x>",), {}, []),
    ],
)
def test_ends_of_a_file_are_stated_or_known_by_name(
    tmp_path: Path, special: tuple[str, ...], stated: Mapping[str, int], expected: list[int]
) -> None:
    ids = {f"{name}_token_id": token_id for name, token_id in stated.items()}
    assert sorted(of_file(tmp_path, *special, **ids).eos_token_ids) == sorted(expected)


def test_every_known_name_ends_an_answer(tmp_path: Path) -> None:
    for name in END_TOKENS - {"</s>"}:
        made = of_file(tmp_path, name, types=NORMAL)
        assert made.eos_token_ids == (256,), name
        assert made.encode_rendered(f"a{name}b") == [*made._encode("a"), 256, *made._encode("b")]
        assert made.decode([256]) == "", "whatever type the file gives it"


def test_a_word_that_merges_make_is_no_end(tmp_path: Path) -> None:
    for types, expected in ((NORMAL, ()), (CONTROL, (258,)), (USER_DEFINED, (258,))):
        pairs = metadata("</", "s>", "</s>", types=types)
        pairs["tokenizer.ggml.token_type"][256:258] = [NORMAL, NORMAL]
        pairs["tokenizer.ggml.merges"] = ["< /", "s >", "</ s>"]
        made = load_tokenizer(gguf(tmp_path / "code.gguf", pairs))
        assert made.eos_token_ids == expected


@pytest.mark.parametrize(
    ("pre", "stated", "expected"),
    [
        ("llama-bpe", {}, True),
        ("llama3", {}, True),
        ("lfm2", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {}, False),
        ("qwen2", {}, False),
        ("smollm", {"add_bos_token": True}, True),
    ],
)
def test_a_file_begins_text_as_llama_cpp_does(
    tmp_path: Path, pre: str, stated: Mapping[str, bool], expected: bool
) -> None:
    made = of_file(tmp_path, "<s>", "</s>", pre=pre, bos_token_id=256, eos_token_id=257, **stated)
    router = routed(made)
    begin = [256] if expected else []
    assert made.add_bos == made.chat_adds_bos == expected
    for text in ("a", "<s>a"):
        bare = made._encode("a")
        once = [256, *bare] if text[0] == "<" else [*begin, *bare]
        assert made.encode_text(text) == list(router.encode(text)) == once
        assert made.encode_rendered(text) == once


def test_a_chat_begins_once_whether_or_not_its_template_says_so(tmp_path: Path) -> None:
    words = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for template in (words, "{{ bos_token }}" + words):
        pairs = metadata("<s>", pre="llama-bpe", bos_token_id=256)
        pairs["tokenizer.ggml.tokens"].append("he")
        pairs["tokenizer.ggml.token_type"].append(NORMAL)
        pairs["tokenizer.chat_template"] = template
        made = load_tokenizer(gguf(tmp_path / "chat.gguf", pairs))
        expected = [256, *made._encode("a")]
        assert list(routed(made).render([{"role": "user", "content": "a"}])) == expected


def test_a_file_may_end_text_too(tmp_path: Path) -> None:
    made = of_file(tmp_path, "<s>", "</s>", bos_token_id=256, eos_token_id=257, add_eos_token=True)
    assert made.encode_text("a") == list(routed(made).encode("a")) == [*made._encode("a"), 257]
    assert not made.add_bos


def test_a_beginning_that_the_file_does_not_name_is_none(tmp_path: Path) -> None:
    assert of_file(tmp_path, "<s>", pre="llama-bpe").encode_text("a") == [BYTES.index("a")]


def test_an_odd_flag_is_named() -> None:
    with pytest.raises(UnsupportedTokenizer, match="add_bos_token is 'yes', not true or false"):
        build_tokenizer(metadata("<s>", "he", add_bos_token="yes", bos_token_id=256))


def test_a_file_without_a_pre_tokenizer_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_file(tmp_path, "<s>")
    assert not caplog.records
    pairs = metadata("he")
    del pairs["tokenizer.ggml.pre"]
    load_tokenizer(gguf(tmp_path / "old.gguf", pairs))
    assert "old.gguf: tokenizer.ggml.pre is missing: text is split as GPT-2 does" in caplog.text


def test_a_file_names_the_template_for_tools_and_its_special_tokens(tmp_path: Path) -> None:
    ids = {"bos": 256, "eot": 257, "padding": 258, "unknown": 259, "seperator": 260}
    pairs = metadata(
        "<s>", "</s>", "<p>", "<u>", "he", **{f"{name}_token_id": i for name, i in ids.items()}
    )
    pairs |= {"tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t"}
    made = load_tokenizer(gguf(tmp_path / "model.gguf", pairs))
    assert (made.chat_template, made.tool_chat_template) == ("d", "t")
    assert made.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<p>",
        "unk_token": "<u>",
        "sep_token": "he",
    }


def test_an_engine_of_an_earlier_version_says_add_bos_alone() -> None:
    plain = byte_level("<s>", "</s>").to_str().encode()
    response = pb.GetModelResponse(tokenizer_json=plain, bos_token="<s>", add_bos=True)
    assert list(load_model(response).encode("a")) == [256, BYTES.index("a")]
    response.add_bos = False
    assert list(load_model(response).encode("a")) == [BYTES.index("a")]


def test_transformers_loads_these_directories(tmp_path: Path) -> None:
    """The oracle of this file is the class that is named, not one of its own choosing."""
    theirs = AutoTokenizer.from_pretrained(directory(tmp_path))
    assert isinstance(theirs, PreTrainedTokenizerFast)
