"""The interface of all checkpoint readers, and the reader for folders of safetensors files."""

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from ullage_engine.model_config.hf_config import HFConfig, read_config
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.files import contradictions, weight_files
from ullage_engine.model_loader.own_tensors import (
    check_contradictions,
    check_tensors,
    with_own_head,
)
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import Encoding, Format, Quantized


class CheckpointReader(Protocol):
    """Protocol for open checkpoints of all formats. Tensors have their Hugging Face names."""

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def formats(self) -> frozenset[Format]:
        """Quantised formats in the checkpoint. If there are none, a user may request any format."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, dequantised if necessary."""
        ...

    def encoding(self, name: str, target: Format | None) -> Encoding | None:
        """Return an encoding that keeps a matrix's quantised values, or None if there is none.

        `target` is the requested format, or None if none is requested. If the result is None, the
        caller must use `read` instead.
        """
        ...

    def quantized(self, name: str) -> Quantized:
        """Return a matrix's quantised values.

        `encoding` must return an encoding for this matrix, not None.
        """
        ...

    def block_kind(self, name: str) -> str:
        """Return the type of a matrix's GGUF blocks, such as Q4_K, or "" if it has none."""
        ...


class PlainMatrices:
    """A mixin for readers of checkpoints that have no quantised matrices."""

    @property
    def formats(self) -> frozenset[Format]:
        return frozenset()

    def encoding(self, name: str, target: Format | None) -> Encoding | None:
        return None

    def quantized(self, name: str) -> Quantized:
        raise KeyError(name)

    def block_kind(self, name: str) -> str:
        return ""


class SafetensorsReader(PlainMatrices):
    """Reads the safetensors files of one model directory."""

    def __init__(self, folder: Path, config: HFConfig | None = None) -> None:
        """Memory-map the files, and read the configuration unless it is passed.

        Raises:
            WeightsError: a file is missing or broken, the files are ambiguous, or the architecture
                is not supported.
        """
        self._folder = folder
        config = config or read_config(folder)
        self.model_config = read_model_config(config)
        self._stack = ExitStack()
        self._files: dict[str, safe_open] = {}
        for path in weight_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                reason = " ".join(str(error).split())
                raise WeightsError(
                    f"{path}: not a whole safetensors file ({reason}); download it again"
                ) from error
            # If several files have a tensor, transformers reads the last one, too.
            self._files |= dict.fromkeys(file.keys(), file)
        self.model_config = with_own_head(self.model_config, self)
        check_contradictions(self.model_config, contradictions(folder))
        check_tensors(self.model_config, self, config)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it."""
        return tuple(self._file(name).get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype of a tensor, such as BF16, without reading its data."""
        return str(self._file(name).get_slice(name).get_dtype())  # type: ignore[no-untyped-call]

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows `start` to `stop` - 1 of one tensor, without converting the values."""
        rows: torch.Tensor = self._file(name).get_slice(name)[start:stop]  # type: ignore[no-untyped-call]
        return rows

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor without converting its values."""
        tensor: torch.Tensor = self._file(name).get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            raise WeightsError(
                f"{self._folder}: tensor {name!r} is missing; download the model again"
            )
        return self._files[name]
