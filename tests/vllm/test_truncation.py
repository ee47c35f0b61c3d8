"""Prompts and inputs of embeddings are cut to the tokens that vLLM's own server keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers.registry import get_tokenizer

from ullage.inference.v1 import inference_pb2 as pb
from ullage_common.chat.affixes import affixes_of
from ullage_common.chat.truncation import truncated

WORDS = "abcdefghij"
TEXT = " ".join(WORDS)
CONTEXT = 9


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a tokenizer whose words are tokens, between [CLS] and [SEP]."""
    vocab = {word: i for i, word in enumerate(("[UNK]", "[CLS]", "[SEP]", *WORDS))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def kept_by_vllm(folder: Path, runner: Any, most: int, *, is_bare: bool) -> list[int]:
    params = TokenizeParams(
        max_total_tokens=CONTEXT,
        max_output_tokens=0 if runner == "pooling" else 1,
        truncate_prompt_tokens=most,
        add_special_tokens=not is_bare,
    )
    tokenizer = get_tokenizer(str(folder), runner_type=runner)
    ids = tokenizer.encode(TEXT, **params.get_encode_kwargs())
    return [*params._token_truncation(tokenizer, ids)]


@pytest.mark.parametrize("is_bare", [False, True])
@pytest.mark.parametrize("most", [3, 5, 9, -1])
def test_embeddings_keep_the_same_tokens(saved: Path, most: int, is_bare: bool) -> None:
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    whole = tokenizer.encode(TEXT, add_special_tokens=not is_bare).ids
    request = pb.GenerateRequest(
        text=TEXT, embed=True, truncate_prompt_tokens=most, omit_special_tokens=is_bare
    )
    kept = truncated(whole, request, CONTEXT, affixes_of(tokenizer))
    assert kept == kept_by_vllm(saved, "pooling", most, is_bare=is_bare)


@pytest.mark.parametrize("most", [3, 5, -1])
def test_prompts_keep_the_same_tokens(saved: Path, most: int) -> None:
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    whole = tokenizer.encode(TEXT, add_special_tokens=False).ids
    request = pb.GenerateRequest(
        text=TEXT, truncate_prompt_tokens=most, omit_special_tokens=True,
        stop=pb.StopConditions(max_tokens=1),
    )  # fmt: skip
    kept = truncated(whole, request, CONTEXT, affixes_of(tokenizer))
    assert kept == kept_by_vllm(saved, "generate", most, is_bare=True)
