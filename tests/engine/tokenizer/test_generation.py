"""Every key of generation_config.json is taken, harmless, or refused with its name and value."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import GenerationConfig

from ullage_engine.tokenizer import generation
from ullage_engine.tokenizer.generation import (
    GenerationError,
    gguf_sampling_defaults,
    sampling_defaults,
)
from ullage_engine.tokenizer.tokenizer import TokenizerError, load_tokenizer

TAKEN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
ALL_KEYS = sorted(GenerationConfig().to_dict())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),
        ({"temperature": 1, "top_k": -1}, {"temperature": 1.0, "top_k": 0}),
        ({"top_k": None, "typical_p": 1.0, "num_beams": 1, "bad_words_ids": []}, {}),
        (
            {"repetition_penalty": 1.05, "min_p": 0.15, "presence_penalty": 1.5},
            {"repetition_penalty": 1.05, "min_p": 0.15, "presence_penalty": 1.5},
        ),
        ({"eos_token_id": [1, 2], "max_new_tokens": 2048, "transformers_version": "4.51"}, {}),
        ({"_name_or_path": "x", "torch_dtype": "bfloat16", "unsloth_fixed": True}, {}),
    ],
)
def test_what_a_file_recommends(config: dict[str, Any], expected: dict[str, float]) -> None:
    assert sampling_defaults(config) == expected


def test_a_file_that_transformers_writes_is_read_as_it_means_it() -> None:
    for given_ in ({}, {"do_sample": True, "temperature": 0.5, "top_k": 7, "eos_token_id": [2]}):
        config = GenerationConfig(**given_)
        for values in (config.to_dict(), config.to_diff_dict()):
            defaults = sampling_defaults(json.loads(json.dumps(values)))
            expected = {key: given_[key] for key in TAKEN if key in given_}
            assert defaults == expected


ODD_VALUES = st.sampled_from([0.5, 3, True, "x", [[1]], {"a": 1}])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ALL_KEYS), ODD_VALUES)
def test_any_key_that_transformers_knows_is_taken_harmless_or_refused(
    key: str, value: object
) -> None:
    """A value that asks for something is in the defaults, or the key is known to change no choice
    of a token, or the refusal names both."""
    try:
        defaults = sampling_defaults({key: value})
    except GenerationError as error:
        assert str(error).startswith(f"{key} is {value!r}")
        assert "model.generationDefaults" in str(error)
    else:
        is_taken = key in defaults or (key == "do_sample" and isinstance(value, bool))
        assert is_taken or key in generation._HARMLESS or value in generation._NEUTRAL[key]


@pytest.mark.parametrize(
    "config",
    [
        {"typical_p": 0.9},
        {"no_repeat_ngram_size": 3},
        {"num_beams": 4},
        {"penalty_alpha": 0.6},
        {"stop_strings": ["###"]},
        {"suppress_tokens": [1, 2]},
        {"bad_words_ids": [[5]]},
        {"guidance_scale": 1.5},
        {"min_new_tokens": 5},
        {"temperature": 5.0},
        {"temperature": "0.7"},
        {"temperature": True},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_k": 2.5},
        {"do_sample": "yes"},
        {"a_new_one": 1},
    ],
)
def test_what_is_not_supported_ends_the_start_and_names_the_switch(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    (tmp_path / "tokenizer.json").write_text(words.to_str())
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    [key] = config
    with pytest.raises(TokenizerError, match=rf"generation_config\.json: {key} is .*[dD]efaults"):
        load_tokenizer(tmp_path, generation_defaults=True)
    made = load_tokenizer(tmp_path)
    assert (made.sampling_defaults, made.eos_token_ids) == ({}, (3,)), "ends count all the same"


def test_metadata_of_a_file_recommend_too() -> None:
    pairs = {
        "temp": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "penalty_repeat": 1.1,
        "penalty_last_n": 64,
        "sequence": "top_k;temp",
        "mirostat": 0,
        "mirostat_tau": 5.0,
    }
    metadata = {f"general.sampling.{name}": value for name, value in pairs.items()}
    assert gguf_sampling_defaults({"general.name": "x", **metadata}) == {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    for name, value in {"mirostat": 2, "xtc_probability": 0.5, "temp": 9.0, "new": 1}.items():
        with pytest.raises(GenerationError, match=rf"general\.sampling\.{name} is {value}"):
            gguf_sampling_defaults({f"general.sampling.{name}": value})
