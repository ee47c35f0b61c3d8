"""Metadata of GGUF files: honoured, harmless, or refused by name."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_config.rope import read_rope
from ullage_engine.model_loader.gguf import GgufReader
from ullage_engine.protocol.errors import WeightsError

HIDDEN = 32
HEADS = 4
VOCAB = 64
HEAD_DIM = HIDDEN // HEADS


def read(tmp_path: Path, allows_unknown: bool = False, **keys: object) -> ModelConfig:
    """The configuration of a Llama's file with these metadata, `__` for each dot."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(48)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys.items():
        name = key.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, float(str(value)))
    writer.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufReader(path, allows_unknown=allows_unknown).model_config


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama__attention__clamp_kqv": 8.0}, "attention.clamp_kqv is 8.0"),
        ({"llama__logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"llama__expert_count": 8}, "expert_count is 8"),
        ({"llama__attention__sliding_window": 64}, "attention.sliding_window is 64"),
        ({"llama__rope__dimension_count": 2}, "rope.dimension_count' is 2"),
        ({"llama__attention__causal": False}, "attention.causal is False"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"llama__rope__scaling__attn_factor": 0.5}, "attn_factor is 0.5"),
        ({"llama__nextn_predict_layers": 1}, "llama.nextn_predict_layers 1 is not known"),
        ({"general__type": "adapter"}, "'adapter'"),
    ],
)
def test_metadata_that_change_numbers_are_refused(
    tmp_path: Path, keys: dict[str, object], words: str
) -> None:
    with pytest.raises(WeightsError) as caught:
        read(tmp_path, **keys)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_metadata_that_are_not_known_can_be_allowed(tmp_path: Path) -> None:
    keys = {"llama__nextn_predict_layers": 1}
    assert read(tmp_path, True, **keys) == read(tmp_path)


def test_metadata_that_change_nothing_are_left_alone(tmp_path: Path) -> None:
    keys: dict[str, object] = {
        "llama__vocab_size": VOCAB,
        "llama__rope__dimension_count": HEAD_DIM,
        "llama__attention__causal": True,
        "llama__attention__sliding_window": 0,
        "llama__rope__scaling__type": "none",
        "general__type": "model",
        "general__license": "mit",
        "maker__note": "x",
    }
    assert read(tmp_path, **keys) == read(tmp_path)


def test_linear_scaling_in_both_spellings(tmp_path: Path) -> None:
    new = read(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    old = read(tmp_path, llama__rope__scale_linear=4.0)
    assert new.rope_factors == old.rope_factors == [4.0] * (HEAD_DIM // 2)


def test_yarn_has_whole_bounds_as_in_llama_cpp(tmp_path: Path) -> None:
    keys: dict[str, object] = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 128,
    }
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    values = {"rope_scaling": scaling, "max_position_embeddings": 512}
    expected = read_rope(HFConfig(Path("c"), values), HEAD_DIM)
    found = read(tmp_path, **keys)
    assert (found.rope_factors, found.rope_scale) == (expected.factors, expected.scale)
    slow = read(tmp_path, **keys, llama__rope__scaling__yarn_beta_slow=8.0)
    assert slow.rope_factors != found.rope_factors
