"""A GGUF file is written as a checkpoint once, and what a killed worker left of one is removed."""

import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from ullage_testing.small_models import foreign_warnings_allowed, smollm2_path

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
    begun = threading.Event()
    may_end = threading.Event()

    def convert(path: Path, dtype: str, folder: Path) -> None:
        conversions.append(folder)
        begun.set()
        assert may_end.wait(DEADLINE_S)
        write_config(path, dtype, folder)

    monkeypatch.setattr(checkpoint, "_convert", convert)
    monkeypatch.setattr(checkpoint, "_LOOK_S", 0.01)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(checkpoint.checkpoint_folder, model, "bfloat16", tmp_path)
        assert begun.wait(DEADLINE_S)
        waits = threading.Semaphore(0)
        second = pool.submit(
            checkpoint.checkpoint_folder, model, "bfloat16", tmp_path, waits.release
        )
        # Its server is told again and again that it goes on.
        assert all(waits.acquire(timeout=DEADLINE_S) for _ in range(3))
        may_end.set()
        assert first.result(DEADLINE_S) == second.result(DEADLINE_S)
    assert len(conversions) == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"\(No space left on device\); name a folder with more room",
        ),
        (
            OSError(errno.EACCES, "Permission denied", "/weights/x"),
            r"\(Permission denied at /weights/x\); name a folder that it may write to",
        ),
    ],
)
def test_a_conversion_that_fails_leaves_nothing_and_says_what_to_do(
    tmp_path: Path,
    model: ModelFiles,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    message: str,
) -> None:
    written: list[int] = []

    def convert(path: Path, dtype: str, folder: Path) -> None:
        write_config(path, dtype, folder)
        written.append(checkpoint.written_bytes(tmp_path))
        raise error

    monkeypatch.setattr(checkpoint, "_convert", convert)
    with pytest.raises(WeightsError, match=message):
        checkpoint.checkpoint_folder(model, "bfloat16", tmp_path)
    assert names(tmp_path) == {"vllm.lock"}
    assert (written, checkpoint.written_bytes(tmp_path)) == ([len("bfloat16")], 0)


def write_parts(path: Path, part_tensors: int) -> None:
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=part_tensors)
    for number, name in enumerate(("a", "b", "c")):
        writer.add_tensor(name, np.full((3, 32), number, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_all_parts_of_a_split_file_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(tmp_path / "model.gguf", 1)
    first, second, _ = sorted(tmp_path.glob("model-*.gguf"))
    read: list[float] = []

    def convert(path: Path, dtype: str, folder: Path) -> None:
        read.extend(float(each.data.mean()) for each in gguf.GGUFReader(path).tensors)
        write_config(path, dtype, folder)

    monkeypatch.setattr(checkpoint, "_convert", convert)
    files = ModelFiles(first, "gguf")
    weights = tmp_path / "weights"
    made = checkpoint.checkpoint_folder(files, "bfloat16", weights)
    assert read == [0.0, 1.0, 2.0]
    assert names(made) == {"config.json"}
    os.utime(second, ns=(1, 1))
    assert checkpoint.checkpoint_folder(files, "bfloat16", weights) != made
    second.unlink()
    with pytest.raises(WeightsError, match=f"missing beside it are {second.name}; download all"):
        checkpoint.checkpoint_folder(files, "bfloat16", weights)


def test_tensors_that_a_file_lacks_get_no_random_numbers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(8)
    writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = r"model\.gguf lacks 9 tensors of its model, such as model\.layers\.0\..*; download it"
    with foreign_warnings_allowed(), pytest.raises(WeightsError, match=words):
        checkpoint.checkpoint_folder(ModelFiles(path, "gguf"), "float32", tmp_path / "weights")


def test_a_folder_that_is_none_is_not_said_to_be_full(tmp_path: Path, model: ModelFiles) -> None:
    (tmp_path / "vllm.unfinished").write_text("a file")
    with pytest.raises(WeightsError, match=r"Not a directory at .*vllm\.unfinished.*may write to"):
        checkpoint.checkpoint_folder(model, "bfloat16", tmp_path)
