"""GPTQ and AWQ: integers packed into int32, in groups of columns with scales and zero points.

weight = (q - zero point) * scale. GPTQ packs along the columns (in) of qweight [in / n, out] and
along the rows (out) of qzeros [groups, out / n], n = 32 / bits, lowest bits first, and stores the
zero point less one. Columns may belong to groups in any order (g_idx). AWQ packs four bits along
the rows of both, in the order 0, 2, 4, 6, 1, 3, 5, 7, and stores zero points as they are.
"""

import torch

from ullage_engine.models.config import ModelConfig
from ullage_engine.quant.formats import Encoding, Format, Quantized
from ullage_engine.weights.errors import WeightsError
from ullage_engine.weights.safetensors import SafetensorsReader

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_last(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] as [..., n * 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


class IntegerMatrices:
    """What GPTQ and AWQ share."""

    def __init__(self, reader: SafetensorsReader, config: ModelConfig, bits: int) -> None:
        self._reader, self._bits = reader, bits
        self._group = config.int("group_size", 128)
        if self._group != -1 and self._group < 1:
            raise WeightsError(
                f"{config.path}: quantization_config.group_size is {self._group}; "
                "use a model with groups of at least one column, or -1"
            )

    @property
    def formats(self) -> frozenset[Format]:
        return frozenset({self._format})

    def is_quantised(self, stem: str) -> bool:
        return f"{stem}.qweight" in self._reader

    def encoding(self, stem: str) -> Encoding | None:
        rows, columns = self._shape(stem)
        group = columns if self._group == -1 else self._group
        if columns % group or not self._is_in_order(stem, columns, group):
            return None
        return Encoding(format=self._format, shape=(rows, columns), group=group, has_zeros=True)

    def quantized(self, stem: str) -> Quantized:
        middle = 1 << self._bits - 1
        scales = self._scales(stem)
        values = (self._codes(stem) - middle).to(torch.int8)
        return Quantized(self._format, values, scales, (middle - self._points(stem)) * scales)

    def dequantised(self, stem: str) -> torch.Tensor:
        groups = self._groups(stem)
        points, scales = self._points(stem)[:, groups], self._scales(stem)[:, groups]
        return (self._codes(stem) - points) * scales

    @property
    def _format(self) -> Format:
        return "int4" if self._bits == 4 else "int8"

    def _scales(self, stem: str) -> torch.Tensor:
        """float32 [out, groups]."""
        scales = self._reader.read(f"{stem}.scales").to(torch.float32).t()
        rows, columns = self._shape(stem)
        groups = 1 if self._group == -1 else -(-columns // self._group)
        if tuple(scales.shape) != (rows, groups):
            raise WeightsError(
                f"tensor '{stem}.scales' has {list(scales.shape[::-1])} scales, but "
                f"quantization_config.group_size {self._group} needs {[groups, rows]}; "
                "download the model again"
            )
        return scales

    def _groups(self, stem: str) -> torch.Tensor:
        """The group of each column."""
        columns = self._shape(stem)[1]
        return torch.arange(columns) // (columns if self._group == -1 else self._group)

    def _is_in_order(self, stem: str, columns: int, group: int) -> bool:
        return torch.equal(self._groups(stem), torch.arange(columns) // group)

    def _shape(self, stem: str) -> tuple[int, int]:
        raise NotImplementedError

    def _codes(self, stem: str) -> torch.Tensor:
        """int32 [out, in], from 0."""
        raise NotImplementedError

    def _points(self, stem: str) -> torch.Tensor:
        """Zero points, int32 [out, groups]."""
        raise NotImplementedError


class GptqMatrices(IntegerMatrices):
    """`quant_method: gptq`."""

    def __init__(self, reader: SafetensorsReader, config: ModelConfig) -> None:
        bits = config.int("bits")
        if bits not in (4, 8):
            raise WeightsError(
                f"{config.path}: quantization_config.bits is {bits}; use a model of 4 or 8 bits"
            )
        _require(
            config,
            checkpoint_format=("gptq", "gptq_v2", None),
            is_marlin_format=(False, None),
            pack_dtype=("int32", None),
            dynamic=({}, None),
        )
        super().__init__(reader, config, bits)
        # The second version of the format stores zero points as they are.
        self._less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        self._path, self._desc_act = config.path, config.bool("desc_act", False)

    def _shape(self, stem: str) -> tuple[int, int]:
        packed = self._reader.shape(f"{stem}.qweight")
        return packed[1], packed[0] * 32 // self._bits

    def _codes(self, stem: str) -> torch.Tensor:
        return unpack_last(self._reader.read(f"{stem}.qweight").t(), self._bits)

    def _points(self, stem: str) -> torch.Tensor:
        stored = unpack_last(self._reader.read(f"{stem}.qzeros"), self._bits)
        # Zero less one was stored as the largest code.
        return (stored + self._less & (1 << self._bits) - 1).t()

    def _groups(self, stem: str) -> torch.Tensor:
        name = f"{stem}.g_idx"
        if name in self._reader:
            return self._reader.read(name).long()
        if self._desc_act:
            raise WeightsError(
                f"{self._path}: quantization_config.desc_act is true, but tensor {name!r} is "
                "missing; download the model again"
            )
        return super()._groups(stem)


class AwqMatrices(IntegerMatrices):
    """`quant_method: awq`."""

    def __init__(self, reader: SafetensorsReader, config: ModelConfig) -> None:
        _require(
            config,
            bits=(4, None),
            version=("gemm", "GEMM", None),
            backend=("autoawq", None),
            zero_point=(True, None),
        )
        super().__init__(reader, config, 4)

    def _shape(self, stem: str) -> tuple[int, int]:
        packed = self._reader.shape(f"{stem}.qweight")
        return packed[1] * len(AWQ_ORDER), packed[0]

    def _codes(self, stem: str) -> torch.Tensor:
        return self._unpacked(f"{stem}.qweight").t()

    def _points(self, stem: str) -> torch.Tensor:
        return self._unpacked(f"{stem}.qzeros").t()

    def _unpacked(self, name: str) -> torch.Tensor:
        codes = unpack_last(self._reader.read(name), 4)
        words = codes.view(codes.shape[0], -1, len(AWQ_ORDER))
        return torch.index_select(words, 2, torch.tensor(AWQ_ORDER).argsort()).flatten(1)


def _require(config: ModelConfig, **known: tuple[object, ...]) -> None:
    """Refuses other values of what changes the numbers' meaning."""
    for key, values in known.items():
        if config.get(key) not in values:
            names = ", ".join("none" if each is None else repr(each) for each in values)
            raise WeightsError(
                f"{config.path}: quantization_config.{key} is {config.get(key)!r}; "
                f"use a model with one of {names}"
            )
