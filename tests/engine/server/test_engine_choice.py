"""Which engine computes is chosen when the model's files are there, wherever they come from."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import save_file
from ullage_testing.small_models import smollm2_path

from ullage_common.config.engine import AdapterSection, EngineConfig, MemorySection
from ullage_engine import main as engine_main
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.server.app import AppError
from ullage_engine.tokenizer.tokenizer import load_tokenizer

Choose = Callable[..., str]
NATIVE = "ullage_engine.worker.main"
VLLM = "ullage_engine.vllm_worker"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
INSTALL = (
    "install it (make install-vllm; on Kubernetes an image that has it, as the chart's "
    "vllmEngineImage or as spec.image)"
)
SET_VLLM = "set engine: vllm (spec.engine: VLLM)"


def folder_of(folder: Path, config: object) -> ModelFiles:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.ones(2)}, folder / "model.safetensors")
    return ModelFiles(folder, "directory")


def gguf_of(folder: Path, architecture: str) -> ModelFiles:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelFiles(path, "gguf")


@pytest.fixture
def choose(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Returns the module of the workers on a CPU."""

    def worker(files: ModelFiles, *, has_vllm: bool = True, **changes: Any) -> str:
        monkeypatch.setattr(engine_main, "find_spec", lambda name: object() if has_vllm else None)
        changed = replace(config, **{"device": "cpu", **changes})
        launch = engine_main._launch(changed, Path("engine.yaml"))(files)
        return launch.program[2]

    return worker


@pytest.mark.parametrize(
    ("model", "module"),
    [
        (LLAMA, NATIVE),
        (LLAMA | {"hidden_act": "gelu"}, VLLM),
        (LLAMA | {"surprise": 1}, VLLM),
        ({"model_type": "gemma3_text"}, VLLM),
        ({"model_type": "bert"}, VLLM),
        ("llama", NATIVE),
        ("qwen2", VLLM),
    ],
    ids=str,
)
def test_on_a_cpu_vllm_computes_what_the_native_engine_does_not_serve(
    choose: Choose, tmp_path: Path, model: dict[str, Any] | str, module: str
) -> None:
    make = gguf_of if isinstance(model, str) else folder_of
    assert choose(make(tmp_path, model)) == module


def test_a_kernel_without_pidfds_is_named_before_a_worker_starts(
    choose: Choose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pidfd_open(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    with pytest.raises(AppError, match=r"pidfd_open \(Function not implemented\); use Linux 5\.3"):
        choose(folder_of(tmp_path, LLAMA))
    assert choose(folder_of(tmp_path, LLAMA), engine="vllm") == VLLM


@pytest.mark.parametrize("kind", ["auto", "native"])
def test_a_model_that_only_vllm_serves_is_refused_with_what_to_do(
    choose: Choose, tmp_path: Path, kind: str
) -> None:
    gemma = folder_of(tmp_path, {"model_type": "gemma3_text"})
    with pytest.raises(AppError) as refusal:
        choose(gemma, has_vllm=False, engine=kind)
    message = str(refusal.value)
    assert "config.json: model_type 'gemma3_text' is not supported" in message
    assert message.endswith(f"; or {SET_VLLM} and {INSTALL}")


def test_an_unknown_key_of_the_configuration_is_refused_or_allowed(
    choose: Choose, config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = folder_of(tmp_path, LLAMA | {"surprise": 1})
    with pytest.raises(
        AppError, match=r"config.json: surprise 1 is not known .*allowUnknownConfig"
    ):
        choose(files, has_vllm=False)
    allowed = replace(config.model, allow_unknown_config=True)
    assert choose(files, has_vllm=False, model=allowed) == NATIVE
    assert any("surprise 1 is not known here" in each.getMessage() for each in caplog.records)


def test_what_stops_vllm_is_named_where_the_native_engine_does_not_serve_a_model(
    choose: Choose, tmp_path: Path
) -> None:
    memory = MemorySection(host_kv=1)
    with pytest.raises(AppError, match=r"; or change what vLLM refuses: memory\.host_kv: "):
        choose(gguf_of(tmp_path, "gemma3"), memory=memory)


def test_vllm_that_is_asked_for_and_absent_is_refused_before_a_download(choose: Choose) -> None:
    missing = ModelFiles(Path("/none"), "directory")
    with pytest.raises(AppError) as refusal:
        choose(missing, has_vllm=False, engine="vllm")
    assert str(refusal.value) == (
        f"engine: vllm is asked for and not installed here; {INSTALL}, or set engine: native "
        "(spec.engine: Native)"
    )
    adapters = (AdapterSection(name="a", source="file:///a", rank=8),)
    with pytest.raises(AppError) as refusal:  # which the native engine would refuse next
        choose(missing, has_vllm=False, engine="vllm", adapters=adapters)
    assert str(refusal.value).endswith(f"not installed here; {INSTALL}")


def test_a_broken_config_is_an_error_of_that_file(choose: Choose, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json: not a JSON object; download the model"):
        choose(folder_of(tmp_path, [1]))


@pytest.mark.parametrize(
    ("absent", "errors"),
    [
        ("", ["model_type 'gemma3_text' is not supported", SET_VLLM]),
        ("model.safetensors", ["'hf://org/gemma': it has no *.safetensors", "name a revision"]),
        ("tokenizer.json", ["tokenizer.json: absent", "save_pretrained"]),
    ],
)
def test_models_of_the_hub_are_looked_at_when_they_are_there(
    tmp_path: Path, run_dir: Path, absent: str, errors: list[str]
) -> None:
    repository = tmp_path / "hub/models--org--gemma"
    folder = repository / "snapshots/abc"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    folder_of(folder, {"model_type": "gemma3_text"})
    (folder / "tokenizer.json").write_bytes(load_tokenizer(smollm2_path()).json_bytes)
    if absent:
        (folder / absent).unlink()
    path = tmp_path / "engine.yaml"
    path.write_text(
        "{model: {source: 'hf://org/gemma', name: g}, device: cpu, "
        f"server: {{host: 127.0.0.1, grpc_port: 0, metrics_port: 0, run_dir: {run_dir}}}}}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ullage_engine.main", "--config", str(path)],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: "), line
    assert all(each in line for each in errors), line
