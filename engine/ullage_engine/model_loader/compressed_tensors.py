"""Reads checkpoints that store matrices as int8 or float8 values together with their scales.

compressed-tensors uses this form for int-quantized and float-quantized models, and stores one
`weight_scale` per tensor or per row. FP8 models from other tools store one scale per block of
weights, and call it `weight_scale_inv` even though weights are multiplied by it. Unsupported
settings in quantization_config raise an error, because ignoring a setting could mean
misinterpreting the stored values.
"""

from dataclasses import dataclass

import torch

from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.keys import check_keys
from ullage_engine.model_config.quantization_keys import COMPRESSED_GROUP, COMPRESSED_NUMBERS
from ullage_engine.model_loader.safetensors import SafetensorsReader
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import Encoding, Format, Quantized

COMPRESSED = ("int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint stores quantised matrices: element type, scales and zero points."""

    types: frozenset[str]
    """Allowed element types of the weights: `int` or `float`."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns per scale block, for models with one scale per block of weights."""
    is_symmetric: bool = True
    """Whether quantisation is symmetric, that is, without zero points."""
    rounds_activations: bool = False
    """Whether activations are rounded to int8, row by row.

    For FP8 models, activations stay in the computing dtype, which is more precise than the model
    requires.
    """


def read_scheme(config: HFConfig) -> Scheme:
    """Return the quantisation scheme of a model with `quant_method` fp8 or compressed-tensors.

    Raises:
        WeightsError: a setting is unknown or has an unsupported value.
    """
    return _fp8(config) if config.get("quant_method") == "fp8" else _compressed(config)


def _fp8(config: HFConfig) -> Scheme:
    return Scheme(frozenset({"float"}), _block(config, "", "weight_block_size"))


def _compressed(config: HFConfig) -> Scheme:
    _one_of(config, "", "format", *COMPRESSED)
    _one_of(config, "", "kv_cache_scheme", None)
    if config.get("sparsity_config") not in (None, {}):
        _one_of(config.section("sparsity_config"), "sparsity_config.", "format", "dense", None)
    groups = config.section("config_groups")
    schemes = [_group(groups, name) for name in groups.values]
    if len(set(schemes)) != 1:
        raise WeightsError(
            f"{config.path}: quantization_config.config_groups has {len(set(schemes))} different "
            "schemes; use a model with one"
        )
    return schemes[0]


def _group(groups: HFConfig, name: str) -> Scheme:
    group = groups.section(name)
    where = f"config_groups.{name}."
    check_keys(group, COMPRESSED_GROUP, f"quantization_config.{where}")
    _one_of(group, where, "output_activations", None)
    _one_of(group, where, "format", *COMPRESSED, None)
    weights = group.section("weights")
    inside = f"{where}weights."
    check_keys(weights, COMPRESSED_NUMBERS, f"quantization_config.{inside}")
    _one_of(weights, inside, "num_bits", 8)
    _one_of(weights, inside, "type", "int", "float", None)
    _one_of(weights, inside, "strategy", "tensor", "channel", "block", None)
    _one_of(weights, inside, "dynamic", False, None)
    _one_of(weights, inside, "actorder", None)
    _one_of(weights, inside, "group_size", None, -1)
    _one_of(weights, inside, "symmetric", True, False, None)
    type = weights.get("type", "int")
    rounds = _rounds(group, where, type)
    is_symmetric = weights.get("symmetric", True) is True
    if not is_symmetric and (rounds or type == "float"):
        _one_of(weights, inside, "symmetric", True)
    block = _block(weights, inside, "block_structure")
    return Scheme(frozenset({str(type)}), block, is_symmetric, rounds)


def _rounds(group: HFConfig, where: str, type: object) -> bool:
    """Return whether the checkpoint requires rounding activations to int8 before matmuls."""
    activations = group.section("input_activations")
    inside = f"{where}input_activations."
    if not activations.values:
        return False
    check_keys(activations, COMPRESSED_NUMBERS, f"quantization_config.{inside}")
    _one_of(activations, inside, "num_bits", 8)
    _one_of(activations, inside, "type", type, None)
    if type == "float":
        return False
    _one_of(activations, inside, "strategy", "token")
    _one_of(activations, inside, "dynamic", True)
    _one_of(activations, inside, "symmetric", True, None)
    return True


def _block(config: HFConfig, where: str, key: str) -> tuple[int, int]:
    sizes = config.list(key) or [128, 128]
    if len(sizes) != 2 or not all(isinstance(each, int) and each > 0 for each in sizes):
        raise WeightsError(
            f"{config.path}: quantization_config.{where}{key} is {sizes!r}, not two whole numbers"
        )
    height, width = (each for each in sizes if isinstance(each, int))
    return height, width


def _one_of(config: HFConfig, where: str, key: str, *values: object) -> None:
    value = config.get(key)
    if not any(value == each and isinstance(value, type(each)) for each in values):
        supported = ", ".join("none" if each is None else repr(each) for each in values)
        raise WeightsError(
            f"{config.path}: quantization_config.{where}{key} is {value!r}; "
            f"use a model with one of {supported}"
        )


SCALES = ("weight_scale", "weight_scale_inv")

_STORED = {"I8": "int", "F8_E4M3": "float"}
"""Maps safetensors dtype names to the type names in quantisation configurations."""

_KNOWN = frozenset({"weight", "bias", "input_scale", "weight_zero_point", *SCALES})
"""Name suffixes of the tensors that together store one matrix. The engine ignores `input_scale`,
the scale of FP8 activations, because it does not round those activations."""


class ScaledMatrices:
    """Reads matrices quantised with `quant_method` fp8 or compressed-tensors (int and float)."""

    def __init__(self, reader: SafetensorsReader, config: HFConfig) -> None:
        self._reader, self._path, self._scheme = reader, config.path, read_scheme(config)
        self._check_tensors()

    @property
    def formats(self) -> frozenset[Format]:
        names = self._reader.names
        stems = (name.removesuffix(".weight") for name in names if name.endswith(".weight"))
        quantised = next((stem for stem in stems if self.is_quantised(stem)), None)
        return frozenset() if quantised is None else frozenset({self._format(quantised)})

    def is_quantised(self, stem: str) -> bool:
        return any(f"{stem}.{scale}" in self._reader for scale in SCALES)

    def encoding(self, stem: str) -> Encoding | None:
        rows, columns = self._reader.shape(f"{stem}.weight")
        scales = self._scales(stem, rows, columns)
        if columns % scales.shape[1]:
            return None
        group = columns // scales.shape[1]
        format = self._format(stem)
        is_block = format == "fp8" and group == self._scheme.block[1]
        if group != columns and not is_block:
            return None
        has_zeros = not self._scheme.is_symmetric
        return Encoding(format=format, shape=(rows, columns), group=group, has_zeros=has_zeros)

    def quantized(self, stem: str) -> Quantized:
        values = self._reader.read(f"{stem}.weight")
        scales = self._scales(stem, *values.shape)
        zeros = None if self._scheme.is_symmetric else -self._points(stem) * scales
        return Quantized(self._format(stem), values, scales, zeros)

    def dequantised(self, stem: str) -> torch.Tensor:
        values = self._reader.read(f"{stem}.weight").to(torch.float32)
        rows, columns = values.shape
        scales = self._scales(stem, rows, columns)
        width = columns if scales.shape[1] == 1 else self._scheme.block[1]
        if not self._scheme.is_symmetric:
            values -= self._points(stem)
        return values * scales.repeat_interleave(width, dim=1)[:, :columns]

    def _check_tensors(self) -> None:
        """Raise an error if a quantised matrix has a tensor that the engine does not support."""
        for name in self._reader.names:
            stem, _, kind = name.rpartition(".")
            if self.is_quantised(stem) and kind not in self._known(name):
                raise WeightsError(
                    f"{self._path}: tensor {name!r} of a quantised matrix is not supported; "
                    "use a symmetric model of int8 or FP8 weights"
                )

    def _known(self, name: str) -> frozenset[str]:
        if not name.endswith(".weight_zero_point") or not self._scheme.is_symmetric:
            return _KNOWN
        # Some tools write zero points for symmetric weights, too. They must be zero.
        return _KNOWN - ({"weight_zero_point"} if self._reader.read(name).any() else set())

    def _format(self, stem: str) -> Format:
        dtype = self._reader.dtype(f"{stem}.weight")
        if _STORED.get(dtype) not in self._scheme.types:
            raise WeightsError(
                f"{self._path}: tensor '{stem}.weight' is {dtype} and has a scale; "
                f"use a model of {' or '.join(_names(self._scheme.types))} weights"
            )
        if dtype == "I8":
            return "w8a8" if self._scheme.rounds_activations else "int8"
        return "fp8"

    def _points(self, stem: str) -> torch.Tensor:
        """Return a matrix's zero points as float32 [rows, 1], or [1, 1] if there is only one."""
        points = self._reader.read(f"{stem}.weight_zero_point").to(torch.float32)
        rows = self._reader.shape(f"{stem}.weight")[0]
        if points.numel() != 1 and tuple(points.shape) not in ((rows,), (rows, 1)):
            raise WeightsError(
                f"{self._path}: tensor '{stem}.weight_zero_point' has shape "
                f"{list(points.shape)}, neither one number nor one for each row; use another model"
            )
        return points.reshape(-1, 1)

    def _scales(self, stem: str, rows: int, columns: int) -> torch.Tensor:
        """Return a matrix's scales as float32 [rows, 1].

        If the checkpoint has one scale per block, return [rows, column blocks] instead.
        """
        name = next(f"{stem}.{each}" for each in SCALES if f"{stem}.{each}" in self._reader)
        scales = self._reader.read(name).to(torch.float32)
        # The shape decides, since there may be as many blocks as rows.
        shape = tuple(scales.shape)
        if scales.numel() == 1:
            return scales.reshape(1, 1).repeat(rows, 1)
        if shape in ((rows,), (rows, 1)):
            return scales.reshape(rows, 1)
        height, width = self._scheme.block
        if shape != (-(-rows // height), -(-columns // width)):
            raise WeightsError(
                f"{self._path}: tensor {name!r} has shape {list(scales.shape)}, which scales "
                f"neither rows nor blocks of {height} x {width}; use another model"
            )
        return scales.repeat_interleave(height, dim=0)[:rows].contiguous()


def _names(types: frozenset[str]) -> list[str]:
    return sorted(name for name, type in _STORED.items() if type in types)
