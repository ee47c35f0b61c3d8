"""Heads and other tensors that the files have and the configuration does not speak of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ullage_common.config.engine import ModelSection
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.protocol.errors import WeightsError

Save = Callable[..., tuple[Any, Path]]
Load = Callable[..., LoadedModel]


def add(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    names = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(path) | names, path)


def load_allowing(folder: Path) -> LoadedModel:
    section = ModelSection(
        source=f"file://{folder}", name="t", quantization="none", allow_unknown_config=True
    )
    prepared = folder / "prepared"
    return load_weights(
        section, torch.device("cpu"), torch.float32, prepared, lambda done, total: None
    )


def test_a_tied_model_with_another_head_computes_with_its_own(
    save_llama: Save, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    _, folder = save_llama(tie_word_embeddings=True)
    head = torch.randn(199, 48)
    add(folder, lm_head__weight=head)
    loaded = load(f"file://{folder}")
    assert not loaded.model_config.tied
    assert torch.equal(loaded.tensors["head"], head)
    (record,) = caplog.records
    assert "lm_head.weight differs from the embedding" in record.getMessage()


def test_a_tied_model_with_the_same_head_stays_tied(save_llama: Save, load: Load) -> None:
    _, folder = save_llama(tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    add(folder, lm_head__weight=embedding.clone())
    loaded = load(f"file://{folder}")
    assert loaded.model_config.tied
    assert "head" not in loaded.tensors


def test_an_untied_model_without_a_head_is_refused(save_llama: Save, load: Load) -> None:
    _, folder = save_llama(tie_word_embeddings=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
    with pytest.raises(WeightsError, match=r"'lm_head.weight' is missing"):
        load(f"file://{folder}")


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.bias", "model.extra_norm.weight", "lm_head.bias"]
)
def test_tensors_that_no_layer_reads_are_refused_or_allowed(
    save_llama: Save, load: Load, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    _, folder = save_llama()
    plain = load(f"file://{folder}")
    add(folder, **{name: torch.ones(48)})
    with pytest.raises(WeightsError) as caught:
        load(f"file://{folder}")
    assert all(word in str(caught.value) for word in (name, "allowUnknownConfig", str(folder)))
    allowed = load_allowing(folder)
    assert all(torch.equal(allowed.tensors[each], plain.tensors[each]) for each in plain.tensors)
    assert any(f"tensor {name} is not read" in record.getMessage() for record in caplog.records)
    # Prepared weights of a start that allowed them do not let in one that does not.
    section = ModelSection(source=f"file://{folder}", name="t", quantization="none")
    with pytest.raises(WeightsError, match=name):
        load_weights(
            section,
            torch.device("cpu"),
            torch.float32,
            folder / "prepared",
            lambda done, total: None,
        )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.k_scale",
        "model.layers.3.mlp.gate_proj.weight",
        "vision_tower.weight",
    ],
)
def test_tensors_that_change_nothing_are_left_alone(
    save_llama: Save, load: Load, name: str
) -> None:
    _, folder = save_llama()
    add(folder, **{name: torch.ones(4)})
    load(f"file://{folder}")


def test_a_bias_of_zeros_changes_nothing(save_llama: Save, load: Load) -> None:
    _, folder = save_llama()
    add(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    load(f"file://{folder}")
