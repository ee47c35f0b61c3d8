"""gpt-oss in MXFP4, packed by hand: kept packed, and computed as transformers computes what the
packed numbers stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ullage_common.config.engine import (
    EngineConfig,
    ModelSection,
    ParallelismSection,
    ServerSection,
)
from ullage_engine.kernels.arena import mxfp4_scratch_bytes
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.errors import WeightsError, WorkerStartError
from ullage_engine.quantize.smoothquant import TextPass
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.worker.rank import RankStartup

Load = Callable[..., LoadedModel]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 199}
EXPERTS = 8
LAYERS = 2


@pytest.fixture
def saved(tmp_path: Path, random_model: Any, save_mxfp4: Any) -> tuple[Any, Path]:
    """transformers' model, dequantised, and the folder of the packed one."""
    seed = 20_261
    model = random_model("gpt_oss", seed, **SIZES)
    save_mxfp4(model, tmp_path, seed)
    return model, tmp_path


def test_logits_are_those_of_the_dequantised_weights(saved: tuple[Any, Path], load: Load) -> None:
    theirs, folder = saved
    tokens = torch.randint(0, 199, (60,)).tolist()
    text = TextPass(load(f"file://{folder}"), torch.float32, 64)
    for count in (60, 1):  # with experts sorted, and pair by pair
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens[:count]])).logits[0]
        ours = text.logits(tokens[:count])
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_prepared_file_has_17_bits_for_4_weights(
    saved: tuple[Any, Path], load: Load, dtype: torch.dtype
) -> None:
    loaded = load(f"file://{saved[1]}", dtype)
    packed = {name: each for name, each in loaded.tensors.items() if ".experts_" in name}
    matrices = [each for name, each in packed.items() if not name.endswith("_bias")]
    weights = LAYERS * EXPERTS * 3 * 64 * 96
    assert sum(each.nbytes for each in matrices) * 8 == weights * 17 // 4
    assert {each.dtype for each in matrices} == {torch.uint8}


def test_gates_come_before_ups(saved: tuple[Any, Path], load: Load) -> None:
    folder = saved[1]
    stored = load_file(folder / "m.safetensors")["model.layers.1.mlp.experts.gate_up_proj_blocks"]
    tensors = load(f"file://{folder}").tensors
    ours = tensors["layers.1.experts_gate_up.values"].view(EXPERTS, 2, 96, 2, 16)
    assert torch.equal(ours[:, 0], stored[:, ::2])
    assert torch.equal(ours[:, 1], stored[:, 1::2])


def test_decoding_takes_what_is_reserved(
    saved: tuple[Any, Path], load: Load, new_runner: Callable[..., ModelRunner]
) -> None:
    runner = new_runner(load(f"file://{saved[1]}", torch.bfloat16), torch.bfloat16)
    assert runner.allocated_bytes()["step_arena"] == runner.step_arena_bytes
    assert runner.step_arena_bytes > mxfp4_scratch_bytes("cpu", 2)


def test_half_precision_is_refused(saved: tuple[Any, Path], load: Load) -> None:
    with pytest.raises(WeightsError, match=r"model\.dtype float16: .* use bfloat16 or float32"):
        load(f"file://{saved[1]}", torch.float16)


def test_blocks_of_another_size_are_refused(saved: tuple[Any, Path], load: Load) -> None:
    folder = saved[1]
    tensors = load_file(folder / "m.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    blocks = tensors[f"{name}_blocks"]
    scales = tensors[f"{name}_scales"]
    tensors[f"{name}_scales"] = scales[:, :, :2].contiguous()
    save_file(tensors, folder / "m.safetensors")
    with pytest.raises(WeightsError, match=rf"'{name}_blocks' .* 32 numbers share a scale"):
        load(f"file://{folder}")
    tensors[f"{name}_blocks"] = blocks[:, :, :2].contiguous()
    save_file(tensors, folder / "m.safetensors")
    with pytest.raises(WeightsError, match=rf"{name}' has shape .* configuration needs"):
        load(f"file://{folder}")


def test_ranks_do_not_share_groups_of_packed_experts(
    saved: tuple[Any, Path], tmp_path: Path
) -> None:
    config = EngineConfig(
        model=ModelSection(source=f"file://{saved[1]}", name="m", dtype="float32"),
        device="cpu",
        gpus=2,
        parallelism=ParallelismSection(tensor=2),
        server=ServerSection(weights_dir=str(tmp_path), threads=torch.get_num_threads()),
    )
    with pytest.raises(
        WorkerStartError, match=r"tensor: 2 ranks .* 96 inputs of .* at 48, but mxfp4 keeps 32"
    ):
        RankStartup(config, 0, lambda loading: None).load()


def test_other_kinds_of_quantisation_are_still_named(saved: tuple[Any, Path], load: Load) -> None:
    folder = saved[1]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl2"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"quant_method 'exl2' .* mxfp4"):
        load(f"file://{folder}")
