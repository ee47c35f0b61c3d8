"""Every mistake in a manifest or a model: one clear line, a non-zero status, nothing running."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def manifest(**changes: Any) -> dict[str, Any]:
    """The example, with values replaced at dotted paths (`__` for a dot)."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = document["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return document


def up(tmp_path: Path, text: str) -> "subprocess.CompletedProcess[str]":
    path = tmp_path / "service.yaml"
    path.write_text(text)
    command = [sys.executable, "-m", "ullage_operator.cli.main", "up", "-f", str(path)]
    return subprocess.run(
        [*command, "--http-port", "0", "--grpc-port", "0"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory__treshold": 0.5}, ["spec.memory.treshold", "threshold"]),
        ({"model__quantization": "int3"}, ["spec.model.quantization", "int3"]),
        ({"memory__safetyReserve": "lots"}, ["spec.memory.safetyReserve", "lots"]),
        ({"pools__single__gpus": 3}, ["spec.pools.single"]),
        ({"model__source": "file:///nowhere/model.gguf"}, ["/nowhere/model.gguf"]),
        ({"model__source": "pkg://no_such_package/model.gguf"}, ["no_such_package"]),
        ({"model__maxModelLen": 99999}, ["maxModelLen", "99999", "8192"]),
        ({"memory__deviceBytes": "64Mi", "pools__single__memory": {}}, ["deviceBytes"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    refused(up(tmp_path, yaml.safe_dump(manifest(**changes))), words)


def test_a_truncated_model(tmp_path: Path) -> None:
    model = tmp_path / "short.gguf"
    model.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(100))
    refused(up(tmp_path, yaml.safe_dump(manifest(model__source=f"file://{model}"))), ["short.gguf"])


def test_what_is_not_a_manifest(tmp_path: Path) -> None:
    refused(up(tmp_path, "a: [unclosed"), ["service.yaml"])


def refused(result: "subprocess.CompletedProcess[str]", words: list[str]) -> None:
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert all(word in errors[0] for word in words), errors[0]
    assert "Traceback" not in result.stderr
