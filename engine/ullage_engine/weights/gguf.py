"""Reads GGUF files: metadata as a geometry, tensors dequantised one at a time."""

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from ullage_engine.models.geometry import LayerSpec, ModelGeometry
from ullage_engine.weights.errors import WeightsError

ARCHITECTURES = ("llama",)

QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names, without layer and suffix, to GGUF's."""


class GgufReader:
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
        self.geometry = self._read_geometry()
        self._check_names()

    def read(self, name: str) -> torch.Tensor:
        """One tensor by its Hugging Face name, in the order of elements Hugging Face uses."""
        own = gguf_name(name)
        tensor = self._tensors.get(own)
        if tensor is None:
            raise WeightsError(f"{self._path}: tensor {own!r} is missing; download the file again")
        if tensor.tensor_type.name == "BF16":
            bits = np.array(tensor.data).view(np.int16)
            values = torch.from_numpy(bits).view(torch.bfloat16)
        else:
            values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        values = values.reshape([int(size) for size in reversed(tensor.shape.tolist())])
        return self._unpermute(own, values)

    def _unpermute(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Undoes the interleaving of rotary halves that llama.cpp's converter does to Q and K."""
        heads = {
            "attn_q.weight": self.geometry.num_heads,
            "attn_k.weight": self.geometry.num_kv_heads,
        }.get(name.rpartition("blk.")[2].partition(".")[2])
        if heads is None or values.shape[0] % (2 * heads):
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
        layer = r"(blk\.\d+\.)?"
        known = re.compile(rf"{layer}({'|'.join([*NAMES.values(), 'rope_freqs'])})\.weight")
        for name in self._tensors:
            if not known.fullmatch(name):
                raise WeightsError(
                    f"{self._path}: tensor {name!r} is not part of the models supported; "
                    "use another model"
                )

    def _value(self, key: str, default: object = None) -> object:
        field = self._file.fields.get(key)
        value = default if field is None else field.contents()
        if value is None:
            raise WeightsError(f"{self._path}: metadata {key!r} is missing; convert the file again")
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int):
            raise WeightsError(f"{self._path}: metadata {key!r} is {value!r}, not a whole number")
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, int | float):
            raise WeightsError(f"{self._path}: metadata {key!r} is {value!r}, not a number")
        return float(value)

    def _read_geometry(self) -> ModelGeometry:
        architecture = self._value("general.architecture")
        if architecture not in ARCHITECTURES:
            raise WeightsError(
                f"{self._path}: architecture {architecture!r} is not supported; "
                f"use a model of {', '.join(ARCHITECTURES)}"
            )
        hidden = self._int("llama.embedding_length")
        heads = self._int("llama.attention.head_count")
        head_dim = self._int("llama.attention.key_length", hidden // heads)
        self._require("llama.rope.dimension_count", head_dim)
        self._require("llama.attention.value_length", head_dim)
        self._require("llama.expert_count", 0)
        return ModelGeometry(
            architecture="llama",
            layers=(LayerSpec(),) * self._int("llama.block_count"),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=self._int("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=self._int("llama.feed_forward_length"),
            vocab=self._vocab(),
            max_position=self._int("llama.context_length"),
            rope_theta=self._float("llama.rope.freq_base", 10000.0),
            rope_factors=self._rope_factors(),
            rms_eps=self._float("llama.attention.layer_norm_rms_epsilon"),
            tied="output.weight" not in self._tensors,
            eos_token_ids=self._eos_token_ids(),
        )

    def _require(self, key: str, expected: int) -> None:
        value = self._int(key, expected)
        if value != expected:
            raise WeightsError(
                f"{self._path}: metadata {key!r} is {value}, but only {expected} is supported; "
                "use another model"
            )

    def _vocab(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise WeightsError(f"{self._path}: tensor 'token_embd.weight' is missing")
        return int(embedding.shape[1])

    def _rope_factors(self) -> list[float] | None:
        scaling = self._file.fields.get("llama.rope.scaling.type")
        kind = "none" if scaling is None else scaling.contents()
        if kind != "none":
            raise WeightsError(
                f"{self._path}: rope scaling {kind!r} is not supported; use a model without it"
            )
        tensor = self._tensors.get("rope_freqs.weight")
        return None if tensor is None else [float(value) for value in tensor.data]

    def _eos_token_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return sorted({self._int(key) for key in keys if key in self._file.fields})


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face calls `name`."""
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight", name)
    assert match is not None, name
    prefix = "" if match[1] is None else f"blk.{match[1]}."
    return f"{prefix}{NAMES[match[2]]}.weight"


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
