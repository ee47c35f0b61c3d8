"""What every reader of checkpoints offers."""

from typing import Protocol

import torch

from ullage_engine.models.geometry import ModelGeometry
from ullage_engine.quant.formats import Encoding, Format, Quantized


class CheckpointReader(Protocol):
    """An open checkpoint of any kind; names are those of Hugging Face."""

    @property
    def geometry(self) -> ModelGeometry: ...

    @property
    def formats(self) -> frozenset[Format]:
        """Formats that the checkpoint has been quantised to; none: any can be asked for."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised if need be."""
        ...

    def encoding(self, name: str, wanted: Format | None) -> Encoding | None:
        """That of the numbers which a matrix is stored in, if they can be computed with as they are
        and are what is wanted; else None, and it is to be read."""
        ...

    def quantized(self, name: str) -> Quantized:
        """The numbers of a matrix that has an `encoding`."""
        ...


class PlainMatrices:
    """The part of a reader of checkpoints that are not quantised."""

    @property
    def formats(self) -> frozenset[Format]:
        return frozenset()

    def encoding(self, name: str, wanted: Format | None) -> Encoding | None:
        return None

    def quantized(self, name: str) -> Quantized:
        raise KeyError(name)
