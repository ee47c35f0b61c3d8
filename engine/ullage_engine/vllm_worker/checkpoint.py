"""Converts GGUF files to checkpoints, because vLLM reads GGUF only on GPUs."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ullage_engine.model_loader.gguf_file import GgufHeader, check_gguf, join_parts
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.protocol.errors import WeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("ullage.engine.vllm")

_UNFINISHED = "vllm.unfinished"
_JOINED = "joined.gguf"
"""Name of the temporary file that joins all parts of a split GGUF file for conversion."""
_LOOK_S = 1.0
"""Seconds between attempts to lock the folder."""


def checkpoint_folder(
    files: ModelFiles, dtype: str, folder: Path, on_wait: Callable[[], None] = lambda: None
) -> Path:
    """Return the folder of a model's checkpoint, converting a GGUF file first if necessary.

    A GGUF file is converted only once per `dtype`.

    Args:
        files: the model's files.
        dtype: dtype of the converted weights.
        folder: parent folder for converted checkpoints.
        on_wait: called about once per second while another engine on this host is converting.

    Raises:
        WeightsError: a file is broken or cannot be converted, or the disk is full.
    """
    if files.format == "directory":
        return files.path
    headers = check_gguf(files.path)
    target = folder / f"vllm-{_key([header.path for header in headers], dtype)}"
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "vllm.lock").open("wb") as lock:
            _acquire(lock, on_wait)
            if not target.is_dir():
                _make(headers, dtype, folder / _UNFINISHED, target)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "name a folder with more room" if is_full else "name a folder that it may write to"
        where = f" at {error.filename}" if error.filename else ""
        raise WeightsError(
            f"server.weights_dir: cannot write {files.path.name} as a checkpoint to {folder} "
            f"({error.strerror}{where}); {remedy}"
        ) from error
    return target


def written_bytes(folder: Path) -> int:
    """Return how many bytes of an unfinished conversion have been written under `folder`."""
    sizes = []
    for path in (folder / _UNFINISHED).glob("*"):
        with contextlib.suppress(FileNotFoundError):  # just finished and renamed
            sizes.append(path.stat().st_size)
    return sum(sizes)


def _acquire(lock: BinaryIO, on_wait: Callable[[], None]) -> None:
    """Lock the folder, waiting while another engine on this host holds the lock.

    The kernel releases the lock if the process that holds it exits.
    """
    is_waiting = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not is_waiting:
                log.info("waiting for another engine that makes a checkpoint: %s", lock.name)
            is_waiting = True
            on_wait()
            time.sleep(_LOOK_S)


def _make(headers: Sequence[GgufHeader], dtype: str, unfinished: Path, target: Path) -> None:
    if unfinished.exists():  # left by a killed worker
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    try:
        path = headers[0].path
        joined = unfinished / _JOINED
        if len(headers) > 1:  # transformers would read the first part alone
            join_parts(headers, joined)
            path = joined
        _convert(path, dtype, unfinished)
        joined.unlink(missing_ok=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(path: Path, dtype: str, folder: Path) -> None:
    # Slow to import, and only used here.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments: dict[str, Any] = {"gguf_file": path.name}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path.parent, dtype=getattr(torch, dtype), output_loading_info=True, **arguments
        )
        _check_whole(path, loaded["missing_keys"])
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **arguments)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        if getattr(error, "errno", None) is not None:  # of the system, not of transformers
            raise
        reason = " ".join(str(error).split())[:300]
        raise WeightsError(
            f"model.source: {path.name} cannot be converted for vLLM: {reason}; name a folder with "
            "safetensors"
        ) from error
    _save(model, folder)
    tokenizer.save_pretrained(folder)


def _check_whole(path: Path, missing: Collection[str]) -> None:
    """Reject a file that lacks some of its model's tensors.

    transformers would otherwise fill missing tensors with random values.
    """
    if missing:
        raise WeightsError(
            f"model.source: {path.name} lacks {len(missing)} tensors of its model, such as "
            f"{min(missing)}; download it again, or name a folder with safetensors"
        )


def _save(model: "PreTrainedModel", folder: Path) -> None:
    """Save a model without references to its GGUF file, which transformers would reject."""
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


def _key(paths: Sequence[Path], dtype: str) -> str:
    states = [(path.name, path.stat()) for path in paths]
    listed = [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in states]
    return hashlib.sha256(" ".join([*listed, dtype]).encode()).hexdigest()[:16]
