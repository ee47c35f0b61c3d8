"""Writes a quantised model as a directory of config.json, tokenizer and safetensors.

int8, fp8 and w8a8 follow compressed-tensors, which other engines read; int4, whose zero points are
no whole numbers where they come from GGUF, has tensors of its own (`ullage_engine.quant.own`).
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from ullage_engine.quant.formats import Format, Quantized
from ullage_engine.quant.own import own_tensors
from ullage_engine.tokenizer import load_tokenizer
from ullage_engine.weights.errors import WeightsError

SHARD_BYTES = 2 << 30

STATISTICS = "calibration.safetensors"
"""Largest activations, kept beside a w8a8 model; the name of no weights."""

EMBEDDING = "model.embed_tokens.weight"
"""Looked up, not multiplied by."""

_COPIED = ("generation_config.json", "special_tokens_map.json", "chat_template.jinja")

Json = dict[str, object]


class ModelDirectory:
    """A directory that is being written, shard by shard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shard: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}
        self._nbytes = 0
        self._plain: list[str] = []

    @property
    def plain_linears(self) -> list[str]:
        """Modules whose weight matrices were written as they are, as Hugging Face names them."""
        return ["lm_head", *(name for name in self._plain if name != "lm_head")]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor as it is."""
        if tensor.dim() == 2 and name.endswith(".weight") and name != EMBEDDING:
            self._plain.append(name.removesuffix(".weight"))
        self._store(name, tensor)

    def _store(self, name: str, tensor: torch.Tensor) -> None:
        self._shard[name] = tensor.contiguous().clone()
        self._nbytes += tensor.nbytes
        if sum(each.nbytes for each in self._shard.values()) >= SHARD_BYTES:
            self._flush()

    def add_matrix(self, name: str, matrix: Quantized) -> None:
        """A quantised matrix instead of `name`, which ends in .weight."""
        stem = name.removesuffix(".weight")
        if matrix.format == "int4":
            for each, tensor in own_tensors(stem, matrix).items():
                self._store(each, tensor)
            return
        self._store(name, matrix.values)
        self._store(f"{stem}.weight_scale", matrix.scales)

    def finish(self, config: Json, source: Path) -> None:
        """Writes what is left: the last shard, the index, configuration and tokenizer."""
        self._flush()
        index = {"metadata": {"total_size": self._nbytes}, "weight_map": self._files}
        self._write_json("model.safetensors.index.json", index)
        self._write_json("config.json", config)
        self._write_tokenizer(source)

    def _flush(self) -> None:
        if not self._shard:
            return
        name = f"model-{len(set(self._files.values())) + 1:05}.safetensors"
        save_file(self._shard, self._folder / name, metadata={"format": "pt"})
        self._files |= dict.fromkeys(self._shard, name)
        self._shard = {}

    def _write_json(self, name: str, value: Json) -> None:
        text = json.dumps(value, indent=2) + "\n"
        (self._folder / name).write_text(text, encoding="utf-8")

    def _write_tokenizer(self, source: Path) -> None:
        tokenizer = load_tokenizer(source)
        (self._folder / "tokenizer.json").write_bytes(tokenizer.json_bytes)
        given = source / "tokenizer_config.json"
        if given.is_file():
            shutil.copy(given, self._folder)
        else:
            texts = {
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "chat_template": tokenizer.chat_template,
            }
            present: Json = {key: text for key, text in texts.items() if text}
            self._write_json("tokenizer_config.json", present)
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copy(source / name, self._folder)


@contextmanager
def unfinished_folder(output: Path) -> Iterator[Path]:
    """A folder beside the output, removed in the end; what a killed run left there is as well.

    Raises:
        WeightsError: another run writes the same output.
    """
    folder = output.parent / f"{output.name}.unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # The kernel drops the lock of a run that dies.
        _lock(descriptor, folder)
        _empty(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise WeightsError(
            f"{folder}: another run writes it; wait for that, or name another --output"
        ) from error


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def quantization_config(format: Format, plain: list[str]) -> Json:
    """What config.json says of matrices in this format, but for the `plain` ones."""
    if format == "int4":
        return {"quant_method": "ullage", "format": "int4"}
    is_float = format == "fp8"
    numbers = {"num_bits": 8, "type": "float" if is_float else "int", "symmetric": True}
    weights = {**numbers, "strategy": "channel", "dynamic": False}
    activations = {**numbers, "strategy": "token", "dynamic": True} if format == "w8a8" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
    }
