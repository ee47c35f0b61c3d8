"""Checkpoints that vLLM reads, made of GGUF files, which it computes with on GPUs only."""

import fcntl
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.protocol.errors import WeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def checkpoint_folder(files: ModelFiles, dtype: str, folder: Path) -> Path:
    """Returns the folder of a model's checkpoint; of a GGUF file, one made of it below `folder`.

    It is made once for a file, in its full precision of `dtype`.

    Raises:
        WeightsError: the file cannot be converted, or there is no room.
    """
    if files.format == "directory":
        return files.path
    target = folder / f"vllm-{_key(files.path, dtype)}"
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "vllm.lock").open("wb") as lock:
            # Waits for another engine of this host. The kernel drops the lock of one that dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _make(files.path, dtype, folder / "vllm.unfinished", target)
    except OSError as error:
        raise WeightsError(
            f"server.weightsDir: cannot write {files.path.name} as a checkpoint to {folder} "
            f"({error.strerror}); name a writable folder with more room"
        ) from error
    return target


def _make(path: Path, dtype: str, unfinished: Path, target: Path) -> None:
    if unfinished.exists():  # of a worker that was killed
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    try:
        _convert(path, dtype, unfinished)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(path: Path, dtype: str, folder: Path) -> None:
    # Slow to import, and only used here.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments: dict[str, Any] = {"gguf_file": path.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=getattr(torch, dtype), **arguments
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **arguments)
    except (ValueError, KeyError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300]
        raise WeightsError(
            f"model.source: {path.name} cannot be converted for vLLM: {reason}; name a folder with "
            "safetensors"
        ) from error
    _save(model, folder)
    tokenizer.save_pretrained(folder)


def _save(model: "PreTrainedModel", folder: Path) -> None:
    """Writes a model as if it had never been a GGUF file, which transformers refuses to."""
    from safetensors.torch import save_file

    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {
        name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _key(path: Path, dtype: str) -> str:
    stat = path.stat()
    text = f"{path.name} {stat.st_size} {stat.st_mtime_ns} {dtype}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
