"""A GGUF file is written as a checkpoint once, and what a killed worker left of one is removed."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ullage_testing.small_models import smollm2_path

from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.vllm_worker import checkpoint

DEADLINE_S = 60.0
KILLED = """
import os, sys
from pathlib import Path
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.vllm_worker import checkpoint

def convert(path, dtype, folder):
    (folder / "model.safetensors").write_bytes(bytes(1000))
    os.kill(os.getpid(), 9)

checkpoint._convert = convert
checkpoint.checkpoint_folder(ModelFiles(Path(sys.argv[1]), "gguf"), sys.argv[3], Path(sys.argv[2]))
"""


@pytest.fixture
def model() -> ModelFiles:
    return ModelFiles(smollm2_path(), "gguf")


def write_config(path: Path, dtype: str, folder: Path) -> None:
    (folder / "config.json").write_text(dtype)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_a_killed_conversion_left_is_removed_by_the_next(
    tmp_path: Path, model: ModelFiles, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    for _ in range(2):
        arguments = [str(model.path), str(tmp_path), "bfloat16"]
        killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], timeout=DEADLINE_S)
        assert killed.returncode == -signal.SIGKILL
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) == 1000
    monkeypatch.setattr(checkpoint, "_convert", write_config)
    folder = checkpoint.checkpoint_folder(model, dtype, tmp_path)
    assert names(tmp_path) == {folder.name, "vllm.lock"}
    assert names(folder) == {"config.json"}


def test_engines_of_a_host_convert_a_file_once(
    tmp_path: Path, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions: list[Path] = []
    begun, may_end = threading.Event(), threading.Event()

    def convert(path: Path, dtype: str, folder: Path) -> None:
        conversions.append(folder)
        begun.set()
        assert may_end.wait(DEADLINE_S)
        write_config(path, dtype, folder)

    monkeypatch.setattr(checkpoint, "_convert", convert)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(checkpoint.checkpoint_folder, model, "bfloat16", tmp_path)
        assert begun.wait(DEADLINE_S)
        second = pool.submit(checkpoint.checkpoint_folder, model, "bfloat16", tmp_path)
        wait_for(lambda: is_waited_for(tmp_path / "vllm.lock") or len(conversions) == 2)
        may_end.set()
        assert first.result(DEADLINE_S) == second.result(DEADLINE_S)
    assert len(conversions) == 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_waited_for(lock: Path) -> bool:
    """Whether a lock is held and somebody waits for it."""
    if not lock.exists():
        return False
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f":{lock.stat().st_ino} " in line for line in lines)


def test_a_conversion_that_fails_leaves_nothing_and_says_what_to_do(
    tmp_path: Path, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(path: Path, dtype: str, folder: Path) -> None:
        write_config(path, dtype, folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_convert", convert)
    with pytest.raises(WeightsError, match=r"No space left on device\); name a writable folder"):
        checkpoint.checkpoint_folder(model, "bfloat16", tmp_path)
    assert names(tmp_path) == {"vllm.lock"}
