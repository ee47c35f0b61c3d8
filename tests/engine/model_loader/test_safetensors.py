"""Model directories: what is read, and what is said of broken ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ullage_engine.model_config.hf_config import read_config
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.errors import WeightsError

Save = Callable[..., tuple[Any, Path]]
Load = Callable[..., LoadedModel]


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def fails_with(load: Load, folder: Path, *words: str) -> None:
    with pytest.raises(WeightsError) as caught:
        load(f"file://{folder}")
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_geometry_prefers_what_is_explicit(save_llama: Save) -> None:
    _, folder = save_llama(head_dim=16)
    assert read_model_config(read_config(folder)).head_dim == 16
    change_config(folder, head_dim=None)
    assert read_model_config(read_config(folder)).head_dim == 8


def test_the_old_spelling_of_positions_is_read(save_llama: Save) -> None:
    _, folder = save_llama()
    scaling = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    change_config(folder, rope_parameters=None, rope_theta=5e5, rope_scaling=scaling)
    model_config = read_model_config(read_config(folder))
    assert model_config.rope_theta == 5e5
    assert model_config.rope_factors is not None
    assert model_config.rope_factors[0] == 1.0
    assert model_config.rope_factors[-1] == 8.0


def test_several_files_with_an_index_are_one_model(save_llama: Save, load: Load) -> None:
    _, folder = save_llama()
    whole = load(f"file://{folder}")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    split = load(f"file://{folder}")
    assert all(torch.equal(split.tensors[name], whole.tensors[name]) for name in whole.tensors)
    (folder / "b.safetensors").unlink()
    fails_with(load, folder, "b.safetensors is missing")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, ["model_type", "'mixtral'", "llama"]),
        ({"attention_bias": True}, ["q_proj.bias", "missing"]),
        ({"mlp_bias": True}, ["mlp_bias", "True", "only False"]),
        ({"attention_multiplier": 0.1}, ["attention_multiplier", "0.1", "use another model"]),
        ({"surprise": [1] * 99}, ["surprise [1, 1", "not known", "allowUnknownConfig"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"hidden_size": "big"}, ["hidden_size", "'big'", "whole number"]),
        ({"rope_parameters": {"rope_type": "axial"}}, ["'axial'", "llama3"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "gptq"]),
        ({"intermediate_size": 81}, ["gate_proj", "[80, 48]", "[81, 48]"]),
        ({"num_hidden_layers": 4}, ["model.layers.3.", "missing"]),
    ],
)
def test_what_is_not_supported_is_named(
    save_llama: Save, load: Load, changes: dict[str, object], words: list[str]
) -> None:
    _, folder = save_llama()
    change_config(folder, **changes)
    fails_with(load, folder, str(folder), *words)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_truncated_weights_are_told(save_llama: Save, load: Load, keep: int) -> None:
    _, folder = save_llama()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    fails_with(load, folder, "model.safetensors", "download it again")


def test_broken_or_absent_files_are_told(save_llama: Save, load: Load) -> None:
    _, folder = save_llama()
    (folder / "config.json").write_text("{")
    fails_with(load, folder, "config.json", "not JSON")
    (folder / "config.json").write_text("[" * 200_000)
    fails_with(load, folder, "config.json", "not JSON")
    (folder / "config.json").write_text("[]")
    fails_with(load, folder, "config.json", "not a JSON object")


def test_a_directory_without_weights_is_told(save_llama: Save, load: Load) -> None:
    _, folder = save_llama()
    (folder / "model.safetensors").unlink()
    fails_with(load, folder, str(folder), "no .safetensors file")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", 5, "a/b.safetensors", ".."]
)
def test_an_index_names_files_of_its_folder_alone(
    save_llama: Save, load: Load, name: object
) -> None:
    _, folder = save_llama()
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails_with(load, folder, repr(name), "no file of this folder")
