"""A directory that is made of a GGUF file keeps what the file says of its tokenizer."""

import json
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from ullage_common.chat.template import ChatTemplate
from ullage_engine.quantize.convert import ModelDirectory
from ullage_engine.tokenizer.tokenizer import ModelTokenizer, load_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = "{{ messages[0].content }}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*BYTES, "<s>", "<|eot_id|>", "<|eom_id|>", "he"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(256)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_string("tokenizer.chat_template", WORDS)
    writer.add_string(
        "tokenizer.chat_template.tool_use", "{{ bos_token }}{% if tools %}{% endif %}" + WORDS
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def chat(made: ModelTokenizer) -> list[list[int]]:
    template = ChatTemplate(made.chat_template, made.special_tokens, made.tool_chat_template)
    turns = [{"role": "user", "content": "he"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    return [made.encode_rendered(template.render(turns, tools=each)) for each in ((), tools)]


def test_ends_beginnings_templates_and_sampling_stay(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    ModelDirectory(folder).finish({}, source)
    before = load_tokenizer(source, generation_defaults=True)
    after = load_tokenizer(folder, generation_defaults=True)
    assert after.eos_token_ids == before.eos_token_ids == (257, 258)
    assert after.special_tokens == before.special_tokens
    assert after.sampling_defaults == before.sampling_defaults == {"temperature": 0.5}
    assert after.encode_text("he") == before.encode_text("he") == [256, 259]
    assert chat(after) == chat(before) == [[256, 259]] * 2
    assert json.loads((folder / "config.json").read_text()) == {}
