"""Reads GGUF files: metadata as a geometry, tensors dequantised one at a time."""

import math
import re
from pathlib import Path

import gguf
import msgspec
import numpy as np
import torch
from gguf.quants import dequantize

from ullage_engine.models.config import ModelConfig
from ullage_engine.models.families import read_model_config
from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.quant.formats import Encoding, Format, Quantized
from ullage_engine.quant.gguf_blocks import BLOCK, KEPT, read_blocks, read_mxfp4
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.gguf_config import GgufMetadata
from ullage_engine.weights.gguf_names import gguf_name, is_known
from ullage_engine.weights.reader import PlainMatrices

QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4")


class GgufReader(PlainMatrices):
    """One open GGUF file."""

    def __init__(self, path: Path) -> None:
        """Maps the file and reads its header.

        Raises:
            WeightsError: not GGUF, cut short, or of an architecture or quantisation not supported.
        """
        self._path = path
        self._file = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._file.tensors}
        self._check_quantisation()
        self._metadata = GgufMetadata(path, self._file)
        self.geometry = self._read_geometry()
        self._check_names()

    @property
    def config(self) -> ModelConfig:
        """The config.json that the metadata amount to."""
        return self._metadata.config(self._vocab(), tied="output.weight" not in self._tensors)

    def read(self, name: str) -> torch.Tensor:
        """One tensor by its Hugging Face name, in the order of elements Hugging Face uses."""
        if ".mlp.experts." in name:
            return self._read_stacked(name)
        own, expert = gguf_name(self._metadata.architecture, name)
        values = self._dequantised(own, expert)
        if name.endswith("conv.conv.weight"):
            return values[:, None]
        return self._unpermute(own, values)

    @property
    def formats(self) -> frozenset[Format]:
        """MXFP4 of gpt-oss's experts is computed with; other blocks are dequantised."""
        names = [name for name in self._tensors if ".ffn_gate_exps.weight" in name]
        is_packed = self.geometry.architecture == "gpt_oss" and any(map(self._is_mxfp4, names))
        return frozenset({"mxfp4"} if is_packed else ())

    def encoding(self, name: str, wanted: Format | None) -> Encoding | None:
        """MXFP4 of gpt-oss's experts is kept, and blocks of four bits if int4 is wanted."""
        if ".mlp.experts." in name:
            return self._packed_encoding(name)
        own, expert = gguf_name(self._metadata.architecture, name)
        tensor = self._tensors.get(own)
        if wanted != "int4" or tensor is None or expert is not None:
            return None
        if tensor.tensor_type.name not in KEPT:
            return None
        columns, rows = (int(size) for size in tensor.shape)
        return Encoding(format="int4", shape=(rows, columns), group=BLOCK, has_zeros=True)

    def quantized(self, name: str) -> Quantized:
        if ".mlp.experts." in name:
            pieces = [read_mxfp4(self._tensors[each].data) for each in _stacked_names(name)]
            codes, scales = (_alternating(list(each)) for each in zip(*pieces, strict=True))
            return Quantized("mxfp4", codes.flatten(0, 1), scales.flatten(0, 1))
        own, _ = gguf_name(self._metadata.architecture, name)
        tensor = self._tensors[own]
        blocks = read_blocks(tensor.data, tensor.tensor_type.name)
        assert blocks.zeros is not None, "both kinds have zeros"
        parts = (blocks.values, blocks.scales, blocks.zeros)
        return Quantized("int4", *(self._unpermute(own, part) for part in parts))

    def _dequantised(self, own: str, expert: int | None = None) -> torch.Tensor:
        tensor = self._tensors.get(own)
        if tensor is None:
            raise WeightsError(f"{self._path}: tensor {own!r} is missing; download the file again")
        shape = [int(size) for size in reversed(tensor.shape.tolist())]
        data = tensor.data if expert is None else tensor.data[expert]
        shape = shape if expert is None else shape[1:]
        if tensor.tensor_type.name == "BF16":
            return torch.from_numpy(np.array(data).view(np.int16)).view(torch.bfloat16).view(shape)
        return torch.from_numpy(np.array(dequantize(data, tensor.tensor_type))).reshape(shape)

    def _read_stacked(self, name: str) -> torch.Tensor:
        """All experts of a gpt-oss layer: GGUF keeps gates and ups apart and [out, in]."""
        rows = _alternating([self._dequantised(each) for each in _stacked_names(name)])
        return rows if name.endswith("_bias") else rows.transpose(1, 2)

    def _is_mxfp4(self, own: str) -> bool:
        tensor = self._tensors.get(own)
        return tensor is not None and tensor.tensor_type.name == "MXFP4"

    def _packed_encoding(self, name: str) -> Encoding | None:
        """That of all experts' rows, one after another."""
        names = _stacked_names(name)
        if not all(map(self._is_mxfp4, names)):
            return None
        columns, *rows = (int(size) for size in self._tensors[names[0]].shape)
        shape = (math.prod(rows) * len(names), columns)
        return Encoding(format="mxfp4", shape=shape, group=BLOCK)

    def _unpermute(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Undoes the interleaving of rotary halves that llama.cpp's converter does to a Llama's Q
        and K; other models keep theirs."""
        heads = {
            "attn_q.weight": self.geometry.num_heads,
            "attn_k.weight": self.geometry.num_kv_heads,
        }.get(name.rpartition("blk.")[2].partition(".")[2])
        is_kept = self._metadata.architecture != "llama"
        if heads is None or is_kept or values.shape[0] % (2 * heads):
            return values
        return values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)

    def _check_quantisation(self) -> None:
        for tensor in self._tensors.values():
            if tensor.tensor_type.name not in QUANTISATIONS:
                raise WeightsError(
                    f"{self._path}: tensor {tensor.name!r} is {tensor.tensor_type.name}; "
                    f"use a file quantised as one of {', '.join(QUANTISATIONS)}"
                )

    def _check_names(self) -> None:
        """Refuses tensors that no layer reads: leaving one out, such as a bias, changes answers."""
        for name in self._tensors:
            if not is_known(self._metadata.architecture, name):
                raise WeightsError(
                    f"{self._path}: tensor {name!r} is not part of the models supported; "
                    "use another model"
                )

    def _read_geometry(self) -> ModelGeometry:
        geometry = read_model_config(self.config, self._metadata.eos_token_ids())
        factors = self._tensors.get("rope_freqs.weight")
        if factors is None:
            return geometry
        return msgspec.structs.replace(
            geometry, rope_factors=[float(each) for each in factors.data]
        )

    def _vocab(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise WeightsError(f"{self._path}: tensor 'token_embd.weight' is missing")
        return int(embedding.shape[1])


def _stacked_names(name: str) -> list[str]:
    """GGUF's names of what Hugging Face stores as one tensor of a gpt-oss layer."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(.+)", name)
    assert match is not None, name
    layer, part = match.groups()
    suffix = "bias" if part.endswith("_bias") else "weight"
    names = ["ffn_down_exps"] if part.startswith("down") else ["ffn_gate_exps", "ffn_up_exps"]
    return [f"blk.{layer}.{each}.{suffix}" for each in names]


def _alternating(parts: list[torch.Tensor]) -> torch.Tensor:
    """[experts, rows, ...]: the rows of gate and up in turn, as Hugging Face has them."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 2)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}; check the file") from error
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # The reader meets the end of a file, or nonsense, as any of these.
        reason = " ".join(str(error).split())
        raise WeightsError(
            f"{path}: not a whole GGUF file ({reason}); download it again"
        ) from error
