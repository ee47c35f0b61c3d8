"""Every mistake in a manifest or a model: one clear line, a non-zero status, nothing running."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def manifest(**changes: Any) -> dict[str, Any]:
    """The example with one pool, and values replaced at dotted paths (`__` for a dot)."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "smollm2.yaml").read_text())
    document["spec"]["pools"] = {"single": document["spec"]["pools"]["single"]}
    for path, value in changes.items():
        *parents, leaf = path.split("__")
        node = document["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return document


def refusal(tmp_path: Path, folder: Path, text: str) -> str:
    """The one line that `ullage up` says about a manifest; it must have left nothing running."""
    path = tmp_path / "service.yaml"
    path.write_text(text)
    command = [sys.executable, "-m", "ullage_cli.main", "up", "-f", str(path)]
    done = subprocess.run(
        [*command, "--http-port", "0", "--grpc-port", "0", "--run-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not [p.pid for p in psutil.process_iter() if str(folder) in command_of(p)]
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory__treshold": 0.5}, ["spec.memory.treshold", "threshold"]),
        ({"model__maxModelLen": 99999}, ["maxModelLen", "99999", "8192"]),
    ],
    ids=["by its definition", "by its engine"],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, service_folder: Path, changes: dict[str, Any], words: list[str]
) -> None:
    """Every other mistake goes one of these ways; their words are tested where they are found."""
    line = refusal(tmp_path, service_folder, yaml.safe_dump(manifest(**changes)))
    assert [word for word in words if word not in line] == [], line


def test_what_is_not_a_manifest(tmp_path: Path, service_folder: Path) -> None:
    assert "service.yaml" in refusal(tmp_path, service_folder, "a: [unclosed")
